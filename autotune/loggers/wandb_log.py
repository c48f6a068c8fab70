"""A run of Weights & Biases, where and how its own variables say: WANDB_PROJECT, WANDB_MODE=offline, ..."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

from autotune.errors import MachineError
from autotune.loggers import require_package
from autotune.loggers.point_log import PointLog, Value
from autotune.records.codec import write_text
from autotune.records.reading import read_bytes

_ID_FILE = "wandb-id.txt"
_STEP = "step"


class WandbLog(PointLog):
    """A training that is resumed goes on in the run it began; steps that are taken again have two points."""

    name = "the W&B run's points"
    _run: Any = None

    def open(self, step: int) -> None:
        """Begin the run; one that is open goes on.

        Raises:
            MachineError: wandb is not installed, or refuses, as without a login.
        """
        require_package("wandb")
        if self._run is not None:
            return
        import wandb

        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "autotune"),
                name=self.folder.name,
                id=self._read_id(),
                resume="allow",
                dir=str(self.folder),
                job_type="search" if self.is_search else "train",
                config=self.config,
                settings=wandb.Settings(silent=True, console="off"),
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise MachineError(f"--log wandb: {reason}", hint="wandb login, or WANDB_MODE=offline") from error
        # Its own steps never go back, and a training's may.
        self._run.define_metric("*", step_metric=_STEP)

    def add(self, step: int, points: Mapping[str, Value]) -> None:
        """Add points."""
        self._run.log({_STEP: step, **points})

    def conclude(self, answer: Mapping[str, Value]) -> None:
        """Write the answer into the run's summary."""
        self._run.summary.update(dict(answer))

    def release(self) -> None:
        """Send what is left, and end the run."""
        run, self._run = self._run, None
        if run is not None:
            run.finish()

    def _read_id(self) -> str:
        """Return the run's id, which is made up once."""
        path = self.folder / _ID_FILE
        if path.exists():
            return read_bytes(path, max_bytes=64).decode("ascii", "replace").strip()
        found = secrets.token_hex(4)
        write_text(path, f"{found}\n")
        return found


LOG = WandbLog
