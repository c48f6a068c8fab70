"""A workload's training that goes on when its process dies: a fresh one resumes it, with a step down.

    autotune train ── parent ──▶ autotune train (same words) ── killed ──▶ run.json + step down ──▶ ... --resume

What a process can survive it deals with itself. Killed by the kernel for want of memory, by a crash in native code, or
with a device that answers nothing any more, it needs another one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from autotune.errors import AutotuneError, MachineError, ProfileError
from autotune.records.layout import CHECKPOINTS_FOLDER, MANIFEST_FILE, METRICS_FILE
from autotune.records.run import RunPlan, StepDown, StepDownAction
from autotune.records.trial import Cause
from autotune.scratch import scratch_folder
from autotune.sentences.settings import describe_exchanges
from autotune.train.folder import RunFolder, read_plan
from autotune.train.recovery.child import AGAIN_STATUS, BEGAN_VARIABLE, NOTE_VARIABLE, read_run_note
from autotune.train.recovery.steps_down import Choice, Fault, choose_step_down
from autotune.train.recovery.supervisor import STOPPING, Ended, Start, supervise

TRAIN = (sys.executable, "-P", "-m", "autotune", "train")

MOST_DEATHS = 3
"""So many deaths in a row that nothing was changed about are enough, with less than `NEW_STEPS` between two of them.

Steps down that change something come to an end by themselves: there is a smallest micro batch, and one baseline.
"""

NEW_STEPS = 100

_KILL_SECONDS = 5.0
_TAIL_BYTES = 64 * 1024
_CHECKPOINT = re.compile(r"step-([0-9]{8,})")
_WITH_VALUE, _ALONE = ("--profile", "--preset"), ("--trust", "--use-candidate")


@dataclass(frozen=True)
class TrainingEnd:
    """How a training ended, over all its processes.

    Attributes:
        status: what to exit with: the last process's own, 128 + N after signal N.
        message: why it was given up; empty when the process has said all there is to say.
        hint: what to do next.
    """

    status: int
    message: str = ""
    hint: str = ""


def train_supervised(
    arguments: Sequence[str], *, say: Callable[[str], None], command: Sequence[str] = TRAIN
) -> TrainingEnd:
    """Run `autotune train` with the given words in a process of its own, and again when that dies.

    Args:
        arguments: the words after `autotune train`, for a workload.
        say: told each step down, one sentence.
        command: what the arguments are given to; it does first what `autotune.train.recovery.child` has for it.

    Raises:
        UsageError: the process cannot be started.
        OSError: no temporary file can be made.
    """
    with scratch_folder() as scratch:
        restarts = _Restarts(tuple(command), tuple(arguments), scratch / "run-folder", say)
        ended = supervise(
            restarts.start,
            next_attempt=restarts.go_on,
            stopping=(*STOPPING, signal.SIGUSR1, signal.SIGUSR2),
            kill_after_seconds=_KILL_SECONDS,
        )
    # Without a word of ours that status is the user's own: their code ended with it.
    is_ours = ended.status == AGAIN_STATUS and restarts.message
    status = MachineError.exit_code if is_ours else ended.exit_status
    return TrainingEnd(status, restarts.message, restarts.hint)


@dataclass
class _Restarts:
    """One training, over all its processes."""

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    note: Path
    say: Callable[[str], None]
    began: float = field(default_factory=time.monotonic)
    deaths: list[int] = field(default_factory=list)
    answered: int = 0
    message: str = ""
    hint: str = ""

    def start(self, attempt: int) -> Start:
        """Return how to start the next process: the first as it was typed, a later one to resume the run."""
        words, typed = [*self.command], [*self.arguments]
        run = read_run_note(self.note)
        if attempt and run is not None:
            words += ["--resume", "--out", str(run.folder)]  # a word that is typed again later says the same
            typed = drop_settings(typed)
        environment = {**os.environ, NOTE_VARIABLE: str(self.note), BEGAN_VARIABLE: repr(self.began)}
        return Start((*words, *typed), environment)

    def go_on(self, ended: Ended) -> bool:
        """Return whether another process is started; record what it is to do otherwise."""
        run = read_run_note(self.note)
        if ended.status >= 0 and ended.status != AGAIN_STATUS:
            if run is not None and ended.attempt and ended.status == ProfileError.exit_code:
                self.say(f"put the source back and go on with --resume --out {run.folder}, or start a new run")
            return False
        cause, detail = ended.explain()
        if run is None:
            if ended.status < 0:
                self.message = f"the training's process died before its run began ({cause}): {detail}"
            return False
        folder = run.folder
        try:
            plan = read_plan(folder)
            if ended.status == AGAIN_STATUS:
                if len(plan.step_downs) <= max(run.step_downs, self.answered):
                    return False  # it has asked for nothing: the status is the user's own
                why = self._count_death(plan.step_downs[-1].action, _newest_checkpoint(folder))
            else:
                cause, detail = ended.explain(has_workers=plan.current_config.num_workers > 0)
                why = self._step_down(RunFolder(folder, plan), cause, detail)
            self.answered = max(self.answered, len(plan.step_downs))
        except AutotuneError as error:
            why = error.message
        except OSError as error:
            why = f"{error.filename or folder}: {error.strerror or error}"
        if why:
            self.message = f"the training's process died ({cause}): {detail}; {why}"
            self.hint = f"go on with --resume --out {folder}"
        return not why

    def _step_down(self, run: RunFolder, cause: Cause, detail: str) -> str:
        """Write what the next process is to do into the run's record; return why there will be none, or nothing."""
        kept = _newest_checkpoint(run.path)
        fault = Fault(cause, detail, max(kept, _last_step(run.path)))
        choice = choose_step_down(fault, run.plan)
        if choice is None:
            return "no setting of autotune's is known to help"
        why = self._count_death(choice.action, kept)
        if why:
            return why
        step_down = _describe(fault, choice, run.plan, kept)
        run.add_step_down(step_down)
        self.answered = len(run.plan.step_downs)
        self.say(step_down.sentence)
        return ""

    def _count_death(self, action: StepDownAction, kept: int) -> str:
        """Return why a death that is answered so is one too many, or nothing."""
        if action != "again":
            return ""
        self.deaths.append(kept)
        last = self.deaths[-MOST_DEATHS:]
        steps = [after - before for before, after in pairwise(last)]
        if len(last) < MOST_DEATHS or any(new >= NEW_STEPS for new in steps):
            return ""
        return f"it is the {MOST_DEATHS}. time with less than {NEW_STEPS} new steps in between"


