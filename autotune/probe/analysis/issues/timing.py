"""What disturbed the timing: the hypervisor, the CPU quota, other processes, the disk, compilation; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autotune.format import count, format_share
from autotune.probe.analysis.issues.policy import IssuePolicy
from autotune.records.measurement import MUCH_STEAL, Interference, Measurement
from autotune.records.probe import Issue


@dataclass(frozen=True)
class _Disturbance:
    """A share that is seen in a block, what it is of, and from where on it counts; None for the policy's share."""

    read: Callable[[Interference], float | None]
    threshold: float | None
    sentence: str
    remedy: str


_DISTURBANCES = {
    "steal": _Disturbance(
        lambda seen: seen.steal_fraction,
        MUCH_STEAL,
        "the hypervisor gave up to {share} of the CPU time to somebody else",
        "use a machine of your own, or repeat the probe at a quieter time",
    ),
    "throttled": _Disturbance(
        lambda seen: seen.throttled_fraction,
        MUCH_STEAL,
        "the CPU quota held the training for up to {share} of the time",
        "raise the quota (docker: --cpus; kubernetes: limits.cpu), or use fewer threads and workers",
    ),
    "other-processes": _Disturbance(
        lambda seen: seen.foreign_cpu_fraction,
        None,
        "other processes used up to {share} of the CPU time",
        "end them, or repeat the probe when they have ended",
    ),
    "disk-pressure": _Disturbance(
        lambda seen: seen.io_pressure_fraction,
        None,
        "something waited for the disk for up to {share} of the time",
        "put the data on a faster disk or into memory, and end what else reads and writes",
    ),
    "memory-pressure": _Disturbance(
        lambda seen: seen.memory_pressure_fraction,
        None,
        "something waited for memory for up to {share} of the time",
        "end other processes, or give the job more memory",
    ),
}


def find_timing_issues(measurement: Measurement, policy: IssuePolicy) -> Iterator[Issue]:
    """Yield what went on beside the training while it was timed.

    Args:
        measurement: its blocks, watched.
        policy: from where on something is an issue.
    """
    total = len(measurement.blocks)
    watched = [block.interference for block in measurement.blocks if block.interference is not None]
    for name, disturbance in _DISTURBANCES.items():
        shares = [disturbance.read(seen) or 0.0 for seen in watched]
        least = policy.disturbed_fraction if disturbance.threshold is None else disturbance.threshold
        much = [share for share in shares if share > least]
        if much:
            told = disturbance.sentence.format(share=format_share(max(much)))
            yield Issue(
                name=name,
                sentence=f"{told} in {len(much)} of {count(total, 'timed block')}",
                remedy=disturbance.remedy,
            )
    compiled = sum(block.recompiled for block in measurement.blocks)
    if compiled:
        yield Issue(
            name="recompilation",
            sentence=f"a graph was compiled in {compiled} of {count(total, 'timed block')}: shapes keep changing",
            remedy="keep shapes alike (drop_last, padding to few lengths), or mark the dimension as dynamic",
        )
