"""What a script's final training leaves behind: `runs/<script>-NNN/{script.json, summary.json}`, and `next.json`.

Nothing else is written into the user's folder. `next.json` is a profile with safer settings, made when a script fails
after its first step: whoever starts it again can start it with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from autotune.machine.hardware import read_hardware, read_software
from autotune.records.codec import write_record
from autotune.records.config import TrainConfig
from autotune.records.layout import SCRIPT_FILE, SUMMARY_FILE
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.run import RunPlan, StepDown, TrainingSummary
from autotune.scratch import scratch_folder
from autotune.train.folder import make_run
from autotune.train.script.progress_files import clear_progress
from autotune.train.script.run import ScriptRun

NEXT_FILE = "next.json"


@dataclass
class ScriptFolder:
    """The folder of one training of a script.

    Attributes:
        path: the folder.
        plan: what it was started with, and the steps down since.
        is_kept: False where no folder could be made, and this one goes when the training does.
    """

    path: Path
    plan: RunPlan
    is_kept: bool

    def add_step_down(self, step_down: StepDown) -> None:
        """Write a step down into the record; from here on its settings are those in force."""
        self.write_plan(self.plan.replace(step_downs=(*self.plan.step_downs, step_down)))

    def write_plan(self, plan: RunPlan) -> None:
        """Save what the training is started with, if the disk lets us: a record is no reason to end it."""
        self.plan = plan
        _write(self.path / SCRIPT_FILE, plan)

    def write_summary(self, summary: TrainingSummary) -> None:
        """Save how it ended."""
        _write(self.path / SUMMARY_FILE, summary)

    def write_next(self, run: ScriptRun, config: TrainConfig, note: str) -> Path | None:
        """Write a profile to go on with, and return where it is; None where it cannot be written.

        Args:
            run: the script.
            config: the safer settings.
            note: why they are.
        """
        path = self.path / NEXT_FILE
        is_written = self.is_kept and _write(path, _make_profile(run, config, note))
        return path if is_written else None


@contextmanager
def opened_folder(run: ScriptRun, say: Callable[[str], None]) -> Iterator[ScriptFolder]:
    """Make the folder of a new training; a temporary one, and a word about it, where that is not possible."""
    plan = RunPlan(
        target=ProfileTarget(label=run.target.spec, fingerprint=run.fingerprint, training_loaders=run.training_loaders),
        asked_config=run.config,
        config=run.config,
        baseline_config=run.baseline_config,
        origin=run.origin,
        promised_samples_per_second=run.promised_samples_per_second,
        seed=0,
        steps=None,
        epochs=None,
    )
    name = run.find_launch(run.config).name
    with scratch_folder() as scratch:
        try:
            folder = ScriptFolder(make_run(Path(run.target.folder), Path(name).stem, None), plan, is_kept=True)
        except OSError as error:
            say(f"no record of this training is kept: {error.filename or 'runs'}: {error.strerror or error}")
            folder = ScriptFolder(scratch, plan, is_kept=False)
        folder.write_plan(plan)
        try:
            yield folder
        finally:
            clear_progress(folder.path)


def _make_profile(run: ScriptRun, config: TrainConfig, note: str) -> Profile:
    """Return a profile with settings that nobody has measured, which it says of itself."""
    if run.profile is not None:
        evidence = run.profile.evidence
        told = evidence.replace(samples_per_second=None, notes=(*evidence.notes, note))
        return run.profile.replace(verdict="inconclusive", config=config, evidence=told)
    return Profile(
        verdict="inconclusive",
        config=config,
        baseline_config=run.baseline_config,
        target=ProfileTarget(label=run.target.spec, fingerprint=run.fingerprint, training_loaders=run.training_loaders),
        hardware=read_hardware(),
        software=read_software(),
    )


def _write(path: Path, record: RunPlan | TrainingSummary | Profile) -> bool:
    try:
        write_record(path, record, private=True)
    except OSError:
        return False
    return True
