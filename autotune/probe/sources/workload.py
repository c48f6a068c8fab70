"""A workload as the probe sees it: one training taken apart, another one, fresh, to be timed and varied.

dataset ── cost, randomness, files     one training ── model, FLOPs, phases, compute alone, an evaluation
                                       another one, fresh ── timed, profiled, a pass over twice the samples
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from autotune.engine.activation_checkpointing import find_switch
from autotune.engine.data_fingerprint import build_dataset
from autotune.engine.dataloader import Order, build_loader
from autotune.engine.device import usable_bytes
from autotune.engine.evaluation import evaluate
from autotune.engine.kernels import read_switches
from autotune.engine.loop import Training, backend_settings
from autotune.engine.operations import Operations, refuses_to_be_watched, watched_operations
from autotune.engine.sharing import find_unshardable
from autotune.measure.clock import clock_for
from autotune.measure.warmup import SLOW_STEP_SECONDS as FEW_STEPS_SECONDS
from autotune.probe.additivity import WINDOWS, measure_additivity
from autotune.probe.collect import collect_facts, time_target
from autotune.probe.data.look import look_at_data
from autotune.probe.machine import find_hazards, room_for_trying, supports_bf16, used_bytes
from autotune.probe.memory.workload import WorkloadMemory
from autotune.probe.model import describe_models, describe_optimizers, read_implementation
from autotune.probe.step.profiler import count_profiled_steps, profile_steps
from autotune.probe.step.switches import time_switches
from autotune.probe.step.syncs import SyncFinder
from autotune.probe.step.timing import keep_resident, measure_elasticity, time_phases, time_resident_steps
from autotune.probe.step.work import WorkProfile
from autotune.probe.time_shares import OutOfTimeError, ProbePolicy, TimeShares, time_limit
from autotune.records.config import TrainConfig
from autotune.records.facts import Additivity, ModelFacts, Switched, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialLimits, TrialResult, TrialSpec
from autotune.runs.source import Run, drive
from autotune.runs.workload_source import WorkloadSource
from autotune.space import SPLIT_KNOBS
from autotune.targets.workload import LoadedWorkload

T = TypeVar("T")


def probe_workload(
    spec: TrialSpec,
    loaded: LoadedWorkload,
    device: torch.device,
    *,
    started: float,
    keep: Callable[[TrialResult], None],
    policy: ProbePolicy | None = None,
) -> TrialResult:
    """Return a workload's facts and the baseline's timing.

    Args:
        spec: of the probe.
        loaded: the workload.
        device: where to run it.
        started: `time.monotonic()` when the process was started.
        keep: as `collect_facts` has it.
        policy: what its parts may take; None for the usual one.

    Raises:
        TargetError: a part of the workload returns something of the wrong type.
    """
    shares = TimeShares(started, spec.limits.time_limit_seconds, policy)
    source = WorkloadProbe(spec, loaded, device, shares=shares)
    found = source.drive(time_target(source, seed=spec.seeds[0]))
    timed = found.complete(spec, elapsed_seconds=shares.elapsed_seconds, startup_seconds=source.built_at - started)
    return collect_facts(source, timed, shares, keep=keep)


class WorkloadProbe:
    """A workload to be probed; the members that are not documented here are `ProbeSource`'s.

    Args:
        spec: of the probe.
        loaded: the workload.
        device: where to run it.
        shares: the time of the probe; its policy says what is too slow to be tried, and what takes too much memory.

    Attributes:
        built_at: `time.monotonic()` when its first training was built.
    """

    def __init__(self, spec: TrialSpec, loaded: LoadedWorkload, device: torch.device, *, shares: TimeShares) -> None:
        self.device = device
        self._spec, self._loaded, self._seed = spec, loaded, spec.seeds[0]
        self._shares, self._policy = shares, shares.policy
        self._baseline = _resolve_settings(loaded.baseline, device)
        size = self._baseline.micro_batch_size
        self._samples = look_at_data(partial(build_dataset, loaded), loaded.collate, batch_size=size, fingerprints=True)
        self._sources = self._samples.facts.random_sources
        self.files, self.folder = self._samples.files, Path(spec.target.folder)
        self.base_bytes = used_bytes(device)
        self.enqueue_fraction = 1.0
        self.switched: tuple[Switched, ...] = ()
        self.built_at = 0.0
        self._steps: WorkloadSource | None = None
        self._facts: TargetFacts | None = None

    @property
    def steps(self) -> WorkloadSource:
        assert self._steps is not None
        return self._steps

    def settings(self) -> AbstractContextManager[None]:
        return backend_settings(self._baseline)

    def drive(self, run: Run[T]) -> T:
        """Take every step that a run asks for; return what it has found out."""
        return drive(run, lambda: self.steps.take_step())

    def begin(self) -> tuple[TrainConfig, TrialLimits]:
        loaded, seed = self._loaded, self._seed
        training = Training(loaded, self._baseline, device=self.device, seed=seed, random_sources=self._sources)
        self.built_at = time.monotonic()
        self._facts = self._take_apart(training)
        baseline = self._facts.baseline
        del training  # two at once may not fit, and the peak of one is to be measured
        self._steps = WorkloadSource(loaded, baseline, self.device, seed=seed, random_sources=self._sources)
        limits = self._spec.limits.replace(seconds_per_sample=self._samples.facts.seconds_per_sample)
        return baseline, limits

    def watch_steps(self, seconds_per_step: float) -> Run[None]:
        # All else can be had later: there are more steps whenever they are wanted.
        seconds = self._shares.grant(self._policy.switch_seconds)
        self.switched = yield from time_switches(self.steps, seconds_per_step, budget_seconds=seconds)

    def describe(self, measurement: Measurement) -> TargetFacts:
        assert self._facts is not None
        return self._facts

    def profile(self, facts: TargetFacts) -> WorkProfile | None:
        seconds, calls = facts.compute_seconds_per_step, facts.model.calls_per_step
        steps = count_profiled_steps(seconds, calls, slow_seconds=self._policy.slow_step_seconds)
        if not steps:
            return None
        training = self.steps.training
        keep_resident(training)
        if seconds < FEW_STEPS_SECONDS:
            training.step()
        profile = profile_steps(training.step, self.device, steps=steps)
        if profile is None or not profile.host_syncs or facts.baseline.compile_mode != "off":
            return profile
        with SyncFinder(self.device) as finder:
            training.step()
        return replace(profile, sync_places=finder.places)

    def vary_batches(self, facts: TargetFacts) -> TargetFacts:
        facts = facts.replace(batch_elasticity=self._try_twice(facts))
        self._steps = None
        return self._add_additivity(facts)

    def open_loader(self, facts: TargetFacts) -> DataLoader[Any] | None:
        loaded = self._loaded
        order = Order(seed=self._seed, shuffle=loaded.shuffle, drop_last=loaded.drop_last)
        try:
            dataset = loaded.workload.train_dataset()
            loader, _ = build_loader(
                dataset, facts.baseline, order, collate=loaded.collate, random_sources=self._sources
            )
        except Exception:  # a dataset that cannot be opened once more: the training has shown that it can be opened
            return None
        return loader

    def open_memory(self, measurement: Measurement) -> WorkloadMemory:
        return WorkloadMemory(self._loaded, self.device, seed=self._seed, room_bytes=room_for_trying(self.device))

    def _try_twice(self, facts: TargetFacts) -> float | None:
        """Return what twice the samples would cost; None where they may not fit, or would take too long."""
        no_room = used_bytes(self.device) > self._policy.room_for_twice * room_for_trying(self.device)
        if no_room or facts.compute_seconds_per_step > self._policy.slow_step_seconds:
            return None
        size, clock = facts.baseline.micro_batch_size, clock_for(self.device)
        training, fetched = self.steps.training, self._samples.fetched
        try:
            return measure_elasticity(training, fetched, size, clock, collate=self._loaded.collate)
        except Exception:  # other batches than the user's own are more than a workload has to bear
            return None

    def _add_additivity(self, facts: TargetFacts) -> TargetFacts:
        """Return the facts with what a split of the batch is: no more than rounding, or another training."""
        additivity: Additivity | None = None
        is_another, fixed = facts.model.has_batch_norm, dict(facts.fixed)
        if not is_another:
            windows = 1 if facts.compute_seconds_per_step >= FEW_STEPS_SECONDS else WINDOWS
            try:
                additivity = measure_additivity(
                    self._loaded,
                    facts.baseline,
                    self.device,
                    seed=self._seed,
                    random_sources=self._sources,
                    windows=windows,
                )
            except Exception as error:  # other parts of a batch are more than a workload has to bear
                told = " ".join(f"{type(error).__name__}: {error}".split())[:160]
                fixed["micro_batch_size"] = f"parts of a batch cannot be computed: {told}"
            is_another = additivity is not None and not additivity.holds
        numerics = facts.numerics | dict.fromkeys(SPLIT_KNOBS if is_another else (), "semantic")
        return facts.replace(additivity=additivity, numerics=numerics, fixed=fixed)

    def _take_apart(self, training: Training) -> TargetFacts:
        """Return the facts that a training shows whose time counts for nothing."""
        loaded, device, clock = self._loaded, self.device, clock_for(self.device)
        optimizers = [training.optimizer]
        optimizer = describe_optimizers(optimizers, device)
        baseline = self._baseline.replace(optimizer_implementation=read_implementation(optimizers, device))
        model = _describe_model(training, baseline)
        phases = time_phases(training, clock)
        resident = time_resident_steps(training, clock)
        self.enqueue_fraction = resident.enqueue_fraction
        evaluate_seconds, troubles = self._time_evaluation(training, baseline)
        return TargetFacts(
            label=loaded.label,
            fingerprint=loaded.fingerprint,
            device="cuda" if device.type == "cuda" else "cpu",
            device_bytes=usable_bytes(device),
            baseline=baseline,
            model=model,
            data=self._samples.facts,
            optimizer=optimizer,
            phases=phases,
            compute_seconds_per_step=resident.seconds,
            knobs=loaded.knobs,
            fixed=_find_fixed(training, loaded),
            numerics={f"user_knobs.{name}": kind for name, kind in loaded.knob_numerics.items()},
            metrics={metric.name: metric.direction for metric in loaded.metrics},
            evaluate_seconds=evaluate_seconds,
            supports_bf16=supports_bf16(device),
            hazards=find_hazards(),
            warnings=troubles,
        )

    def _time_evaluation(self, training: Training, baseline: TrainConfig) -> tuple[float | None, tuple[str, ...]]:
        """Return the seconds of one evaluation, or None and why there is no number."""
        if not self._loaded.metrics:
            return None, ()
        most, began = self._policy.evaluation_seconds, time.perf_counter()
        try:
            with time_limit(most):
                evaluate(self._loaded, training, baseline)
            return time.perf_counter() - began, ()
        except OutOfTimeError:
            return None, (f"evaluate takes more than {most:.0f} s: loss checks will compare losses only",)


def _resolve_settings(baseline: TrainConfig, device: torch.device) -> TrainConfig:
    """Return the baseline with what PyTorch and the workload's module have set by themselves."""
    baseline = read_switches(baseline, device)
    if device.type == "cuda":
        return baseline
    return baseline.replace(num_threads=baseline.num_threads or torch.get_num_threads())


def _find_fixed(training: Training, loaded: LoadedWorkload) -> dict[str, str]:
    """Return the knobs that cannot be varied because of a part that the workload has, with reasons."""
    has_average, finds_unused = training.averaged is not None, loaded.finds_unused_parameters
    why_not = find_unshardable(training.model, finds_unused=finds_unused, has_average=has_average)
    return {"distributed_strategy": why_not} if why_not else {}


def _describe_model(training: Training, baseline: TrainConfig) -> ModelFacts:
    model = training.model
    try:
        with watched_operations() as seen:
            outcome = training.step()
    except Exception as error:
        if not refuses_to_be_watched(error):
            raise
        seen, outcome = Operations(), training.step()
    counted = seen.flops if baseline.compile_mode == "off" else 0
    trainable = (parameter for parameter in model.parameters() if parameter.requires_grad)
    found = describe_models([model], trainable, seen, flops_per_sample=counted / outcome.samples if counted else None)
    blocks = found.checkpointable_blocks or int(find_switch(model) is not None)
    return found.replace(calls_per_step=seen.calls, checkpointable_blocks=blocks)
