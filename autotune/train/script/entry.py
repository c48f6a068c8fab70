"""Entry of a script's final training: the hooks apply the settings and count; the script runs as it always does.

Its parent reads what is counted here, and what went wrong, from a file for each process: see `progress`.
"""

from __future__ import annotations

import math
import os
import sys
import time
import traceback
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autotune.format import count, format_duration, format_figure
from autotune.isolation.causes import explain_exception
from autotune.records.codec import parse_record
from autotune.records.training_process import Failure, ScriptPlan, TrainingProgress
from autotune.records.trial import Cause
from autotune.runs.run_script import run_script
from autotune.sentences.training import list_speed
from autotune.targets.launch.command import Launch
from autotune.train.policy import TRAIN_POLICY
from autotune.train.recovery.child import tie_to_parent
from autotune.train.script.progress import write_progress

if TYPE_CHECKING:
    from autotune.engine.hooks.script import ScriptHooks
    from autotune.engine.hooks.steps import ScriptStep

_OWN_FOLDER = str(Path(__file__).parents[2])


class ScriptTraining:
    """Counts what one process of a script's training does.

    Args:
        plan: what it was started with.
    """

    def __init__(self, plan: ScriptPlan) -> None:
        self._plan = plan
        self._progress = TrainingProgress(rank=int(os.environ.get("RANK", "0")))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._process = os.getpid()
        self._first = self._aside = self._waited_aside = self._waited_before = 0.0
        self._aside_since: float | None = None
        self._written = -math.inf
        self._line_due, self._line_samples, self._line_seconds = TRAIN_POLICY.script_first_lines_seconds, 0, 0.0
        self._caught: tuple[int, Cause, str] | None = None
        self._hooks: ScriptHooks | None = None
        self._stack = ExitStack()

    def install(self) -> None:
        """Install the hooks; called when the script has imported torch."""
        from autotune.engine.hooks.script import ScriptHooks, ScriptSettings

        settings = ScriptSettings(
            self._plan.config,
            frozenset(self._plan.changed),
            self._plan.training_loaders,
            on_compile_failure=self._record_eager,
        )
        self._hooks = ScriptHooks(
            settings,
            on_step=self._count,
            turn=self._turn,
            now=time.perf_counter,
            go_on=partial(self._turn, True),
            on_error=self._record_caught,
        )
        self._stack.enter_context(self._hooks.installed())

    def finish(self, status: int, error: BaseException | None) -> None:
        """Write down how far the script came and what ended it.

        Args:
            status: its exit status.
            error: that it ended with; None when it ended by itself.
        """
        if os.getpid() != self._process:
            return
        found: tuple[Cause, str] | None = None
        if isinstance(error, Exception):
            found = explain_exception(error)[1:]
        elif error is None and status != 0 and self._caught is not None and self._caught[0] == self._progress.steps:
            found = self._caught[1:]  # caught in the step it ended in: it gave up
        if found is not None:
            self._update(failure=Failure(cause=found[0], detail=found[1], at=time.time()))
        self._write()

    def _update(self, **changes: Any) -> None:
        self._progress = self._progress.model_copy(update=changes)  # checked by who reads it, not at each step

    def _turn(self, is_training: bool) -> None:
        now = time.perf_counter()
        if not is_training and self._aside_since is None:
            self._aside_since, self._waited_before = now, self._data_seconds()
        elif is_training and self._aside_since is not None:
            self._aside += now - self._aside_since
            self._waited_aside += self._data_seconds() - self._waited_before
            self._aside_since = None

    def _count(self, step: ScriptStep) -> None:
        if os.getpid() != self._process:
            return  # a process that the script forked trains something of its own
        now, before, policy = time.perf_counter(), self._progress, TRAIN_POLICY
        samples = step.samples * self._world_size
        steps = before.steps + 1
        if steps == 1:
            # The first step also compiles, and starts the workers.
            self._first, self._aside, self._waited_aside = now, 0.0, self._data_seconds()
        self._update(
            steps=steps,
            samples=before.samples + samples,
            training_samples=before.training_samples + (samples if steps > 1 else 0),
            training_seconds=max(0.0, now - self._first - self._aside),
            data_wait_seconds=self._data_seconds() - self._waited_aside,
        )
        since = now - self._first
        if steps % policy.script_loss_steps == 0:
            self._check_loss(step)
        is_young = since < policy.script_young_seconds
        seconds = policy.script_young_progress_seconds if is_young else policy.script_progress_seconds
        if steps <= policy.script_first_steps or now - self._written >= seconds:
            self._written = now
            self._write()
        if since >= self._line_due:
            self._tell_pace(since)

    def _check_loss(self, step: ScriptStep) -> None:
        """Look at the loss of this step: those of earlier ones may lie in memory that a later step has used again."""
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        losses, progress = [float(loss) for loss in step.losses], self._progress
        total = sum(losses)  # an infinity or a NaN among them stays in it
        if math.isfinite(total):
            self._update(loss=total if losses else progress.loss)
            return
        if progress.non_finite_step is None:
            self._update(non_finite_step=progress.steps)
            self._write()
            self._tell(f"warning: the loss is not finite at step {progress.steps:,}; the script goes on as it will")

    def _record_eager(self, error: BaseException) -> None:
        _, _, detail = explain_exception(error)
        steps = self._progress.steps
        self._update(eager_step=steps, eager_detail=detail)
        self._write()
        self._tell(f"a compilation failed after {count(steps, 'step')}: the model runs eagerly ({detail[:200]})")

    def _record_caught(self, error: Exception) -> None:
        # Not the error itself: it would keep the frames alive, and without its traceback nobody sees where it was.
        _, cause, detail = explain_exception(error)
        self._caught = (self._progress.steps, cause, detail)

    def _data_seconds(self) -> float:
        return 0.0 if self._hooks is None else float(self._hooks.timer.seconds["data"])

    def _write(self) -> None:
        self._update(peak_memory_bytes=_read_peak_bytes())
        write_progress(Path(self._plan.progress_folder), self._progress)

    def _tell_pace(self, elapsed: float) -> None:
        progress = self._progress
        first, later = TRAIN_POLICY.script_first_lines_seconds, TRAIN_POLICY.script_lines_seconds
        samples = progress.training_samples - self._line_samples
        seconds = progress.training_seconds - self._line_seconds
        self._line_samples, self._line_seconds = progress.training_samples, progress.training_seconds
        between = first if elapsed < later else later
        self._line_due = between * (elapsed // between + 1)
        facts = [f"{count(progress.steps, 'step')} in {format_duration(elapsed)}"]
        if samples and seconds > 0:
            facts += list_speed(samples / seconds, self._plan.promised_samples_per_second)
        if progress.loss is not None:
            facts.append(f"loss {format_figure(progress.loss)}")
        self._tell(", ".join(facts))

    def _tell(self, text: str) -> None:
        if self._progress.rank:
            return
        try:
            sys.stderr.write(f"autotune: {text}\n")
            sys.stderr.flush()
        except (OSError, ValueError):  # the reader has gone, or the script has closed it
            return


def main(plan: ScriptPlan, arguments: list[str]) -> int:
    """Run the script to its end and return its exit status."""
    if plan.as_json:
        os.dup2(2, 1)  # standard output is for the answer alone, which the parent prints
    launch = Launch(
        sys.executable,
        plan.interpreter_options,
        plan.kind,
        plan.name,
        tuple(arguments),
        passes_local_rank=plan.passes_local_rank,
    )
    training = ScriptTraining(plan)
    try:
        status = run_script(launch, on_torch=training.install)
    except BaseException as error:
        training.finish(1, error)
        raise
    training.finish(status, None)
    return status


def print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception as Python does, without this package's own frames and what it starts a script with."""
    shown = traceback.TracebackException(kind, error, trace)
    for one in _list_chain(shown):
        frames = [frame for frame in one.stack if not _is_own(frame)]
        if frames and not (one.stack[-1].filename.startswith(_OWN_FOLDER)):  # one of our own errors is shown whole
            one.stack = traceback.StackSummary.from_list(frames)
    try:
        sys.stderr.write("".join(shown.format()))
        sys.stderr.flush()
    except (OSError, ValueError):  # the reader has gone, or the script has closed it
        return


def _list_chain(shown: traceback.TracebackException) -> list[traceback.TracebackException]:
    found, left = [], [shown]
    while left:
        one = left.pop()
        found.append(one)
        left += [other for other in (one.__cause__, one.__context__, *(one.exceptions or ())) if other is not None]
    return found


def _is_own(frame: traceback.FrameSummary) -> bool:
    return frame.filename.startswith(_OWN_FOLDER) or frame.filename == "<frozen runpy>"


def _read_peak_bytes() -> int:
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_reserved())
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    os.environ.pop("PYTHONSAFEPATH", None)
    tie_to_parent()
    sys.excepthook = print_traceback
    sys.exit(main(parse_record(sys.argv[1], ScriptPlan, name="the training's plan"), sys.argv[2:]))
