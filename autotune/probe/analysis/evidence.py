"""The further figures a verdict rests on, one a sentence, the strongest for its class first; pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.format import (
    count,
    format_bandwidth,
    format_bytes,
    format_factor,
    format_flops,
    format_share,
    format_time,
    times,
)
from autotune.probe.analysis.bounds import least_load_seconds
from autotune.probe.analysis.figures import StepFigures, divide, optimizer_share
from autotune.probe.analysis.policy import VerdictPolicy
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.probe import Limit

_ELASTICITIES = (-4.0, 4.0)


@dataclass(frozen=True)
class StepCase:
    """A step to judge.

    Attributes:
        facts: what the probe found about the target.
        figures: the baseline's step in numbers.
        hardware: the machine.
    """

    facts: TargetFacts
    figures: StepFigures
    hardware: HardwareInfo

    @property
    def policy(self) -> VerdictPolicy:
        """From where on a figure says something."""
        return self.figures.policy

    @property
    def all_reduce_fraction(self) -> float | None:
        """Share of a step that an all-reduce of the gradients would fill; None with one rank or no measured rate.

        Source: NCCL's performance notes: 2 (n - 1) / n times the bytes over the bus bandwidth.
        """
        ranks, rate = self.facts.ceilings.ranks, self.facts.ceilings.all_reduce_bytes_per_second
        if ranks < 2:
            return None
        seconds = divide(2 * (ranks - 1) / ranks * self.facts.model.parameter_bytes, rate)
        return divide(seconds, self.figures.step_seconds)


def collect_evidence(case: StepCase, limit: Limit) -> tuple[str, ...]:
    """Return the figures that were measured, those that speak for the limit first.

    Args:
        case: the step.
        limit: what binds it.
    """
    names = dict.fromkeys([*_FIRST.get(limit, ()), *_FIGURES])
    if limit == "input":
        del names["waits"]  # the verdict's own figure
    sentences = [_FIGURES[name](case) for name in names]
    return tuple(sentence for sentence in sentences if sentence)


def describe_mfu(figures: StepFigures) -> str:
    """Return how much of the measured rate the matrix products reach, against what the hardware keeps up."""
    if figures.flops_per_second is None:
        return "MFU not known: its operations could not be counted"
    reached = format_flops(figures.flops_per_second)
    if figures.mfu is None or figures.ceiling_flops_per_second is None:
        name = figures.arithmetic
        why = f"{name} is emulated here" if figures.is_emulated else f"the rate of {name} was not measured"
        return f"MFU not known: {reached}, and {why}"
    rates = f"{reached} of {format_flops(figures.ceiling_flops_per_second)}"
    return f"MFU {format_share(figures.mfu)} of the measured {figures.arithmetic} rate ({rates})"


def _tell_shares(case: StepCase) -> str:
    work = case.facts.work
    if work is None:
        return ""
    return (
        f"of the computation {format_share(work.products_fraction)} are matrix products, "
        f"{format_share(work.traffic_fraction)} memory traffic, {format_share(work.overhead_fraction)} overhead"
    )


def _tell_wait_share(case: StepCase) -> str:
    share = case.figures.wait_fraction
    return f"{format_share(share)} of a step waits for the loader" if share > case.policy.notable_wait_fraction else ""


def _tell_waiting(case: StepCase) -> str:
    figures, data = case.figures, case.facts.data
    load = data.seconds_per_sample * figures.samples_per_step
    if load <= 0:
        return ""
    sentence = (
        f"one process loads a step's samples in {format_time(load)}, "
        f"the computation takes {format_time(figures.compute_seconds)}"
    )
    if data.loader_seconds_per_step is not None:
        workers = case.facts.baseline.num_workers
        used = f"with {count(workers, 'worker')}" if workers else "without workers"
        sentence += f"; the loader alone, {used}, takes {format_time(data.loader_seconds_per_step)}"
    return sentence


def _tell_least_loading(case: StepCase) -> str:
    load = least_load_seconds(case.facts, case.figures, case.hardware)
    if load <= case.figures.compute_seconds:
        return ""
    cpus = case.hardware.usable_cpu_count
    return f"loading takes {format_time(load)} a step even when {cpus} CPUs share it, more than the computation"


def _tell_burst(case: StepCase) -> str:
    figures = case.figures
    burst = figures.burst_flops_per_second
    if figures.burst_mfu is None or burst is None or burst == figures.ceiling_flops_per_second:
        return ""
    return f"MFU {format_share(figures.burst_mfu)} of the best rate for a moment ({format_flops(burst)})"


def _tell_products(case: StepCase) -> str:
    """Return the rate of the products while they run: low, and better products are what there is to gain."""
    figures, work = case.figures, case.facts.work
    if work is None or figures.mfu is None:
        return ""
    rate = divide(figures.mfu, work.products_fraction * figures.compute_fraction)
    if rate is None or rate > case.policy.most_of_a_limit:
        return ""  # the products that count were too few or too short to be told from the rest
    return f"while matrix products run they reach {format_share(rate)} of that rate"


def _tell_launches(case: StepCase) -> str:
    work, launch = case.facts.work, case.facts.ceilings.launch_seconds
    if work is None:
        return ""
    calls = f"{work.operations_per_step:,.0f} {'kernels' if case.facts.device == 'cuda' else 'operations'} a step"
    share = None if launch is None else divide(work.operations_per_step * launch, case.figures.compute_seconds)
    if launch is None or share is None:
        return calls
    return f"{calls} at {format_time(launch)} a call: {format_share(share)} of the computation"


def _tell_elasticity(case: StepCase) -> str:
    elasticity = case.facts.batch_elasticity
    if elasticity is None:
        return ""
    low, high = _ELASTICITIES
    return f"a pass over twice the samples takes {format_factor(2 ** min(high, max(low, elasticity)))} the time"


def _tell_busy(case: StepCase) -> str:
    work = case.facts.work
    return (
        ""
        if work is None or work.device_busy_fraction is None
        else f"kernels run in {format_share(work.device_busy_fraction)} of a step"
    )


def _tell_enqueue(case: StepCase) -> str:
    work = case.facts.work
    return (
        ""
        if work is None or work.enqueue_fraction is None
        else f"the host needs {format_share(work.enqueue_fraction)} of a step to hand it over"
    )


def _tell_traffic(case: StepCase) -> str:
    rate = describe_memory_rate(case)
    return f"memory traffic runs at {rate}" if rate else ""


def describe_memory_rate(case: StepCase) -> str:
    """Return the rate of the memory traffic beside the measured one, the latter where it is known; "" without any."""
    achieved = None if case.facts.work is None else case.facts.work.bytes_per_second
    memory = case.facts.ceilings.memory_bytes_per_second
    if achieved is None:
        return ""
    ratio = divide(achieved, memory)
    if ratio is None or memory is None:
        return format_bandwidth(achieved)
    cached = " (a part of it stays in the caches)" if ratio > case.policy.most_plausible_rate else ""
    return f"{format_bandwidth(achieved)} of {format_bandwidth(memory)} measured{cached}"


def _tell_optimizer(case: StepCase) -> str:
    share = optimizer_share(case.facts.phases)
    seconds = format_time(case.facts.phases.optimizer_seconds)
    return f"the optimizer takes {format_share(share)} of the computation ({seconds})" if share > 0 else ""


def _tell_all_reduce(case: StepCase) -> str:
    share, ceilings = case.all_reduce_fraction, case.facts.ceilings
    if share is None:
        return ""
    size = format_bytes(case.facts.model.parameter_bytes)
    sentence = f"an all-reduce of {size} between {ceilings.ranks} ranks would fill {format_share(share)} of a step"
    if share <= case.policy.hidden_all_reduce_fraction:
        return f"{sentence}: it can hide behind the backward pass, so this is no proof"
    if share > case.policy.most_all_reduce_fraction:
        return f"{sentence}: not all gradients can travel at the measured rate"
    return f"{sentence}; how much of it hides behind the backward pass was not measured"


def _tell_syncs(case: StepCase) -> str:
    work = case.facts.work
    if work is None or work.host_syncs_per_step <= 0:
        return ""
    waits = " and waits for the GPU" if case.facts.device == "cuda" else ""
    return f"the host asks for a value {times(work.host_syncs_per_step)} a step{waits}"


_FIGURES: dict[str, Callable[[StepCase], str]] = {
    "shares": _tell_shares,
    "busy": _tell_busy,
    "enqueue": _tell_enqueue,
    "launches": _tell_launches,
    "elasticity": _tell_elasticity,
    "burst": _tell_burst,
    "products": _tell_products,
    "traffic": _tell_traffic,
    "optimizer": _tell_optimizer,
    "waits": _tell_wait_share,
    "waiting": _tell_waiting,
    "loading": _tell_least_loading,
    "all-reduce": _tell_all_reduce,
    "syncs": _tell_syncs,
}

_FIRST: dict[Limit, tuple[str, ...]] = {
    "input": ("loading", "waiting"),
    "communication": ("all-reduce",),
    "launch": ("busy", "enqueue", "launches", "elasticity", "syncs"),
    "compute": ("burst", "products", "shares", "elasticity"),
    "bandwidth": ("traffic", "optimizer", "shares"),
}
