"""Which limit binds a step, and what to try first. Records in, `Verdict` and ranked `Advice` out; pure.

    input          waiting is more than a tenth of a step, or most of what a step takes beyond its computation; without
                   workers, loading and computing take turns, and it has to be the largest share of all
    communication  an all-reduce of the gradients would fill more than half of a step
    launch         overhead is most of the computation, or a GPU is idle because the host hands work over too slowly
    compute        matrix products are most of the computation
    bandwidth      memory traffic is
    unknown        anything else, and two shares that are nearly the same: the sentence names both
    unreliable     the machine was too busy to tell, or the figures contradict each other: asked before all of them

Each is tried in this order. Without the profiler's shares (`StepWork`), `compute` takes an MFU above half and
`bandwidth` an optimizer that fills most of the step and moves memory near its limit.
"""

from __future__ import annotations

from autotune.format import format_bandwidth, format_factor, format_rough_factor, format_share, format_time
from autotune.probe.analysis.advice.rank import advise
from autotune.probe.analysis.bounds import bound_speedup, count_optimizer_bytes
from autotune.probe.analysis.evidence import StepCase, collect_evidence, describe_memory_rate, describe_mfu
from autotune.probe.analysis.figures import StepFigures, derive_figures, divide, optimizer_share
from autotune.probe.analysis.policy import USUAL, VerdictPolicy
from autotune.probe.analysis.reliability import describe_lost_cpus, explain_unreliable, is_disturbed
from autotune.records.facts import StepWork, TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Advice, Limit, Verdict

_Finding = tuple[Limit, str] | None


def judge(
    report_facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo, *, policy: VerdictPolicy = USUAL
) -> tuple[Verdict, tuple[Advice, ...]]:
    """Return the limit that binds the baseline's step, and the knobs worth trying, best first.

    Args:
        report_facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
        policy: from where on a figure binds.
    """
    case = StepCase(report_facts, derive_figures(report_facts, measurement, policy=policy), hardware)
    limit, deciding = _find_limit(case)
    trouble = explain_unreliable(case, measurement)
    if not trouble and limit == "unknown" and _is_slow_traffic(case) and is_disturbed(case, measurement):
        trouble = f"{deciding}, and {describe_lost_cpus(case, measurement, least=0.0)}"
    if trouble:
        return _doubt(case, trouble), advise(report_facts, measurement, hardware, limit="unreliable")
    ceiling, reason = bound_speedup(report_facts, case.figures, hardware)
    name = limit if limit == "unknown" else f"{limit}-bound"
    verdict = Verdict(
        limit=limit,
        sentence=f"{name}: {deciding}{'; ' if deciding else ''}{describe_mfu(case.figures)}",
        evidence=collect_evidence(case, limit),
        speedup_ceiling=ceiling,
        ceiling_reason=reason,
    )
    return verdict, advise(report_facts, measurement, hardware, limit=limit)


def _doubt(case: StepCase, trouble: str) -> Verdict:
    """Return the verdict that there is none: no limit, and no bound, which would rest on the same figures."""
    sentence = f"not reliable: {trouble}; probe again when the machine is quieter"
    return Verdict(limit="unreliable", sentence=sentence, evidence=collect_evidence(case, "unreliable"))


def _find_limit(case: StepCase) -> tuple[Limit, str]:
    """Return the limit and the figure that decides it."""
    for look in (_find_input, _find_communication, _find_idle_gpu, _find_largest_share, _find_without_shares):
        found = look(case)
        if found is not None:
            return found
    return "unknown", _describe_unknown(case.figures)


def _find_input(case: StepCase) -> _Finding:
    figures = case.figures
    if not figures.is_input_bound or _is_smaller_turn(case):
        return None
    sentence = f"{format_share(figures.wait_fraction)} of a step waits for the loader"
    ratio = divide(figures.step_seconds, figures.step_seconds - figures.wait_seconds)
    if ratio is not None:
        step, rest = format_time(figures.step_seconds), format_time(figures.step_seconds - figures.wait_seconds)
        sentence += f", without which it takes {rest} instead of {step} ({format_rough_factor(ratio)})"
    return "input", sentence


def _is_smaller_turn(case: StepCase) -> bool:
    """Return whether loading takes turns with the computation, and some kind of work takes longer than it."""
    work = case.facts.work
    if work is None or case.facts.baseline.num_workers > 0:
        return False
    largest = max(work.products_fraction, work.traffic_fraction, work.overhead_fraction)
    return case.figures.wait_fraction < largest * case.figures.compute_fraction


