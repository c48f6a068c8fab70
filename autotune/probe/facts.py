"""Inside the probe's process: build the target with its own settings, look at it, time it.

dataset ── cost, randomness      one training ── model, FLOPs, phases, compute alone
machine ── ceilings              another one, fresh ── end-to-end throughput
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset, default_collate

from autotune.engine.activation_checkpointing import find_repeated_blocks
from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import Training, backend_settings, evaluate
from autotune.engine.memory_format import has_4d_convolution
from autotune.engine.operations import watched_operations
from autotune.engine.optimizer import current_implementation, read_optimizer_facts
from autotune.engine.precision import allows_tf32
from autotune.engine.windows import ResidentWindows
from autotune.measure.clock import Clock, clock_for
from autotune.measure.throughput import time_training
from autotune.probe.additivity import measure_additivity
from autotune.probe.interference import watch_interference
from autotune.probe.limits import measure_ceilings
from autotune.records.config import TrainConfig
from autotune.records.facts import Additivity, DataFacts, ModelFacts, StepPhases, TargetFacts
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.space import SPLIT_KNOBS
from autotune.targets.workload import LoadedWorkload

_FETCH_SECONDS = 0.5
_MOST_FETCHES = 64
_PHASES_SECONDS = 1.0
_CEILINGS_SECONDS = 2.0
_EVALUATION_SECONDS = 20.0
_PHASES = ("data", "copy", "forward", "backward", "optimizer")


def probe_workload(spec: TrialSpec, loaded: LoadedWorkload, device: torch.device, *, started: float) -> TrialResult:
    """Return the target's facts and the baseline's timing.

    Raises:
        TargetError: a part of the workload returns something of the wrong type.
    """
    baseline = _resolve_settings(loaded.baseline, device)
    data, sources = _look_at_data(loaded, baseline)
    with backend_settings(baseline, device):
        training = Training(loaded, baseline, device=device, seed=spec.seeds[0], random_sources=sources)
        startup = time.monotonic() - started
        baseline = baseline.replace(optimizer_implementation=current_implementation(training.optimizer, device))
        facts = _look_at_training(training, loaded, baseline, device, data=data)
        del training
        fresh = Training(loaded, baseline, device=device, seed=spec.seeds[0], random_sources=sources)
        measurement, curve = time_training(
            fresh, baseline, spec.limits, device, seed=spec.seeds[0], interference=watch_interference(device)
        )
    return TrialResult(
        spec=spec.replace(config=baseline),
        status=TrialStatus.COMPLETED,
        elapsed_seconds=time.monotonic() - started,
        startup_seconds=startup,
        measurement=measurement,
        curves=(curve,),
        # The ceilings come last: they touch a lot of memory, which would count as the training's peak.
        facts=_add_additivity(facts, spec, loaded, device).replace(
            ceilings=measure_ceilings(device, budget_seconds=_CEILINGS_SECONDS)
        ),
    )


def _add_additivity(facts: TargetFacts, spec: TrialSpec, loaded: LoadedWorkload, device: torch.device) -> TargetFacts:
    """Return the facts with what a split of the batch is on this target: no more than rounding, or another training."""
    additivity: Additivity | None = None
    is_another, fixed = facts.model.has_batch_norm, dict(facts.fixed)
    if not is_another:
        sources = facts.data.random_sources
        try:
            additivity = measure_additivity(loaded, facts.baseline, device, seed=spec.seeds[0], random_sources=sources)
        except Exception as error:  # other parts of a batch than the user's own are more than a workload has to bear
            told = " ".join(f"{type(error).__name__}: {error}".split())[:160]
            fixed["micro_batch_size"] = f"parts of a batch cannot be computed: {told}"
        is_another = additivity is not None and not additivity.holds
    numerics = facts.numerics | dict.fromkeys(SPLIT_KNOBS if is_another else (), "semantic")
    return facts.replace(additivity=additivity, numerics=numerics, fixed=fixed)


def _look_at_training(
    training: Training, loaded: LoadedWorkload, baseline: TrainConfig, device: torch.device, *, data: DataFacts
) -> TargetFacts:
    optimizer = read_optimizer_facts(training.optimizer, device)
    model = _look_at_model(training, baseline)
    phases, compute_seconds = _time_phases(training, clock_for(device))
    evaluate_seconds, troubles = _time_evaluation(loaded, training, baseline, device)
    return TargetFacts(
        label=loaded.label,
        fingerprint=loaded.fingerprint,
        device="cuda" if device.type == "cuda" else "cpu",
        baseline=baseline,
        model=model,
        data=data,
        optimizer=optimizer,
        phases=phases,
        compute_seconds_per_step=compute_seconds,
        knobs=loaded.knobs,
        numerics={f"user_knobs.{name}": kind for name, kind in loaded.knob_numerics.items()},
        metrics={metric.name: metric.direction for metric in loaded.metrics},
        evaluate_seconds=evaluate_seconds,
        supports_bf16=supports_bf16(device),
        warnings=(*troubles, *find_troubles()),
    )


def _resolve_settings(baseline: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the baseline with what PyTorch and the workload's module have set by themselves."""
    if device.type == "cuda":
        return baseline.replace(
            allow_tf32=baseline.allow_tf32 or allows_tf32(),
            cudnn_benchmark=baseline.cudnn_benchmark or torch.backends.cudnn.benchmark,
        )
    return baseline.replace(num_threads=baseline.num_threads or torch.get_num_threads())


