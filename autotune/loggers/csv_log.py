"""A CSV file in the run's folder: a row for each step that something is known at, a column for each figure."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path

from autotune.loggers.point_log import PointLog, Value
from autotune.records.codec import write_text

_STEP = "step"


class CsvLog(PointLog):
    """Rows are appended; the file is written anew where a figure comes for the first time, or steps are taken again."""

    name = "the CSV file's rows"

    @property
    def path(self) -> Path:
        """The file."""
        return self.folder / ("trials.csv" if self.is_search else "metrics.csv")

    def open(self, step: int) -> None:
        """Read what there is up to a step, and leave out what comes after."""
        self._columns, rows = [_STEP], []
        if self.path.exists() and (step or self.is_search):
            with self.path.open(encoding="utf-8", newline="") as file:
                reader = csv.DictReader(file)
                rows = [row for row in reader if self.is_search or int(row[_STEP] or 0) <= step]
                self._columns = list(reader.fieldnames or self._columns)
        self._write(rows)

    def add(self, step: int, points: Mapping[str, Value]) -> None:
        """Append a row."""
        row = {_STEP: step, **points}
        new = [name for name in row if name not in self._columns]
        if new:
            with self.path.open(encoding="utf-8", newline="") as file:
                rows = list(csv.DictReader(file))
            self._columns += new
            self._write(rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self._columns).writerow(row)

    def conclude(self, answer: Mapping[str, Value]) -> None:
        """Append the answer as a row without a step."""
        self.add("", answer)  # type: ignore[arg-type]

    def _write(self, rows: Iterable[Mapping[str, object]]) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        write_text(self.path, text.getvalue())


LOG = CsvLog
