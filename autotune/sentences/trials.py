"""How a trial ended, in words. Pure."""

from __future__ import annotations

from autotune.format import count, format_bytes, format_factor, format_rate
from autotune.records.trial import GradientPlan, TrialResult
from autotune.sentences.noise import list_remarks

_LONGEST = 160
"""Characters of how a trial failed: the rest of an error is in its folder."""


def name_status(status: str) -> str:
    """Return how a trial ended, in words."""
    return status.replace("_", " ")


def describe_result(result: TrialResult, baseline_rate: float | None) -> str:
    """Return how a trial ended in a few words.

    Args:
        result: of the trial.
        baseline_rate: of the baseline in samples per second, to hold its own against; None before it is known.
    """
    measurement = result.measurement
    if measurement is None:
        if result.captures is not None and result.spec.fidelity is not None:
            return _describe_fidelity(result.spec.fidelity)
        if result.curves:
            return f"{count(len(result.curves), 'seed')} trained"
        if result.tape is not None:
            return f"{len(result.tape.batches)} batches read"
        bound = result.samples_per_second_bound
        rate = f"at most {format_rate(bound)}; " if bound is not None else ""
        return f"{name_status(result.status)}: {rate}{result.error or result.cause}"[:_LONGEST]
    own = measurement.samples_per_second
    ratio = [format_factor(own / baseline_rate)] if baseline_rate else []
    memory = format_bytes(measurement.peak_memory.used_bytes)
    return ", ".join([*ratio, format_rate(own), memory, *list_remarks(measurement)])


def _describe_fidelity(plan: GradientPlan) -> str:
    words = f"gradients of {plan.windows} batches"
    if plan.later_steps:
        more = f" and of {plan.windows}" if plan.first_windows else " and"
        first = plan.first_windows or plan.windows
        words = f"gradients of {first} batches at the start{more} after {plan.later_steps} steps"
    words += " in float64" if plan.reference else ""
    return words if plan.dropout else f"{words}, without dropout"
