"""Sentences about evidence and noise, shared by the command line and the report. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from autotune.records.measurement import Interference
from autotune.records.profile import MachineNoise, OneOffCosts, Profile
from autotune.records.quality import TRAININGS, DriftLimits, Margin, QualityCheck
from autotune.units import format_percent

TELLING_COMPILE_SECONDS = 0.1

JUDGED_BY_BOUNDS = TRAININGS[:3]
"""Drift tests whose worsening and margin say it all; the others have their figures in their reason."""

_TELLING_RANGE = 1.10
_TELLING_SHARE = 0.05
_MINUTES_UP_TO = 3 * 3600
_HOURS_UP_TO = 72
_FOUR_DECIMALS_FROM = 0.001
_BEYOND_TELLING = 20.0


def describe_power(profile: Profile) -> str | None:
    """Return what these pairs could have shown and what it would take to know more; None when it is proven."""
    confirmation = profile.evidence.confirmation
    if confirmation is None or profile.verdict != "inconclusive":
        return None
    ended = " (ended early, more would hardly have shown it)" if confirmation.futile else ""
    pairs = count(len(confirmation.log_ratios), "pair")
    least = confirmation.smallest_detectable
    if least is None:
        text = f"{pairs} are too few to tell anything{ended}"
    else:
        shown = f"a gain of {least:.2f}x or more" if least < _BEYOND_TELLING else "nothing"
        text = f"with this noise {pairs} show {shown}{ended}"
    if confirmation.extra_seconds_needed is not None:
        more = format_budget(confirmation.extra_seconds_needed)
        return f"{text}; about {more} more would settle it: autotune search --resume --budget {more}"
    if confirmation.wanted_speedup is None:
        return text
    if confirmation.budget_needed_seconds is None:
        return f"{text}; {confirmation.wanted_speedup:.2f}x is out of reach without a quieter machine"
    return (
        f"{text}; to show {confirmation.wanted_speedup:.2f}x takes --budget "
        f"{format_budget(confirmation.budget_needed_seconds)} or a quieter machine"
    )


def describe_untested(profile: Profile) -> list[str]:
    """Return what became of the candidates, what was not tried, and the budget that would; empty where some were."""
    found = profile.evidence.not_tested
    if found is None:
        return []
    started = sum(found.outcomes.values())
    ends = ", ".join(f"{number} {status.replace('_', ' ')}" for status, number in sorted(found.outcomes.items()))
    what = count(started, "candidate was", "candidates were")
    lines = [f"{what} started and none could be timed: {ends}" if started else "no candidate was started"]
    if found.left_out:
        lines.append(f"{count(found.left_out, 'candidate was', 'candidates were')} left out, as they cannot run here")
    if found.settings:
        names = ", ".join(name.removeprefix("user_knobs.") for name in found.settings)
        lines.append(f"not tried: {len(found.settings)} of {count(found.settings_known, 'setting')}: {names}")
    if found.budget_needed_seconds is None:
        told = "each was tried and failed" if found.settings_known else "there is none to try here"
        return [*lines, f"a larger budget would not help: of the settings {told}"]
    budget = format_budget(found.budget_needed_seconds)
    return [*lines, f"about {budget} would try them: autotune search --resume --budget {budget}"]


def describe_candidate(profile: Profile) -> str | None:
    """Return what is known of the candidate that is not proven, and how to use it; None without one."""
    candidate = profile.candidate
    if candidate is None:
        return None
    about = "not timed" if candidate.speedup_estimate is None else f"about {candidate.speedup_estimate:.2f}x"
    if not candidate.passed_checks:
        return f"{about}, {candidate.reason}"
    return f"{about}, learns as well, not proven faster: {candidate.reason}"


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


def format_drift(worsening: float, margin: Margin) -> str:
    """Return a worsening in the unit of a margin: `+0.12%` if that is relative, else `+0.0012`."""
    if margin.unit == "relative":
        return format_percent(worsening)
    is_small = 0.0 < abs(worsening) < _FOUR_DECIMALS_FROM
    return f"{worsening:+.2g}" if is_small else f"{worsening:+.4f}"


def format_margin(margin: Margin) -> str:
    """Return what a margin allows: `+0.50%`, or `+0.0010` in the figure's own unit."""
    return format_drift(margin.amount, margin)


