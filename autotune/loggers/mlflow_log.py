"""A run of MLflow, where its own variables say: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from autotune.errors import MachineError
from autotune.loggers import require_package
from autotune.loggers.point_log import PointLog, Value, is_number
from autotune.records.codec import write_text
from autotune.records.reading import read_bytes

_ID_FILE = "mlflow-id.txt"
_LONGEST_TEXT = 500
_BATCH = 100
"""Parameters or tags in one request, as MLflow allows them."""


class MlflowLog(PointLog):
    """A training that is resumed goes on in the run it began; steps that are taken again have two points."""

    name = "the MLflow run's points"
    _client: Any = None
    _id: str = ""

    def open(self, step: int) -> None:
        """Begin the run; one that is open goes on.

        Raises:
            MachineError: mlflow is not installed, or its store cannot be reached.
        """
        require_package("mlflow")
        if self._client is not None:
            return
        from mlflow import MlflowClient

        try:
            self._client = MlflowClient()
            self._id = self._open_run()
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            hint = "set MLFLOW_TRACKING_URI, such as sqlite:///mlflow.db"
            raise MachineError(f"--log mlflow: {reason}", hint=hint) from error

    def add(self, step: int, points: Mapping[str, Value]) -> None:
        """Add points; what is no number is a tag under the step's number."""
        from mlflow.entities import Metric, RunTag

        now = int(time.time() * 1000)
        numbers = {name: float(value) for name, value in points.items() if is_number(value)}  # type: ignore[arg-type]
        words = {name: str(value) for name, value in points.items() if not is_number(value) and value is not None}
        tags = [RunTag(f"{name}.{step:04d}", value[:_LONGEST_TEXT]) for name, value in words.items()]
        self._client.log_batch(
            self._id, metrics=[Metric(name, value, now, step) for name, value in numbers.items()], tags=tags[:_BATCH]
        )

    def conclude(self, answer: Mapping[str, Value]) -> None:
        """Write the answer as tags and metrics."""
        for name, value in answer.items():
            if is_number(value):
                self._client.log_metric(self._id, name, float(value))  # type: ignore[arg-type]
            elif value is not None:
                self._client.set_tag(self._id, name, str(value)[:_LONGEST_TEXT])

    def release(self) -> None:
        """End the run."""
        client, self._client = self._client, None
        if client is not None:
            client.set_terminated(self._id)

    def _open_run(self) -> str:
        """Return the id of the run that this folder has begun, else of a new one."""
        path = self.folder / _ID_FILE
        if path.exists():
            known = read_bytes(path, max_bytes=64).decode("ascii", "replace").strip()
            self._client.update_run(known, status="RUNNING")
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "autotune")
        experiment = self._client.get_experiment_by_name(name)
        place = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run_id: str = self._client.create_run(place, run_name=self.folder.name).info.run_id
        for key, value in self.config.items():
            self._client.log_param(run_id, key, str(value)[:_LONGEST_TEXT])
        write_text(path, f"{run_id}\n")
        return run_id


LOG = MlflowLog
