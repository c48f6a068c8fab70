"""The supervisor of a final training, of either way in: a process dies, a step down is written, another goes on.

    attempt ── ended ──▶ Recovery.read_death ──▶ choose_step_down ──▶ Recovery.decide ──▶ the plan, said ──▶ attempt
                                │ none                                       │ no
                                ▼                                            ▼
                           it is the end                            Recovery.give_up

What a process can survive it deals with itself. Killed by the kernel for want of memory, by a crash in native code, or
with a device that answers nothing any more, it needs another one. How a workload and a script differ in this is their
`Recovery`: a workload goes on from its last checkpoint, a script's state is its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from autotune.errors import AutotuneError
from autotune.records.run import StepDown
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.attempts import STOPPING, Ended, Start, run_attempts
from autotune.train.recovery.steps_down import AdjustableKnobs, Choice, Fault, choose_step_down, make_step_down
from autotune.train.runs.folder import RunFolder


@dataclass(frozen=True)
class Death:
    """A process of a training that ended before the training was done.

    Attributes:
        attempt: which one it was, counted from 0.
        fault: what ended it.
        folder: of the run.
        knobs: what can be changed about the training.
        resumed_step: optimizer steps that another process begins with.
        written: the step down that the process itself has written for another one; None where it has not.
    """

    attempt: int
    fault: Fault
    folder: RunFolder
    knobs: AdjustableKnobs
    resumed_step: int = 0
    written: StepDown | None = None


@dataclass(frozen=True)
class Decision:
    """What is done about a death.

    Attributes:
        choice: what another process is started with; None where none is.
        sentence: all of it for the user, or why there is no other process.
    """

    choice: Choice | None
    sentence: str


class Recovery(Protocol):
    """What a workload and a script do differently when a process of their training has ended."""

    def start(self, attempt: int) -> Start:
        """Return how to start an attempt, counted from 0."""

    def read_death(self, ended: Ended) -> Death | None:
        """Return what went wrong; None where nothing did, or nothing can be done and the user knows all there is."""

    def decide(self, death: Death, choice: Choice | None) -> Decision:
        """Return whether to start another process, and with what.

        Args:
            death: of the last one.
            choice: the smallest safe step down; None where none is known.
        """

    def give_up(self, death: Death, reason: str) -> None:
        """Tell the user that no other process is started."""


@dataclass(frozen=True)
class Supervisor:
    """A training over all of its processes.

    Attributes:
        recovery: of the workload or the script.
        say: is given what the user should know, one sentence at a time.
        stopping: signals that ask the training to end.
        kills_on_ctrl_c: a process is killed a while after a second Ctrl-C.
        policy: the training's thresholds.
    """

    recovery: Recovery
    say: Callable[[str], None]
    stopping: tuple[int, ...] = STOPPING
    kills_on_ctrl_c: bool = False
    policy: TrainPolicy = TRAIN_POLICY

    def run(self) -> Ended:
        """Run the training's processes and return how the last one ended.

        Raises:
            UsageError: a process cannot be started.
        """
        return run_attempts(
            self.recovery.start,
            next_attempt=self._recover,
            stopping=self.stopping,
            kills_on_ctrl_c=self.kills_on_ctrl_c,
            policy=self.policy,
        )

    def _recover(self, ended: Ended) -> bool:
        """Write down what another process is to do; return whether it is started."""
        death = self.recovery.read_death(ended)
        if death is None:
            return False
        try:
            reason = self._step_down(death)
        except (AutotuneError, OSError) as error:
            reason = describe_error(error, death.folder.path)
        if reason is None:
            return True
        self.recovery.give_up(death, reason)
        return False

    def _step_down(self, death: Death) -> str | None:
        """Write a step down into the run's plan and say it; return why there is none, None where there is."""
        if death.written is not None:
            choice: Choice | None = Choice(death.written.action, death.written.config)
        else:
            choice = choose_step_down(death.fault, death.folder.plan, death.knobs, policy=self.policy)
        decision = self.recovery.decide(death, choice)
        if decision.choice is None:
            return decision.sentence
        if death.written is None:  # else it is in the plan, and the process has said it
            step_down = make_step_down(
                death.fault, decision.choice, resumed_step=death.resumed_step, sentence=decision.sentence
            )
            death.folder.add_step_down(step_down)
            self.say(step_down.sentence)
        return None


def describe_error(error: AutotuneError | OSError, folder: str | Path) -> str:
    """Return what kept a run's record from being read or written, with the file it was or the run's folder."""
    if isinstance(error, AutotuneError):
        return error.message
    return f"{error.filename or folder}: {error.strerror or error}"
