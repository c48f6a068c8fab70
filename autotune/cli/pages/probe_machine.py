"""What a machine is and what it can do, on the page of `autotune probe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autotune.cli.pages.layout import LinePage
from autotune.format import (
    count,
    format_age,
    format_bandwidth,
    format_bytes,
    format_of,
    format_share,
    format_time,
)
from autotune.records.ceilings import Ceilings, MatmulRate
from autotune.records.hardware import GpuInfo, HardwareInfo, SoftwareInfo
from autotune.sentences.machine import describe_products, list_gpu

# What makes arithmetic faster, the widest first; the others are on every machine of the kind or come with these.
_TELLING_FEATURES = (
    *("amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni", "avx512f"),
    *("sme", "sve2", "sve", "svebf16", "bf16", "i8mm", "asimdhp"),
)
_TELLING_USE = 0.05
_USUAL_FEATURES = ("avx2", "asimd")


def show_machine(page: LinePage, hardware: HardwareInfo, software: SoftwareInfo) -> None:
    """Print the section on what the machine is."""
    page.heading("machine")
    page.facts("CPU", _list_cpu(hardware))
    held = [f"held back by {name}={value}" for name, value in hardware.instruction_limits.items()]
    page.facts("instructions", [*_list_features(hardware.cpu_features), *held])
    page.facts("memory", _list_memory(hardware))
    for label, facts in _list_gpus(hardware.gpus):
        page.facts(label, facts)
    page.facts("runs in", hardware.environment)
    versions = {"autotune": software.autotune, "Python": software.python, "torch": software.torch}
    versions |= {"CUDA": software.cuda or "", "driver": software.driver or ""}
    page.facts("versions", [*(f"{name} {value}" for name, value in versions.items() if value), software.platform])
    tools = ["C++ compiler"] if hardware.has_cpp_compiler else []
    page.facts("found", [*tools, *sorted(hardware.host_allocators)])
    if hardware.preloaded_malloc is not None:
        page.facts("malloc", [f"{hardware.preloaded_malloc}, from your own LD_PRELOAD"])


def show_limits(page: LinePage, ceilings: Ceilings, age_seconds: float) -> None:
    """Print the section on what the machine can do; it is left out when nothing was measured."""
    rows = list(_list_limits(ceilings))
    if not ceilings.matmul and not rows:
        return
    device = {"cpu": "of the CPU", "cuda": "of the GPU"}.get(ceilings.device or "", "")
    page.heading("limits", ", ".join(part for part in (device, format_age(age_seconds)) if part))
    best = max((_kept_up(rate) for rate in ceilings.matmul), default=0.0)
    plain = ceilings.flops_per_second("fp32")
    for rate in ceilings.matmul:
        fraction = _kept_up(rate) / best if best > 0 else 0.0
        page.scale(f"{rate.dtype} products", fraction, describe_products(rate, plain))
    for label, facts in rows:
        page.facts(label, facts)


def _list_cpu(hardware: HardwareInfo) -> list[str]:
    facts = [hardware.cpu_name, count(hardware.usable_cpu_count, "usable CPU")]
    threads, cores = hardware.affinity_cpu_count, hardware.core_count
    if threads is not None and cores is not None and threads != cores:
        facts.append(f"{count(threads, 'thread')} on {count(cores, 'core')}")
    elif cores is not None:
        facts.append(count(cores, "core"))
    elif threads is not None and threads != hardware.usable_cpu_count:
        facts.append(f"may run on {threads}")
    if hardware.cpu_quota is not None:
        facts.append(f"quota of {hardware.cpu_quota:.3g}")
    if hardware.numa_node_count is not None and hardware.numa_node_count > 1:
        facts.append(f"{hardware.numa_node_count} NUMA nodes")
    if hardware.last_level_cache_bytes is not None:
        facts.append(f"{format_bytes(hardware.last_level_cache_bytes)} of last-level cache")
    return facts


def _list_features(features: Sequence[str]) -> list[str]:
    telling = [name for name in _TELLING_FEATURES if name in features]
    return telling or [name for name in _USUAL_FEATURES if name in features]


def _list_memory(hardware: HardwareInfo) -> list[str]:
    limit, total = format_bytes(hardware.memory_limit_bytes), format_bytes(hardware.memory_total_bytes)
    facts = [
        f"{format_of(limit, total)} usable" if hardware.memory_limit_bytes < hardware.memory_total_bytes else total
    ]
    facts.append(f"{format_bytes(hardware.memory_available_bytes)} free now")
    if hardware.swap_used_bytes > 0:
        facts.append(f"swap {format_bytes(hardware.swap_used_bytes)} in use")
    if hardware.shared_memory_total_bytes is not None:
        facts.append(f"/dev/shm {format_bytes(hardware.shared_memory_total_bytes)}")
    return facts


def _list_gpus(gpus: Sequence[GpuInfo]) -> Iterator[tuple[str, list[str]]]:
    """Yield a row a GPU; what many of one kind have in common is said once."""
    if not gpus:
        yield "GPU", ["none"]
        return
    kinds = [list_gpu(gpu) for gpu in gpus]
    alike = len(gpus) > 1 and all(kind == kinds[0] for kind in kinds)
    if alike:
        yield "GPUs", [f"{len(gpus)} x {kinds[0][0]}", *kinds[0][1:]]
    for number, (gpu, kind) in enumerate(zip(gpus, kinds, strict=True)):
        yield "GPU" if len(gpus) == 1 else f"GPU {number}", [*([] if alike else kind), *_list_state(gpu)]


def _list_state(gpu: GpuInfo) -> list[str]:
    facts = [f"{format_bytes(gpu.memory_free_bytes)} free"] if gpu.memory_total_bytes else []
    if gpu.sm_clock_mhz is not None:
        most = "" if gpu.sm_clock_max_mhz is None else f" of {gpu.sm_clock_max_mhz}"
        facts.append(f"{gpu.sm_clock_mhz}{most} MHz")
    if gpu.temperature_celsius is not None:
        facts.append(f"{gpu.temperature_celsius} C")
    if gpu.utilization_fraction is not None and gpu.utilization_fraction >= _TELLING_USE:
        facts.append(f"{format_share(gpu.utilization_fraction)} busy before this")
    if gpu.slowdowns:
        facts.append(f"clock held down ({', '.join(gpu.slowdowns)})")
    if gpu.other_processes:
        facts.append(count(gpu.other_processes, "other process", "other processes"))
    return facts


def _kept_up(rate: MatmulRate) -> float:
    return rate.sustained_flops_per_second or rate.flops_per_second


def _list_limits(ceilings: Ceilings) -> Iterator[tuple[str, list[str]]]:
    copied, triad = ceilings.memory_bytes_per_second, ceilings.triad_bytes_per_second
    up, pageable_up = ceilings.copy_to_device_bytes_per_second, ceilings.pageable_to_device_bytes_per_second
    down, pageable_down = ceilings.copy_from_device_bytes_per_second, ceilings.pageable_from_device_bytes_per_second
    rates = {
        "memory": {"copy": copied, "triad": triad},
        "host to device": {"page-locked": up, "pageable": pageable_up},
        "device to host": {"page-locked": down, "pageable": pageable_down},
        "all-reduce": {f"over {count(ceilings.ranks, 'rank')}": ceilings.all_reduce_bytes_per_second},
    }
    for label, named in rates.items():
        facts = [f"{name} {format_bandwidth(rate)}" for name, rate in named.items() if rate is not None]
        if facts:
            yield label, facts
    launch, wait = ceilings.launch_seconds, ceilings.synchronize_seconds
    calls = [] if launch is None else [f"{format_time(launch)} to call a tiny operation"]
    calls += [] if wait is None else [f"{format_time(wait)} to wait for an idle device"]
    if calls:
        yield "launch", calls
