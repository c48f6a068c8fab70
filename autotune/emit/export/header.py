"""Where exported settings come from: gain, machine, versions and date, as lines for the head of a file."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

from autotune.emit.export.exported import Request
from autotune.format import count, format_bounds
from autotune.records.config import spread_config
from autotune.records.hardware import HardwareInfo
from autotune.records.profile import Profile
from autotune.sentences.answer import describe_speedup
from autotune.sentences.settings import describe_exchanges, describe_share

_MOST_CHARACTERS, _WIDTH = 1000, 110


def make_request(profile: Profile, libraries: Mapping[str, str]) -> Request:
    """Return what an exporter is asked for an answer.

    Args:
        profile: the answer.
        libraries: paths of malloc libraries by knob value, as they are on this machine.
    """
    hardware, target, size = profile.hardware, profile.target, profile.world_size
    return Request(
        config=spread_config(profile.config, size),
        baseline=spread_config(profile.baseline_config, size),
        header=tuple(part for line in list_header(profile) for part in _wrap(line)),
        libraries=libraries,
        on_gpu=bool(hardware.gpus) if target.device is None else target.device == "cuda",
        cores=hardware.core_count or hardware.usable_cpu_count,
        is_script=target.is_script,
        processes=max(size, target.launched_processes),
    )


def list_header(profile: Profile) -> list[str]:
    """Return where an answer comes from, a line each."""
    software = profile.software
    versions = f"PyTorch {software.torch}, Python {software.python}, autotune {software.autotune}"
    day = "" if profile.date is None else f"{profile.date}, "
    exchanges = describe_exchanges(profile.baseline_config, profile.config)
    return [
        f"Measured by autotune on {profile.target.label}: {describe_speedup(profile)}{_describe_interval(profile)}",
        f"{day}{describe_machine(profile.hardware)}; {versions}",
        f"{exchanges}; all else stays as you have it" if exchanges else "Nothing differs from your own settings.",
        *_describe_share(profile),
    ]


def _describe_share(profile: Profile) -> list[str]:
    """Return how many processes were measured, where there were several, and what each has of the batch."""
    if profile.target.launched_processes > 1:
        return [f"Measured with {profile.target.launched_processes} processes; the batch is that of each."]
    if profile.world_size == 1:
        return []
    return [f"Measured with {describe_share(profile.config, profile.world_size)}."]


def _describe_interval(profile: Profile) -> str:
    """Return the interval that the claim is the lower end of; empty where nothing is claimed."""
    claimed = profile.speedup
    if profile.verdict != "improved" or claimed is None:
        return ""
    if profile.memory_ratio is not None:
        memory = profile.memory_ratio
        return f"; {100 * memory.confidence_level:.3g}% interval of the peak {format_bounds(memory.low, memory.high)}"
    return f"; {100 * claimed.confidence_level:.3g}% interval {format_bounds(claimed.low, claimed.high)}"


def describe_machine(hardware: HardwareInfo) -> str:
    """Return a machine in a few words, e.g. `NVIDIA H200, 16 CPUs of Xeon Platinum 8480C`."""
    names = dict.fromkeys(gpu.name for gpu in hardware.gpus)
    return ", ".join([*names, f"{count(hardware.usable_cpu_count, 'CPU')} of {hardware.cpu_name}"])


def _wrap(line: str) -> list[str]:
    """Return lines that are comments in every format, printable ASCII: a profile may have been written by anybody."""
    shown = "".join(c if c.isascii() and c.isprintable() else "?" for c in line)
    cut = shown if len(shown) <= _MOST_CHARACTERS else f"{shown[:_MOST_CHARACTERS]}..."
    return textwrap.wrap(cut, _WIDTH, break_on_hyphens=False)
