"""Inside the probe's process: what the hooks have seen of a script, as the facts the search space is built from."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.format import format_share
from autotune.machine.disk import opened_files
from autotune.measure.clock import clock_for
from autotune.probe.child import (
    add_disk,
    anchor_memory,
    can_checkpoint,
    describe_profile,
    find_hazards,
    list_precisions,
    memory_limit,
    settle_ceilings,
    supports_bf16,
)
from autotune.probe.loader import drain_loader
from autotune.probe.memory import look_at_script_memory
from autotune.probe.profiler import StepProfiler, count_profiled_steps
from autotune.probe.script_data import look_at_data
from autotune.probe.script_model import find_fixed, look_at_models, look_at_optimizers, read_baseline
from autotune.probe.time_shares import (
    LOADER_SECONDS,
    MEMORY_GRACE,
    MEMORY_SECONDS,
    OutOfTimeError,
    TimeShares,
    time_limit,
)
from autotune.probe.work import WorkProfile
from autotune.records.facts import StepPhases, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.trial import TrialSpec
from autotune.space import SPLIT_KNOBS

_FIRST_STEADY_STEP = 2
_MARKED_STEPS = 10
"""Steps until the phases that were marked in a GPU's stream are read."""

_MOST_ATTEMPTS = 3
"""A script that does something else between all its steps is not profiled."""


