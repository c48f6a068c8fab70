"""Two run folders to one comparison.

run.json or script.json (RunPlan), summary.json (TrainingSummary), metrics.jsonl ──▶ RunSide, twice ──▶ RunComparison
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from autotune.errors import UsageError
from autotune.records.comparison import LossPair, RunComparison, RunSide, RunState, SettingPair
from autotune.records.config import changed_fields, get_knob
from autotune.records.layout import METRICS_FILE
from autotune.records.reading import MOST_COUNT
from autotune.records.run import RunPlan, TrainingSummary
from autotune.train.loop.metrics import read_lines
from autotune.train.runs.folder import open_run

_TAIL_FRACTION = 0.1
_ONE_PAIR = "one pair of runs: no interval"


@dataclass
class RunLog:
    """What metrics.jsonl tells of a run.

    Attributes:
        points: samples and loss of each training line.
        steps: of the last training line.
        epoch: of the last line.
        samples: of the last training line.
        farthest: most samples of any line.
        seconds: in steps, by the throughput of the lines.
        metrics: of the last evaluation.
    """

    points: list[tuple[int, float]] = field(default_factory=list)
    steps: int = 0
    epoch: int = 0
    samples: int = 0
    farthest: int = 0
    seconds: float = 0.0
    metrics: dict[str, float | None] = field(default_factory=dict)

    def add(self, line: dict[str, Any]) -> None:
        """Take in a line; a training resumed from before it says its steps again, and they count anew.

        Raises:
            KeyError: a field is missing.
            TypeError: a field is no number.
        """
        step = _count(line["step"])
        if "samples" not in line:
            self.metrics = {name: _figure(value) for name, value in line.items() if name not in ("step", "epoch")}
            return
        samples, rate, loss = _count(line["samples"]), _figure(line.get("samples_per_second")), _figure(line["loss"])
        if rate is not None and rate > 0:
            seconds = self.seconds + max(0, samples - self.farthest) / rate
            self.seconds = seconds if math.isfinite(seconds) else self.seconds
        self.farthest = max(self.farthest, samples)
        while self.points and self.points[-1][0] >= samples:
            self.points.pop()
        if loss is not None:
            self.points.append((samples, loss))
        self.steps, self.samples, self.epoch = step, samples, _count(line.get("epoch", 0))


def compare_runs(first: Path, second: Path) -> RunComparison:
    """Return two runs side by side; they need not be finished, nor of the same target, and both are said.

    Raises:
        UsageError: a folder holds no run.
        AutotuneError: a file of a run is damaged.
    """
    sides, logs = zip(*(_read_run(folder) for folder in (first, second)), strict=True)
    a, b = sides
    names = changed_fields(a.config, b.config)
    same_length = a.samples == b.samples
    return RunComparison(
        first=a,
        second=b,
        settings=tuple(
            SettingPair(name=name, first=get_knob(a.config, name), second=get_knob(b.config, name)) for name in names
        ),
        throughput_ratio=_divide(b.samples_per_second, a.samples_per_second),
        training_time_ratio=_divide(b.training_seconds, a.training_seconds) if same_length else None,
        loss=pair_losses(*(log.points for log in logs)),
        notes=tuple(_list_notes(a, b)),
    )


def pair_losses(first: list[tuple[int, float]], second: list[tuple[int, float]]) -> LossPair | None:
    """Return the losses of two runs after the same number of samples; None when one has none by then.

    Args:
        first: samples and loss of each log line, in order.
        second: the same of the other run.
    """
    if not first or not second:
        return None
    end = min(first[-1][0], second[-1][0])
    begin = math.floor((1.0 - _TAIL_FRACTION) * end)
    # Where lines are further apart than a tenth of the run, the last one stands for it.
    tails = [
        [loss for samples, loss in points if begin < samples <= end]
        or [loss for samples, loss in points if samples <= end][-1:]
        for points in (first, second)
    ]
    if not all(tails):
        return None
    a, b = tails
    return LossPair(
        from_samples=begin,
        to_samples=end,
        first=fmean(a),
        second=fmean(b),
        first_lines=len(a),
        second_lines=len(b),
    )


def _read_run(folder: Path) -> tuple[RunSide, RunLog]:
    run = open_run(folder)
    plan, log, summary = run.plan, _read_log(folder), run.read_summary()
    # A run that was resumed writes on: what it left at an earlier stop is not how it ended.
    if summary is None or log.steps > summary.steps:
        return _describe_log(folder, plan, log), log
    return _describe_summary(folder, plan, summary), log


def _describe_log(folder: Path, plan: RunPlan, log: RunLog) -> RunSide:
    return RunSide(
        **_describe_plan(folder, plan, "unfinished"),
        config=plan.current_config,
        steps=log.steps,
        epochs=log.epoch,
        samples=log.samples,
        loss=log.points[-1][1] if log.points else None,
        metrics=log.metrics,
        best=None,
        samples_per_second=_divide(log.samples, log.seconds),
        promised_samples_per_second=plan.promised_samples_per_second,
        training_seconds=log.seconds or None,
        step_downs=plan.step_downs,
    )


def _describe_summary(folder: Path, plan: RunPlan, summary: TrainingSummary) -> RunSide:
    same = ("steps", "epochs", "samples", "loss", "metrics", "best", "samples_per_second")
    speed = ("promised_samples_per_second", "evaluation_seconds", "checkpoint_seconds", "data_wait_fraction")
    machine = ("mfu", "peak_memory_bytes", "skipped_steps", "allocator_retries", "step_downs", "guard")
    return RunSide(
        **_describe_plan(folder, plan, "finished" if summary.finished else "stopped"),
        config=summary.config or plan.current_config,
        training_seconds=summary.training_seconds or None,
        **{name: getattr(summary, name) for name in (*same, *speed, *machine)},
    )


def _describe_plan(folder: Path, plan: RunPlan, state: RunState) -> dict[str, Any]:
    return {
        "folder": str(folder),
        "state": state,
        "target": plan.target,
        "origin": plan.origin,
        "seed": plan.seed,
        "planned_steps": plan.steps,
        "planned_epochs": plan.epochs,
    }


def _read_log(folder: Path) -> RunLog:
    log = RunLog()
    try:
        for line in read_lines(folder):
            try:
                log.add(line)
            except (KeyError, TypeError):
                continue
    except OSError as error:
        raise UsageError(f"{folder / METRICS_FILE}: {error.strerror or error}", hint="check its permissions") from None
    return log


def _list_notes(a: RunSide, b: RunSide) -> Iterator[str]:
    for side, name in ((a, "a"), (b, "b")):
        if side.state == "stopped":
            yield f"{name} is not finished: it was stopped at step {side.steps:,} and can be resumed"
        elif side.state == "unfinished":
            yield f"{name} is not finished: its log goes to step {side.steps:,}, and its figures are from that log"
    if a.target.label != b.target.label:
        yield f"the targets differ ({a.target.label} and {b.target.label}): losses and metrics may mean other things"
    elif a.target.fingerprint != b.target.fingerprint:
        yield f"{a.target.label} was changed between the two runs"
    data = {side.target.data_fingerprint for side in (a, b)}
    if len(data) > 1 and None not in data:
        yield "they were trained on other data"
    if a.samples != b.samples:
        yield f"the runs are not equally long ({a.samples:,} and {b.samples:,} samples)"
    if a.seed != b.seed:
        yield f"the seeds differ ({a.seed} and {b.seed})"
    yield _ONE_PAIR


def _divide(part: float | None, whole: float | None) -> float | None:
    if part is None or not whole:
        return None
    ratio = part / whole
    return ratio if math.isfinite(ratio) else None


def _figure(value: object) -> float | None:
    """Return a finite number; None for what is none.

    Raises:
        TypeError: it is no number at all.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_COUNT:
        raise TypeError(f"{value!r} is no count")
    return value
