"""A search's answer, in words: the verdict, what it rests on, what it cost and what would settle more. Pure."""

from __future__ import annotations

from autotune.format import (
    count,
    format_bounds,
    format_budget,
    format_bytes,
    format_duration,
    format_factor,
    format_factor_down,
    format_share,
)
from autotune.records.measurement import Interval
from autotune.records.objective import Objective
from autotune.records.profile import Candidate, OneOffCosts, Profile
from autotune.sentences.loss_check import describe_drift, find_extra_samples
from autotune.sentences.noise import describe_busy_machine, describe_noise
from autotune.sentences.objective import describe_gain, describe_least, describe_less
from autotune.sentences.settings import describe_changes, name_setting
from autotune.sentences.trials import name_status

_TELLING_COMPILE_SECONDS = 0.1
"""A compilation that took less is none: what is not compiled has a few milliseconds too."""

_TELLING_MEMORY = 0.9
"""Of the answer's peak: who is short of memory is helped by less than that."""

_BEYOND_TELLING = 20.0
"""A gain that no setting has: such pairs show nothing."""


def describe_speedup(profile: Profile) -> str:
    """Return the verdict as one sentence, the lower end of the interval first."""
    if profile.verdict == "not-tested":
        return "not tested: nothing but your own settings could be measured; keep them"
    found = _describe_estimate(profile)
    if profile.verdict == "improved" and profile.memory_ratio is not None and profile.speedup is not None:
        least = describe_least(profile.objective, 1 / profile.memory_ratio.high)
        less = describe_less(profile.baseline_memory, profile.memory)
        speed = format_factor(profile.speedup.estimate)
        return f"improved: {least} at {speed} of your speed ({'; '.join(part for part in (less, found) if part)})"
    if profile.verdict == "improved" and profile.speedup is not None:
        whole = " over the planned run" if profile.objective is Objective.TIME_TO_FINISH else ""
        extra = find_extra_samples(profile)
        net = "" if extra is None else f", net of up to {format_factor(extra)} the samples for the same loss"
        return f"improved: at least {format_factor_down(profile.speedup.low)} faster{whole}{net} ({found})"
    kept = "keep your settings" if profile.verdict == "keep" else "inconclusive: keep your settings"
    if profile.verdict == "keep" and not profile.evidence.pairs:
        refused = " and learned as well" if profile.candidate is not None else ""
        if profile.objective is Objective.MEMORY:
            return f"keep your settings: nothing that was measured needs less memory at your speed{refused}"
        return f"keep your settings: nothing that was measured beat them{refused}"
    return f"{kept} ({found})" if found else kept


def _describe_estimate(profile: Profile) -> str:
    """Return the figures of the pairs; empty where there are none. An interval that is not known is said to be so."""
    speedup, confirmation = profile.speedup, profile.evidence.confirmation
    pairs = count(profile.evidence.pairs, "pair")
    if profile.memory_ratio is not None and speedup is not None:
        return _describe_kept_speed(profile, profile.memory_ratio, speedup)
    if speedup is not None:
        point = "point" if profile.verdict == "improved" else "best candidate"
        usual = confirmation.interval if confirmation is not None else None
        interval = "" if usual is None else f", 95 % {format_bounds(usual.low, usual.high)}"
        return f"{point} {format_factor(speedup.estimate)}{interval}, {pairs}"
    candidate = profile.candidate
    if candidate is None or candidate.speedup_estimate is None:
        return ""
    rests = f"{pairs}, too few for an interval" if candidate.pairs else "in the search alone"
    return f"best candidate about {_describe_figures(profile, candidate)}, {rests}"


def _describe_kept_speed(profile: Profile, memory: Interval, speed: Interval) -> str:
    """Return the figures of the pairs of a search for less memory: the speed beside a claim, else both."""
    pairs = count(profile.evidence.pairs, "pair")
    kept = f"speed at least {format_factor_down(speed.low)}, {pairs}"
    if profile.verdict == "improved":
        return kept
    return f"best candidate {describe_gain(profile.objective, 1 / memory.estimate)}, {kept}"


def _describe_figures(profile: Profile, candidate: Candidate) -> str:
    """Return the speed-up of a candidate that is not proven, with its peak where memory is what counts."""
    about = format_factor(candidate.speedup_estimate or 1.0)
    if profile.objective is not Objective.MEMORY:
        return about
    less = describe_less(profile.baseline_memory, candidate.memory)
    return f"{about} of your speed{f', {less}' if less else ''}"


