"""A machine on paper: file trees for /proc and /sys, and an NVML with planted GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def mount(point: str, kind: str, options: str = "rw", top: str = "/") -> str:
    return f"31 23 0:28 {top} {point} rw,nosuid shared:9 - {kind} {kind} {options}\n"


V2 = mount("/sys/fs/cgroup", "cgroup2")
V1 = mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct") + mount(
    "/sys/fs/cgroup/memory", "cgroup", "rw,memory"
)


def cpu(
    number: int, *, threads: str = "", cache: str = "", kib: int = 0, level: int = 3, package: int = 0, core: int = 0
) -> dict[str, str]:
    """Return the files of a CPU: a small first level and, where it is named, the cache it shares with others."""
    folder = f"sys/devices/system/cpu/cpu{number}"
    files = {
        f"{folder}/topology/physical_package_id": f"{package}\n",
        f"{folder}/topology/core_id": f"{core}\n",
        **_cache(folder, 0, level=1, kib=48, cpus=threads or str(number)),
    }
    if threads:
        files[f"{folder}/topology/core_cpus_list"] = f"{threads}\n"
    return {**files, **_cache(folder, 3, level=level, kib=kib, cpus=cache)} if cache else files


def _cache(folder: str, index: int, *, level: int, kib: int, cpus: str) -> dict[str, str]:
    cache = f"{folder}/cache/index{index}"
    return {f"{cache}/level": f"{level}\n", f"{cache}/size": f"{kib}K\n", f"{cache}/shared_cpu_list": f"{cpus}\n"}


FOUR_CORES = {
    "sys/devices/system/node/node0/cpulist": "0-1,4-5\n",
    "sys/devices/system/node/node1/cpulist": "2-3,6-7\n",
    **cpu(0, threads="0,4", cache="0-1,4-5", kib=32768),
    **cpu(1, threads="1,5", cache="0-1,4-5", kib=32768, core=1),
    **cpu(2, threads="2,6", cache="2-3,6-7", kib=32768, package=1),
    **cpu(3, threads="3,7", cache="2-3,6-7", kib=32768, package=1, core=1),
    **cpu(4, threads="0,4", cache="0-1,4-5", kib=32768),
    **cpu(5, threads="1,5", cache="0-1,4-5", kib=32768, core=1),
    **cpu(6, threads="2,6", cache="2-3,6-7", kib=32768, package=1),
    **cpu(7, threads="3,7", cache="2-3,6-7", kib=32768, package=1, core=1),
}
"""Two packages of two cores of two threads; each package has a memory node and a cache of 32 MiB."""


LOST, UNKNOWN, NOT_SUPPORTED = pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_SUPPORTED


class Gpu(SimpleNamespace):
    """A GPU of the fake driver: an attribute that is an int error raises, one that is missing is not supported."""

    def __init__(self, name: str, uuid: str, **facts: Any) -> None:
        defaults = {
            "memory": SimpleNamespace(total=80 * GIB, free=79 * GIB),
            "capability": (9, 0),
            "power": 700_000,
            "compute": [],
            "graphics": [],
            "clock": 1_980,
            "drawn": 452_250,
            "temperature": 61,
            "reasons": 0,
            "old_reasons": 0,
            "clock_max": 2_100,
            "utilization": SimpleNamespace(gpu=37, memory=5),
            "pcie_generation": 5,
            "pcie_width": 16,
            "links": [],
            "mig": [0, 0],
            "slices": [],
            "handle_error": None,
        }
        super().__init__(name=name, uuid=uuid, **{**defaults, **facts})


class FakeNvml(ModuleType):
    """NVML with planted GPUs; call number `fail_on_call` and every later one raises `failure`."""

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus: list[Gpu], *, fail_on_call: int = 0, failure: int = UNKNOWN) -> None:
        super().__init__("pynvml")
        self.gpus, self.fail_on_call, self.failure = gpus, fail_on_call, failure
        self.calls, self.is_open = 0, False

    def _call(self, value: Any = None) -> Any:
        self.calls += 1
        if self.fail_on_call and self.calls >= self.fail_on_call:
            raise pynvml.NVMLError(self.failure)
        if isinstance(value, pynvml.NVMLError):
            raise value
        return value

    def nvmlInit(self) -> None:
        self._call()
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self._call()
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._call(b"580.95.05")

    def nvmlDeviceGetCount(self) -> Any:
        return self._call(len(self.gpus))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._call(self.gpus[index].handle_error or self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        found = [part for gpu in self.gpus for part in gpu.slices if part.uuid == uuid]
        return self._call(found[0] if found else pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND))

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, part: Gpu) -> Any:
        (gpu,) = (gpu for gpu in self.gpus if part in gpu.slices)
        return self._call(getattr(part, "chip_error", gpu))

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> Any:
        return self._call(gpu.uuid)

    def nvmlDeviceGetName(self, gpu: Gpu) -> Any:
        return self._call(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return self._call(gpu.memory)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> Any:
        return self._call(gpu.capability)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: Gpu) -> Any:
        return self._call(gpu.power)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> Any:
        return self._call(
            [SimpleNamespace(pid=pid) for pid in gpu.compute] if isinstance(gpu.compute, list) else gpu.compute
        )

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> Any:
        return self._call([SimpleNamespace(pid=pid) for pid in gpu.graphics])

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._call(gpu.clock)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> Any:
        return self._call(gpu.drawn)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._call(gpu.temperature)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> Any:
        return self._call(gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> Any:
        return self._call(gpu.old_reasons)

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._call(gpu.clock_max)

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:
        return self._call(gpu.utilization)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: Gpu) -> Any:
        return self._call(gpu.pcie_generation)

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: Gpu) -> Any:
        return self._call(gpu.pcie_width)

    def nvmlDeviceGetNvLinkState(self, gpu: Gpu, link: int) -> Any:
        return self._call(gpu.links[link] if link < len(gpu.links) else pynvml.NVMLError(NOT_SUPPORTED))

    def nvmlDeviceGetMigMode(self, gpu: Gpu) -> Any:
        return self._call(gpu.mig)


def two_unlike_gpus() -> list[Gpu]:
    big = Gpu("NVIDIA H200", "GPU-aaaa-1111", compute=[101, 102, os.getpid()], graphics=[102, 103], links=[1, 0, 1])
    small = Gpu(
        b"NVIDIA RTX A2000",
        b"GPU-aabb-2222",
        memory=SimpleNamespace(total=12 * GIB, free=GIB),
        capability=(8, 6),
        power=70_500,
        mig=pynvml.NVMLError(NOT_SUPPORTED),
    )
    return [big, small]


CHIP_FACTS = ("capability", "power", "clock", "drawn", "temperature", "reasons", "old_reasons", "clock_max")


def divided_gpu(**facts: Any) -> Gpu:
    """Return a GPU with one slice, which tells its memory and processes and sends every other question to the chip."""
    refused = pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
    silent = {fact: refused for fact in (*CHIP_FACTS, "utilization", "pcie_generation", "pcie_width", "mig")}
    memory = SimpleNamespace(total=18 * GIB, free=17 * GIB)
    part = Gpu("NVIDIA H200 MIG 1g.18gb", "MIG-5", **{**silent, "memory": memory, "compute": [7], **facts})
    return Gpu("NVIDIA H200", "GPU-1", mig=[1, 1], slices=[part], utilization=pynvml.NVMLError(NOT_SUPPORTED))