def _look_at_data(loaded: LoadedWorkload, baseline: TrainConfig) -> tuple[DataFacts, tuple[str, ...]]:
    dataset: Any = loaded.workload.train_dataset()
    iterable = isinstance(dataset, IterableDataset)
    count = None if iterable else len(dataset)
    sources = find_random_sources(dataset, loaded.collate)
    collate = loaded.collate or default_collate
    facts = DataFacts(
        sample_count=count,
        seconds_per_sample=_time_samples(dataset, baseline.micro_batch_size, collate, iterable=iterable),
        random_sources=sources,
        iterable=iterable,
    )
    return facts, sources


def _time_samples(dataset: Any, batch: int, collate: Callable[[list[Any]], Any], *, iterable: bool) -> float:
    stream = iter(dataset) if iterable else (dataset[index] for index in range(len(dataset)))
    began = time.perf_counter()
    samples: list[Any] = []
    for sample in stream:
        samples.append(sample)
        if len(samples) >= max(batch, _MOST_FETCHES) or time.perf_counter() - began > _FETCH_SECONDS:
            break
    if not samples:
        return 0.0
    collate(samples[:batch])
    return (time.perf_counter() - began) / len(samples)


def _look_at_model(training: Training, baseline: TrainConfig) -> ModelFacts:
    model = training.model
    trainable = [p for p in model.parameters() if p.requires_grad]
    with watched_operations() as seen:
        outcome = training.step()
    counted = seen.flops if baseline.compile_mode == "off" else 0
    own_switch = callable(getattr(model, "gradient_checkpointing_enable", None))
    blocks = len(find_repeated_blocks(model))
    return ModelFacts(
        parameter_count=sum(p.numel() for p in trainable),
        parameter_bytes=sum(p.numel() * p.element_size() for p in trainable),
        has_batch_norm=any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()),
        has_4d_convolution=has_4d_convolution(model),
        calls_attention=seen.attention,
        checkpointable_blocks=blocks or int(own_switch),
        flops_per_sample=counted / outcome.samples if counted else None,
    )


def _time_phases(training: Training, clock: Clock) -> tuple[StepPhases, float]:
    """Return the phases of a step and the time of a step whose batch is on the device already, in seconds."""
    training.step()
    totals = dict.fromkeys(_PHASES, 0.0)
    steps = 0
    began = clock.now()
    while steps < 2 or (clock.now() - began < _PHASES_SECONDS and steps < 20):
        _add_phases(training, clock, totals)
        steps += 1
    seconds = {name: total / steps for name, total in totals.items()}
    return (
        StepPhases(
            data_wait_seconds=seconds["data"],
            copy_seconds=seconds["copy"],
            forward_seconds=seconds["forward"],
            backward_seconds=seconds["backward"],
            optimizer_seconds=seconds["optimizer"],
        ),
        _time_resident_steps(training, clock),
    )


def _add_phases(training: Training, clock: Clock, totals: dict[str, float]) -> None:
    clock.synchronize()
    last = clock.now()

    def note(phase: str) -> None:
        nonlocal last
        clock.synchronize()
        now = clock.now()
        totals[phase] += now - last
        last = now

    training.step(note)


def _time_resident_steps(training: Training, clock: Clock) -> float:
    window = training.windows.next_window()
    training.windows = ResidentWindows(window, [training.place(batch) for batch in window.batches])
    training.step()
    durations: list[float] = []
    while len(durations) < 2 or (sum(durations) < _PHASES_SECONDS and len(durations) < 20):
        clock.synchronize()
        began = clock.now()
        training.step()
        clock.synchronize()
        durations.append(clock.now() - began)
    return sum(durations) / len(durations)


class _TooLongError(Exception):
    """An evaluation did not end in time."""


def _time_evaluation(
    loaded: LoadedWorkload, training: Training, baseline: TrainConfig, device: torch.device
) -> tuple[float | None, tuple[str, ...]]:
    """Return the seconds of one evaluation, or None and why there is no number."""
    if not loaded.metrics:
        return None, ()

    def give_up(*_: Any) -> None:
        raise _TooLongError

    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, _EVALUATION_SECONDS)
    began = time.perf_counter()
    try:
        evaluate(loaded, training.model, baseline, device)
        return time.perf_counter() - began, ()
    except _TooLongError:
        sentence = f"evaluate takes more than {_EVALUATION_SECONDS:.0f} s: drift checks will compare losses only"
        return None, (sentence,)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def supports_bf16(device: torch.device) -> bool:
    """Return whether bf16 autocast runs on a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ones = torch.ones(8, 8, requires_grad=True)
            nn.functional.linear(ones, ones).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def find_troubles() -> tuple[str, ...]:
    """Return what makes every training of this process slow, one sentence each."""
    found = []
    if torch.is_anomaly_enabled():
        found.append("autograd's anomaly detection is on: it checks every operation and slows training a lot")
    if torch.are_deterministic_algorithms_enabled():
        found.append("deterministic algorithms are on: some kernels are slower")
    return tuple(found)