def _find_communication(case: StepCase) -> _Finding:
    share, ranks = case.all_reduce_fraction, case.facts.ceilings.ranks
    least, most = case.policy.hidden_all_reduce_fraction, case.policy.most_all_reduce_fraction
    if share is None or not least < share <= most:
        return None
    return "communication", (
        f"an all-reduce of the gradients between {ranks} ranks would fill {format_share(share)} of a step, "
        "and the backward pass can hide a part of it only"
    )


def _find_idle_gpu(case: StepCase) -> _Finding:
    work, elasticity = case.facts.work, case.facts.batch_elasticity
    if case.facts.device != "cuda" or work is None:
        return None
    busy, enqueue = work.device_busy_fraction, work.enqueue_fraction
    if busy is None or busy >= case.policy.busy_fraction:
        return None
    sentence = f"kernels run in {format_share(busy)} of a step"
    if enqueue is not None and enqueue >= case.policy.enqueue_fraction:
        return "launch", f"{sentence}, and the host needs {format_share(enqueue)} of it to hand it over"
    if elasticity is not None and elasticity < case.policy.free_elasticity:
        return "launch", f"{sentence}, and twice the samples take {format_factor(2 ** max(-1.0, elasticity))} the time"
    return None


def _find_largest_share(case: StepCase) -> _Finding:
    work = case.facts.work
    if work is None:
        return None
    shares = {
        "matrix products": work.products_fraction,
        "memory traffic": work.traffic_fraction,
        "overhead": work.overhead_fraction,
    }
    (first, largest), (second, next_largest), (third, least) = sorted(shares.items(), key=lambda item: -item[1])
    if round(largest - next_largest, 6) < case.policy.clear_lead:
        return "unknown", (
            f"{first} ({format_share(largest)}) and {second} ({format_share(next_largest)}) take about as much of the "
            "computation"
        )
    share = f"{format_share(largest)} of the computation"
    if first == "matrix products":
        return "compute", f"matrix products take {share}"
    if first == "memory traffic":
        traffic = f"memory traffic takes {share}{_describe_traffic(case, work)}"
        if _is_slow_traffic(case):
            return "unknown", f"{traffic}: far less than the memory can, so something else holds it up"
        return "bandwidth", traffic
    if largest > case.policy.overhead_fraction:
        return "launch", f"calling operations, not what they do, takes {share}"
    others = f"{second} {format_share(next_largest)}, {third} {format_share(least)}"
    return "unknown", f"no share of the computation stands out: {first} {format_share(largest)}, {others}"


def _is_slow_traffic(case: StepCase) -> bool:
    """Return whether most of the computation is memory traffic at a rate that no memory explains."""
    work = case.facts.work
    if work is None or work.traffic_fraction < max(work.products_fraction, work.overhead_fraction):
        return False
    ratio = divide(work.bytes_per_second, case.facts.ceilings.memory_bytes_per_second)
    return ratio is not None and ratio < case.policy.least_plausible_rate


def _describe_traffic(case: StepCase, work: StepWork) -> str:
    """Return the rate of the memory traffic, and whether most of it is the optimizer's."""
    rate = describe_memory_rate(case) if case.facts.ceilings.memory_bytes_per_second is not None else ""
    text = f" at {rate}" if rate else ""
    share = optimizer_share(case.facts.phases)
    if share > case.policy.most * work.traffic_fraction:
        text += f", and the optimizer is most of it ({format_share(share)})"
    return text


def _find_without_shares(case: StepCase) -> _Finding:
    facts, figures, policy = case.facts, case.figures, case.policy
    if figures.mfu is None:
        return None
    if figures.mfu > policy.compute_mfu:
        return "compute", ""  # the MFU that every sentence ends with is what decides
    seconds, memory = facts.phases.optimizer_seconds, facts.ceilings.memory_bytes_per_second
    traffic = divide(float(count_optimizer_bytes(facts)), seconds)
    ratio = divide(traffic, memory)
    # Above, the traffic never left the caches.
    if (
        traffic is None
        or memory is None
        or ratio is None
        or not policy.optimizer_rate <= ratio <= policy.most_plausible_rate
    ):
        return None
    if figures.mfu >= policy.bandwidth_mfu or figures.optimizer_fraction <= policy.most:
        return None
    rates = f"{format_bandwidth(traffic)} of {format_bandwidth(memory)} measured"
    return "bandwidth", (
        f"the optimizer takes {format_share(figures.optimizer_fraction)} of a step and moves at least {rates}"
    )


def _describe_unknown(figures: StepFigures) -> str:
    wait, copy = format_share(figures.wait_fraction), format_share(figures.copy_fraction)
    model, optimizer = format_share(figures.model_fraction), format_share(figures.optimizer_fraction)
    return (
        f"a step takes {format_time(figures.step_seconds)} and waits {wait} of it for the loader; forward and "
        f"backward take {model}, the optimizer {optimizer}, copies {copy}; launches and memory traffic were not told "
        "apart"
    )
