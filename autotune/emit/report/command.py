"""A search as a command to repeat."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from autotune.format import format_budget
from autotune.presets import load_presets
from autotune.records.objective import usual_objective
from autotune.records.quality import DriftLimits, Margin
from autotune.records.script import Script
from autotune.records.search import SearchState
from autotune.targets.user_knob import write_knob

_OWN_PRESET = "FILE.json"
"""Stands for the file of a preset that is not a shipped one: where it was is in no record."""


def describe_command(state: SearchState) -> str:
    """Return the command that makes a search again, as it was typed but for secrets, which are in no record."""
    script = state.target.script
    words = [] if script is not None else [state.target.spec]
    words += [] if state.budget_seconds is None else ["--budget", _format_budget(state.budget_seconds)]
    words += ["--nproc-per-node", str(state.world_size)] if state.world_size > 1 else []
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
        words += ["--preset", preset.name if preset in load_presets() else _OWN_PRESET]
    words += [] if script is None else [*_list_script_options(script), "--", *script.command]
    return shlex.join(["autotune", "search", *words])


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
        return f"{amount / 3600:.15g}h" if amount >= 3600 else f"{amount:.15g}s"
    return f"{amount:.15g}{unit}"


def _list_script_options(script: Script) -> Iterator[str]:
    for knob in script.knobs:
        yield from ("--knob", write_knob(knob))
    for metric in script.metrics:
        option, given = ("--metric-key", metric.key) if metric.pattern is None else ("--metric-regex", metric.pattern)
        yield from (option, given or metric.name, "--direction", metric.direction)
    for option, number in (("--check-steps", script.quality_steps), ("--check-epochs", script.quality_epochs)):
        if number is not None:
            yield from (option, str(number))
