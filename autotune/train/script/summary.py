"""What the attempts of a script's training come to together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autotune.records.run import TrainingSummary
from autotune.train.recovery.supervisor import Ended
from autotune.train.script.folder import ScriptFolder
from autotune.train.script.progress_files import ScriptProgress
from autotune.train.script.run import ScriptRun

NO_GUARD = "not watched for drift: the gradients of a script cannot be computed a second time to compare them"
_COUNTED_AGAIN = "it was started more than once: steps that it took again were counted again"


@dataclass
class ScriptSummary:
    """The attempts of one training.

    Attributes:
        leading: what the first process of each attempt counted, by attempt.
    """

    leading: dict[int, ScriptProgress] = field(default_factory=dict)

    def add(self, attempt: int, notes: Sequence[ScriptProgress]) -> bool:
        """Take in what the processes of an attempt wrote; return whether it is the first time."""
        if attempt in self.leading:
            return False
        self.leading[attempt] = next((one for one in notes if one.rank == 0), ScriptProgress())
        return True

    def summarize(self, run: ScriptRun, folder: ScriptFolder, ended: Ended, elapsed_seconds: float) -> TrainingSummary:
        """Return how the training ended; what only a workload's training knows stays empty."""
        all_of_them, plan = list(self.leading.values()), folder.plan
        config, seconds = plan.current_config, sum(one.seconds for one in all_of_them)
        samples, waited = (
            sum(one.timed_samples for one in all_of_them),
            sum(one.data_wait_seconds for one in all_of_them),
        )
        return TrainingSummary(
            folder=str(folder.path) if folder.is_kept else "",
            checkpoint="",
            finished=ended.status == 0,
            target=plan.target,
            origin=run.origin,
            config=config if run.knows_settings else None,
            steps=sum(one.steps for one in all_of_them),
            epochs=0,
            samples=sum(one.samples for one in all_of_them),
            loss=all_of_them[-1].loss,
            metrics={},
            samples_per_second=samples / seconds if samples and seconds > 0 else None,
            promised_samples_per_second=run.promised_samples_per_second if config == run.config else None,
            data_wait_fraction=min(1.0, max(0.0, waited / seconds)) if seconds > 0 else None,
            peak_memory_bytes=max(one.peak_memory_bytes for one in all_of_them) or None,
            training_seconds=seconds,
            elapsed_seconds=elapsed_seconds,
            step_downs=plan.step_downs,
            warnings=self._list_warnings(run),
        )

    def _list_warnings(self, run: ScriptRun) -> tuple[str, ...]:
        found = [
            f"the loss was not finite at step {one.non_finite_step:,}"
            for one in self.leading.values()
            if one.non_finite_step is not None
        ]
        if sum(one.steps > 0 for one in self.leading.values()) > 1:
            found.append(_COUNTED_AGAIN)
        if run.config != run.baseline_config:
            found.append(NO_GUARD)
        return tuple(found)
