"""What disturbs a measurement, in words: how far figures vary, and what else went on. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from autotune.format import count, format_factor, format_share
from autotune.records.measurement import Interference, Measurement
from autotune.records.profile import GUESSED_DEGREES, MachineNoise

_TELLING_RANGE = 1.10
"""Judgement: a baseline whose launches differ by less is as steady as machines are."""
_TELLING_SHARE = 0.05
"""Judgement: of the CPU time; less is a machine's own housekeeping."""

_HIDING_SHARE = 0.25
"""Judgement: of the CPU time; where others have more, launches differ by more than most settings bring."""


def describe_busy_machine(noise: MachineNoise) -> str | None:
    """Return what to do where others had so much of the CPUs that a gain cannot be seen; None on a quiet machine."""
    reading = noise.interference
    share = None if reading is None else reading.foreign_cpu_fraction
    if share is None or share < _HIDING_SHARE:
        return None
    return "a machine as busy as that hides gains: search again when it is quieter"


def describe_noise(noise: MachineNoise) -> str:
    """Return how much the machine's figures vary, and why, as one line."""
    told = f"launches of one setting differ by {100 * noise.launch_sd:.1f} % (standard deviation)"
    is_seen = noise.degrees_of_freedom > GUESSED_DEGREES
    words = [told if is_seen else "no setting was launched twice, so by how much launches differ is not known"]
    if noise.baseline_range > _TELLING_RANGE:
        words.append(f"your own settings by up to {format_factor(noise.baseline_range)}")
    if noise.machine_changes:
        words.append(f"the machine changed its speed {count(noise.machine_changes, 'time')}")
    words += describe_interference([noise.interference])
    for number, what in (
        (noise.not_steady, "not steady"),
        (noise.raced, "ended early as clearly slower"),
    ):
        if number:
            words.append(f"{number} of {count(noise.launches, 'launch', 'launches')} {what}")
    if noise.disturbed:
        words.append(f"{noise.disturbed} of {count(noise.blocks, 'block')} disturbed")
    return "; ".join(words)


def describe_interference(readings: Sequence[Interference | None]) -> list[str]:
    """Return what else went on in some blocks, a few words each; nothing where it was little or is not known.

    Args:
        readings: one a block.
    """
    seen = [reading for reading in readings if reading is not None]
    words = []
    for name, what in (
        ("foreign_cpu_fraction", "of the CPUs used by others"),
        ("steal_fraction", "stolen by the hypervisor"),
        ("throttled_fraction", "held by the CPU quota"),
    ):
        shares = [share for reading in seen if (share := getattr(reading, name)) is not None]
        if shares and fmean(shares) >= _TELLING_SHARE:
            words.append(f"{format_share(fmean(shares))} {what}")
    held = sorted({reason for reading in seen if reading.gpu is not None for reason in reading.gpu.slowdowns})
    return [*words, f"the GPU was held down ({', '.join(held)})"] if held else words


def list_remarks(measurement: Measurement) -> list[str]:
    """Return what to know about a timing, a few words each: not settled, ended early, disturbed."""
    remarks = []
    if not measurement.steady:
        remarks.append(f"not steady ({measurement.unsettled})" if measurement.unsettled else "not steady")
    if measurement.ended_by == "racing":
        remarks.append("clearly slower, ended early")
    return remarks + describe_interference([block.interference for block in measurement.blocks])
