"""Records in words, shared by the commands. Pure."""

from __future__ import annotations

import math

from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.records.profile import Profile
from autotune.records.quality import QualityCheck
from autotune.records.trial import GradientPlan, TrialResult
from autotune.sentences import (
    JUDGED_BY_BOUNDS,
    TELLING_COMPILE_SECONDS,
    count,
    describe_break_even,
    describe_drift,
    describe_interference,
    describe_noise,
    describe_power,
    describe_untested,
    format_drift,
    format_margin,
)
from autotune.units import format_bytes, format_duration, format_rate

_TELLING_SAMPLES = 0.005


def describe_changes(config: TrainConfig, baseline: TrainConfig) -> str:
    """Return how a config differs from the baseline, e.g. `precision=bf16 num_workers=2`."""
    changes = [f"{_short(name)}={get_knob(config, name)}" for name in changed_fields(config, baseline)]
    return " ".join(changes) or "your settings"


def describe_speedup(profile: Profile) -> str:
    """Return the verdict as one sentence, the lower end of the interval first."""
    if profile.verdict == "not-tested":
        return "not tested: nothing but your own settings could be measured; keep them"
    found = _describe_estimate(profile)
    if profile.verdict == "improved" and profile.speedup is not None:
        # Rounded down, or "at least" would not be true.
        least = math.floor(100 * profile.speedup.low) / 100
        whole = " over the planned run" if profile.one_off.planned_samples is not None else ""
        more = next((check.difference for check in profile.quality if check.test == "samples-to-loss"), None)
        costs = more is not None and more.high >= _TELLING_SAMPLES
        net = f", net of up to {1.0 + more.high:.2f}x the samples for the same loss" if more and costs else ""
        return f"improved: at least {least:.2f}x faster{whole}{net} ({found})"
    kept = "keep your settings" if profile.verdict == "keep" else "inconclusive: keep your settings"
    if profile.verdict == "keep" and not profile.evidence.pairs:
        refused = " and learned as well" if profile.candidate is not None else ""
        return f"keep your settings: nothing that was measured beat them{refused}"
    return f"{kept} ({found})" if found else kept


def _describe_estimate(profile: Profile) -> str:
    """Return the figures of the pairs; empty where there are none. An interval that is not known is said to be so."""
    speedup, confirmation = profile.speedup, profile.evidence.confirmation
    pairs = count(profile.evidence.pairs, "pair")
    if speedup is not None:
        point = "point" if profile.verdict == "improved" else "best candidate"
        usual = confirmation.interval if confirmation is not None else None
        interval = "" if usual is None else f", 95 % {usual.low:.2f}-{usual.high:.2f}"
        return f"{point} {speedup.estimate:.2f}x{interval}, {pairs}"
    candidate = profile.candidate
    if candidate is None or candidate.speedup_estimate is None:
        return ""
    rests = f"{pairs}, too few for an interval" if candidate.pairs else "in the search alone"
    return f"best candidate about {candidate.speedup_estimate:.2f}x, {rests}"


def list_evidence(profile: Profile) -> list[str]:
    """Return what the answer rests on and what it cost, a line each."""
    evidence, costs = profile.evidence, profile.one_off
    lines = [describe_drift(profile), describe_power(profile), *describe_untested(profile)]
    if evidence.noise is not None:
        lines.append(f"noise: {describe_noise(evidence.noise)}")
    trials = ", ".join(f"{number} {status}" for status, number in sorted(evidence.trials.items()))
    share = evidence.measured_fraction
    measured = "" if share is None else f", {100 * share:.0f} % of it inside measured blocks"
    if evidence.drift_fraction:
        measured += f", {100 * evidence.drift_fraction:.0f} % in the drift gate"
    compiled = costs.compile_seconds > TELLING_COMPILE_SECONDS
    once = f"; compilation {format_duration(costs.compile_seconds)} once" if compiled else ""
    lines.append(f"search {format_duration(costs.search_seconds)} ({trials or 'no trial'}){measured}{once}")
    return [line for line in (*lines, describe_break_even(costs), *evidence.notes) if line]


def describe_check(check: QualityCheck) -> str:
    """Return a drift check as one line."""
    if check.test not in JUDGED_BY_BOUNDS:
        return f"{check.metric}: {check.reason}: {check.verdict}"
    shown = "not measured"
    if check.difference is not None:
        low, high = (format_drift(end, check.margin) for end in (check.difference.low, check.difference.high))
        shown = f"{format_drift(check.difference.estimate, check.margin)} ({low} to {high})"
    if check.test == "exact-losses":
        shown = "bit for bit the same"
    covered = f"{check.seeds} seeds x {check.samples:,} samples"
    return f"{check.metric}: {shown}, limit {format_margin(check.margin)}, {covered}: {check.verdict}"


def describe_result(result: TrialResult, baseline_rate: float | None) -> str:
    """Return how a trial ended in a few words."""
    measurement = result.measurement
    if measurement is None:
        if result.curves:
            return f"{len(result.curves)} seeds trained"
        if result.captures is not None and result.spec.fidelity is not None:
            return _describe_fidelity(result.spec.fidelity)
        if result.tape is not None:
            return f"{len(result.tape.batches)} batches read"
        bound = result.samples_per_second_bound
        rate = f"at most {format_rate(bound)}; " if bound is not None else ""
        return f"{result.status.replace('_', ' ')}: {rate}{result.error or result.cause}"[:160]
    words = [format_rate(measurement.samples_per_second)]
    if baseline_rate:
        words.append(f"{measurement.samples_per_second / baseline_rate:.2f}x")
    words.append(format_bytes(measurement.peak_memory.device_bytes or measurement.peak_memory.host_bytes))
    if not measurement.steady:
        words.append(f"not steady ({measurement.unsettled})" if measurement.unsettled else "not steady")
    if measurement.ended_by == "racing":
        words.append("clearly slower, ended early")
    words += describe_interference([block.interference for block in measurement.blocks])
    return ", ".join(words)


def _describe_fidelity(plan: GradientPlan) -> str:
    words = f"gradients of {plan.windows} batches"
    words += f" at the start and after {plan.later_steps} steps" if plan.later_steps else ""
    words += " in float64" if plan.reference else ""
    return words if plan.dropout else f"{words}, without dropout"


def _short(name: str) -> str:
    return name.removeprefix("user_knobs.")
