"""A trial of a script: the hooks report its steps; once enough is known the result is written and the process ends.

    script starts ── imports torch: hooks ── first training call: knobs ── step ── step ── ... ── result, exit

Nothing of the script runs after that: no `finally`, no exit handler, no last checkpoint.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from inspect import GEN_SUSPENDED, getgeneratorstate
from pathlib import Path
from typing import NoReturn

import torch

from autotune.distributed.world import looks_lost
from autotune.engine.dataloader import read_batch_size
from autotune.engine.device import limit_device_memory, require_supported
from autotune.engine.hooks.script import ScriptHooks, ScriptSettings, shifted_seeds
from autotune.engine.hooks.steps import ScriptStep
from autotune.errors import MachineError, TargetError
from autotune.isolation.causes import Outcome, describe_hopeless, encodable, explain_exception
from autotune.isolation.channel.progress import ProgressWriter
from autotune.isolation.prepare import exit_at_once, own_record
from autotune.measure.hopeless import TooSlowError
from autotune.measure.throughput import TrainingEndedError
from autotune.measure.timing import DivergedError
from autotune.probe.collect import collect_facts, time_target
from autotune.probe.sources.script import ScriptProbe
from autotune.probe.time_shares import OutOfTimeError, TimeShares
from autotune.records.codec import write_record
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.layout import LOST_STATUS, PARTIAL_FILE, RESULT_FILE
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.runs.purpose import make_run
from autotune.runs.script_source import ScriptSource
from autotune.runs.source import Found, Run
from autotune.targets.script import placeholder_names

COMPILE_SECONDS = 150.0
"""First steps that compile and have not ended by then are given up, where nothing is known of how long they take."""

_WATCHED_STEPS = 2

_FLAG_STEPS = 4


class ScriptTrial:
    """One trial of a script in this process.

    Attributes:
        spec: what is asked.
        hooks: on the script; there once it has imported torch.
        is_seeded: the script set a seed before its first step.
    """

    def __init__(
        self,
        spec: TrialSpec,
        folder: Path,
        *,
        started: float,
        last_line: str = "",
        progress: ProgressWriter | None = None,
        on_begin: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.is_seeded = False
        self.hooks: ScriptHooks
        self.startup_seconds = 0.0
        self._folder, self._started, self._process = folder, started, os.getpid()
        self._rank = int(os.environ.get("RANK", "0"))
        self._leads = self._rank == 0
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._stack = ExitStack()
        self._progress = progress
        self._source: ScriptSource | None = None
        self._run: Run[Found] | None = None
        self._probe: ScriptProbe | None = None
        self._shares = TimeShares(started, spec.limits.time_limit_seconds)
        self._watchdog: threading.Timer | None = None
        self._last_line, self._on_begin = last_line, on_begin
        self._micro_batches: list[int] = []

    def install(self) -> None:
        """Hang up the hooks; called when the script has imported torch."""
        spec = self.spec
        settings = make_settings(spec.config, spec)
        inspects = spec.purpose == "probe"
        self.hooks = ScriptHooks(
            settings,
            on_step=self._take,
            turn=self._turn,
            now=time.perf_counter,
            go_on=self._go_on,
            on_error=self._fail_step,
            inspects=inspects,
        )
        self._stack.enter_context(shifted_seeds(spec.seeds[0], self._note_seed))
        self._stack.enter_context(self.hooks.installed())
        baseline = spec.baseline
        step = self._world_size * (baseline.effective_batch_size if baseline is not None else 1)
        self._source = ScriptSource(self.hooks, spec, samples_per_window=step)
        times = spec.purpose not in ("quality", "fidelity", "tape")
        if self._leads or not times:  # of several processes one is timed; the others would only keep it waiting
            self._run = self._make_probe() if inspects else self._make_run()

    def heard(self, line: str) -> None:
        """The script printed a line; what its own processes print is not heard."""
        if os.getpid() != self._process:
            return
        self._last_line = line.strip() or self._last_line
        if self._source is not None and self._source.metrics.read(line) and self._is_waiting():
            self._end_run()

    def ended(self, error: BaseException | None, status: int) -> NoReturn:
        """The script ended by itself: with an exception, or an exit status that need not mean anything."""
        if os.getpid() != self._process:
            os._exit(status if error is None else 1)
        if self._probe is not None and self._probe.pause.is_awaited:  # all that is needed is known
            self._end_in_pause(self._probe, error)
        if error is not None:
            self._fail_by(error)
        if status != 0 and self.hooks.steps == 0:
            text = f"the script ended with exit status {status} before its first step; it printed: {self._last_line}"
            self.fail((TrialStatus.CRASHED, "target", text[:400]))
        self._end_run()

    def fail(self, outcome: Outcome, hint: str = "") -> NoReturn:
        """Write a failure and end the process."""
        status, cause, error = outcome[0], outcome[1], encodable(outcome[2])
        if not self._leads:
            error = f"process {self._rank} of {self._world_size}: {error}"
        seconds = self.elapsed_seconds
        result = TrialResult(
            spec=self.spec, status=status, cause=cause, error=error, hint=hint, elapsed_seconds=seconds
        )
        if self._leads:
            self.finish(result)
        if not (self._folder / RESULT_FILE).exists():
            with own_record():
                write_record(self._folder / RESULT_FILE, result)
        exit_at_once(1)  # the launcher then ends the leading process as well

    def _fail_by(self, error: BaseException) -> NoReturn:
        """Write what failed and end the process; what has become of another one is told by the launcher."""
        if self._world_size > 1 and looks_lost(error):
            exit_at_once(LOST_STATUS)
        self.fail(explain_exception(error))

    def _keep(self, partial: TrialResult) -> None:
        """Write what is known so far, for the case that the process does not live to tell the rest."""
        if self._leads:
            with own_record():
                write_record(self._folder / PARTIAL_FILE, partial)

    def finish(self, result: TrialResult) -> NoReturn:
        """Write the result and end the process."""
        if self._leads:
            with own_record():
                write_record(self._folder / RESULT_FILE, result)
        exit_at_once(0)

    @property
    def elapsed_seconds(self) -> float:
        """Since the process was started."""
        return time.monotonic() - self._started

    def _note_seed(self) -> None:
        self.is_seeded = True

    def _turn(self, is_training: bool) -> None:
        if os.getpid() != self._process:
            return  # a loader's worker, or a process that the script forked
        if not self.startup_seconds:
            if not (is_training and self.hooks.models.roots):
                return
            self._begin()
        self._get_source().turn(is_training)
        if self._probe is not None and not is_training:
            self._probe.turn_aside()

    def _go_on(self) -> None:
        if os.getpid() == self._process and self.startup_seconds:
            self._get_source().go_on()

    def _begin(self) -> None:
        self.startup_seconds = self.elapsed_seconds
        self._on_begin()
        try:
            require_supported(self.hooks.device, of_script=True)
        except MachineError as error:
            self.fail((TrialStatus.CRASHED, "machine", error.message), hint=error.hint)
        limit_device_memory(self.spec.limits.device_memory_limit_bytes, self.hooks.device)
        self._get_source().begin()
        self._resume(lambda run: next(run))
        self._watch_compilation()

    def _watch_compilation(self) -> None:
        if self.spec.config is None or self.spec.config.compile_mode == "off":
            return
        seconds, pace = COMPILE_SECONDS, self.spec.limits.pace
        if pace is not None:
            seconds = max(seconds, pace.compile_seconds or 0.0) + _WATCHED_STEPS * pace.first_step_seconds
        text = f"compiling was not done after {seconds:.0f} s"
        self._watchdog = threading.Timer(seconds, self.fail, [(TrialStatus.TIMED_OUT, "compile-timeout", text)])
        self._watchdog.daemon = True
        self._watchdog.start()

    def _take(self, step: ScriptStep) -> None:
        if os.getpid() != self._process:
            return  # a process that the script forked trains something of its own
        if not self.startup_seconds:
            self._begin()
        if self.hooks.steps == _WATCHED_STEPS and self._watchdog is not None:
            self._watchdog.cancel()
        self._check_step(step)
        total = replace(step, samples=step.samples * self._world_size)
        taken = self._get_source().add_step(total, _add_losses(step))
        self._resume(lambda run: run.send(taken))

    def _resume(self, resume: Callable[[Run[Found]], object]) -> None:
        """Let the run go on to the next step that it asks for; end the process when it needs no more."""
        if self._run is None:
            return
        try:
            resume(self._run)
        except StopIteration as end:
            self._run = None
            if self._leads:
                self._conclude(end.value)
        except TrainingEndedError:
            self.finish(self._describe_too_short())
        except TargetError as error:
            self.fail((TrialStatus.UNSUPPORTED, "no-optimizer-step", error.message))
        except DivergedError as error:
            self.fail(explain_exception(error))
        except TooSlowError as error:
            self.finish(describe_hopeless(self.spec, error.hopeless, elapsed_seconds=self.elapsed_seconds))

    def _end_run(self) -> NoReturn:
        """Let the run make do with the steps it has had: there will be no more."""
        if not self.startup_seconds:
            self.finish(self._describe_too_short())
        while self._run is not None:
            self._resume(lambda run: run.throw(TrainingEndedError()))
        exit_at_once(0)  # not the process that writes

    def _end_in_pause(self, probe: ScriptProbe, error: BaseException | None) -> NoReturn:
        if isinstance(error, OutOfTimeError):
            probe.pause.give_up()
        for root in self.hooks.models.roots:
            root.train()  # a validation may have been cut
        self._end_run()

    def _conclude(self, found: Found) -> NoReturn:
        try:
            result = found.complete(
                self.spec, elapsed_seconds=self.elapsed_seconds, startup_seconds=self.startup_seconds
            )
            if self._probe is not None:
                self._stack.close()  # what follows is ours, not the script's
                self._probe.is_seeded = self.is_seeded
                result = collect_facts(self._probe, result, self._shares, keep=self._keep)
        except DivergedError as error:
            self.fail(explain_exception(error))
        self.finish(result)

    def _make_run(self) -> Run[Found]:
        spec = self.spec
        return make_run(
            self._get_source(),
            spec,
            spec.config or TrainConfig(),
            self._folder,
            seed=spec.seeds[0],
            leads=self._leads,
            progress=self._progress if self._leads else None,
        )

    def _make_probe(self) -> Run[Found]:
        self._probe = ScriptProbe(self.hooks, self._get_source(), self.spec, shares=self._shares)
        return time_target(self._probe, seed=self.spec.seeds[0], progress=self._progress if self._leads else None)

    def _describe_too_short(self) -> TrialResult:
        """Return the result of a script that ended before anything could be found out."""
        steps = self.hooks.steps
        if steps:
            text = f"the script took {steps} optimizer steps and ended, too few to time one"
            hint = "let it train longer, e.g. with --epochs 1000: a trial ends it when enough is measured"
        else:
            text = "the script ended without an optimizer step or a backward pass in this process"
            text += f"; it printed: {self._last_line}" if self._last_line else ""
            hint = "does it start the training in another process, or end before it?"
        return TrialResult(
            spec=self.spec,
            status=TrialStatus.CRASHED,
            cause="target",
            error=text[:400],
            hint=hint,
            elapsed_seconds=self.elapsed_seconds,
        )

    def _is_waiting(self) -> bool:
        # Any thread may print; while another one takes a step, that one sees that nothing more is awaited.
        return self._run is not None and getgeneratorstate(self._run) == GEN_SUSPENDED

    def _get_source(self) -> ScriptSource:
        assert self._source is not None
        return self._source

    def _fail_step(self, error: Exception) -> None:
        # A script may catch what our settings break, leave the step out and go on: that is no training to measure.
        if self.spec.config is not None and self.spec.config != self.spec.baseline:
            traceback.print_exception(error)
            self._fail_by(error)

    def _check_step(self, step: ScriptStep) -> None:
        """Fail a trial in which the script does not do what its settings say, even if it goes on as if it did."""
        spec = self.spec
        if spec.config is None or spec.config == spec.baseline:
            return
        self._micro_batches.append(step.micro_batches)
        if self.hooks.steps == _FLAG_STEPS:
            assert spec.target.script is not None
            ignored = self._find_ignored_flag(placeholder_names(spec.target.script), spec.config)
            if ignored:
                self.fail((TrialStatus.UNSUPPORTED, "flag-ignored", ignored))

    def _find_ignored_flag(self, names: frozenset[str], config: TrainConfig) -> str:
        """Return which flag the script does not obey; empty where it may obey them all.

        The first step is no witness, nor is a single other one: a loader that fetches one batch ahead gives the first
        of an epoch one more, and the last of an epoch may accumulate less.
        """
        sizes = {read_batch_size(loader) for loader in self.hooks.loaders.training_loaders}
        if "micro_batch_size" in names and sizes and not sizes & {None, config.micro_batch_size}:
            found = " and ".join(map(str, sorted(size for size in sizes if size is not None)))
            return f"the command asks for micro batches of {config.micro_batch_size}, and they are {found}"
        wanted, taken = config.gradient_accumulation_steps, self._micro_batches[1:]
        if "gradient_accumulation_steps" in names and wanted not in taken:
            return f"the command asks for {wanted} micro batches a step, and a step takes {taken[-1]}"
        return ""


def make_settings(config: TrainConfig | None, spec: TrialSpec) -> ScriptSettings:
    """Return what is to be changed about a script: what its own flags do not change already."""
    baseline = spec.baseline
    if config is None or baseline is None:
        return ScriptSettings(TrainConfig())
    assert spec.target.script is not None
    changed = frozenset(changed_fields(config, baseline)) - placeholder_names(spec.target.script)
    in_float64 = spec.fidelity is not None and spec.fidelity.reference
    return ScriptSettings(config, changed, spec.training_loaders, in_float64)


def _add_losses(step: ScriptStep) -> torch.Tensor:
    """Return the loss of a step: the sum over its backward passes, which scripts that accumulate have divided."""
    losses = [loss.reshape(()).float().to(step.losses[0].device) for loss in step.losses]
    return losses[0] if len(losses) == 1 else torch.stack(losses).sum() if losses else torch.zeros(())
