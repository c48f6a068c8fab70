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
        if result.curves:
            return f"{count(len(result.curves), 'seed')} trained"
        if result.captures is not None and result.spec.fidelity is not None:
            return _describe_fidelity(result.spec.fidelity)
        if result.tape is not None:
            return f"{len(result.tape.batches)} batches read"
        bound = result.samples_per_second_bound
        rate = f"at most {format_rate(bound)}; " if bound is not None else ""
        return f"{name_status(result.status)}: {rate}{result.error or result.cause}"[:_LONGEST]
    words = [format_rate(measurement.samples_per_second)]
    if baseline_rate:
        words.append(format_factor(measurement.samples_per_second / baseline_rate))
    words.append(format_bytes(measurement.peak_memory.used_bytes))
    return ", ".join([*words, *list_remarks(measurement)])


def _describe_fidelity(plan: GradientPlan) -> str:
    words = f"gradients of {plan.windows} batches"
    words += f" at the start and after {plan.later_steps} steps" if plan.later_steps else ""
    words += " in float64" if plan.reference else ""
    return words if plan.dropout else f"{words}, without dropout"
