"""Inside the probe's process: build the target with its own settings, look at it, time it.

dataset ── cost, randomness, files     one training ── model, FLOPs, phases, compute alone, what it is spent on
machine ── ceilings                    another one, fresh ── end-to-end throughput, a pass over twice the samples
loader alone, memory by mode           each part within its allowance; what there is no time for is None
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from autotune.engine.activation_checkpointing import find_repeated_blocks, find_switch
from autotune.engine.dataloader import Order, build_loader
from autotune.engine.evaluation import evaluate
from autotune.engine.loop import Training, backend_settings
from autotune.engine.memory_format import has_4d_convolution
from autotune.engine.operations import watched_operations
from autotune.engine.optimizer import current_implementation, read_optimizer_facts
from autotune.engine.precision import allows_tf32
from autotune.measure.clock import clock_for
from autotune.measure.warmup import SLOW_STEP_SECONDS as FEW_STEPS_SECONDS
from autotune.probe.additivity import WINDOWS, measure_additivity
from autotune.probe.child import (
    add_disk,
    anchor_memory,
    can_checkpoint,
    describe_profile,
    find_hazards,
    list_precisions,
    memory_limit,
    room_for_trying,
    settle_ceilings,
    supports_bf16,
    used_bytes,
)
from autotune.probe.loader import drain_loader
from autotune.probe.memory import look_at_memory
from autotune.probe.profiler import count_profiled_steps, profile_steps
from autotune.probe.samples import Samples, look_at_data
from autotune.probe.step import ResidentSteps, keep_resident, measure_elasticity, time_phases, time_resident_steps
from autotune.probe.time_shares import (
    LOADER_SECONDS,
    MEMORY_GRACE,
    MEMORY_SECONDS,
    SLOW_STEP_SECONDS,
    OutOfTimeError,
    TimeShares,
    time_limit,
)
from autotune.probe.work import WorkProfile
from autotune.records.config import TrainConfig
from autotune.records.facts import Additivity, DataFacts, ModelFacts, TargetFacts
from autotune.records.trial import TrialResult, TrialSpec
from autotune.runs.timing import time_steps
from autotune.runs.workload_source import WorkloadSource
from autotune.space import SPLIT_KNOBS
from autotune.targets.workload import LoadedWorkload

_EVALUATION_SECONDS = 20.0

_ROOM_FOR_TWICE = 0.4
"""Share of the memory that a training may use and still be given twice the samples."""


def probe_workload(
    spec: TrialSpec,
    loaded: LoadedWorkload,
    device: torch.device,
    *,
    started: float,
    keep: Callable[[TrialResult], None],
) -> TrialResult:
    """Return the target's facts and the baseline's timing.

    Args:
        spec: of the probe.
        loaded: the workload.
        device: where to run it.
        started: `time.monotonic()` when the process was started.
        keep: called with what is known before what may end the process or take too long: the profiler, other batches,
            the look at the memory, in which code that reads tensors by their address finds none.

    Raises:
        TargetError: a part of the workload returns something of the wrong type.
    """
    allowance, seed = TimeShares(started, spec.limits.time_limit_seconds), spec.seeds[0]
    baseline = _resolve_settings(loaded.baseline, device)
    samples, base_bytes = look_at_data(loaded, baseline), used_bytes(device)
    sources, sample_seconds = samples.facts.random_sources, samples.facts.seconds_per_sample
    with backend_settings(baseline, device):
        training = Training(loaded, baseline, device=device, seed=seed, random_sources=sources)
        startup = time.monotonic() - started
        facts, resident = _look_at_training(training, loaded, baseline, device, data=samples.facts)
        baseline = facts.baseline
        del training
        source = WorkloadSource(loaded, baseline, device, seed=seed, random_sources=sources)
        limits = spec.limits.replace(seconds_per_sample=sample_seconds)
        found, fresh = source.drive(time_steps(source, baseline, limits, seed=seed)), source.training
        del source
        elapsed = time.monotonic() - started
        timed = found.complete(spec.replace(config=baseline), elapsed_seconds=elapsed, startup_seconds=startup)
        result = timed.replace(facts=facts)
        keep(result)
        profile = _profile(fresh, facts, device)
        facts = facts.replace(batch_elasticity=_try_twice(fresh, loaded, facts, samples, device))
        del fresh
        facts = _add_loader(_add_additivity(facts, spec, loaded, device), spec, loaded, allowance)
        keep(result.replace(facts=facts))
        facts = _add_memory(facts, spec, loaded, device, base_bytes=base_bytes, allowance=allowance)
    assert found.measurement is not None
    facts = _add_machine(anchor_memory(facts, found.measurement), spec, samples, device, allowance)
    work = describe_profile(profile, facts, step_seconds=resident.seconds, enqueue_fraction=resident.enqueue_fraction)
    return result.replace(facts=facts.replace(work=work), elapsed_seconds=time.monotonic() - started)


def _add_machine(
    facts: TargetFacts, spec: TrialSpec, samples: Samples, device: torch.device, allowance: TimeShares
) -> TargetFacts:
    """Return the facts with the disk of the data and the machine's limits: last, they touch a lot of memory."""
    facts = add_disk(facts, samples.files, Path(spec.target.folder), allowance)
    return facts.replace(ceilings=settle_ceilings(spec, device))


