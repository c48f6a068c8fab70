"""What slows a training or endangers it, and is no knob. Records in, one `Issue` each out; pure.

    machine ── swap, memory, GPUs, CPU quota      target ── hazards, hidden waits, /dev/shm, CPUs asked for twice
    timing  ── blocks in which the machine was busy with something else

Settings that a search varies are named only where they ask for more than the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator

from autotune.format import count, format_bytes, format_share, format_time, times
from autotune.probe.analysis.issues.gpu import find_gpu_issues
from autotune.probe.analysis.issues.policy import USUAL, IssuePolicy
from autotune.probe.analysis.issues.timing import find_timing_issues
from autotune.probe.analysis.pipeline import count_shared_memory_bytes, plan_pipeline
from autotune.records.ceilings import Ceilings
from autotune.records.facts import Hazard, TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Issue

_MORE_SHARED_MEMORY = (
    "give the container more (docker: --shm-size=8g; kubernetes: an emptyDir of medium Memory at /dev/shm), "
    "or use fewer workers"
)
_HAZARDS: dict[Hazard, tuple[str, str]] = {
    "anomaly-detection": (
        "autograd's anomaly detection is on: it checks every operation of every backward pass for NaN",
        "remove torch.autograd.set_detect_anomaly(True) once the bug is found",
    ),
    "deterministic-algorithms": (
        "deterministic algorithms are on: some kernels are slower, and some are ruled out",
        "call torch.use_deterministic_algorithms(False) unless runs have to repeat bit for bit",
    ),
    "launch-blocking": (
        "CUDA_LAUNCH_BLOCKING is set: the host waits for every single kernel",
        "unset CUDA_LAUNCH_BLOCKING; it is for debugging",
    ),
}


def find_issues(
    hardware: HardwareInfo,
    *,
    facts: TargetFacts | None = None,
    measurement: Measurement | None = None,
    ceilings: Ceilings | None = None,
    policy: IssuePolicy = USUAL,
) -> tuple[Issue, ...]:
    """Return what is wrong with a machine, and with a training on it, the most dangerous first.

    Args:
        hardware: the machine.
        facts: what the probe found about the target; None without one.
        measurement: the baseline, timed end to end; None without a target.
        ceilings: measured limits; None takes the target's.
        policy: from where on something is an issue.
    """
    limits = ceilings if ceilings is not None or facts is None else facts.ceilings
    found = [*_look_at_memory(hardware, policy)]
    if facts is not None:
        found += _look_at_shared_memory(hardware, facts, measurement, policy)
        found += [Issue(name=name, sentence=_HAZARDS[name][0], remedy=_HAZARDS[name][1]) for name in facts.hazards]
    if facts is None or facts.device == "cuda":
        found += find_gpu_issues(hardware, measurement, policy)
    found += _look_at_cpus(hardware, facts)
    if facts is not None:
        found += _look_at_syncs(facts)
        found += _look_at_own_code(facts, policy)
    if facts is not None and measurement is not None:
        found += _look_at_samples(facts, measurement, policy)
    if measurement is not None:
        found += _look_at_peak(hardware, measurement, policy, on_gpu=facts is not None and facts.device == "cuda")
        found += find_timing_issues(measurement, policy)
    if limits is not None:
        found += _look_at_rates(limits, policy)
    return tuple(found)


def _look_at_memory(hardware: HardwareInfo, policy: IssuePolicy) -> Iterator[Issue]:
    limit, available = hardware.memory_limit_bytes, hardware.memory_available_bytes
    if hardware.swap_used_bytes > policy.swap_fraction * hardware.memory_total_bytes:
        used, total = format_bytes(hardware.swap_used_bytes), format_bytes(hardware.swap_total_bytes)
        yield Issue(
            name="swap",
            sentence=f"{used} of {total} swap are in use: pages that come back from the disk stop a training",
            remedy="end what needs the memory, then empty the swap (swapoff -a; swapon -a)",
        )
    if available < policy.little_memory_fraction * limit:
        yield Issue(
            name="memory",
            sentence=f"memory is nearly full: {format_bytes(available)} of {format_bytes(limit)} are available",
            remedy="end other processes, or give the job more memory",
        )


def _look_at_shared_memory(
    hardware: HardwareInfo, facts: TargetFacts, measurement: Measurement | None, policy: IssuePolicy
) -> Iterator[Issue]:
    """Yield that /dev/shm does not hold the batches of the user's workers, or of those a search will try."""
    total, free = hardware.shared_memory_total_bytes, hardware.shared_memory_free_bytes
    if total is None and free == 0:
        return  # not known, or a system without it
    planned = 0 if measurement is None else plan_pipeline(facts, measurement, hardware).workers
    used = facts.baseline.num_workers
    for workers, verb in ((used, "need"), (planned, "would need")):
        needed = count_shared_memory_bytes(facts, workers)
        if needed is not None and needed > free:
            yield Issue(
                name="shared-memory",
                sentence=f"{count(workers, 'loader worker')} {verb} {format_bytes(needed)} of /dev/shm for their "
                f"batches, {format_bytes(free)} are free: they end with a bus error",
                remedy=_MORE_SHARED_MEMORY,
            )
            return
    if (
        used > 0
        and total is not None
        and total <= policy.container_shared_memory_bytes
        and facts.data.batch_bytes is None
    ):
        yield Issue(
            name="shared-memory",
            sentence=f"{count(used, 'loader worker')} share {format_bytes(total)} of /dev/shm, a container's default: "
            "larger batches end with a bus error",
            remedy=_MORE_SHARED_MEMORY,
        )


