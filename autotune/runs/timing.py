"""Time a script's steps as a workload's are timed; in a probe, look at everything else as well."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.hooks.steps import ScriptStep
from autotune.isolation.progress import ProgressWriter
from autotune.machine.interference import watch_interference
from autotune.measure.clock import AsideClock, clock_for
from autotune.measure.hopeless import Phase
from autotune.measure.memory import MemoryMeter, resident_bytes
from autotune.measure.throughput import TrainingEndedError, measure_throughput
from autotune.measure.timing import Timing, make_timing
from autotune.probe.child import used_bytes
from autotune.probe.script import ScriptProbe
from autotune.probe.time_shares import Allowance
from autotune.records.config import TrainConfig
from autotune.records.measurement import Measurement
from autotune.records.trial import LossCurve, TrialResult, TrialSpec, TrialStatus

if TYPE_CHECKING:
    from autotune.runs.script import ScriptTrial


class TimingRun:
    """Times the steps of a script, as those of a workload are timed.

    Args:
        spec: what is asked.
        leads: of several processes this is the one that measures; the others would only keep it waiting.
        progress: told what the script is at; None where nobody asks.
    """

    def __init__(self, spec: TrialSpec, *, leads: bool = True, progress: ProgressWriter | None = None) -> None:
        self._spec, self._leads, self._progress = spec, leads, progress
        self._probe: ScriptProbe | None = None
        self._clock: AsideClock
        self._timing: Timing | None = None
        self._measurement: Measurement | None = None
        self._waited_seconds = 0.0
        self._began = 0.0
        self._base_bytes = 0

    def watch(self, hooks: ScriptHooks) -> None:
        """Note what the process holds before the script has built anything."""
        self._base_bytes = resident_bytes()

    def begin(self, hooks: ScriptHooks) -> None:
        """Start the measurement."""
        self._hooks, device = hooks, hooks.device
        if not self._leads:
            self._clock = AsideClock(clock_for(device))
            return
        if device.type == "cuda":
            self._base_bytes = max(0, used_bytes(device) - torch.cuda.memory_reserved(device))
        self._probe = ScriptProbe(hooks, base_bytes=self._base_bytes) if self._spec.purpose == "probe" else None
        self._began = time.perf_counter()
        self._clock = AsideClock(clock_for(device))
        self._timing = make_timing(
            device,
            clock=self._clock,
            read_scale=hooks.optimizers.read_scale,
            interference=watch_interference(device),
            progress=self._progress,
        )
        self._waited_seconds = hooks.timer.seconds["data"]  # its first batch is here
        config = self._spec.config or TrainConfig()
        self._steps = measure_throughput(self._timing, config, self._spec.limits, MemoryMeter(device))
        next(self._steps)

    def turn(self, is_training: bool) -> None:
        """Stop the clock while the script validates."""
        if is_training:
            self._clock.come_back()
            if self._timing is not None and self._hooks.steps == 0:
                # Of later steps it is not known when their batch was there.
                self._timing.enter(self._timing.phase)
        else:
            self._clock.step_aside()
            if self._timing is not None and self._measurement is None:
                self._timing.enter(Phase.LOADING)
            if self._probe is not None:
                self._probe.turn_aside()

    def take(self, step: ScriptStep, loss: torch.Tensor) -> bool:
        """Note a step; True when enough is measured."""
        if self._timing is None:
            return False
        if self._measurement is not None:
            return self._probe is None or self._probe.take_profiled(self._measurement.seconds_per_step)
        self._clock.come_back()
        self._timing.losses.append(loss)
        self._timing.samples += max(1, step.samples)
        waited = self._hooks.timer.seconds["data"]
        self._timing.data_wait_seconds += waited - self._waited_seconds
        self._waited_seconds = waited
        if self._probe is not None:
            self._probe.take(step)
        try:
            next(self._steps)
        except StopIteration as end:
            measurement: Measurement = end.value
            self._measurement = measurement
            return self._probe is None or self._probe.take_profiled(measurement.seconds_per_step)
        return False

    def result(self, trial: ScriptTrial) -> TrialResult:
        """Return the timing, and in a probe the facts."""
        if self._measurement is None:
            self._measurement = self._cut_short()
        if self._measurement is None or self._timing is None:
            return describe_too_short(trial)
        losses = self._timing.read_losses()
        curve = LossCurve(seed=trial.spec.seeds[0], losses=losses, samples=self._timing.samples)
        result = TrialResult(
            spec=trial.spec,
            status=TrialStatus.COMPLETED,
            elapsed_seconds=trial.elapsed_seconds,
            startup_seconds=trial.startup_seconds,
            measurement=self._measurement,
            curves=(curve,),
        )
        if self._probe is None:
            return result
        aside = self._clock.aside_seconds / max(1e-9, time.perf_counter() - self._began)
        allowance = Allowance(time.monotonic() - trial.elapsed_seconds, trial.spec.limits.time_limit_seconds)
        trial.unhook()
        facts = self._probe.find_facts(trial.spec, self._measurement, is_seeded=trial.is_seeded, aside_fraction=aside)
        result = result.replace(spec=trial.spec.replace(config=facts.baseline), facts=facts)
        trial.keep(result)  # what follows may take too long, or not let the process live
        self._probe.stop()
        return result.replace(facts=self._probe.add_costly_facts(facts, trial.spec, self._measurement, allowance))

    def _cut_short(self) -> Measurement | None:
        if self._timing is None:
            return None
        try:
            self._steps.throw(TrainingEndedError())
        except StopIteration as end:
            measurement: Measurement = end.value
            return measurement
        except TrainingEndedError:
            return None
        return None


def describe_too_short(trial: ScriptTrial) -> TrialResult:
    """Return the result of a script that ended before anything could be found out."""
    steps = trial.hooks.steps
    if steps:
        text = f"the script took {steps} optimizer steps and ended, too few to time one; let it train longer"
    else:
        text = "the script ended without an optimizer step or a backward pass in this process"
    elapsed = trial.elapsed_seconds
    return TrialResult(spec=trial.spec, status=TrialStatus.CRASHED, cause="target", error=text, elapsed_seconds=elapsed)
