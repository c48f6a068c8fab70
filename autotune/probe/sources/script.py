"""A script as the probe sees it: what the hooks note while it trains, and the objects it leaves behind.

its steps ── timed, phases noted on the way ── some more under the profiler, then none      its objects, to look at
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.engine.compilation import compiled_graph_count
from autotune.engine.device import on_accelerator, reserved_bytes, usable_bytes
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.format import format_duration, format_share
from autotune.measure.clock import clock_for
from autotune.measure.memory import resident_bytes
from autotune.measure.throughput import TrainingEndedError
from autotune.probe.data.generators import OWN_GENERATOR, draws_itself, workers_draw_alike
from autotune.probe.data.look import Samples, count_held, find_pickling_trouble, look_at_data
from autotune.probe.machine import find_hazards, supports_bf16, used_bytes
from autotune.probe.memory.script import ScriptMemory
from autotune.probe.model import describe_models, describe_optimizers
from autotune.probe.sources.epoch_pause import EpochPause
from autotune.probe.sources.script_settings import find_fixed, read_baseline
from autotune.probe.sources.script_sharing import find_fixed_sharing
from autotune.probe.step.profiler import StepProfiler, count_profiled_steps
from autotune.probe.step.switches import time_switches
from autotune.probe.step.syncs import SyncFinder
from autotune.probe.step.work import WorkProfile
from autotune.probe.time_shares import TimeShares
from autotune.records.config import TrainConfig
from autotune.records.facts import DataFacts, ModelFacts, StepPhases, Switched, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.script import Numerics
from autotune.records.trial import TrialLimits, TrialSpec
from autotune.runs.script_source import ScriptSource
from autotune.runs.source import Run
from autotune.space import SPLIT_KNOBS
from autotune.targets.script import placeholder_names

_FIRST_STEADY_STEP = 2
_MARKED_STEPS = 10
"""Steps until the phases that were marked in a GPU's stream are read."""

_MOST_ATTEMPTS = 3
"""A script that does something else between all its steps is not profiled."""

_NOTABLE_ASIDE = 0.1
"""Share of the time that a script may validate in without a word about it."""

_LOADER_KNOBS = ("num_workers", "prefetch_factor", "persistent_workers")


