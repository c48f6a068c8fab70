"""The parent of a script's final training: it counts with it, and does about a failure what is safe for a script.

before the first step   nothing is lost: it is started again with a step down
after it                its state is its own: it ends, and the way to go on is said, unless it may be restarted
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autotune.format import count
from autotune.records.run import StepDown, TrainingSummary
from autotune.records.secrets import hide_secrets, mask_words
from autotune.sentences.settings import describe_exchanges
from autotune.sentences.training import list_speed
from autotune.targets.user_knob import write_knob
from autotune.train.recovery.steps_down import Choice, Fault
from autotune.train.recovery.supervisor import Ended, Start, supervise
from autotune.train.script.folder import ScriptFolder, opened_folder
from autotune.train.script.progress_files import ScriptProgress, clear_progress, find_failure, read_progress
from autotune.train.script.run import ScriptRun
from autotune.train.script.steps_down import choose_for_later, choose_script_step_down
from autotune.train.script.summary import ScriptSummary

MOST_STARTS = 12
"""Attempts before the first step, of one training: halving a micro batch comes to an end, and so does this."""

_OWN_CAUSES = ("crash-exit", "user-error")
_LONGEST_DETAIL = 300


@dataclass(frozen=True)
class ScriptEnd:
    """How a script's training ended.

    Attributes:
        status: what to exit with: the script's own, 128 + N after signal N.
        summary: of all its attempts.
    """

    status: int
    summary: TrainingSummary


def train_script(
    run: ScriptRun, *, say: Callable[[str], None], max_restarts: int = 0, as_json: bool = False
) -> ScriptEnd:
    """Run a script to its end under its settings.

    Args:
        run: the script, checked.
        say: told what the user should know, one sentence at a time.
        max_restarts: times it is started again after steps were taken: it goes on from its own checkpoints then.
        as_json: standard output is for the summary, so what the script prints there goes to standard error.

    Raises:
        UsageError: the command cannot be started.
        MachineError: a step down needs a library this machine does not have.
    """
    began = time.monotonic()
    with opened_folder(run, say) as folder:
        parent = _ScriptParent(run, folder, say, max_restarts, as_json)
        exchanged = run.exchanged_malloc
        if exchanged is not None:
            say(exchanged)
        ended = supervise(parent.start, next_attempt=parent.go_on)
        return ScriptEnd(ended.exit_status, parent.conclude(ended, time.monotonic() - began))


@dataclass
class _ScriptParent:
    """One training of a script, over all its attempts."""

    run: ScriptRun
    folder: ScriptFolder
    say: Callable[[str], None]
    restarts_left: int
    as_json: bool
    tally: ScriptSummary = field(default_factory=ScriptSummary)

    def start(self, _attempt: int) -> Start:
        """Return how to start the next attempt."""
        clear_progress(self.folder.path)
        config = self.folder.plan.current_config
        return self.run.start(config, notes=self.folder.path, as_json=self.as_json)

    def go_on(self, ended: Ended) -> bool:
        """Return whether the script is started again; say what went wrong, and what is done or can be done."""
        if ended.status == 0:
            return False
        notes = self._collect(ended)
        failure = find_failure(notes)
        has_workers = not self.run.knows_settings or self.folder.plan.current_config.num_workers > 0
        told = ended.explain(has_workers=has_workers)
        cause, detail = told if failure is None else (failure.cause, failure.detail)
        detail = hide_secrets(detail, self.run.script.command)
        fault = Fault(cause, detail, max((one.steps for one in notes), default=0))
        choice = choose_script_step_down(fault, self.folder.plan, self.run.levers)
        if cause in _OWN_CAUSES and not (cause == "user-error" and self.restarts_left and fault.step):
            return False  # it has said so itself
        if fault.step == 0 and choice is not None and ended.attempt + 1 < MOST_STARTS:
            self._step_down(fault, choice, "nothing is lost, so it is started again")
            return True
        if fault.step and self.restarts_left:
            self.restarts_left -= 1
            again = Choice("again", self.folder.plan.current_config)
            self._step_down(fault, choice or again, "it is started again, to go on from its own checkpoints")
            return True
        self._explain(fault)
        return False

    def conclude(self, ended: Ended, elapsed_seconds: float) -> TrainingSummary:
        """Write the summary and return it."""
        self._collect(ended)
        summary = self.tally.summarize(self.run, self.folder, ended, elapsed_seconds)
        self.folder.write_summary(summary)
        rate, promised = summary.samples_per_second, summary.promised_samples_per_second
        measured = [] if rate is None else list_speed(rate, promised)
        self.say(", ".join([count(summary.steps, "step"), *measured]))
        return summary

    def _collect(self, ended: Ended) -> list[ScriptProgress]:
        """Return what the processes of an attempt wrote, and write down what they did by themselves."""
        notes = read_progress(self.folder.path)
        is_new = self.tally.add(ended.attempt, notes)
        eager = next((one for one in notes if one.eager_step is not None), None)
        plan = self.folder.plan
        if is_new and eager is not None and eager.eager_step is not None:
            detail = hide_secrets(eager.eager_detail, self.run.script.command)
            fault = Fault("compile-error", detail, eager.eager_step)
            config = plan.current_config.replace(compile_mode="off")
            self._record(fault, Choice("eager", config), "the model ran eagerly from there on")
        return notes

    def _step_down(self, fault: Fault, choice: Choice, what: str) -> None:
        changes = describe_exchanges(self.folder.plan.current_config, choice.config)
        self.say(self._record(fault, choice, f"{what} with {changes}" if changes else f"{what} as it was"))

    def _record(self, fault: Fault, choice: Choice, what: str) -> str:
        sentence = f"{_describe_fault(fault)}; {what}"
        step_down = StepDown(
            step=fault.step,
            resumed_step=0,  # how far its own checkpoints take a script back is not known here
            cause=fault.cause,
            detail=fault.detail,
            action=choice.action,
            sentence=sentence,
            config=choice.config,
        )
        self.folder.add_step_down(step_down)
        return sentence

    def _explain(self, fault: Fault) -> None:
        """Say what failed, and how to go on with safer settings where there are any."""
        choice = choose_for_later(fault, self.folder.plan, self.run.levers)
        said = _describe_fault(fault)
        if fault.step:
            said += "; its checkpoints are its own, and it cannot be taken back to one from here"
        changes = describe_exchanges(self.folder.plan.current_config, choice.config) if choice else ""
        path = self.folder.write_next(self.run, choice.config, said) if choice and changes else None
        if path is None:
            self.say(f"{said}. No setting of autotune's is known to help.")
            return
        self.say(f"{said}. To start it again with {changes}: {_show_command(self.run, path)}")


def _describe_fault(fault: Fault) -> str:
    when = f"after {count(fault.step, 'step')}" if fault.step else "before its first step"
    return f"the script failed {when} ({fault.cause}): {fault.detail[:_LONGEST_DETAIL]}"


def _show_command(run: ScriptRun, profile: Path) -> str:
    folder = Path(run.target.folder).resolve()
    shown = profile.resolve()
    shown = shown.relative_to(folder) if shown.is_relative_to(folder) else shown
    knobs = [word for knob in run.script.knobs for word in ("--knob", write_knob(knob))]
    return shlex.join(["autotune", "train", "--profile", str(shown), *knobs, "--", *mask_words(run.script.command)])
