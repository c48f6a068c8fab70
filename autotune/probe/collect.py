"""Inside the probe's process: the target is timed as it is, then looked at, whichever way in it has come.

timed ── switches ── facts that cost little ── profile ── other batches ── loader ── memory by mode ── disk, limits
kept                                                                kept
each part within its share of the time; what there is no time for is None
"""

from __future__ import annotations

from collections.abc import Callable

from autotune.machine.disk import measure_disk_read
from autotune.measure.timing import Progress
from autotune.probe.data.loader import drain_loader
from autotune.probe.machine import find_ceilings, list_precisions, memory_limit
from autotune.probe.memory.look import cap_memory, look_at_memory
from autotune.probe.model import can_checkpoint
from autotune.probe.sources.protocol import ProbeSource
from autotune.probe.step.work import describe_profile
from autotune.probe.time_shares import OutOfTimeError, TimeShares, time_limit
from autotune.records.facts import TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialResult
from autotune.runs.source import Found, Run
from autotune.runs.timing import time_steps


def time_target(source: ProbeSource, *, seed: int, progress: Progress | None = None) -> Run[Found]:
    """Return the timing of a target with its own settings.

    Args:
        source: the target.
        seed: that its training is started with.
        progress: told what the measurement is at; None where nobody asks.

    Raises:
        DivergedError: a loss is not finite.
        TrainingEndedError: it ended before anything could be timed.
        TargetError: a part of a workload returns something of the wrong type.
    """
    with source.settings():
        config, limits = source.begin()
        found = yield from time_steps(source.steps, config, limits, seed=seed, progress=progress)
        assert found.measurement is not None
        if found.measurement.ended_by != "training":
            yield from source.watch_steps(found.measurement.seconds_per_step)
    return found


def collect_facts(
    source: ProbeSource, timed: TrialResult, shares: TimeShares, *, keep: Callable[[TrialResult], None]
) -> TrialResult:
    """Return the result of a probe with the facts about its target.

    Args:
        source: the target, which was timed.
        timed: the result without facts.
        shares: the time of the probe.
        keep: called with what is known before what may end the process or take too long: the profiler, other batches,
            the look at the memory, in which code that reads tensors by their address finds none.
    """
    measurement = timed.measurement
    assert measurement is not None
    with source.settings():
        facts = source.describe(measurement).replace(switched=source.switched)
        result = timed.replace(spec=timed.spec.replace(config=facts.baseline), facts=facts)
        keep(result)
        profile = source.profile(facts)
        facts = _add_loader(source.vary_batches(facts), source, shares)
        keep(result.replace(facts=facts))
        facts = cap_memory(_add_memory(facts, source, measurement, shares), measurement)
    # The limits last: to find them touches a lot of memory.
    facts = _add_disk(facts, source, shares)
    facts = facts.replace(ceilings=find_ceilings(timed.spec, source.device))
    facts = facts.replace(work=describe_profile(profile, facts, enqueue_fraction=source.enqueue_fraction))
    return result.replace(facts=facts, elapsed_seconds=shares.elapsed_seconds)


def _add_loader(facts: TargetFacts, source: ProbeSource, shares: TimeShares) -> TargetFacts:
    """Return the facts with what the loader does alone."""
    seconds = shares.grant(shares.policy.loader_seconds)
    loader = source.open_loader(facts) if seconds else None
    times = None if loader is None else drain_loader(loader, budget_seconds=seconds)
    if times is None:
        return facts
    return facts.replace(data=times.add_to(facts.data, facts.baseline.gradient_accumulation_steps))


def _add_memory(facts: TargetFacts, source: ProbeSource, measurement: Measurement, shares: TimeShares) -> TargetFacts:
    """Return the facts with the memory by mode."""
    seconds, device = shares.grant(shares.policy.memory_seconds), source.device
    if not seconds:
        return facts
    try:
        # A real step and the one before it are looked at, however long they take.
        with time_limit(shares.policy.memory_grace * seconds + 2 * facts.compute_seconds_per_step):
            memory = look_at_memory(
                source.open_memory(measurement),
                facts.baseline,
                device,
                base_bytes=source.base_bytes,
                limit_bytes=memory_limit(device),
                supported=list_precisions(facts),
                checkpoints=can_checkpoint(facts.model),
                budget_seconds=seconds,
            )
    except OutOfTimeError:  # a single step, or a copy of the model, that takes this long
        return facts.replace(warnings=(*facts.warnings, "there was no time to follow its memory"))
    return facts.replace(memory=memory)


def _add_disk(facts: TargetFacts, source: ProbeSource, shares: TimeShares) -> TargetFacts:
    """Return the facts with how fast the data can be read from their disk."""
    seconds = shares.grant(shares.policy.disk_seconds)
    rate = measure_disk_read(source.files, source.folder, budget_seconds=seconds) if seconds else None
    return facts.replace(data=facts.data.replace(disk_read_bytes_per_second=rate))