def describe_limits(limits: DriftLimits) -> str:
    """Return what `--max-drift` allows as one line, e.g. `loss +0.50%, metrics +0.50%, accuracy +0.0010`."""
    named = [("loss", limits.loss), ("metrics", limits.metric or limits.loss), *limits.metrics.items()]
    return ", ".join(f"{name} {format_margin(margin)}" for name, margin in named)


def describe_drift(profile: Profile) -> str | None:
    """Return exactly what was tested of the training, and how far; None when nothing was.

    The bound is the worst of the one-sided 95 % bounds of the losses and metrics that were compared.
    """
    trained = [check for check in profile.quality if check.test in TRAININGS and check.difference is not None]
    if not trained:
        return _describe_gradients(profile.quality)
    samples = min(check.samples for check in trained)
    planned = profile.one_off.planned_samples
    share = "of a planned run whose length was not told" if planned is None else _share_of(samples, planned)
    seeds = count(min(check.seeds for check in trained), "seed")
    bounds = ", ".join(_list_bounds(trained))
    return f"{bounds} (95 %) up to {samples:,} samples {share}, {seeds}; beyond that not tested"


def _list_bounds(trained: Sequence[QualityCheck]) -> list[str]:
    """Return the worst bound of all relative worsenings, and the others one by one."""
    relative, others = [], []
    for check in trained:
        high = check.difference.high if check.difference is not None else 0.0
        if check.test == "samples-to-loss":
            others.append(f"samples to the same loss <= {1.0 + high:.2f}x")
        elif check.margin.unit == "absolute":
            others.append(f"{check.metric} worse by <= {format_drift(high, check.margin)}")
        else:
            relative.append(high)
    return [*([f"drift <= {100 * max(0.0, *relative):.2g} %"] if relative else []), *others]


def _share_of(samples: int, planned: float) -> str:
    return f"= {100 * samples / planned:.2g} % of the planned run"


def _describe_gradients(checks: Sequence[QualityCheck]) -> str | None:
    found = next((check for check in checks if check.test == "gradients" and check.fidelity), None)
    if found is not None:
        points = " and ".join(dict.fromkeys(one.point for one in found.fidelity))
        windows = min(one.windows for one in found.fidelity)
        return f"the gradients of {windows} batches are the same at {points}; no training was compared"
    data = next((check for check in checks if check.test == "tape"), None)
    return None if data is None else f"the training data are the same: {data.reason}; nothing else is changed"


def find_failed(checks: Sequence[QualityCheck]) -> QualityCheck:
    """Return the check that a candidate failed: an inferior one, else the last that was left open.

    Raises:
        ValueError: it passed all of them.
    """
    for verdict in ("inferior", "inconclusive"):
        found = [check for check in checks if check.verdict == verdict]
        if found:
            return found[0] if verdict == "inferior" else found[-1]
    raise ValueError("every check was passed")


def describe_refusal(changes: Sequence[str], checks: Sequence[QualityCheck], log_speedup: float | None) -> str:
    """Return why the drift gate refused some changes, for the notes of a search.

    Args:
        changes: each as `name=value`.
        checks: of the candidate; one of them was not passed.
        log_speedup: of the candidate in the search; None when it was not timed.
    """
    check = find_failed(checks)
    ran = "" if log_speedup is None else f" (a candidate with it ran at {math.exp(log_speedup):.2f}x)"
    found = check.reason
    if check.test in ("paired-losses", "metric") and check.difference is not None:
        estimate, most = (format_drift(one, check.margin) for one in (check.difference.estimate, check.difference.high))
        limit = format_margin(check.margin)
        found = (
            f"{check.metric} worse by {estimate}, limit {limit}"
            if check.verdict == "inferior"
            else f"{check.metric} was not shown to stay within {limit}: {estimate}, up to {most}"
        )
    return f"{', '.join(changes)} was refused by the drift check{ran}: {found}"


def format_budget(seconds: float) -> str:
    """Return a duration as it can be typed, rounded up to what is worth distinguishing, e.g. `25m` or `3h`."""
    if seconds < _MINUTES_UP_TO:
        return f"{math.ceil(seconds / 60)}m"
    hours = math.ceil(seconds / 3600)
    return f"{hours}h" if hours < _HOURS_UP_TO else f"{math.ceil(hours / 24)}d"


def count(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"