def _look_at_cpus(hardware: HardwareInfo, facts: TargetFacts | None) -> Iterator[Issue]:
    usable, quota, affinity = hardware.usable_cpu_count, hardware.cpu_quota, hardware.affinity_cpu_count
    workers = 0 if facts is None else facts.baseline.num_workers
    wanted = (affinity or usable) if facts is None else workers + _count_threads(hardware, facts)
    if quota is not None and affinity is not None and quota < affinity and quota < wanted:
        asked = f"{affinity} CPUs are visible" if facts is None else f"threads and workers want {wanted}"
        yield Issue(
            name="cpu-quota",
            sentence=f"the control group grants the time of {quota:.3g} CPUs, {asked}: it stops all of them in turn",
            remedy=f"raise the quota (docker: --cpus; kubernetes: limits.cpu), or use {usable} threads and workers",
        )
    elif facts is not None and workers <= usable < wanted:
        yield Issue(
            name="oversubscribed",
            sentence=f"{count(wanted - workers, 'thread')} and {count(workers, 'loader worker')} share "
            f"{count(usable, 'usable CPU')}",
            remedy="use fewer of either: num_threads + num_workers <= usable CPUs",
        )
    if workers > usable:
        yield Issue(
            name="workers",
            sentence=f"{count(workers, 'loader worker')} share {count(usable, 'usable CPU')}",
            remedy=f"use num_workers={usable} or fewer, unless the workers only wait for a disk or a network",
        )


def _count_threads(hardware: HardwareInfo, facts: TargetFacts) -> int:
    """Return the threads that compute; on a GPU one feeds it."""
    if facts.device == "cuda":
        return 1
    return facts.baseline.num_threads or hardware.affinity_cpu_count or hardware.usable_cpu_count


def _look_at_syncs(facts: TargetFacts) -> Iterator[Issue]:
    syncs = 0.0 if facts.work is None else facts.work.host_syncs_per_step
    if syncs < 1 or "anomaly-detection" in facts.hazards:  # which itself asks after each operation
        return
    meaning = "each waits for the GPU" if facts.device == "cuda" else "on a GPU each would wait for it"
    yield Issue(
        name="host-syncs",
        sentence=f".item() or the like runs {times(syncs)} a step{_name_places(facts)}: {meaning}",
        remedy="keep values on the device (detach(), add them up there) and read them every hundred steps",
    )


def _look_at_samples(facts: TargetFacts, measurement: Measurement, policy: IssuePolicy) -> Iterator[Issue]:
    """Yield which function makes samples expensive, where a step waits for them."""
    data = facts.data
    if measurement.data_wait_fraction < policy.waiting_fraction or data.hot_call_fraction is None:
        return
    share, wait = format_share(data.hot_call_fraction), format_share(measurement.data_wait_fraction)
    yield Issue(
        name="slow-samples",
        sentence=f"{share} of the time of a sample ({format_time(data.seconds_per_sample)}) goes into {data.hot_call}, "
        f"and {wait} of a step waits for samples",
        remedy="make that cheaper: do it once and keep the result, work on smaller inputs, use a faster library",
    )


def _look_at_own_code(facts: TargetFacts, policy: IssuePolicy) -> Iterator[Issue]:
    """Yield that much of a step is code of the training's own: environments that are played, metrics, logs.

    Of a GPU nothing is told: there, copies of a script are in what is left.
    """
    own, whole = facts.phases.other_seconds, facts.phases.seconds
    if facts.device != "cpu" or own <= policy.own_code_fraction * whole:
        return
    yield Issue(
        name="own-code",
        sentence=f"{format_share(own / whole)} of a step is spent in neither loader, model nor optimizer, "
        "but in code of the training's own, such as an environment that is played or metrics of each batch",
        remedy="profile it (python -m cProfile -s tottime): few settings make that faster",
    )


def _name_places(facts: TargetFacts) -> str:
    places = () if facts.work is None else facts.work.host_sync_places
    return f", at {', '.join(places)}" if places else ""


def _look_at_peak(
    hardware: HardwareInfo, measurement: Measurement, policy: IssuePolicy, *, on_gpu: bool
) -> Iterator[Issue]:
    peak = measurement.peak_memory
    device = hardware.gpus[0].memory_total_bytes if on_gpu and hardware.gpus else 0
    for name, used, limit in (
        ("host-peak", peak.host_bytes, hardware.memory_limit_bytes),
        ("device-peak", peak.device_bytes or 0, device),
    ):
        if limit > 0 and used > policy.peak_fraction * limit:
            where = "memory" if name == "host-peak" else "the GPU's memory"
            yield Issue(
                name=name,
                sentence=f"the training's peak is {format_bytes(used)} of {format_bytes(limit)} of {where}: "
                "a longer sample or an evaluation may not fit",
                remedy="use a smaller micro batch with more accumulation, or activation checkpointing",
            )


def _look_at_rates(ceilings: Ceilings, policy: IssuePolicy) -> Iterator[Issue]:
    plain = ceilings.flops_per_second("fp32") or 0.0  # what is slower is emulated, and nobody trains with it
    held = {
        rate.dtype: rate.sustained_flops_per_second / rate.flops_per_second
        for rate in ceilings.matmul
        if rate.sustained_flops_per_second is not None and rate.flops_per_second >= plain > 0
    }
    dtype = min(held, key=held.__getitem__, default=None)
    if dtype is not None and held[dtype] < policy.sustained_fraction:
        yield Issue(
            name="sustained-rate",
            sentence=f"{dtype} matrix products keep up {format_share(held[dtype])} of their best rate: "
            "clocks come down under load, or something else runs",
            remedy="look at cooling, the power limit and other processes, then probe again",
        )
