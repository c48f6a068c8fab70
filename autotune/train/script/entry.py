"""Entry of a script's final training: the hooks apply the settings and count; the script runs as it always does.

Its parent reads what is counted here, and what went wrong, from a file for each process: see `script_notes`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from autotune.format import count, format_duration, format_figure
from autotune.isolation.causes import explain_exception
from autotune.records.config import TrainConfig
from autotune.records.trial import Cause
from autotune.runs.run_script import run_script
from autotune.sentences.training import list_speed
from autotune.targets.launch.command import Launch
from autotune.train.recovery.child import tie_to_parent
from autotune.train.script.progress_files import Failure, ScriptProgress

if TYPE_CHECKING:
    from autotune.engine.hooks.script import ScriptHooks
    from autotune.engine.hooks.steps import ScriptStep

LOOK_STEPS = 10
"""Steps between two looks at the loss: each waits for the device once."""

_NOTED_STEPS = 50
_YOUNG_SECONDS, _YOUNG_NOTE_SECONDS, _NOTE_SECONDS = 60.0, 1.0, 5.0
_OWN_FOLDER = str(Path(__file__).parents[2])
_FIRST_LINES_SECONDS = 15.0
_LINES_SECONDS = 60.0


class ScriptTraining:
    """Counts what one process of a script's training does.

    Args:
        plan: what `ScriptRun.start` wrote.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        self._plan, self._folder = plan, Path(plan["notes"])
        self._progress = ScriptProgress(rank=int(os.environ.get("RANK", "0")))
        self._world_size = int(os.environ.get("WORLD_SIZE", "1"))
        self._process = os.getpid()
        self._first = self._aside = self._waited_aside = self._waited_before = 0.0
        self._aside_since: float | None = None
        self._noted = -math.inf
        self._line_due, self._line_samples, self._line_seconds = _FIRST_LINES_SECONDS, 0, 0.0
        self._caught: tuple[int, Cause, str] | None = None
        self._hooks: ScriptHooks | None = None
        self._stack = ExitStack()

    def install(self) -> None:
        """Hang up the hooks; called when the script has imported torch."""
        from autotune.engine.hooks.script import ScriptHooks, ScriptSettings

        settings = ScriptSettings(
            TrainConfig(**self._plan["config"]),
            frozenset(self._plan["changed"]),
            tuple(self._plan["training_loaders"]),
            on_compile_failure=self._note_eager,
        )
        self._hooks = ScriptHooks(
            settings, on_step=self._take, turn=self._turn, now=time.perf_counter, on_error=self._note_caught
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
        if isinstance(error, Exception):
            _, cause, detail = explain_exception(error)
            self._progress.failure = Failure(cause, detail, time.time())
        elif error is None and status != 0 and self._caught is not None and self._caught[0] == self._progress.steps:
            self._progress.failure = Failure(*self._caught[1:], time.time())  # caught in the step it ended in: gave up
        self._write()

    def _turn(self, is_training: bool) -> None:
        now = time.perf_counter()
        if not is_training and self._aside_since is None:
            self._aside_since, self._waited_before = now, self._data_seconds()
        elif is_training and self._aside_since is not None:
            self._aside += now - self._aside_since
            self._waited_aside += self._data_seconds() - self._waited_before
            self._aside_since = None

    def _take(self, step: ScriptStep) -> None:
        if os.getpid() != self._process:
            return  # a process that the script forked trains something of its own
        now, progress = time.perf_counter(), self._progress
        samples = step.samples * self._world_size
        progress.samples += samples
        progress.steps += 1
        if progress.steps == 1:
            # The first step also compiles, and starts the workers.
            self._first, self._aside, self._waited_aside = now, 0.0, self._data_seconds()
        else:
            progress.timed_samples += samples
            progress.seconds = now - self._first - self._aside
            progress.data_wait_seconds = self._data_seconds() - self._waited_aside
        if progress.steps % LOOK_STEPS == 0:
            self._look(step)
        # A process that is killed leaves no other word: most scripts that fail do so early.
        note_seconds = _YOUNG_NOTE_SECONDS if now - self._first < _YOUNG_SECONDS else _NOTE_SECONDS
        if progress.steps <= _NOTED_STEPS or now - self._noted >= note_seconds:
            self._noted = now
            self._write()
        if now - self._first >= self._line_due:
            self._tell_pace(now)

    def _look(self, step: ScriptStep) -> None:
        """Look at the loss of this step: those of earlier ones may lie in memory that a later step has used again."""
        import torch

        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        losses = [float(loss) for loss in step.losses]
        progress = self._progress
        if all(map(math.isfinite, losses)):
            progress.loss = sum(losses) if losses else progress.loss
            return
        if progress.non_finite_step is None:
            progress.non_finite_step = progress.steps
            self._write()
            self._tell(f"warning: the loss is not finite at step {progress.steps:,}; the script goes on as it will")

    def _note_eager(self, error: BaseException) -> None:
        _, _, detail = explain_exception(error)
        self._progress.eager_step, self._progress.eager_detail = self._progress.steps, detail
        self._write()
        self._tell(
            f"a compilation failed after {count(self._progress.steps, 'step')}: the model runs eagerly ({detail[:200]})"
        )

    def _note_caught(self, error: Exception) -> None:
        # Not the error itself: it would keep the frames alive, and without its traceback nobody sees where it was.
        _, cause, detail = explain_exception(error)
        self._caught = (self._progress.steps, cause, detail)

    def _data_seconds(self) -> float:
        return 0.0 if self._hooks is None else float(self._hooks.timer.seconds["data"])

    def _write(self) -> None:
        self._progress.peak_memory_bytes = _read_peak_bytes()
        self._progress.write(self._folder)

    def _tell_pace(self, now: float) -> None:
        progress, elapsed = self._progress, now - self._first
        samples, seconds = progress.timed_samples - self._line_samples, progress.seconds - self._line_seconds
        self._line_samples, self._line_seconds = progress.timed_samples, progress.seconds
        between = _FIRST_LINES_SECONDS if elapsed < _LINES_SECONDS else _LINES_SECONDS
        self._line_due = between * (elapsed // between + 1)
        facts = [f"{count(progress.steps, 'step')} in {format_duration(elapsed)}"]
        if samples and seconds > 0:
            facts += list_speed(samples / seconds, self._plan["promised"])
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


def main(plan: dict[str, Any], arguments: list[str]) -> int:
    """Run the script to its end and return its exit status."""
    if plan["json"]:
        os.dup2(2, 1)  # standard output is for the answer alone, which the parent prints
    launch = Launch(sys.executable, tuple(plan["interpreter_options"]), plan["kind"], plan["name"], tuple(arguments))
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
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