def drop_settings(words: Sequence[str]) -> list[str]:
    """Return the words of a command without those that say where the settings come from.

    A run that goes on has them in its record, and the profile may be another one by then.
    """
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            return [*kept, word, *left]
        if word in _WITH_VALUE:
            next(left, None)
        elif word not in _ALONE and word.partition("=")[0] not in _WITH_VALUE:
            kept.append(word)
    return kept


def _describe(fault: Fault, choice: Choice, plan: RunPlan, kept: int) -> StepDown:
    changes = describe_exchanges(plan.current_config, choice.config)
    how = f"with {changes}" if changes else "with the same settings"
    return StepDown(
        step=fault.step,
        resumed_step=kept,
        cause=fault.cause,
        detail=fault.detail,
        action=choice.action,
        sentence=f"step {fault.step:,}: {fault.detail}; a fresh process goes on from step {kept:,} {how}",
        config=choice.config,
    )


def _newest_checkpoint(folder: Path) -> int:
    """Return the steps of the newest whole checkpoint by name, 0 without one."""
    whole = (path for path in (folder / CHECKPOINTS_FOLDER).glob("step-*") if (path / MANIFEST_FILE).is_file())
    names = (_CHECKPOINT.fullmatch(path.name) for path in whole)
    return max((int(name[1]) for name in names if name is not None), default=0)


def _last_step(folder: Path) -> int:
    """Return the last step that the log tells of, 0 if none."""
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue  # cut short by the death
    return 0
