"""A workload's training that goes on when its process dies: another one resumes it, with a step down.

autotune train ── parent ──▶ autotune train (same words) ── killed ──▶ run.json + step down ──▶ ... --resume
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from autotune.errors import AutotuneError, MachineError, ProfileError
from autotune.records.run import RunPlan, StepDownAction
from autotune.records.training_process import OpenedRun, RankEnd
from autotune.records.trial import Cause
from autotune.scratch import scratch_folder
from autotune.sentences.settings import describe_exchanges
from autotune.train.loop.metrics import read_last_step
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.ranks.handover import read_verdict
from autotune.train.recovery.attempts import STOPPING, Ended, Start
from autotune.train.recovery.child import AGAIN_STATUS, BEGAN_VARIABLE, OPENED_VARIABLE, read_opened_run
from autotune.train.recovery.steps_down import Choice, Fault, workload_knobs
from autotune.train.recovery.supervisor import Death, Decision, Supervisor, describe_error
from autotune.train.runs.folder import RunFolder, newest_whole_step, read_plan

TRAIN = (sys.executable, "-P", "-m", "autotune", "train")

RANKS = (sys.executable, "-P", "-m", "autotune.train.ranks.launcher")
"""With how many, and how the nodes meet, what the same words are given to where several processes train."""

NO_NODES = "-"
"""In place of how nodes meet, where all processes are on this one."""

_WITH_VALUE, _ALONE = ("--profile", "--preset"), ("--skip-verification", "--trust", "--use-candidate")


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
    arguments: Sequence[str],
    *,
    say: Callable[[str], None],
    command: Sequence[str] = TRAIN,
    restarts: bool = True,
    policy: TrainPolicy = TRAIN_POLICY,
) -> TrainingEnd:
    """Run `autotune train` with the given words in a process of its own, and again when that dies.

    Args:
        arguments: the words after `autotune train`, for a workload.
        say: is given each step down, one sentence.
        command: what the arguments are given to; it does first what `autotune.train.recovery.child` has for it.
        restarts: start a process again that dies.
        policy: the training's thresholds.

    Raises:
        UsageError: the process cannot be started.
        OSError: no temporary file can be made.
    """
    with scratch_folder() as scratch:
        recovery = WorkloadRecovery(
            tuple(command), tuple(arguments), scratch / "opened-run.json", say, policy, restarts
        )
        stopping = (*STOPPING, signal.SIGUSR1, signal.SIGUSR2)
        ended = Supervisor(recovery, say, stopping, kills_on_ctrl_c=True, policy=policy).run()
    # Without a word of ours that status is the user's own: their code ended with it.
    is_ours = ended.status == AGAIN_STATUS and recovery.message
    status = MachineError.exit_code if is_ours else ended.exit_status
    return TrainingEnd(status, recovery.message, recovery.hint)


@dataclass
class WorkloadRecovery:
    """How a workload's training goes on: from its last checkpoint, as often as something changes or steps are made.

    Attributes:
        command: that trains.
        arguments: as typed.
        opened: file in which the process tells of its run.
        say: is given what the user should know.
        policy: the training's thresholds.
        restarts: a process that dies is followed by another.
        began: `time.monotonic()` at the first process's start.
        deaths: optimizer steps kept at each death that nothing was changed about.
        answered: steps down in the plan that another process was or is started for.
        message: why it was given up; empty while it was not.
        hint: what to do next.
    """

    command: tuple[str, ...]
    arguments: tuple[str, ...]
    opened: Path
    say: Callable[[str], None]
    policy: TrainPolicy
    restarts: bool = True
    began: float = field(default_factory=time.monotonic)
    deaths: list[int] = field(default_factory=list)
    answered: int = 0
    message: str = ""
    hint: str = ""

    def start(self, attempt: int) -> Start:
        """Return how to start the next process: the first as it was typed, a later one to resume the run."""
        words, typed = [*self.command], [*self.arguments]
        run = read_opened_run(self.opened)
        if attempt and run is not None:
            words += ["--resume", "--run-dir", run.folder]  # a word that is typed again later says the same
            typed = drop_settings(typed)
        environment = {**os.environ, OPENED_VARIABLE: str(self.opened), BEGAN_VARIABLE: repr(self.began)}
        return Start((*words, *typed), environment)

    def read_death(self, ended: Ended) -> Death | None:
        """Return what went wrong, from how the process ended and what it has written into its run."""
        run = read_opened_run(self.opened)
        if ended.status >= 0 and ended.status != AGAIN_STATUS:
            if run is not None and ended.attempt and ended.status == ProfileError.exit_code:
                self.say(f"put the source back and go on with --resume --run-dir {run.folder}, or start a new run")
            return None
        verdict = read_verdict(self.opened) if ended.status == AGAIN_STATUS else None
        cause, detail = ended.explain() if verdict is None else (verdict.cause, verdict.detail)
        if run is None:
            if ended.status < 0 or verdict is not None:
                self.message = f"the training's process died before its run began ({cause}): {detail}"
            return None
        try:
            return self._examine(ended, run, verdict)
        except (AutotuneError, OSError) as error:
            self._explain(cause, detail, describe_error(error, run.folder), Path(run.folder))
            return None

    def _examine(self, ended: Ended, run: OpenedRun, verdict: RankEnd | None) -> Death | None:
        folder = RunFolder(Path(run.folder), read_plan(Path(run.folder)))
        plan, written = folder.plan, None
        cause, detail = ended.explain(has_workers=plan.current_config.num_workers > 0)
        if verdict is not None:
            cause, detail = verdict.cause, verdict.detail
        elif ended.status == AGAIN_STATUS:
            if len(plan.step_downs) <= max(run.step_downs, self.answered):
                return None  # it has asked for nothing: the status is the user's own
            written = plan.step_downs[-1]
        kept = newest_whole_step(folder.checkpoints)
        fault = Fault(cause, detail, max(kept, read_last_step(folder.path)))
        return Death(ended.attempt, fault, folder, workload_knobs(), kept, written)

    def decide(self, death: Death, choice: Choice | None) -> Decision:
        """Return whether the run is resumed: not when it dies again and again of the same without getting further."""
        if not self.restarts:
            return Decision(None, "the other nodes have ended as well, and all are started again together")
        if choice is None:
            return Decision(None, "no setting of autotune's is known to help")
        reason = self._count_death(choice.action, death.resumed_step)
        if reason:
            return Decision(None, reason)
        plan = death.folder.plan
        self.answered = len(plan.step_downs) + (death.written is None)
        return Decision(choice, _describe(death, choice, plan))

    def give_up(self, death: Death, reason: str) -> None:
        """Keep for the end why the run is not resumed."""
        if death.fault.cause == "timeout":
            self.message, self.hint = death.fault.detail, f"go on with --resume --run-dir {death.folder.path}"
            return
        self._explain(death.fault.cause, death.fault.detail, reason, death.folder.path)

    def _explain(self, cause: Cause, detail: str, reason: str, folder: Path) -> None:
        self.message = f"the training's process died ({cause}): {detail}; {reason}"
        self.hint = f"go on with --resume --run-dir {folder}"

    def _count_death(self, action: StepDownAction, kept: int) -> str:
        """Return why a death that is answered so is one too many, or nothing.

        Steps down that change something come to an end by themselves: there is a smallest micro batch, and one
        baseline.
        """
        if action != "again":
            return ""
        most, least = self.policy.most_deaths, self.policy.least_new_steps
        self.deaths.append(kept)
        last = self.deaths[-most:]
        steps = [after - before for before, after in pairwise(last)]
        if len(last) < most or any(new >= least for new in steps):
            return ""
        return f"it is the {most}. time with less than {least} new steps in between"


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


def _describe(death: Death, choice: Choice, plan: RunPlan) -> str:
    changes = describe_exchanges(plan.current_config, choice.config)
    how = f"with {changes}" if changes else "with the same settings"
    fault = death.fault
    return f"step {fault.step:,}: {fault.detail}; a fresh process goes on from step {death.resumed_step:,} {how}"
