"""A script's training, counted from outside: what is safe to do about a failure depends on its first step.

before the first step   nothing is lost: it is started again with a step down
after it                its state is its own: it ends, and the way to go on is said, unless it may be restarted
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from autotune.format import count
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.config import TrainConfig
from autotune.records.layout import NEXT_FILE
from autotune.records.profile import Profile
from autotune.records.run import RunPlan, TrainingSummary
from autotune.records.secrets import hide_secrets, mask_words
from autotune.records.training_process import TrainingProgress
from autotune.scratch import scratch_folder
from autotune.sentences.settings import describe_exchanges
from autotune.sentences.training import list_speed
from autotune.targets.user_knob import write_knob
from autotune.train.policy import TRAIN_POLICY
from autotune.train.recovery.attempts import Ended, Start
from autotune.train.recovery.steps_down import Choice, Fault, choose_step_down, make_step_down
from autotune.train.recovery.supervisor import Death, Decision, Supervisor
from autotune.train.report import summarize
from autotune.train.runs.folder import SCRIPT_RUN, RunFolder, make_run
from autotune.train.script.progress import add_up, clear_progress, find_failure, read_progress
from autotune.train.script.run import ScriptRun

NO_GUARD = "not watched for drift: the gradients of a script cannot be computed a second time to compare them"

_SMALLER_BATCHES = "; what looks at a whole batch, as BatchNorm or a loss over pairs, sees fewer samples then"
_COUNTED_AGAIN = "it was started more than once: steps that it took again were counted again"
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
    run: ScriptRun,
    *,
    say: Callable[[str], None],
    max_restarts: int = 0,
    as_json: bool = False,
) -> ScriptEnd:
    """Run a script to its end under its settings.

    Args:
        run: the script, checked.
        say: is given what the user should know, one sentence at a time.
        max_restarts: times it is started again after steps were taken: it goes on from its own checkpoints then.
        as_json: standard output is for the summary, so what the script prints there goes to standard error.

    Raises:
        UsageError: the command cannot be started.
        MachineError: a step down needs a library this machine does not have.
    """
    began = time.monotonic()
    with opened_folder(run, say) as folder:
        recovery = ScriptRecovery(run, folder, say, max_restarts, as_json)
        exchanged = run.exchanged_malloc
        if exchanged is not None:
            say(exchanged)
        ended = Supervisor(recovery, say).run()
        return ScriptEnd(ended.exit_status, recovery.conclude(ended, time.monotonic() - began))


@contextmanager
def opened_folder(run: ScriptRun, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Make the folder of a new training; a temporary one, and a word about it, where that is not possible."""
    noise = None if run.profile is None else run.profile.evidence.noise
    plan = RunPlan(
        target=run.profile_target,
        asked_config=run.config,
        config=run.config,
        baseline_config=run.baseline_config,
        origin=run.origin,
        promised_samples_per_second=run.promised_samples_per_second,
        promised_noise=None if noise is None else noise.launch_sd,
        seed=0,
        steps=None,
        epochs=None,
    )
    name = run.find_launch(run.config).name
    with scratch_folder() as scratch:
        try:
            folder = RunFolder(make_run(Path(run.target.folder), Path(name).stem, None), plan, SCRIPT_RUN)
        except OSError as error:
            say(f"no record of this training is kept: {error.filename or 'runs'}: {error.strerror or error}")
            folder = RunFolder(scratch, plan, SCRIPT_RUN, is_kept=False)
        folder.write_plan(plan)
        try:
            yield folder
        finally:
            clear_progress(folder.path)