def list_evidence(profile: Profile) -> list[str]:
    """Return what the answer rests on and what it cost, a line each."""
    evidence, costs = profile.evidence, profile.one_off
    lines = [describe_drift(profile), describe_power(profile), *describe_untested(profile), describe_saving(profile)]
    if evidence.noise is not None:
        lines.append(f"noise: {describe_noise(evidence.noise)}")
        lines.append(None if profile.verdict == "improved" else describe_busy_machine(evidence.noise))
    trials = ", ".join(f"{number} {name_status(status)}" for status, number in sorted(evidence.trials.items()))
    share = evidence.measured_fraction
    measured = "" if share is None else f", {format_share(share)} of it inside measured blocks"
    if evidence.drift_fraction:
        measured += f", {format_share(evidence.drift_fraction)} in the loss check"
    compiled = costs.compile_seconds > _TELLING_COMPILE_SECONDS
    once = f"; compilation {format_duration(costs.compile_seconds)} once" if compiled else ""
    lines.append(f"search {format_duration(costs.search_seconds)} ({trials or 'no trial'}){measured}{once}")
    return [line for line in (*lines, describe_break_even(costs), *evidence.notes) if line]


def describe_saving(profile: Profile) -> str | None:
    """Return the measured settings that need least memory; None where none needs much less than the answer's."""
    least = profile.pareto[-1] if profile.pareto else None
    if least is None or profile.memory is None:
        return None
    used, before = least.memory.used_bytes, profile.memory.used_bytes
    if used > _TELLING_MEMORY * before:
        return None
    names = f" (preset {', '.join(least.presets)})" if least.presets else ""
    return (
        f"least memory that was read: {format_bytes(used)} at {format_factor(least.speedup)} with "
        f"{describe_changes(least.config, profile.baseline_config)}{names}; not proven"
    )


def describe_power(profile: Profile) -> str | None:
    """Return what these pairs could have shown and what it would take to know more; None when it is proven."""
    confirmation = profile.evidence.confirmation
    if confirmation is None or profile.verdict != "inconclusive":
        return None
    ended = " (ended early, more would hardly have shown it)" if confirmation.futile else ""
    pairs = count(len(confirmation.log_ratios), "pair")
    least = confirmation.smallest_detectable
    if profile.memory_ratio is not None:
        text = f"{pairs} do not show that it both saves memory and is as fast{ended}"
    elif least is None:
        text = f"{pairs} are too few to tell anything{ended}"
    else:
        shown = f"a gain of {format_factor(least)} or more" if least < _BEYOND_TELLING else "nothing"
        text = f"with this noise {pairs} show {shown}{ended}"
    if confirmation.extra_seconds_needed is not None:
        more = format_budget(confirmation.extra_seconds_needed)
        return f"{text}; about {more} more would settle it: autotune search --resume --budget {more}"
    if confirmation.wanted_speedup is None:
        return text
    if confirmation.budget_needed_seconds is None:
        return f"{text}; {format_factor(confirmation.wanted_speedup)} is out of reach without a quieter machine"
    return (
        f"{text}; to show {format_factor(confirmation.wanted_speedup)} takes --budget "
        f"{format_budget(confirmation.budget_needed_seconds)} or a quieter machine"
    )


def describe_untested(profile: Profile) -> list[str]:
    """Return what became of the candidates, what was not tried, and the budget that would; empty where some were."""
    found = profile.evidence.not_tested
    if found is None:
        return []
    started = sum(found.outcomes.values())
    ends = ", ".join(f"{number} {name_status(status)}" for status, number in sorted(found.outcomes.items()))
    what = count(started, "candidate was", "candidates were")
    lines = [f"{what} started and none could be timed: {ends}" if started else "no candidate was started"]
    if found.left_out:
        lines.append(f"{count(found.left_out, 'candidate was', 'candidates were')} left out, as they cannot run here")
    if found.settings:
        names = ", ".join(name_setting(name) for name in found.settings)
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
    timed = candidate.speedup_estimate is not None
    about = f"about {_describe_figures(profile, candidate)}" if timed else "not timed"
    if not candidate.passed_checks:
        return f"{about}, {candidate.reason}"
    proven = "not proven" if profile.objective is Objective.MEMORY else "not proven faster"
    return f"{about}, learns as well, {proven}: {candidate.reason}"


def describe_break_even(costs: OneOffCosts) -> str | None:
    """Return after how many samples what was paid once is paid back; None without a gain."""
    if costs.search_break_even_samples is None or costs.break_even_samples is None:
        return None
    search = f"the search is paid back after {costs.search_break_even_samples:,.0f} samples"
    if costs.compile_seconds <= _TELLING_COMPILE_SECONDS:
        return search
    return f"the compilation is paid back after {costs.break_even_samples:,.0f} samples, {search}"
