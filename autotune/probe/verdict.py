"""Which limit binds a step, and what to try first. Records in, `Verdict` and ranked `Advice` out; pure.

    input      waiting is more than a tenth of a step, or most of what a step takes beyond its computation
    compute    matrix products reach more than half of their measured rate
    bandwidth  they reach less than 30 %, and an optimizer that fills most of the step moves memory near its limit
    unknown    anything else: the sentence says what was measured

`launch` is never answered: telling it from memory traffic takes the time to enqueue a step, which is not measured.
"""

from __future__ import annotations

from autotune.probe.advice import advise
from autotune.probe.figures import (
    StepFigures,
    best_flops_per_second,
    derive_figures,
    format_flops,
    format_share,
    format_step,
)
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Advice, Limit, Verdict

_INPUT_WAIT_FRACTION = 0.10
_INPUT_STEP_RATIO = 1.1
_COMPUTE_MFU = 0.50
_BANDWIDTH_MFU = 0.30
_BANDWIDTH_OPTIMIZER_FRACTION = 0.50
# Achieved over measured memory rate: below, something else limits; above, the traffic never left the caches.
_BANDWIDTH_RATES = (0.6, 1.25)
# Reads of parameter and gradient and the write of the parameter; Adam also reads and writes two moments.
_LEAST_OPTIMIZER_PASSES = 3
_ADAM_PASSES = 7
_ADAMS = frozenset({"Adam", "AdamW", "NAdam", "RAdam"})


def judge(
    report_facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo
) -> tuple[Verdict, tuple[Advice, ...]]:
    """Return the limit that binds the baseline's step, and the knobs worth trying, best first.

    Args:
        report_facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
    """
    figures = derive_figures(report_facts, measurement)
    limit, sentence = _find_limit(report_facts, figures, hardware)
    verdict = Verdict(limit=limit, sentence=sentence, speedup_ceiling=_bound_speedup(report_facts, figures, hardware))
    return verdict, advise(report_facts, measurement, hardware, limit=limit)


def _find_limit(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> tuple[Limit, str]:
    if _is_input_bound(figures):
        return "input", _describe_input(facts, figures, hardware)
    if figures.mfu is not None and figures.mfu > _COMPUTE_MFU:
        return "compute", f"compute-bound: {_describe_mfu(figures)}"
    traffic = _optimizer_bytes_per_second(facts)
    memory = facts.ceilings.memory_bytes_per_second
    low, high = _BANDWIDTH_RATES
    if (
        figures.mfu is not None
        and figures.mfu < _BANDWIDTH_MFU
        and figures.optimizer_fraction > _BANDWIDTH_OPTIMIZER_FRACTION
        and traffic is not None
        and memory is not None
        and low <= traffic / memory <= high
    ):
        share = format_share(figures.optimizer_fraction)
        rates = f"{traffic / 1e9:.3g} of the measured {memory / 1e9:.3g} GB/s"
        return "bandwidth", (
            f"bandwidth-bound: the optimizer takes {share} of a step and moves at least {rates}; "
            f"{_describe_mfu(figures)}"
        )
    return "unknown", _describe_unknown(figures)


def _is_input_bound(figures: StepFigures) -> bool:
    if figures.wait_fraction > _INPUT_WAIT_FRACTION:
        return True
    beyond_seconds = figures.step_seconds - figures.compute_seconds
    slower = figures.step_seconds > _INPUT_STEP_RATIO * figures.compute_seconds
    return slower and figures.wait_seconds > 0.5 * beyond_seconds


def _describe_input(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> str:
    sentence = f"input-bound: {format_share(figures.wait_fraction)} of a step waits for the loader"
    rest_seconds = figures.step_seconds - figures.wait_seconds
    if rest_seconds > 0:
        ratio = figures.step_seconds / rest_seconds
        step, rest = format_step(figures.step_seconds), format_step(rest_seconds)
        sentence += f"; without the wait a step takes {rest} instead of {step} ({ratio:.2g}x)"
    load_seconds = _least_load_seconds(facts, figures, hardware)
    if load_seconds > figures.compute_seconds:
        sentence += (
            f"; loading a step's samples takes {format_step(load_seconds)} even when shared evenly by "
            f"{hardware.usable_cpu_count} CPUs, more than the computation ({format_step(figures.compute_seconds)})"
        )
    return sentence


def _describe_mfu(figures: StepFigures) -> str:
    if figures.flops_per_second is None:
        return "its operations could not be counted"
    reached = format_flops(figures.flops_per_second)
    if figures.mfu is None or figures.ceiling_flops_per_second is None:
        return f"it reaches {reached}, and the rate of {figures.arithmetic} was not measured"
    rates = f"{reached} of {format_flops(figures.ceiling_flops_per_second)}"
    return f"matrix products reach {format_share(figures.mfu)} of the measured {figures.arithmetic} rate ({rates})"


def _describe_unknown(figures: StepFigures) -> str:
    wait, copy = format_share(figures.wait_fraction), format_share(figures.copy_fraction)
    model, optimizer = format_share(figures.model_fraction), format_share(figures.optimizer_fraction)
    return (
        f"unknown: a step takes {format_step(figures.step_seconds)} and waits {wait} of it for the loader; "
        f"{_describe_mfu(figures)}; forward and backward take {model}, the optimizer {optimizer}, copies {copy}; "
        "launches and memory traffic were not told apart"
    )


def _optimizer_bytes_per_second(facts: TargetFacts) -> float | None:
    """Return the least rate at which the optimizer moved memory; None when its phase took no time."""
    passes = _ADAM_PASSES if facts.optimizer.name in _ADAMS else _LEAST_OPTIMIZER_PASSES
    seconds = facts.phases.optimizer_seconds
    return passes * facts.model.parameter_bytes / seconds if seconds > 0 else None


def _bound_speedup(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> float | None:
    """Return t_step / max(t_load, FLOPs / fastest rate): samples must be loaded, and products computed, at least once.

    None when operations cannot be counted, and when the measured step is shorter than the bound: then the bound is
    wrong (convolutions by fewer operations, a loader that sleeps), and a wrong bound would end a search early.
    """
    best = best_flops_per_second(facts.ceilings)
    flops_per_sample = facts.model.flops_per_sample
    if not flops_per_sample or not best:
        return None
    compute_seconds = flops_per_sample * figures.samples_per_step / best
    ratio = figures.step_seconds / max(_least_load_seconds(facts, figures, hardware), compute_seconds)
    return ratio if ratio >= 1.0 else None


def _least_load_seconds(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> float:
    """Return the time to load one step's samples, shared evenly by all usable CPUs."""
    return facts.data.seconds_per_sample * figures.samples_per_step / hardware.usable_cpu_count
