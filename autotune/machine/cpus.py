"""The CPUs this process may run on: model, instruction sets, cores, memory nodes, caches. /proc and /sys in."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from autotune.machine.procfs import read_cpu_list, read_text

# Instruction sets PyTorch's kernels and oneDNN choose by, as the kernel spells them: x86 `flags`, arm64 `Features`.
_FEATURES = frozenset(
    (
        *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
        *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "svebf16", "sme"),
    )
)
_CPUS = "sys/devices/system/cpu"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class _Cache:
    level: int
    size_bytes: int
    cpus: frozenset[int]


def read_cpu_fields(root: Path) -> dict[str, str]:
    """Return what /proc/cpuinfo says of its first processor; empty when it cannot be read.

    Args:
        root: where /proc is.
    """
    fields: dict[str, str] = {}
    for line in (read_text(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    return fields


def read_cpu_flags(fields: dict[str, str]) -> frozenset[str] | None:
    """Return the flags among what `read_cpu_fields` found; None when there are none."""
    flags = fields.get("flags", fields.get("Features"))
    return None if flags is None else frozenset(flags.split())


def name_cpu(fields: dict[str, str]) -> str:
    """Return the processor's model; arm64 names none, so there it is the numbers of maker and part."""
    if "model name" not in fields and "CPU part" in fields:
        return f"{platform.machine()} implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return fields.get("model name") or platform.processor() or platform.machine()


def select_features(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the instruction sets that matter to training, sorted."""
    return tuple(sorted(_FEATURES & flags))


def read_affinity() -> frozenset[int] | None:
    """Return the numbers of the CPUs this process may be scheduled on; None where the system does not tell."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux; a kernel that refuses
        return None


def count_cores(root: Path, cpus: frozenset[int]) -> int | None:
    """Return the physical cores that some CPUs are threads of; None when one of them does not tell.

    Source: Linux `Documentation/ABI/stable/sysfs-devices-system-cpu`.

    Args:
        root: where /sys is.
        cpus: their numbers.
    """
    cores = {_find_core(root / _CPUS / f"cpu{cpu}/topology") for cpu in cpus}
    return None if None in cores else len(cores) or None


def count_numa_nodes(root: Path, cpus: frozenset[int]) -> int | None:
    """Return the memory nodes that some CPUs belong to; None when the kernel does not tell.

    Source: Linux `Documentation/ABI/stable/sysfs-devices-node`.

    Args:
        root: where /sys is.
        cpus: their numbers.
    """
    nodes = [read_cpu_list(folder / "cpulist") for folder in (root / "sys/devices/system/node").glob("node[0-9]*")]
    return sum(bool(node & cpus) for node in nodes if node is not None) or None


def read_last_level_cache_bytes(root: Path, cpus: frozenset[int]) -> int | None:
    """Return the size of the highest cache level that some CPUs reach, all instances together; None when not told.

    Source: Linux `Documentation/ABI/testing/sysfs-devices-system-cpu` (`cache/index*`).

    Args:
        root: where /sys is.
        cpus: their numbers.
    """
    caches = []
    remaining = cpus
    while remaining:
        cpu = min(remaining)
        cache = _find_last_level(root / _CPUS / f"cpu{cpu}/cache")
        if cache is None:
            return None
        caches.append(cache)
        remaining -= {cpu, *cache.cpus}
    highest = max((cache.level for cache in caches), default=0)
    return sum(cache.size_bytes for cache in caches if cache.level == highest) or None


def _find_core(topology: Path) -> frozenset[int] | tuple[str, str] | None:
    """Return what tells the core of a CPU from every other core; None when it cannot be read."""
    # The threads of a core tell it best: its number is its own within a package at most, on arm64 within a cluster.
    for name in ("core_cpus_list", "thread_siblings_list"):
        threads = read_cpu_list(topology / name)
        if threads:
            return threads
    package, core = read_text(topology / "physical_package_id"), read_text(topology / "core_id")
    return None if package is None or core is None else (package, core)


def _find_last_level(folder: Path) -> _Cache | None:
    """Return the highest cache level of a CPU; None when none can be read."""
    found = []
    for index in folder.glob("index[0-9]*"):
        level, size_bytes = read_text(index / "level"), _parse_size(read_text(index / "size"))
        cpus = read_cpu_list(index / "shared_cpu_list")
        if level is not None and level.isdecimal() and size_bytes is not None and cpus:
            found.append(_Cache(int(level), size_bytes, cpus))
    return max(found, key=lambda cache: cache.level, default=None)


def _parse_size(text: str | None) -> int | None:
    """Return the bytes of a text like `32768K`; None for what is none."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text or "")
    return int(match[1]) * _UNITS[match[2]] if match else None