class ScriptProbe:
    """A script to be probed; the members that are not documented here are `ProbeSource`'s.

    Made before the script has built anything: what the process holds then is its own.

    Args:
        hooks: on the script.
        steps: that they report.
        spec: of the probe.
        shares: the time of the probe.

    Attributes:
        is_seeded: the script set a seed before its first step.
        pause: what it does between two epochs.
    """

    def __init__(self, hooks: ScriptHooks, steps: ScriptSource, spec: TrialSpec, *, shares: TimeShares) -> None:
        self.is_seeded = False
        self.steps = steps
        self.base_bytes = resident_bytes()
        self.enqueue_fraction = 1.0
        self.switched: tuple[Switched, ...] = ()
        self.files: list[Path] = []
        self.folder = Path()
        self._hooks, self._spec, self._shares = hooks, spec, shares
        self._began = 0.0
        self._micro_batches: list[int] = []
        self._passes: list[int] = []
        self._evaluations: list[int] = []
        self._samples: list[int] = []
        self._since: tuple[int, float, Counter[str]] | None = None
        self._until: tuple[int, float, Counter[str]] | None = None
        self._phases: StepPhases | None = None
        self._marked: list[str] = []
        self._profiler: StepProfiler | None = None
        self._finder: SyncFinder | None = None
        self._profiled_steps = self._wanted_steps = self._attempts = 0
        self.pause = EpochPause(hooks)
        self._aside: float | None = None

    @property
    def device(self) -> torch.device:
        return self._hooks.device

    def settings(self) -> AbstractContextManager[None]:
        return nullcontext()  # the script has set torch as it likes

    def begin(self) -> tuple[TrainConfig, TrialLimits]:
        if on_accelerator(self.device):
            self.base_bytes = max(0, used_bytes(self.device) - reserved_bytes(self.device))
        self._clock = clock_for(self.device)
        self._began = time.perf_counter()
        self.steps.on_step = self._note_step
        return TrainConfig(), self._spec.limits

    def watch_steps(self, seconds_per_step: float) -> Run[None]:
        """See the pause after the epoch where it is near, try switches, profile steps: the script takes none later."""
        hooks = self._hooks
        self._until = (hooks.steps, time.perf_counter(), Counter(hooks.timer.seconds))
        self._aside = self._read_aside()
        micro_batches, limit = max(1, _most_common(self._micro_batches)), self._shares.grant_pause()
        yield from self.pause.see(self.device, seconds_per_step, micro_batches=micro_batches, limit=limit)
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:  # one of several would keep the others waiting
            seconds = self._shares.grant(self._shares.policy.switch_seconds)
            self.switched = yield from time_switches(self.steps, seconds_per_step, budget_seconds=seconds)
        slowest = self._shares.policy.slow_step_seconds
        calls = hooks.models.seen.calls * self._count_evaluations()
        self._wanted_steps = count_profiled_steps(seconds_per_step, calls, slow_seconds=slowest)
        while self._wanted_steps and self._attempts <= _MOST_ATTEMPTS:
            if self._profiler is None:
                self._profiler = StepProfiler(self.device)
                self._profiler.start()
            else:  # begun before this step, and not thrown away on the way
                self._profiled_steps += 1
            if self._profiled_steps >= self._wanted_steps:
                break
            try:
                yield
            except TrainingEndedError:
                break
        if self._profiler is not None:
            self._profiler.end_steps()
            yield from self._find_syncs()

    def _find_syncs(self) -> Run[None]:
        """See one more step, where nothing is compiled: a compiler and an observer are in each other's way."""
        if compiled_graph_count():
            return
        self._finder = SyncFinder(self.device)
        with self._finder:
            try:
                yield
            except TrainingEndedError:
                self._finder = None

    def turn_aside(self) -> None:
        """Throw away what the profiler has seen: the script does something else than train, and that is no step."""
        self._finder = None
        if self._profiler is not None and self._profiled_steps < self._wanted_steps:
            self._profiler.stop(0)
            self._profiler, self._profiled_steps = None, 0
            self._attempts += 1

    def describe(self, measurement: Measurement) -> TargetFacts:
        hooks, script = self._hooks, self._spec.target.script
        assert script is not None
        measured = self._read_aside() if self._aside is None else self._aside
        aside = max(measured, self.pause.fraction)
        micro_batches, processes = max(1, _most_common(self._micro_batches)), int(os.environ.get("WORLD_SIZE", "1"))
        own = _most_common(self._samples) // processes
        baseline = read_baseline(hooks, script, micro_batches=micro_batches, samples=own)
        samples, fixed = self._look_at_data(baseline)
        self.files = samples.files
        draws: dict[str, Numerics] = dict.fromkeys(_LOADER_KNOBS if samples.facts.random_sources else (), "rounding")
        model = self._describe_models(measurement)
        return TargetFacts(
            label=self._spec.target.spec,
            fingerprint="",  # known to the supervisor, who sees the folder as it was before the script wrote to it
            device="cuda" if self.device.type == "cuda" else "cpu",
            device_bytes=usable_bytes(self.device),
            baseline=baseline,
            model=model,
            data=samples.facts,
            optimizer=describe_optimizers(hooks.optimizers.optimizers, self.device),
            phases=self._phases or self._split_step(measured),
            compute_seconds_per_step=max(1e-9, measurement.seconds_per_step * (1.0 - measurement.data_wait_fraction)),
            computed_beside_workers=baseline.num_workers > 0,
            knobs={knob.name: knob.values for knob in script.knobs},
            metrics={metric.name: metric.direction for metric in script.metrics},
            evaluate_seconds=0.0 if script.metrics else None,
            fixed=fixed | find_fixed(hooks, script, baseline) | self._find_fixed_sharing(baseline, processes),
            numerics=draws
            | {f"user_knobs.{knob.name}": knob.numerics for knob in script.knobs}
            | dict.fromkeys(SPLIT_KNOBS if model.has_batch_norm else (), "semantic"),
            scales_loss=hooks.optimizers.scales_loss,
            training_loaders=tuple(sorted(hooks.watch.training_loaders)),
            launched_processes=processes,
            aside_fraction=aside,
            supports_bf16=supports_bf16(self.device),
            hazards=find_hazards(),
            warnings=_describe_habits(aside, is_seeded=self.is_seeded, exceeded_seconds=self.pause.exceeded_seconds),
        )

    def _read_aside(self) -> float:
        """Return the share of the time so far in which the script has done something else than train."""
        return min(1.0, max(0.0, self.steps.aside_seconds / max(1e-9, time.perf_counter() - self._began)))

    def _find_fixed_sharing(self, baseline: TrainConfig, processes: int) -> dict[str, str]:
        script = self._spec.target.script
        if processes == 1 or script is None:
            return {}
        own = placeholder_names(script)
        found = find_fixed_sharing(self._hooks.sharing, baseline)
        return {name: reason for name, reason in found.items() if name not in own}

    def profile(self, facts: TargetFacts) -> WorkProfile | None:
        profiler, self._profiler = self._profiler, None
        profile = None if profiler is None else profiler.stop(self._profiled_steps)
        return profile if profile is None or self._finder is None else replace(profile, sync_places=self._finder.places)

    def vary_batches(self, facts: TargetFacts) -> TargetFacts:
        return facts  # a script makes its batches by itself

    def open_loader(self, facts: TargetFacts) -> DataLoader[Any] | None:
        return self._hooks.loaders.training_loader

    def open_memory(self, measurement: Measurement) -> ScriptMemory:
        return ScriptMemory(self._hooks, measurement)

    def _note_step(self, step: ScriptStep) -> None:
        """Note a timed step."""
        hooks, on_gpu = self._hooks, self.device.type == "cuda"
        if hooks.steps > _FIRST_STEADY_STEP:
            self._micro_batches.append(step.micro_batches)
            # A script may put the batches of its loader together and call its model once on all of them.
            passes = min(step.micro_batches, step.calls or step.micro_batches)
            self._passes.append(passes)
            self._evaluations.append(max(passes, step.closures // max(1, len(hooks.models.roots))))
            self._samples.append(step.samples)
        elif hooks.steps == _FIRST_STEADY_STEP:
            self._since = (hooks.steps, time.perf_counter(), Counter(hooks.timer.seconds))
            self._marked = hooks.timer.follow(self._clock.mark if on_gpu else None)
        if hooks.steps == _MARKED_STEPS and on_gpu and self._since is not None:
            self._phases = self._read_marks(hooks.steps - self._since[0])

    def _read_marks(self, steps: int) -> StepPhases:
        """Return the phases of a step from the marks in the device's stream."""
        names = self._marked
        self._hooks.timer.follow(None)
        self._clock.synchronize()
        totals = dict.fromkeys(("data", "forward", "backward", "optimizer", "other"), 0.0)
        for name, seconds in zip(names, self._clock.take_intervals(), strict=True):
            totals[name] = totals.get(name, 0.0) + seconds
        return _make_phases({name: seconds / steps for name, seconds in totals.items()}, totals["other"] / steps)

    def _split_step(self, aside_fraction: float) -> StepPhases:
        """Return the phases of a step by the host's clock; what is in none of them is other."""
        if self._since is None:
            return _make_phases({}, 0.0)
        hooks, (first, began, before) = self._hooks, self._since
        last, ended, after = self._until or (hooks.steps, time.perf_counter(), hooks.timer.seconds)
        steps = max(1, last - first)
        whole = (ended - began) * (1.0 - aside_fraction) / steps
        seconds = {name: (value - before[name]) / steps for name, value in after.items() if name != "aside"}
        return _make_phases(seconds, max(0.0, whole - sum(seconds.values())))

    def _look_at_data(self, baseline: TrainConfig) -> tuple[Samples, dict[str, str]]:
        """Return what the training samples show, and the loader's knobs that must stay, with reasons."""
        loader = self._hooks.loaders.training_loader
        if loader is None:
            reason = "the script has no DataLoader to train from"
            data = DataFacts(sample_count=None, seconds_per_sample=0.0, random_sources=(), iterable=False)
            return Samples(data), dict.fromkeys((*_LOADER_KNOBS, "pin_memory"), reason)
        if isinstance(loader.dataset, IterableDataset):  # its stream may be the very one that was trained from
            facts = DataFacts(sample_count=None, seconds_per_sample=0.0, random_sources=(), iterable=True)
            samples, trouble = Samples(facts), ""
        else:
            samples, trouble = _look_at_samples(loader, baseline)
        sources = {*self._hooks.loaders.random_sources, *samples.facts.random_sources}
        samples = replace(samples, facts=samples.facts.replace(random_sources=tuple(sorted(sources))))
        if trouble:
            return samples, dict.fromkeys(_LOADER_KNOBS, trouble)
        if baseline.persistent_workers:
            return samples, {"persistent_workers": "the script keeps its workers already"}
        if samples.keeps_read:
            return samples, {"persistent_workers": "its dataset keeps what it has read, which workers begin anew with"}
        return samples, {}

    def _count_evaluations(self) -> int:
        """Return how often a step evaluates each model, on a micro batch or again on the same one."""
        return max(1, _most_common(self._evaluations))

    def _describe_models(self, measurement: Measurement) -> ModelFacts:
        roots, optimizers = self._hooks.models.roots, self._hooks.optimizers.optimizers
        # Not by `requires_grad`: scripts with several models switch it off and on within a step.
        stepped = [p for one in optimizers for group in one.param_groups for p in group["params"]]
        trainable = {id(p): p for p in stepped or [p for root in roots for p in root.parameters()]}.values()
        seen = self._hooks.models.seen
        samples_per_step = measurement.samples / sum(block.optimizer_steps for block in measurement.blocks)
        # A backward pass counts as two forward ones, of what is trained: at least so much, where some weights are not.
        # Each model is taken to be called once for each evaluation.
        all_weights = sum(p.numel() for p in {id(p): p for root in roots for p in root.parameters()}.values())
        trained = min(1.0, sum(p.numel() for p in trainable) / max(1, all_weights))
        per_step = (1.0 + 2.0 * trained) * seen.flops * self._count_evaluations()
        calls = seen.calls * max(1, _most_common(self._passes))
        return describe_models(
            roots, trainable, seen, flops_per_sample=per_step / samples_per_step if per_step else None
        ).replace(calls_per_step=calls or None)


def _look_at_samples(loader: DataLoader[Any], baseline: TrainConfig) -> tuple[Samples, str]:
    """Return what the samples of a map-style dataset show, and why its loader's knobs must stay; empty where not.

    Samples that are drawn at random are others in every worker; what matters is that no more of them draw the same.
    """
    dataset, held = loader.dataset, count_held(loader.dataset)
    samples, trouble = _fetch_some(loader, baseline.micro_batch_size)
    samples = replace(samples, keeps_read=count_held(dataset) > held)
    if not baseline.num_workers and samples.keeps_read:
        trouble = "its dataset keeps what it has read, which each worker would read again in every epoch"
    if not trouble and draws_itself(dataset):
        is_alike = workers_draw_alike(loader)
        sources = (*samples.facts.random_sources, OWN_GENERATOR)
        samples = replace(samples, facts=samples.facts.replace(random_sources=sources, workers_draw_alike=is_alike))
        if is_alike and not baseline.num_workers:
            trouble = "its dataset has a random generator of its own: every worker would start with a copy of it"
    return samples, find_pickling_trouble(dataset) or trouble


def _fetch_some(loader: DataLoader[Any], batch_size: int) -> tuple[Samples, str]:
    """Return what samples fetched one by one show, and what went wrong."""
    collate = loader.collate_fn if loader.batch_size is not None or loader.batch_sampler is not None else _first
    try:
        return look_at_data(lambda: loader.dataset, collate, batch_size=batch_size, fingerprints=False), ""
    except Exception as error:
        count = _count_samples(loader.dataset)
        data = DataFacts(sample_count=count, seconds_per_sample=0.0, random_sources=(), iterable=False)
        return Samples(data), f"its samples could not be fetched one by one ({type(error).__name__}: {error})"[:200]


def _count_samples(dataset: Any) -> int | None:
    """Return how many samples a dataset has; None where only the script's own sampler knows."""
    try:
        return len(dataset)
    except TypeError:
        return None


def _first(samples: list[Any]) -> Any:
    return samples[0]


def _make_phases(seconds: Mapping[str, float], other: float) -> StepPhases:
    return StepPhases(
        data_wait_seconds=seconds.get("data", 0.0),
        copy_seconds=0.0,
        forward_seconds=seconds.get("forward", 0.0),
        backward_seconds=seconds.get("backward", 0.0),
        optimizer_seconds=seconds.get("optimizer", 0.0),
        other_seconds=other,
    )


def _describe_habits(aside_fraction: float, *, is_seeded: bool, exceeded_seconds: float) -> tuple[str, ...]:
    sentences = []
    if not is_seeded:
        sentences.append("the script sets no seed: all trials are given the same one; your own runs are left without")
    if aside_fraction > _NOTABLE_ASIDE:
        share = format_share(aside_fraction)
        sentences.append(f"{share} of the time goes to validation and the like, which faster steps do not shorten")
    if exceeded_seconds:
        sentences.append(
            f"between two epochs the script does something else for more than {format_duration(exceeded_seconds)}, "
            "which faster steps do not shorten"
        )
    return tuple(sentences)


def _most_common(values: list[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 1
