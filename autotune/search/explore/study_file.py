"""`study.db`: a copy of the study that stock Optuna tools open, and on which nothing depends.

    study in memory ──trials that ended──▶ SQLite in memory ──the whole file, by rename──▶ study.db

The file is replaced, never written into: nobody's lock is waited for, a reader goes on with what it has opened, and
what somebody else has left in its place is neither opened nor followed.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from optuna.storages import RDBStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial

from autotune.records.codec import write_bytes

STUDY_NAME = "autotune"
"""Name of the study in the file."""


class StudyFile:
    """The copy on disk, best effort: what goes wrong is told once, and the file is left as it is from then on.

    Args:
        path: of the file; whatever is there is replaced.
        told: hears of the error, in one sentence.
    """

    def __init__(self, path: Path, told: Callable[[str], None]) -> None:
        self._path, self._told = path, told
        self._connection = sqlite3.connect(":memory:")
        self._copied = 0
        self._is_given_up = False

    def update(self, trials: Sequence[FrozenTrial]) -> None:
        """Bring the file up to date.

        Args:
            trials: all of the study so far, in order; those that are new here have ended.
        """
        if self._is_given_up:
            return
        try:
            storage, study = self._copy
            for trial in trials[self._copied :]:
                storage.create_new_trial(study, template_trial=trial)
            self._copied = len(trials)
            write_bytes(self._path, self._connection.serialize(), durable=False)
        except Exception as error:  # whatever SQLite, SQLAlchemy, Optuna or the disk raise: the search needs none of it
            self._is_given_up = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
            self._told(
                f"{self._path} could not be written ({reason}): the search goes on without it, and a resumed one "
                "builds it anew"
            )

    @cached_property
    def _copy(self) -> tuple[RDBStorage, int]:
        storage = RDBStorage("sqlite://", engine_kwargs={"creator": lambda: self._connection})
        return storage, storage.create_new_study([StudyDirection.MAXIMIZE], STUDY_NAME)
