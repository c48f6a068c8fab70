"""What a probe of one process cannot tell of several: whether they learn the same, and how fast they are together.

probe, one process alone ── may the batch be shared out? ── the user's own settings, launched with all processes
└─▶ throughput, losses and start of the baseline
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from autotune.errors import UsageError
from autotune.knobs import find_split_trouble
from autotune.probe.run import explain_failed_baseline
from autotune.records.config import spread_config
from autotune.records.facts import TargetFacts
from autotune.records.probe import ProbeReport
from autotune.records.search import SearchState
from autotune.records.trial import TrialLimits, TrialResult, TrialSpec


def require_shareable_batch(target: TargetFacts) -> None:
    """Make sure that several processes learn what one would, as far as a probe can tell.

    Args:
        target: what it found.

    Raises:
        UsageError: they would not, or the effective batch cannot be divided by them.
    """
    baseline, size = target.baseline, target.world_size
    each = spread_config(baseline, size)
    trouble = find_split_trouble(target)
    # Statistics over all processes are of the same samples where a micro batch of one is what they have at a time.
    is_same_micro_batch = each.micro_batch_size * (size if target.model.has_batch_norm else 1)
    if trouble is not None and is_same_micro_batch != baseline.micro_batch_size:
        raise UsageError(
            f"--nproc-per-node {size}: several processes would learn something else than one: {trouble}",
            hint="leave --nproc-per-node out, or give the baseline more accumulation and a smaller micro batch",
        )


def make_first_launch(state: SearchState, target: TargetFacts, limits: TrialLimits, *, number: int) -> TrialSpec:
    """Return the launch of the user's own settings that several processes are known by.

    Args:
        state: what the search was asked to do.
        target: what its probe found.
        limits: of the launch.
        number: of its trial.
    """
    return TrialSpec(
        number=number,
        purpose="measure",
        target=state.target,
        config=target.baseline,
        device=target.device,
        world_size=state.world_size,
        seeds=(state.seed,),
        random_sources=target.data.random_sources,
        limits=limits.replace(seconds_per_sample=target.data.seconds_per_sample),
    )


def find_first_launch(known: Sequence[TrialResult], target: TargetFacts) -> TrialResult | None:
    """Return that launch among the trials of a search; None where it is still to be made.

    Args:
        known: trials of the search.
        target: what its probe found.
    """
    launches = (one for one in known if one.spec.purpose == "measure" and one.measurement is not None and one.curves)
    return next((one for one in launches if one.spec.config == target.baseline), None)


def add_first_launch(
    report: ProbeReport, probed: TrialResult, launched: TrialResult, find_log: Callable[[int], Path | None]
) -> tuple[ProbeReport, TrialResult]:
    """Return a probe's report and trial with how fast all processes are, what they learn and how long they start.

    Args:
        report: of one process.
        probed: the trial behind it.
        launched: the user's own settings with all processes.
        find_log: returns where what a trial has printed can be read after a failure, by the trial's number.

    Raises:
        UsageError: they cannot be trained so, or in the time there was.
        TargetError: the training fails.
        MachineError: a limit of this machine's stops it.
    """
    if launched.measurement is None or not launched.curves:
        raise explain_failed_baseline(launched, find_log(launched.spec.number))
    probed = probed.replace(
        measurement=launched.measurement, curves=launched.curves, startup_seconds=launched.startup_seconds
    )
    return report.replace(measurement=launched.measurement), probed