class ScriptProbe:
    """Gathers facts while a script trains.

    Args:
        hooks: on the script.
        base_bytes: that the process held before the script built anything.
    """

    def __init__(self, hooks: ScriptHooks, *, base_bytes: int) -> None:
        self._hooks, self._base_bytes = hooks, base_bytes
        self._micro_batches: list[int] = []
        self._samples: list[int] = []
        self._since: tuple[int, float, Counter[str]] | None = None
        self._phases: StepPhases | None = None
        self._clock = clock_for(hooks.device)
        self._marked: list[str] = []
        self._profiler: StepProfiler | None = None
        self._profile: WorkProfile | None = None
        self._profiled_steps = self._wanted_steps = self._attempts = 0
        self._until: tuple[int, float, Counter[str]] | None = None
        self._files: list[Path] = []

    def take(self, step: ScriptStep) -> None:
        """Note a step."""
        steps = self._hooks.steps
        on_gpu = self._hooks.device.type == "cuda"
        if steps > _FIRST_STEADY_STEP:
            self._micro_batches.append(step.micro_batches)
            self._samples.append(step.samples)
        elif steps == _FIRST_STEADY_STEP:
            self._since = (steps, time.perf_counter(), Counter(self._hooks.timer.seconds))
            self._marked = self._hooks.timer.follow(self._clock.mark if on_gpu else None)
        if steps == _MARKED_STEPS and on_gpu and self._since is not None:
            self._phases = self._read_marks(steps - self._since[0])

    def take_profiled(self, seconds_per_step: float) -> bool:
        """Note a step after the last timed one; True when the profiler has seen enough of them.

        Args:
            seconds_per_step: of the training; a slow one is not profiled.
        """
        if self._until is None:
            self._until = (self._hooks.steps, time.perf_counter(), Counter(self._hooks.timer.seconds))
        if self._profiler is None:
            self._wanted_steps = count_profiled_steps(seconds_per_step, self._hooks.models.seen.calls)
            if not self._wanted_steps or self._attempts > _MOST_ATTEMPTS:
                return True
            self._profiler = StepProfiler(self._hooks.device)
            self._profiler.start()
            return False
        self._profiled_steps += 1
        return self._profiled_steps >= self._wanted_steps

    def turn_aside(self) -> None:
        """The script does something else than train: what the profiler sees of it is no step."""
        if self._profiler is not None and self._profiled_steps < self._wanted_steps:
            self._profiler.stop(0)
            self._profiler, self._profiled_steps = None, 0
            self._attempts += 1

    def stop(self) -> None:
        """End the profiler, if it is at work; the script takes no further step."""
        if self._profiler is not None:
            self._profile = self._profiler.stop(self._profiled_steps)
        self._profiler = None

    def _read_marks(self, steps: int) -> StepPhases:
        """Return the phases of a step from the marks in the device's stream."""
        names = self._marked
        self._hooks.timer.follow(None)
        self._clock.synchronize()
        totals: Counter[str] = Counter()
        for name, seconds in zip(names, self._clock.take_intervals(), strict=True):
            totals[name] += seconds  # type: ignore[assignment]
        return StepPhases(
            data_wait_seconds=totals["data"] / steps,
            copy_seconds=0.0,
            forward_seconds=totals["forward"] / steps,
            backward_seconds=totals["backward"] / steps,
            optimizer_seconds=totals["optimizer"] / steps,
            other_seconds=totals["other"] / steps,
        )

    def find_facts(
        self, spec: TrialSpec, measurement: Measurement, *, is_seeded: bool, aside_fraction: float
    ) -> TargetFacts:
        """Return the facts about the script that are there already; nothing of it runs afterwards."""
        hooks, script = self._hooks, spec.target.script
        assert script is not None
        phases = self._phases or self._split_step(aside_fraction)
        micro_batches = max(1, _most_common(self._micro_batches))
        baseline = read_baseline(hooks, script, micro_batches=micro_batches, samples=_most_common(self._samples))
        with opened_files() as files:
            data, fixed, numerics = look_at_data(hooks, hooks.loaders.training_loader, baseline)
        self._files = list(files)
        fixed |= find_fixed(hooks, script, baseline)
        model = look_at_models(hooks, measurement, micro_batches=micro_batches)
        return TargetFacts(
            label=spec.target.spec,
            fingerprint="",  # known to the supervisor, who sees the folder as it was before the script wrote to it
            device="cuda" if hooks.device.type == "cuda" else "cpu",
            baseline=baseline,
            model=model,
            data=data,
            optimizer=look_at_optimizers(hooks.optimizers.optimizers, hooks.device),
            phases=phases,
            compute_seconds_per_step=max(1e-9, measurement.seconds_per_step * (1.0 - measurement.data_wait_fraction)),
            knobs={knob.name: knob.values for knob in script.knobs},
            metrics={metric.name: metric.direction for metric in script.metrics},
            evaluate_seconds=0.0 if script.metrics else None,
            fixed=fixed,
            numerics=numerics
            | {f"user_knobs.{knob.name}": knob.numerics for knob in script.knobs}
            | dict.fromkeys(SPLIT_KNOBS if model.has_batch_norm else (), "semantic"),
            scales_loss=hooks.optimizers.scales_loss,
            training_loaders=tuple(sorted(hooks.watch.training_loaders)),
            aside_fraction=min(1.0, max(0.0, aside_fraction)),
            supports_bf16=supports_bf16(hooks.device),
            hazards=find_hazards(),
            warnings=_describe_habits(aside_fraction, is_seeded=is_seeded),
        )

    def add_costly_facts(
        self, facts: TargetFacts, spec: TrialSpec, measurement: Measurement, allowance: TimeShares
    ) -> TargetFacts:
        """Return the facts with the loader alone, the memory by mode, the machine's limits and what steps do."""
        hooks, loader = self._hooks, self._hooks.loaders.training_loader
        if loader is not None:
            times = drain_loader(loader, budget_seconds=allowance.grant(LOADER_SECONDS))
            if times is not None:
                batches = max(1, _most_common(self._micro_batches))
                facts = facts.replace(data=times.add_to(facts.data, batches))
        memory_seconds = allowance.grant(MEMORY_SECONDS)
        if memory_seconds:
            try:
                with time_limit(MEMORY_GRACE * memory_seconds):
                    facts = self._add_memory(facts, measurement, memory_seconds)
            except (Exception, OutOfTimeError):  # a script's objects may be anything; its training is timed already
                pass
        facts = add_disk(facts, self._files, Path.cwd(), allowance)
        facts = facts.replace(ceilings=settle_ceilings(spec, hooks.device))
        seconds = facts.compute_seconds_per_step
        return facts.replace(work=describe_profile(self._profile, facts, step_seconds=seconds))

    def _add_memory(self, facts: TargetFacts, measurement: Measurement, seconds: float) -> TargetFacts:
        """Return the facts with the memory by mode."""
        memory = look_at_script_memory(
            self._hooks,
            facts.baseline,
            self._hooks.device,
            measurement=measurement,
            base_bytes=self._base_bytes,
            limit_bytes=memory_limit(self._hooks.device),
            supported=list_precisions(facts),
            checkpoints=can_checkpoint(facts.model),
            budget_seconds=seconds,
        )
        return anchor_memory(facts.replace(memory=memory), measurement)

    def _split_step(self, aside_fraction: float) -> StepPhases:
        if self._since is None:
            return StepPhases(
                data_wait_seconds=0, copy_seconds=0, forward_seconds=0, backward_seconds=0, optimizer_seconds=0
            )
        first, began, before = self._since
        last, ended, after = self._until or (self._hooks.steps, time.perf_counter(), self._hooks.timer.seconds)
        steps = max(1, last - first)
        whole = (ended - began) * (1.0 - aside_fraction) / steps
        seconds = {name: (value - before[name]) / steps for name, value in after.items()}
        return StepPhases(
            data_wait_seconds=seconds.get("data", 0.0),
            copy_seconds=0.0,
            forward_seconds=seconds.get("forward", 0.0),
            backward_seconds=seconds.get("backward", 0.0),
            optimizer_seconds=seconds.get("optimizer", 0.0),
            other_seconds=max(0.0, whole - sum(seconds.values())),
        )


def _describe_habits(aside_fraction: float, *, is_seeded: bool) -> tuple[str, ...]:
    sentences = []
    if not is_seeded:
        sentences.append("the script sets no seed: all trials are given the same one; your own runs are left without")
    if aside_fraction > 0.1:
        share = format_share(aside_fraction)
        sentences.append(f"{share} of the time goes to validation and the like, which faster steps do not shorten")
    return tuple(sentences)


def _most_common(values: list[int]) -> int:
    return Counter(values).most_common(1)[0][0] if values else 1