@dataclass
class ScriptRecovery:
    """How a script's training goes on: from its beginning before its first step, after it only if that was allowed.

    Attributes:
        run: the script.
        folder: of the run.
        say: is given what the user should know.
        restarts_left: times it may be started again after steps were taken.
        as_json: standard output is for the summary.
        leading: what the first process of each attempt counted, by attempt.
    """

    run: ScriptRun
    folder: RunFolder
    say: Callable[[str], None]
    restarts_left: int
    as_json: bool
    leading: dict[int, TrainingProgress] = field(default_factory=dict)

    def start(self, _attempt: int) -> Start:
        """Return how to start the next attempt."""
        clear_progress(self.folder.path)
        config = self.folder.plan.current_config
        return self.run.start(config, progress=self.folder.path, as_json=self.as_json)

    def read_death(self, ended: Ended) -> Death | None:
        """Return what went wrong, from what its processes wrote or else from how it ended."""
        if ended.status == 0:
            return None
        processes = self._collect(ended)
        failure = find_failure(processes)
        has_workers = not self.run.knows_settings or self.folder.plan.current_config.num_workers > 0
        cause, detail = ended.explain(has_workers=has_workers) if failure is None else (failure.cause, failure.detail)
        steps = max((one.steps for one in processes), default=0)
        if cause in _OWN_CAUSES and not (cause == "user-error" and self.restarts_left and steps):
            return None  # it has said so itself
        fault = Fault(cause, hide_secrets(detail, self.run.script.command), steps)
        # How far its own checkpoints take a script back is not known here, so no step is said to be kept.
        return Death(ended.attempt, fault, self.folder, self.run.adjustable_knobs)

    def decide(self, death: Death, choice: Choice | None) -> Decision:
        """Return whether the script is started again."""
        fault = death.fault
        if fault.step == 0 and choice is not None and death.attempt + 1 < TRAIN_POLICY.most_starts:
            return self._restart(fault, choice, "nothing is lost, so it is started again")
        if fault.step and self.restarts_left:
            self.restarts_left -= 1
            again = Choice("again", self.folder.plan.current_config)
            return self._restart(fault, choice or again, "it is started again, to go on from its own checkpoints")
        return Decision(None, "")

    def give_up(self, death: Death, _reason: str) -> None:
        """Say what failed, and how to go on with safer settings where there are any."""
        fault, plan = death.fault, self.folder.plan
        # Whoever starts it again does so by themselves: the same settings once more are no advice.
        choice = choose_step_down(fault, plan, death.knobs, repeats=False)
        said = _describe_fault(fault)
        if fault.step:
            said += "; its checkpoints are its own, and it cannot be taken back to one from here"
        changes = describe_exchanges(plan.current_config, choice.config) if choice else ""
        path = self._write_next(choice.config, said) if choice and changes else None
        if path is None:
            self.say(f"{said}. No setting of autotune's is known to help.")
            return
        said += _SMALLER_BATCHES if choice is not None and choice.action == "fewer-samples" else ""
        self.say(f"{said}. To start it again with {changes}: {_show_command(self.run, path)}")

    def conclude(self, ended: Ended, elapsed_seconds: float) -> TrainingSummary:
        """Write the summary and return it; what only a workload's training knows stays empty.

        Args:
            ended: how the last attempt ended.
            elapsed_seconds: of all of them.
        """
        self._collect(ended)
        run, plan, total = self.run, self.folder.plan, add_up([*self.leading.values()])
        summary = summarize(plan, total, finished=ended.status == 0, elapsed_seconds=elapsed_seconds).replace(
            folder=str(self.folder.path) if self.folder.is_kept else "",
            config=plan.current_config if run.knows_settings else None,
            promised_samples_per_second=(
                run.promised_samples_per_second if plan.current_config == run.config else None
            ),
            warnings=self._list_warnings(),
        )
        self.folder.write_summary(summary)
        rate, promised = summary.samples_per_second, summary.promised_samples_per_second
        measured = [] if rate is None else list_speed(rate, promised)
        self.say(", ".join([count(summary.steps, "step"), *measured]))
        return summary

    def _collect(self, ended: Ended) -> list[TrainingProgress]:
        """Return what the processes of an attempt wrote, and write down what they did by themselves."""
        processes = read_progress(self.folder.path)
        if ended.attempt in self.leading:
            return processes
        self.leading[ended.attempt] = next((one for one in processes if one.rank == 0), TrainingProgress())
        eager = next((one for one in processes if one.eager_step is not None), None)
        if eager is not None and eager.eager_step is not None:
            detail = hide_secrets(eager.eager_detail, self.run.script.command)
            fault = Fault("compile-error", detail, eager.eager_step)
            choice = Choice("eager", self.folder.plan.current_config.replace(compile_mode="off"))
            sentence = f"{_describe_fault(fault)}; the model ran eagerly from there on"
            self.folder.add_step_down(make_step_down(fault, choice, resumed_step=0, sentence=sentence))
        return processes

    def _restart(self, fault: Fault, choice: Choice, how: str) -> Decision:
        changes = describe_exchanges(self.folder.plan.current_config, choice.config)
        told = f"{_describe_fault(fault)}; {how} {f'with {changes}' if changes else 'as it was'}"
        return Decision(choice, f"{told}{_SMALLER_BATCHES if choice.action == 'fewer-samples' else ''}")

    def _write_next(self, config: TrainConfig, note: str) -> Path | None:
        """Write a profile to go on with, and return where it is; None where it cannot be written."""
        is_written = self.folder.is_kept and self.folder.write(NEXT_FILE, _make_profile(self.run, config, note))
        return self.folder.path / NEXT_FILE if is_written else None

    def _list_warnings(self) -> tuple[str, ...]:
        found = [
            f"the loss was not finite at step {one.non_finite_step:,}"
            for one in self.leading.values()
            if one.non_finite_step is not None
        ]
        if sum(one.steps > 0 for one in self.leading.values()) > 1:
            found.append(_COUNTED_AGAIN)
        if self.run.config != self.run.baseline_config:
            found.append(NO_GUARD)
        return tuple(found)


def _make_profile(run: ScriptRun, config: TrainConfig, note: str) -> Profile:
    """Return a profile with settings that nobody has measured, which it says of itself.

    Args:
        run: the script.
        config: the safer settings.
        note: why they are.
    """
    if run.profile is not None:
        evidence = run.profile.evidence
        told = evidence.replace(samples_per_second=None, notes=(*evidence.notes, note))
        return run.profile.replace(verdict="inconclusive", config=config, evidence=told)
    return Profile(
        verdict="inconclusive",
        config=config,
        baseline_config=run.baseline_config,
        target=run.profile_target,
        hardware=read_hardware(),
        software=read_software(),
    )


def _describe_fault(fault: Fault) -> str:
    when = f"after {count(fault.step, 'step')}" if fault.step else "before its first step"
    return f"the script failed {when} ({fault.cause}): {fault.detail[:_LONGEST_DETAIL]}"


def _show_command(run: ScriptRun, profile: Path) -> str:
    folder = Path(run.target.folder).resolve()
    shown = profile.resolve()
    shown = shown.relative_to(folder) if shown.is_relative_to(folder) else shown
    knobs = [word for knob in run.script.knobs for word in ("--knob", write_knob(knob))]
    return shlex.join(["autotune", "train", "--profile", str(shown), *knobs, "--", *mask_words(run.script.command)])