def _add_memory(
    facts: TargetFacts,
    spec: TrialSpec,
    loaded: LoadedWorkload,
    device: torch.device,
    *,
    base_bytes: int,
    allowance: TimeShares,
) -> TargetFacts:
    """Return the facts with the memory by mode."""
    seconds = allowance.grant(MEMORY_SECONDS)
    if not seconds:
        return facts
    try:
        # A real step and the one before it are looked at, however long they take.
        with time_limit(MEMORY_GRACE * seconds + 2 * facts.compute_seconds_per_step):
            memory = look_at_memory(
                loaded,
                facts.baseline,
                device,
                seed=spec.seeds[0],
                base_bytes=base_bytes,
                limit_bytes=memory_limit(device),
                room_bytes=room_for_trying(device),
                supported=list_precisions(facts),
                checkpoints=can_checkpoint(facts.model),
                budget_seconds=seconds,
            )
    except OutOfTimeError:  # a single step, or a copy of the model, that takes this long
        return facts.replace(warnings=(*facts.warnings, "there was no time to follow its memory"))
    return facts.replace(memory=memory)


def _profile(training: Training, facts: TargetFacts, device: torch.device) -> WorkProfile | None:
    """Return some steps under the profiler; after the timing, which it must not disturb."""
    steps = count_profiled_steps(facts.compute_seconds_per_step, facts.model.calls_per_step)
    if not steps:
        return None
    keep_resident(training)
    if facts.compute_seconds_per_step < FEW_STEPS_SECONDS:
        training.step()
    return profile_steps(training.step, device, steps=steps)


def _try_twice(
    training: Training, loaded: LoadedWorkload, facts: TargetFacts, samples: Samples, device: torch.device
) -> float | None:
    """Return what twice the samples would cost; None where they may not fit, or would take too long."""
    no_room = used_bytes(device) > _ROOM_FOR_TWICE * room_for_trying(device)
    if no_room or facts.compute_seconds_per_step > SLOW_STEP_SECONDS:
        return None
    size = facts.baseline.micro_batch_size
    try:
        return measure_elasticity(training, samples.fetched, size, clock_for(device), collate=loaded.collate)
    except Exception:  # other batches than the user's own are more than a workload has to bear
        return None


def _add_loader(facts: TargetFacts, spec: TrialSpec, loaded: LoadedWorkload, allowance: TimeShares) -> TargetFacts:
    """Return the facts with what the loader does alone."""
    baseline, data = facts.baseline, facts.data
    seconds = allowance.grant(LOADER_SECONDS)
    if not seconds:
        return facts
    order = Order(seed=spec.seeds[0], shuffle=loaded.shuffle, drop_last=loaded.drop_last)
    try:
        dataset = loaded.workload.train_dataset()
        loader, _ = build_loader(dataset, baseline, order, collate=loaded.collate, random_sources=data.random_sources)
    except Exception:  # a dataset that cannot be opened once more: the training has shown that it can be opened
        return facts
    times = drain_loader(loader, budget_seconds=seconds)
    return facts if times is None else facts.replace(data=times.add_to(data, baseline.gradient_accumulation_steps))


