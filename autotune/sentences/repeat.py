"""A search as a command to repeat, and what its answer saves of a whole training. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from autotune.format import format_budget, format_duration
from autotune.records.objective import Objective, usual_objective
from autotune.records.profile import Profile
from autotune.records.quality import DriftLimits, Margin
from autotune.records.script import Script
from autotune.records.search import SearchState

EXAMPLE_SECONDS = 10 * 3600.0
"""Of a training whose length was not told."""


def describe_command(state: SearchState) -> str:
    """Return the command that makes a search again, as it was typed but for secrets, which are in no record."""
    script = state.target.script
    words = [] if script is not None else [state.target.spec]
    words += [] if state.budget_seconds is None else ["--budget", _format_budget(state.budget_seconds)]
    words += ["--seed", str(state.seed)] if state.seed else []
    words += _list_limits(state.max_drift)
    if state.memory_limit_bytes is not None:
        words += ["--memory-limit", f"{state.memory_limit_bytes}B"]
    if state.planned_run is not None:
        words += ["--train-for", _format_length(state.planned_run.amount, state.planned_run.unit)]
    if state.objective is not usual_objective(is_length_known=state.planned_run is not None):
        words += ["--objective", state.objective.value]
    for option, values in (("--only", state.only), ("--exclude", state.exclude)):
        for value in values:
            words += [option, value]
    words += ["--tune-batch-size"] if state.allowed else []
    words += ["--lr-scaling", state.learning_rate_rule] if state.learning_rate_rule != "none" else []
    for preset in state.presets:
        words += ["--preset", preset.name]
    words += [] if script is None else [*_list_script_options(script), "--", *script.command]
    return shlex.join(["autotune", "search", *words])


def describe_saving(profile: Profile, state: SearchState | None, baseline_rate: float, *, aside: float) -> str:
    """Return how long a training takes with the answer; empty where nothing is proven.

    Args:
        profile: the answer.
        state: what the search was asked, which may tell how long the training is.
        baseline_rate: samples per second of the user's own settings.
        aside: share of a run that is no training step, and stays as it is.
    """
    whole = find_run_seconds(profile, state, baseline_rate)
    seconds = whole or EXAMPLE_SECONDS
    if not _saves(profile) or profile.speedup is None:
        return ""
    ends = [shorten_run(seconds, ratio, aside) for ratio in (profile.speedup.estimate, profile.speedup.low)]
    if not max(seconds, *ends) < math.inf:
        return ""
    point, most = map(format_duration, ends)
    saved = format_duration(save_seconds(profile, seconds, aside))
    run = f"Your run of {format_duration(seconds)}" if whole else f"A training of {format_duration(seconds)}"
    return f"{run} takes about {point}, at most {most}: at least {saved} less."


def describe_price(
    profile: Profile, state: SearchState | None, baseline_rate: float, *, aside: float, price: float
) -> str:
    """Return what the answer saves at a price per hour, and what the search has cost; arguments as above."""
    search = profile.one_off.search_seconds / 3600 * price
    if not _saves(profile):
        return f"At {price:,.2f} an hour the search has cost {search:,.2f}."
    whole = find_run_seconds(profile, state, baseline_rate)
    saved = save_seconds(profile, whole or EXAMPLE_SECONDS, aside) / 3600 * price
    run = "run" if whole else "such training"
    return f"At {price:,.2f} an hour: at least {saved:,.2f} less for each {run}; the search has cost {search:,.2f}."


def _saves(profile: Profile) -> bool:
    known = profile.speedup
    is_faster = profile.verdict == "improved" and profile.objective is not Objective.MEMORY
    return is_faster and known is not None and min(known.low, known.estimate) > 0.0


def find_run_seconds(profile: Profile, state: SearchState | None, baseline_rate: float) -> float | None:
    """Return how long the user's own run takes as it is; None where its length was not told."""
    planned = None if state is None else state.planned_run
    if planned is not None and planned.unit == "seconds":
        return planned.amount
    samples = profile.one_off.planned_samples
    return None if samples is None else samples / baseline_rate


def save_seconds(profile: Profile, seconds: float, aside: float) -> float:
    """Return how much less a run takes at least, by the lower end of the speed-up."""
    assert profile.speedup is not None
    return seconds - shorten_run(seconds, profile.speedup.low, aside)


def shorten_run(seconds: float, ratio: float, aside: float) -> float:
    """Return how long a run takes whose steps are faster by a ratio."""
    return seconds * (aside + (1 - aside) / ratio)


def _list_limits(limits: DriftLimits) -> Iterator[str]:
    usual = DriftLimits().loss
    if limits.loss != usual:
        yield from ("--max-loss-increase", _format_limit(limits.loss))
    if (limits.metric or limits.loss) != usual:
        yield from ("--metric-limit", _format_limit(limits.metric or limits.loss))
    for name, margin in limits.metrics.items():
        yield from ("--metric-limit", f"{name}={_format_limit(margin)}")


def _format_limit(margin: Margin) -> str:
    if margin.unit == "relative":
        return f"{100 * margin.amount:.10g}%"
    form = "max-degradation" if margin.amount >= 0 else "min-improvement"
    return f"{form}={abs(margin.amount):.10g}"


def _format_budget(seconds: float) -> str:
    is_round = seconds % 60 == 0
    return format_budget(seconds) if is_round and seconds < 3 * 3600 else f"{seconds:g}s"


def _format_length(amount: float, unit: str) -> str:
    if unit == "seconds":
        return f"{amount / 3600:g}h" if amount >= 3600 else f"{amount:g}s"
    return f"{amount:g}{unit}"


def _list_script_options(script: Script) -> Iterator[str]:
    for knob in script.knobs:
        yield from ("--knob", f"{knob.name}={','.join(map(str, knob.values))}:{knob.numerics}")
    for metric in script.metrics:
        option, given = ("--metric-key", metric.key) if metric.pattern is None else ("--metric-regex", metric.pattern)
        yield from (option, given or metric.name, "--direction", metric.direction)
    for option, number in (("--check-steps", script.quality_steps), ("--check-epochs", script.quality_epochs)):
        if number is not None:
            yield from (option, str(number))
