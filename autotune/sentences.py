"""Sentences about evidence and noise, shared by the command line and the report. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from autotune.records.measurement import Interference
from autotune.records.profile import MachineNoise, OneOffCosts, Profile

TELLING_COMPILE_SECONDS = 0.1

_TELLING_RANGE = 1.10
_TELLING_SHARE = 0.05
_MINUTES_UP_TO = 3 * 3600
_HOURS_UP_TO = 72


def describe_power(profile: Profile) -> str | None:
    """Return what these pairs could have shown and what it would take to know more; None when it is proven."""
    confirmation = profile.evidence.confirmation
    if confirmation is None or profile.verdict != "inconclusive":
        return None
    ended = " (ended at half of the pairs, the others would hardly have shown it)" if confirmation.futile else ""
    pairs = count(profile.evidence.pairs, "pair")
    text = f"with this noise {pairs} show a gain of {confirmation.smallest_detectable:.2f}x or more{ended}"
    if confirmation.wanted_speedup is None:
        return text
    if confirmation.budget_needed_seconds is None:
        return f"{text}; {confirmation.wanted_speedup:.2f}x is out of reach without a quieter machine"
    return (
        f"{text}; to show {confirmation.wanted_speedup:.2f}x takes --budget "
        f"{format_budget(confirmation.budget_needed_seconds)} or a quieter machine"
    )


def describe_noise(noise: MachineNoise) -> str:
    """Return how much the machine's figures vary, and why, as one line."""
    words = [f"launches of one setting differ by {100 * noise.launch_sd:.1f} % (standard deviation)"]
    if noise.baseline_range > _TELLING_RANGE:
        words.append(f"your own settings by up to {noise.baseline_range:.2f}x")
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


def describe_break_even(costs: OneOffCosts) -> str | None:
    """Return after how many samples what was paid once is paid back; None without a gain."""
    if costs.search_break_even_samples is None or costs.break_even_samples is None:
        return None
    search = f"the search is paid back after {costs.search_break_even_samples:,.0f} samples"
    if costs.compile_seconds <= TELLING_COMPILE_SECONDS:
        return search
    return f"the compilation is paid back after {costs.break_even_samples:,.0f} samples, {search}"


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
            words.append(f"{100 * fmean(shares):.0f} % {what}")
    held = sorted({reason for reading in seen if reading.gpu is not None for reason in reading.gpu.slowdowns})
    return [*words, f"the GPU was held down ({', '.join(held)})"] if held else words


def format_budget(seconds: float) -> str:
    """Return a duration as it can be typed, rounded up to what is worth distinguishing, e.g. `25m` or `3h`."""
    if seconds < _MINUTES_UP_TO:
        return f"{math.ceil(seconds / 60)}m"
    hours = math.ceil(seconds / 3600)
    return f"{hours}h" if hours < _HOURS_UP_TO else f"{math.ceil(hours / 24)}d"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