def _add_additivity(facts: TargetFacts, spec: TrialSpec, loaded: LoadedWorkload, device: torch.device) -> TargetFacts:
    """Return the facts with what a split of the batch is on this target: no more than rounding, or another training."""
    additivity: Additivity | None = None
    is_another, fixed = facts.model.has_batch_norm, dict(facts.fixed)
    if not is_another:
        sources, few = facts.data.random_sources, facts.compute_seconds_per_step >= FEW_STEPS_SECONDS
        windows, seed = 1 if few else WINDOWS, spec.seeds[0]
        try:
            additivity = measure_additivity(
                loaded, facts.baseline, device, seed=seed, random_sources=sources, windows=windows
            )
        except Exception as error:  # other parts of a batch than the user's own are more than a workload has to bear
            told = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            fixed["micro_batch_size"] = f"parts of a batch cannot be computed: {told}"
        is_another = additivity is not None and not additivity.holds
    numerics = facts.numerics | dict.fromkeys(SPLIT_KNOBS if is_another else (), "semantic")
    return facts.replace(additivity=additivity, numerics=numerics, fixed=fixed)


def _look_at_training(
    training: Training, loaded: LoadedWorkload, baseline: TrainConfig, device: torch.device, *, data: DataFacts
) -> tuple[TargetFacts, ResidentSteps]:
    optimizer = read_optimizer_facts(training.optimizer, device)
    baseline = baseline.replace(optimizer_implementation=current_implementation(training.optimizer, device))
    model, clock = _look_at_model(training, baseline), clock_for(device)
    phases = time_phases(training, clock)
    resident = time_resident_steps(training, clock)
    evaluate_seconds, troubles = _time_evaluation(loaded, training, baseline, device)
    facts = TargetFacts(
        label=loaded.label,
        fingerprint=loaded.fingerprint,
        device="cuda" if device.type == "cuda" else "cpu",
        baseline=baseline,
        model=model,
        data=data,
        optimizer=optimizer,
        phases=phases,
        compute_seconds_per_step=resident.seconds,
        knobs=loaded.knobs,
        numerics={f"user_knobs.{name}": kind for name, kind in loaded.knob_numerics.items()},
        metrics={metric.name: metric.direction for metric in loaded.metrics},
        evaluate_seconds=evaluate_seconds,
        supports_bf16=supports_bf16(device),
        hazards=find_hazards(),
        warnings=troubles,
    )
    return facts, resident


def _resolve_settings(baseline: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the baseline with what PyTorch and the workload's module have set by themselves."""
    if device.type == "cuda":
        return baseline.replace(
            allow_tf32=baseline.allow_tf32 or allows_tf32(),
            cudnn_benchmark=baseline.cudnn_benchmark or torch.backends.cudnn.benchmark,
        )
    return baseline.replace(num_threads=baseline.num_threads or torch.get_num_threads())


def _look_at_model(training: Training, baseline: TrainConfig) -> ModelFacts:
    model = training.model
    trainable = [p for p in model.parameters() if p.requires_grad]
    with watched_operations() as seen:
        outcome = training.step()
    counted = seen.flops if baseline.compile_mode == "off" else 0
    own_switch = find_switch(model) is not None
    blocks = len(find_repeated_blocks(model))
    return ModelFacts(
        parameter_count=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in trainable),
        has_batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        has_4d_convolution=has_4d_convolution(model),
        calls_attention=seen.attention,
        calls_per_step=seen.calls,
        checkpointable_blocks=blocks or int(own_switch),
        flops_per_sample=counted / outcome.samples if counted else None,
    )


def _time_evaluation(
    loaded: LoadedWorkload, training: Training, baseline: TrainConfig, device: torch.device
) -> tuple[float | None, tuple[str, ...]]:
    """Return the seconds of one evaluation, or None and why there is no number."""
    if not loaded.metrics:
        return None, ()
    began = time.perf_counter()
    try:
        with time_limit(_EVALUATION_SECONDS):
            evaluate(loaded, training, baseline)
        return time.perf_counter() - began, ()
    except OutOfTimeError:
        sentence = f"evaluate takes more than {_EVALUATION_SECONDS:.0f} s: loss checks will compare losses only"
        return None, (sentence,)
