"""The input pipeline: how many workers it needs, what they cost, and whether it is the limit. Pure.

    one process ──L──▶ a step's samples          w workers ──L / w──▶          computation ──C──▶

On a GPU workers have the CPUs to themselves; on a CPU what they take the computation's threads have to do without.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.format import format_share, format_time
from autotune.knobs import most_workers
from autotune.probe.analysis.bounds import least_load_seconds
from autotune.probe.analysis.evidence import StepCase
from autotune.probe.analysis.figures import StepFigures, derive_figures, divide
from autotune.probe.analysis.reliability import explain_unreliable
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement

_WORKER_MARGIN = 1.2
_SHARED_MEMORY_MARGIN = 1.3
_EPOCH_START_FRACTION = 0.02
_SLOW_BATCH_RATIO = 2.0
_CLEARLY_SLOWER = 1.2
# Measured with the user's own workers over what one process takes shared by as many: beyond, the cost is no model.
_AGREEMENT = (0.5, 2.0)
_NOTHING = 0.05
_MOST_HANDING_OVER = 10.0
"""Times as long as in one process: no loader is taken to need more for a batch (judgement; seen: nine)."""
_MOST_CROWDED = 0.5
"""Of what a computation took beside workers: no more of it is taken to be theirs (judgement)."""

COMPUTE_KNOBS = frozenset(
    (
        *("precision", "matmul_precision", "attention_backend", "optimizer_implementation", "memory_format"),
        *("cudnn_benchmark", "activation_checkpointing", "compile_mode", "device_allocator"),
    )
)
"""Knobs of the computation alone: they load no sample faster, and leave no CPU to the loader."""


@dataclass(frozen=True)
class PipelinePlan:
    """What the input pipeline of a training needs.

    Attributes:
        seconds_per_sample: fetching and collating in one process.
        load_seconds: one step's samples in one process.
        matching_workers: workers whose loading is as fast as the computation, with a fifth to spare, if they scale;
            None when the computation took no time.
        workers: the best number here as predicted: `matching_workers`, and no more than the CPUs allow, or the memory
            where samples are waited for.
        workers_reason: why these are not the matching ones; empty when they are.
        step_seconds: a step with them as predicted, loading shared evenly and overlapped with the computation.
        shared_memory_bytes: of /dev/shm they need for their batches; None when the size of a batch is not known.
        shared_memory_fits: /dev/shm has that free; None when either is not known.
        persistent_worthwhile: starting the workers takes more than 2 % of an epoch; None when not known.
        prefetch_worthwhile: a batch in twenty takes more than twice the median; None when not known.
        data_is_limit: that all usable CPUs load no step as fast as it is computed, in one sentence; empty when they
            do.
    """

    seconds_per_sample: float
    load_seconds: float
    matching_workers: int | None
    workers: int
    workers_reason: str
    step_seconds: float
    shared_memory_bytes: int | None
    shared_memory_fits: bool | None
    persistent_worthwhile: bool | None
    prefetch_worthwhile: bool | None
    data_is_limit: str


def plan_pipeline(facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo) -> PipelinePlan:
    """Return what the input pipeline needs on this machine.

    Sources: Mohan et al. 2021 (arXiv 2007.06775) for the cost of loading against that of computing; PyTorch's
    `torch.utils.data` for prefetching and shared memory.

    Args:
        facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
    """
    figures, data = derive_figures(facts, measurement), facts.data
    load = data.seconds_per_sample * figures.samples_per_step
    matching = _match_workers(load, figures.compute_seconds)
    workers, reason = _choose_workers(facts, hardware, load=load, matching=matching, own_step=figures.step_seconds)
    needed = count_shared_memory_bytes(facts, workers)
    slow = data.slow_batch_ratio
    return PipelinePlan(
        seconds_per_sample=data.seconds_per_sample,
        load_seconds=load,
        matching_workers=matching,
        workers=workers,
        workers_reason=reason,
        step_seconds=predict_step(facts, hardware, load=load, workers=workers, own_step=figures.step_seconds),
        shared_memory_bytes=needed,
        shared_memory_fits=_fits_shared_memory(needed, hardware),
        persistent_worthwhile=_is_start_slow(facts, measurement),
        prefetch_worthwhile=None if slow is None else slow > _SLOW_BATCH_RATIO,
        data_is_limit=_describe_limit(facts, figures, hardware),
    )


def compute_knobs_gain_nothing(facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo) -> str:
    """Return in one sentence that the data side is the limit whatever the computation does; empty when in doubt.

    The step has to be input-bound, its samples have to load a fifth slower than it computes even with all CPUs, what
    one process takes has to agree within 2x with the user's own loader, and the CPU time that the computation takes
    from the loader has to be next to nothing. Without workers to add or in use, loading and computing take turns, and
    a faster computation is a faster step. Arguments as of `plan_pipeline`.
    """
    figures, workers = derive_figures(facts, measurement), facts.baseline.num_workers
    load = facts.data.seconds_per_sample * figures.samples_per_step
    takes_turns = workers == 0 and bool(explain_fixed_workers(facts))
    if not figures.is_input_bound or takes_turns:
        return ""
    if explain_unreliable(StepCase(facts, figures, hardware), measurement):
        return ""  # what loads slowly beside others may be the others' doing
    if least_load_seconds(facts, figures, hardware) < _CLEARLY_SLOWER * figures.compute_seconds:
        return ""
    measured = facts.data.loader_seconds_per_step
    agreement = divide(None if measured is None else measured * max(1, workers), load)
    low, high = _AGREEMENT
    if agreement is None or not low <= agreement <= high or _host_seconds(facts, hardware) > _NOTHING * load:
        return ""
    return f"{_describe_limit(facts, figures, hardware)}: compute knobs gain nothing"


def count_shared_memory_bytes(facts: TargetFacts, workers: int) -> int | None:
    """Return what the batches of some workers take in /dev/shm; None when the size of a batch is not known."""
    if facts.data.batch_bytes is None:
        return None
    return math.ceil(_SHARED_MEMORY_MARGIN * facts.data.batch_bytes * workers * facts.baseline.prefetch_factor)


def _match_workers(load_seconds: float, compute_seconds: float) -> int | None:
    ratio = divide(_WORKER_MARGIN * load_seconds, compute_seconds)
    return None if ratio is None else math.ceil(ratio)


def explain_fixed_workers(facts: TargetFacts) -> str:
    """Return why another number of workers cannot be tried; empty where it can."""
    if "num_workers" in facts.fixed:
        return facts.fixed["num_workers"]
    return "workers would each repeat an iterable dataset" if facts.data.iterable else ""


def _choose_workers(
    facts: TargetFacts, hardware: HardwareInfo, *, load: float, matching: int | None, own_step: float
) -> tuple[int, str]:
    """Return the best number of workers, the fewest of equally good ones, and why it is not the matching one."""
    if fixed := explain_fixed_workers(facts):
        return facts.baseline.num_workers, fixed
    usable = hardware.usable_cpu_count
    most = max(usable, most_workers(facts, hardware))
    wanted = most if matching is None else matching
    if load <= 0:
        return 0, ""
    enough = f"{usable} CPUs are usable" if most == usable else f"more than {most} are not tried"
    if facts.device == "cuda":
        return min(wanted, most), enough if wanted > most else ""

    def predict(workers: int) -> tuple[float, float]:
        """Return the step, and the step when loading takes a fifth longer: of equally fast numbers it decides."""
        spare = predict_step(facts, hardware, load=_WORKER_MARGIN * load, workers=workers, own_step=own_step)
        return predict_step(facts, hardware, load=load, workers=workers, own_step=own_step), spare

    best = min(range(most + 1), key=predict)
    if best >= wanted:
        return wanted, ""
    if best == most:
        return best, enough
    if best > usable:
        share = format_share(facts.data.cpu_fraction or 0.0)
        return best, f"the CPUs have no time for more: {share} of loading is work"
    return best, f"the computation needs {usable - best} of the {usable} usable CPUs"


def predict_step(facts: TargetFacts, hardware: HardwareInfo, *, load: float, workers: int, own_step: float) -> float:
    """Return the seconds of a step with some workers, loading shared evenly; computing takes turns without any.

    On a CPU both sides share its time: a step is no shorter than all of their CPU time over all CPUs. What a sample is
    waited for takes none. What the user's own workers take of it, a computation that was timed beside them did without.

    Args:
        facts: what the probe found about the target.
        hardware: the machine.
        load: seconds that one process takes to load a step's samples.
        workers: of the loader.
        own_step: seconds of a step with the user's own workers, as it was timed.
    """
    compute, handed_over = facts.compute_seconds_per_step, load * _handing_over(facts, hardware)
    if facts.device != "cpu":
        return load + compute if workers == 0 else min(max(load / workers, compute), load + compute)
    cpus, threads = hardware.usable_cpu_count, _count_threads(facts, hardware)
    busy = handed_over * ((facts.data.cpu_fraction or 0.0) if facts.data.waits else 1.0)
    beside = (divide(busy, own_step) or 0.0) if facts.computed_beside_workers else 0.0
    compute *= 1.0 - min(_MOST_CROWDED, max(0.0, threads + beside - cpus) / threads)
    if workers == 0:
        return load + compute
    shared = (busy + compute * threads) / cpus
    return min(max(handed_over / workers, compute, shared), handed_over + compute)


def _handing_over(facts: TargetFacts, hardware: HardwareInfo) -> float:
    """Return how many times as long as one process alone workers take for a batch: they hand it over to another one.

    By the user's own loader, timed with no training beside it; 1 where that has no workers, or more than work to do.
    """
    own, measured = facts.baseline.num_workers, facts.data.loader_seconds_per_step
    if not own or measured is None or facts.data.waits:
        return 1.0
    alone = facts.data.seconds_per_sample * facts.baseline.effective_batch_size
    return min(_MOST_HANDING_OVER, max(1.0, divide(measured * min(own, hardware.usable_cpu_count), alone) or 1.0))


def _count_threads(facts: TargetFacts, hardware: HardwareInfo) -> int:
    """Return the threads that compute on a CPU, no more than can run at once."""
    return min(facts.baseline.num_threads or hardware.usable_cpu_count, hardware.usable_cpu_count)


def _host_seconds(facts: TargetFacts, hardware: HardwareInfo) -> float:
    """Return the CPU time that a step's computation takes: of all threads, or of the one that feeds a GPU."""
    if facts.device == "cpu":
        return facts.compute_seconds_per_step * _count_threads(facts, hardware)
    share = facts.work.enqueue_fraction if facts.work is not None else None
    return facts.compute_seconds_per_step * (1.0 if share is None else share)


def _fits_shared_memory(needed: int | None, hardware: HardwareInfo) -> bool | None:
    free = hardware.shared_memory_free_bytes
    unknown = free == 0 and hardware.shared_memory_total_bytes is None
    return None if needed is None or unknown else needed <= free


def _is_start_slow(facts: TargetFacts, measurement: Measurement) -> bool | None:
    start, count = facts.data.epoch_start_seconds, facts.data.sample_count
    if start is None or count is None or facts.baseline.num_workers == 0:
        return None  # without workers the first batch is all there is to a start
    return start > _EPOCH_START_FRACTION * count / measurement.samples_per_second


def _describe_limit(facts: TargetFacts, figures: StepFigures, hardware: HardwareInfo) -> str:
    load = least_load_seconds(facts, figures, hardware)
    if load <= figures.compute_seconds:
        return ""
    return (
        f"the data side is the limit: loading a step's samples takes {format_time(load)} even when shared by "
        f"{hardware.usable_cpu_count} CPUs, the computation {format_time(figures.compute_seconds)}"
    )
