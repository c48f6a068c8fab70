"""What the machine and its software are: facts, and the fingerprints that bind a profile to them."""

from __future__ import annotations

import hashlib
from typing import Literal

from autotune.records.codec import Record


class GpuInfo(Record):
    """One GPU as NVML reports it."""

    name: str
    """Product name."""
    memory_total_bytes: int
    """Installed device memory."""
    memory_free_bytes: int
    """Device memory free at the time of the probe."""
    compute_capability: str | None = None
    """Major.minor, e.g. `9.0`; None when the driver does not say."""
    power_limit_watts: float | None = None
    """Enforced power limit; None when unknown."""
    other_processes: int = 0
    """Processes other than ours that hold memory on it."""
    sm_clock_mhz: int | None = None
    """Clock of the multiprocessors at the time of the probe; None when the driver does not say, as below."""
    sm_clock_max_mhz: int | None = None
    """Highest clock they may reach."""
    temperature_celsius: int | None = None
    """Of the chip."""
    slowdowns: tuple[str, ...] = ()
    """Why the clock is held down, e.g. `power-cap`, `thermal`, `hardware`; empty when it is not."""
    utilization_fraction: float | None = None
    """Share of the last second in which it ran anything."""
    pcie_generation: int | None = None
    """Of the link to the host as it can be here; an idle link may run slower."""
    pcie_width: int | None = None
    """Lanes of that link."""
    nvlinks: int = 0
    """Active links to other GPUs."""
    mig: Literal["off", "on", "slice"] | None = None
    """Multi-instance GPU: `on` for a GPU that is divided, `slice` for a part of one."""


INSTRUCTION_LIMITS = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR", "MKL_DEBUG_CPU_TYPE", "OPENBLAS_CORETYPE"),
)
"""Variables by which libraries under PyTorch are told what instructions or arithmetic to use."""


class HardwareInfo(Record):
    """The machine as this process may use it."""

    cpu_name: str
    """Processor model."""
    usable_cpu_count: int
    """CPUs by affinity and cgroup quota, not by the host's count."""
    cpu_features: tuple[str, ...]
    """Instruction sets that matter to training, sorted, e.g. `amx_bf16`, `avx512_bf16`."""
    memory_total_bytes: int
    """Memory installed."""
    memory_limit_bytes: int
    """Smaller of the memory installed and the cgroup's limit."""
    memory_available_bytes: int
    """Memory that could be used now without swapping."""
    shared_memory_free_bytes: int
    """Free space in /dev/shm; 0 where there is none."""
    gpus: tuple[GpuInfo, ...] = ()
    """Visible NVIDIA GPUs."""
    missing: tuple[str, ...] = ()
    """Facts that could not be read, one sentence each."""
    host_allocators: dict[str, str] = {}
    """Preloadable malloc libraries found, by knob value: `jemalloc`, `tcmalloc`."""
    preloaded_malloc: str | None = None
    """File name of the malloc library in the user's own LD_PRELOAD, which is the baseline's; None without one."""
    has_cpp_compiler: bool = False
    """A C++ compiler is on PATH (torch.compile needs one on a CPU)."""
    affinity_cpu_count: int | None = None
    """CPUs this process may be scheduled on; None when not known, as below."""
    cpu_quota: float | None = None
    """CPU time that the cgroup grants, in CPUs; None without a quota."""
    core_count: int | None = None
    """Physical cores among those CPUs."""
    numa_node_count: int | None = None
    """Memory nodes those CPUs belong to."""
    last_level_cache_bytes: int | None = None
    """Largest cache that those CPUs reach, all of its instances together."""
    swap_total_bytes: int = 0
    """Swap space."""
    swap_used_bytes: int = 0
    """Of it in use."""
    shared_memory_total_bytes: int | None = None
    """Size of /dev/shm."""
    environment: tuple[str, ...] = ()
    """What this process runs in, in words: a container, a Slurm job, a Kubernetes pod; empty on a plain machine."""
    instruction_limits: dict[str, str] = {}
    """Variables of the environment that hold back which instructions are used, with their values."""

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits over what a measurement depends on (not over what changes by the minute)."""
        parts = [self.cpu_name, str(self.usable_cpu_count), str(round(self.memory_limit_bytes / 2**30))]
        parts += [f"{gpu.name}/{round(gpu.memory_total_bytes / 2**30)}" for gpu in self.gpus]
        parts += [f"{name}={value}" for name, value in sorted(self.instruction_limits.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


class SoftwareInfo(Record):
    """Versions a measurement depends on."""

    autotune: str
    """This package."""
    python: str
    """Interpreter."""
    torch: str
    """PyTorch, with its build tag, e.g. `2.13.0+cpu`."""
    cuda: str | None = None
    """CUDA that PyTorch was built for; None for a CPU build."""
    driver: str | None = None
    """NVIDIA driver; None without one."""
    platform: str
    """Operating system and architecture."""

    @property
    def fingerprint(self) -> str:
        """Twelve hex digits over torch, CUDA and the driver."""
        parts = [self.torch, self.cuda or "", self.driver or ""]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
