"""Whether a step could be measured at all. Records in, the reason why not out, in one sentence; pure.

    blocks ── CPUs that others had        canary ── speed before and after        rates ── beyond what was measured

A little of each is on every machine. What counts is a quarter of the CPUs that the training wants, missing for most of
the time, a machine that changed its speed by half, and products faster than the fastest that were ever seen here.
"""

from __future__ import annotations

from autotune.format import count, format_flops, format_rough_factor, format_share
from autotune.probe.analysis.evidence import StepCase
from autotune.probe.analysis.figures import divide
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Interference, Measurement


def explain_unreliable(case: StepCase, measurement: Measurement) -> str:
    """Return why the figures of a step tell nothing of it; empty where they do, or where nothing was watched.

    Args:
        case: the step.
        measurement: the baseline, timed end to end.
    """
    for trouble in (
        describe_lost_cpus(case, measurement, least=case.policy.much_lost_fraction),
        _describe_changed_speed(measurement, case.policy.changed_speed),
        _describe_impossible_products(case),
    ):
        if trouble:
            return trouble
    return ""


def is_disturbed(case: StepCase, measurement: Measurement) -> bool:
    """Return whether others had a tenth of the CPUs the training wants, or more, for most of the time."""
    return bool(describe_lost_cpus(case, measurement, least=case.policy.some_lost_fraction))


def describe_lost_cpus(case: StepCase, measurement: Measurement, *, least: float) -> str:
    """Return what others had of the CPUs that the training wants, where it was much of them for most of the time.

    Args:
        case: the step.
        measurement: the baseline, its blocks watched.
        least: share of those CPUs from which on it is much.
    """
    watched = [(block.seconds, block.interference) for block in measurement.blocks if block.interference is not None]
    lost = [(seconds, seen) for seconds, seen in watched if _find_lost(seen, case.facts, case.hardware) > least]
    if not lost or sum(seconds for seconds, _ in lost) <= case.policy.most * measurement.seconds:
        return ""
    others, stolen = (
        max(getattr(seen, name) or 0.0 for _, seen in lost) for name in ("foreign_cpu_fraction", "steal_fraction")
    )
    whose = "other processes used" if others >= stolen else "the hypervisor gave somebody else"
    blocks = f"{len(lost)} of {count(len(measurement.blocks), 'timed block')}"
    return f"{whose} up to {format_share(max(others, stolen))} of the CPU time in {blocks}"


def _find_lost(seen: Interference, facts: TargetFacts, hardware: HardwareInfo) -> float:
    """Return the share of the CPUs that the training wants which others had."""
    usable, baseline = hardware.usable_cpu_count, facts.baseline
    threads = 1 if facts.device == "cuda" else baseline.num_threads or usable
    wanted = max(1, min(usable, threads + baseline.num_workers))
    left = usable * (1.0 - seen.taken_fraction)
    return 1.0 - max(0.0, left) / wanted


def _describe_changed_speed(measurement: Measurement, changed: float) -> str:
    canary = measurement.canary
    ratio = None if canary is None else divide(canary.after_seconds, canary.before_seconds)
    if ratio is None or 1 / changed < ratio < changed:
        return ""
    longer = format_rough_factor(ratio)
    return f"the machine changed its speed: the same small piece of work took {longer} as long afterwards as before"


def _describe_impossible_products(case: StepCase) -> str:
    """Return that products ran faster than was possible; of convolutions there are ways with fewer operations."""
    figures = case.figures
    reached, most = figures.flops_per_second, figures.burst_flops_per_second
    ratio = divide(reached, most)
    if reached is None or most is None or ratio is None or ratio <= case.policy.most_plausible_rate:
        return ""
    if case.facts.model.has_4d_convolution:
        return ""
    rates = f"{format_flops(reached)} in the training, {format_flops(most)} at best alone"
    return f"the figures contradict each other: {figures.arithmetic} products ran at {rates}"
