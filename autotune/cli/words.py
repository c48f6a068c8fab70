"""Records in words, shared by the commands. Pure."""

from __future__ import annotations

import math

from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.records.measurement import QualityCheck
from autotune.records.profile import Profile
from autotune.records.trial import TrialResult
from autotune.units import format_bytes, format_percent, format_rate


def describe_changes(config: TrainConfig, baseline: TrainConfig) -> str:
    """Return how a config differs from the baseline, e.g. `precision=bf16 num_workers=2`."""
    changes = [f"{_short(name)}={get_knob(config, name)}" for name in changed_fields(config, baseline)]
    return " ".join(changes) or "your settings"


def describe_speedup(profile: Profile) -> str:
    """Return the verdict as one sentence, the lower end of the interval first."""
    speedup, pairs = profile.speedup, profile.evidence.pairs
    level = f"{100 * speedup.confidence_level:.0f} % interval {speedup.low:.2f}-{speedup.high:.2f}, {pairs} pairs"
    if profile.verdict == "improved":
        # Rounded down, or "at least" would not be true.
        least = math.floor(100 * speedup.low) / 100
        return f"improved: at least {least:.2f}x faster (point {speedup.estimate:.2f}x, {level})"
    if profile.verdict == "inconclusive":
        return f"inconclusive: keep your settings (best candidate {speedup.estimate:.2f}x, {level})"
    if pairs:
        return f"keep your settings (best candidate {speedup.estimate:.2f}x, {level})"
    return "keep your settings"


def describe_check(check: QualityCheck) -> str:
    """Return a drift check as one line."""
    shown = "not measured"
    if check.difference is not None:
        low, high = (format_percent(end) for end in (check.difference.low, check.difference.high))
        shown = f"{format_percent(check.difference.estimate)} ({low} to {high})"
    if check.test == "exact-losses":
        shown = "bit for bit the same"
    covered = f"{check.seeds} seeds x {check.samples:,} samples"
    return f"{check.metric}: {shown}, limit {format_percent(check.margin)}, {covered}: {check.verdict}"


def describe_result(result: TrialResult, baseline_rate: float | None) -> str:
    """Return how a trial ended in a few words."""
    measurement = result.measurement
    if measurement is None:
        if result.curves:
            return f"{len(result.curves)} seeds trained"
        return f"{result.status}: {result.error or result.cause}"[:100]
    words = [format_rate(measurement.samples_per_second)]
    if baseline_rate:
        words.append(f"{measurement.samples_per_second / baseline_rate:.2f}x")
    words.append(format_bytes(measurement.peak_memory.device_bytes or measurement.peak_memory.host_bytes))
    if not measurement.steady:
        words.append("not steady")
    return ", ".join(words)


def _short(name: str) -> str:
    return name.removeprefix("user_knobs.")
