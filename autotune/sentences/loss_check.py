"""Whether the same is learned, in words: margins, what was compared, what was refused and why. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.format import count, format_factor, format_percent
from autotune.records.profile import Profile
from autotune.records.quality import TRAININGS, DriftLimits, Margin, QualityCheck
from autotune.sentences.settings import name_value

JUDGED_BY_BOUNDS = TRAININGS[:3]
"""Tests whose worsening and margin say it all; the others have their figures in their reason."""

_FOUR_DECIMALS_FROM = 0.001
_TELLING_SAMPLES = 0.005
"""More samples for the same loss than this are worth a word: less does not show in a factor of two decimals."""

VERDICTS = {"non-inferior": "not worse", "inferior": "worse", "inconclusive": "not proven"}
"""What people call what a check has shown."""


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
    """Return what the user allows as one line, e.g. `loss +0.50%, metrics +0.50%, accuracy +0.0010`."""
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
            others.append(f"samples to the same loss <= {format_factor(1.0 + high)}")
        elif check.margin.unit == "absolute":
            others.append(f"{check.metric} worse by <= {format_drift(high, check.margin)}")
        else:
            relative.append(high)
    return [*([f"at most {100 * max(0.0, *relative):.2g} % worse"] if relative else []), *others]


def _share_of(samples: int, planned: float) -> str:
    return f"= {100 * samples / planned:.2g} % of the planned run"


def _describe_gradients(checks: Sequence[QualityCheck]) -> str | None:
    found = next((check for check in checks if check.test == "gradients" and check.fidelity), None)
    if found is not None:
        gone = {_place(one.point) for one in found.fidelity if one.is_transient}
        points = " and ".join(
            one for one in dict.fromkeys(_place(one.point) for one in found.fidelity) if one not in gone
        )
        windows = min(one.windows for one in found.fidelity)
        what = "gradients" if any(one.subject == "gradients" for one in found.fidelity) else "optimizer's steps"
        is_shown = all(one.verdict == "non-inferior" for one in found.fidelity)
        same = "are the same" if is_shown else "differ by no more than is lost in their noise"
        but = "".join(f", {point} but for what is gone by then" for point in sorted(gone))
        return f"the {what} of {windows} batches {same} {points}{but}; no training is part of the proof"
    data = next((check for check in checks if check.test == "tape"), None)
    return None if data is None else f"the training data are the same: {data.reason}; nothing else is changed"


def _place(point: str) -> str:
    return point if point.startswith("after ") else f"at {point}"


def describe_check(check: QualityCheck) -> str:
    """Return a drift check as one line."""
    if check.test not in JUDGED_BY_BOUNDS:
        named = check.reason if check.reason.startswith(f"{check.metric}, ") else f"{check.metric}: {check.reason}"
        return f"{named}: {VERDICTS[check.verdict]}"
    shown = "bit for bit the same" if check.test == "exact-losses" else describe_worsening(check)
    covered = f"{count(check.seeds, 'seed')} x {check.samples:,} samples"
    return f"{check.metric}: {shown}, limit {format_margin(check.margin)}, {covered}: {VERDICTS[check.verdict]}"


def describe_worsening(check: QualityCheck) -> str:
    """Return by how much a candidate was worse, with its interval, e.g. `+0.12% (-0.08% to +0.31%)`."""
    found = check.difference
    if found is None:
        return "not measured"
    estimate, low, high = (format_drift(value, check.margin) for value in (found.estimate, found.low, found.high))
    return f"{estimate} ({low} to {high})"


def find_extra_samples(profile: Profile) -> float | None:
    """Return how many times the samples the same loss takes at most; None where that is not worth a word."""
    more = next((check.difference for check in profile.quality if check.test == "samples-to-loss"), None)
    return 1.0 + more.high if more is not None and more.high >= _TELLING_SAMPLES else None


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


def describe_untold(check: QualityCheck) -> str:
    """Return what trainings were too noisy to tell of settings whose gradients have told enough.

    Args:
        check: of losses or a metric, with a difference.
    """
    assert check.difference is not None
    estimate, most = (format_drift(one, check.margin) for one in (check.difference.estimate, check.difference.high))
    return (
        f"{check.metric}: {estimate}, up to {most}, in {count(check.seeds, 'short training')}, too noisy for a "
        f"limit of {format_margin(check.margin).lstrip('+')}; the gradients show no difference that matters"
    )


def describe_refusal(changes: Sequence[str], checks: Sequence[QualityCheck], log_speedup: float | None) -> str:
    """Return why the drift gate refused some changes, for the notes of a search.

    Args:
        changes: each as `field=value`.
        checks: of the candidate; one of them was not passed.
        log_speedup: of the candidate in the search; None when it was not timed.
    """
    check = find_failed(checks)
    ran = "" if log_speedup is None else f" (a candidate with it ran at {format_factor(math.exp(log_speedup))})"
    found = check.reason
    if check.test in ("paired-losses", "metric") and check.difference is not None:
        estimate, most = (format_drift(one, check.margin) for one in (check.difference.estimate, check.difference.high))
        limit = format_margin(check.margin)
        found = (
            f"{check.metric} worse by {estimate}, limit {limit}"
            if check.verdict == "inferior"
            else f"{check.metric} was not shown to stay within {limit}: {estimate}, up to {most}"
        )
    return f"{', '.join(map(name_value, changes))} was refused by the loss check{ran}: {found}"
