"""What a step cannot do without, and so the speed-up that no setting can pass. Records in, numbers out; pure.

    samples ── must be loaded          products ── must be computed          optimizer state ── must pass the memory

Each takes a least time at the fastest rate that was measured here. They can overlap, so the longest one binds.
"""

from __future__ import annotations

from autotune.format import format_bandwidth, format_flops, format_time
from autotune.probe.analysis.figures import StepFigures, divide, fastest_arithmetic
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo

# Reads of parameter and gradient and the write of the parameter; Adam also reads and writes two moments.
_LEAST_OPTIMIZER_PASSES = 3
_ADAM_PASSES = 7
_ADAMS = frozenset({"Adam", "AdamW", "NAdam", "RAdam"})

_GPU_CACHE_BYTES = 2**28
"""No GPU has a larger cache; the driver does not tell its size."""

_NO_BOUND = 100.0
"""Times faster: a step that its bound is so small a part of spends its time on what no bound here knows of."""


def bound_speedup(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> tuple[float | None, str]:
    """Return t_step / max(t_load, t_products, t_optimizer) and what binds it, in one sentence.

    None when operations cannot be counted, when the bound is next to nothing of the step, and when the measured step is
    shorter than the bound: then the bound is wrong (convolutions by fewer operations, a loader that sleeps), and a
    wrong bound would end a search early.

    Source: Williams et al. 2009, the roofline model, with loading as a third roof.
    """
    fastest, flops_per_sample = fastest_arithmetic(facts.rates), facts.model.flops_per_sample
    flops = flops_per_sample * figures.samples_per_step if flops_per_sample else None
    products = divide(flops, fastest.flops_per_second) if fastest is not None else None
    if fastest is None or not products:
        return None, ""
    load, optimizer = least_load_seconds(facts, figures, hardware), least_optimizer_seconds(facts, hardware)
    longest = max(load, products, optimizer)
    ratio = divide(figures.step_seconds, longest)
    if ratio is None or ratio < 1.0:
        return None, ""
    if ratio > _NO_BOUND:
        return None, "what a step must load, compute and update takes less than 1 % of it, which bounds nothing"
    time = format_time(longest)
    if longest == products:
        rate = f"{fastest.dtype}, {format_flops(fastest.flops_per_second)}"
        return ratio, f"matrix products take {time} of a step at the fastest measured rate ({rate})"
    if longest == load:
        return ratio, f"loading a step's samples takes {time} even when {_count_loaders(facts, hardware)} CPUs share it"
    rate = format_bandwidth(_memory_rate(facts) or 0.0)
    return ratio, f"the optimizer's passes over parameters and state take {time} at the measured memory rate ({rate})"


def least_load_seconds(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> float:
    """Return the time to load one step's samples, shared evenly by all usable CPUs.

    What a sample waits for, a disk or a network, more workers can wait for at once: only its CPU time counts. Where
    the user's own loader, its workers shared out alike, was seen to be faster than that, its time counts.
    """
    data, loaders = facts.data, _count_loaders(facts, hardware)
    busy_seconds = data.seconds_per_sample * (1.0 if data.cpu_fraction is None else data.cpu_fraction)
    shared = busy_seconds * figures.samples_per_step / loaders
    if data.loader_seconds_per_step is None:
        return shared
    return min(shared, data.loader_seconds_per_step * max(1, facts.baseline.num_workers) / loaders)


def least_optimizer_seconds(facts: TargetFacts, hardware: HardwareInfo) -> float:
    """Return the time that the optimizer's passes over the memory take at the fastest measured rate.

    What a cache holds from one step to the next is neither read nor written, so twice the cache's size is taken off.
    An optimizer seen to be faster than its passes makes fewer (sparse gradients, sharded state): its time counts.
    0 when the rate or the cache is not known.
    """
    cache = _GPU_CACHE_BYTES if facts.device == "cuda" else hardware.last_level_cache_bytes
    if cache is None:
        return 0.0
    traffic = count_optimizer_bytes(facts) - 2 * cache
    seconds = divide(float(max(0, traffic)), _memory_rate(facts))
    return min(seconds or 0.0, facts.phases.optimizer_seconds)


def count_optimizer_bytes(facts: TargetFacts) -> int:
    """Return the least memory traffic of one optimizer step over all parameters, in bytes."""
    passes = _ADAM_PASSES if facts.optimizer.name in _ADAMS else _LEAST_OPTIMIZER_PASSES
    return passes * facts.model.parameter_bytes


def _count_loaders(facts: TargetFacts, hardware: HardwareInfo) -> int:
    return max(1, hardware.usable_cpu_count, facts.baseline.num_workers)


def _memory_rate(facts: TargetFacts) -> float | None:
    rates = (facts.ceilings.memory_bytes_per_second, facts.ceilings.triad_bytes_per_second)
    return max((rate for rate in rates if rate is not None), default=None)
