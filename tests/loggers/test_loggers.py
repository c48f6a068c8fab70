"""Loggers: a table of rows, a run of W&B without a network, one of MLflow in a local store; of trainings and searches.

Tests of a package that is not installed are skipped: pip install wandb mlflow-skinny
"""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from emit_records import BASELINE, make_facts, make_profile, make_report, make_trial
from typer.testing import CliRunner

from autotune.cli import app
from autotune.errors import MachineError
from autotune.loggers import LoggerName, find_logger, read_loggers
from autotune.loggers.csv_log import CsvLog
from autotune.loggers.search_log import LoggedSearch, logged
from autotune.records import TrialStatus
from autotune.search.progress import SearchProgress, SearchReporter

PROGRESS = SearchProgress("search", 1, 48.0, baseline_samples_per_second=1000.0)
FASTER = BASELINE.replace(num_workers=4)


def make_line(step: int, **changes: Any) -> dict[str, Any]:
    return {"step": step, "epoch": 0, "samples": 8 * step, "loss": 2.0 / step} | changes


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def search_with(names: list[LoggerName], folder: Path, *, inner: SearchReporter | None = None) -> list[str]:
    """Log a search of two trials, one of which fails; return the warnings."""
    warnings: list[str] = []
    with logged(names, inner or SearchReporter(), warnings.append) as (reporter, finish):
        reporter.opened(folder)
        reporter.probed(make_report(target=make_facts(baseline=BASELINE)))
        reporter.trial_finished(PROGRESS, make_trial(1, FASTER, rate=1250.0))
        reporter.trial_finished(PROGRESS, make_trial(2, rate=None, status=TrialStatus.TIMED_OUT, error="late"))
        finish(make_profile())
    return warnings


# What is missing, and what goes wrong


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.parametrize("command", ["train", "search"])
def test_a_package_that_is_missing_is_said_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda one, *more: None if one == name else found(one, *more))
    done = CliRunner().invoke(app, [command, "demo", "--log", "csv", "--log", name, "--json"])
    assert done.exit_code == MachineError.exit_code
    error = json.loads(done.stdout)["error"]
    assert error["message"] == f"--log {name}: {name} is not installed"
    assert error["hint"] == f"pip install {name}, or autotune-torch[{name}]"
    assert [*tmp_path.iterdir()] == []


def test_a_tool_that_there_is_not_is_told_with_those_that_there_are() -> None:
    done = CliRunner().invoke(app, ["train", "--log", "wanbd"])
    assert done.exit_code == 2
    message, hint = done.stderr.splitlines()
    assert message == "error: --log 'wanbd' is not known"
    assert hint == "  did you mean wandb? it is one of tensorboard, wandb, mlflow, csv"


def test_each_name_has_a_logger() -> None:
    names: tuple[LoggerName, ...] = get_args(LoggerName)
    assert len({find_logger(name) for name in names}) == len(names) == 4
    assert read_loggers(["csv", "csv"]) == ("csv",)


def test_what_goes_wrong_ends_the_rows_and_nothing_else(tmp_path: Path) -> None:
    warnings: list[str] = []
    with CsvLog(tmp_path, least_seconds=0.0, warn=warnings.append) as log:
        log(make_line(10))
        log.path.unlink()
        log(make_line(20, error=1.0))
        log(make_line(30))
    assert len(warnings) == 1
    assert warnings[0].startswith("the CSV file's rows end at step 20: ")
    assert "No such file" in warnings[0]


# CSV


def test_a_row_has_what_is_known_at_a_step(tmp_path: Path) -> None:
    with CsvLog(tmp_path, least_seconds=0.0) as log:
        log(make_line(10))
        log({"step": 10, "epoch": 0, "accuracy": 0.5, "undefined": None})
        log(make_line(20))
    rows = read(tmp_path / "metrics.csv")
    assert [row["step"] for row in rows] == ["10", "10", "20"]
    assert [row["train/loss"] for row in rows] == ["0.2", "", "0.1"]
    assert [row["evaluation/accuracy"] for row in rows] == ["", "0.5", ""]


def test_rows_of_steps_that_are_taken_again_are_left_out(tmp_path: Path) -> None:
    with CsvLog(tmp_path, least_seconds=0.0) as log:
        for step in (10, 20, 30):
            log(make_line(step, loss=1.0))
        log.rewind(20)
        log(make_line(30, loss=2.0))
    with CsvLog(tmp_path, least_seconds=0.0, resumed_step=10) as log:
        log(make_line(20, loss=3.0))
    assert [(row["step"], row["train/loss"]) for row in read(tmp_path / "metrics.csv")] == [
        ("10", "1.0"),
        ("20", "3.0"),
    ]


def test_a_new_run_begins_a_new_table(tmp_path: Path) -> None:
    for loss in (1.0, 2.0):
        with CsvLog(tmp_path, least_seconds=0.0) as log:
            log(make_line(10, loss=loss))
    assert [row["train/loss"] for row in read(tmp_path / "metrics.csv")] == ["2.0"]


def test_a_search_is_a_row_for_each_trial_and_one_for_the_answer(tmp_path: Path) -> None:
    assert search_with(["csv"], tmp_path) == []
    first, second, answer = read(tmp_path / "trials.csv")
    assert (first["step"], first["trial/status"], first["trial/speedup"]) == ("1", "completed", "1.25")
    assert (first["config/num_workers"], first["trial/changes"]) == ("4", "workers=4")
    assert (second["trial/status"], second["trial/error"], second["trial/speedup"]) == ("timed_out", "late", "")
    assert (answer["step"], answer["answer/verdict"]) == ("", make_profile().verdict)
    search_with(["csv"], tmp_path)  # resumed
    assert [row["step"] for row in read(tmp_path / "trials.csv")] == ["1", "2", "", "1", "2", ""]


def test_a_logged_search_is_told_as_any_other(tmp_path: Path) -> None:
    heard: list[str] = []

    class Told(SearchReporter):
        def told(self, sentence: str) -> None:
            heard.append(sentence)

        def trial_finished(self, progress: SearchProgress, result: Any) -> None:
            heard.append(f"trial {result.spec.number}")

    search_with(["csv"], tmp_path, inner=Told())
    LoggedSearch(["csv"], Told(), heard.append).told("a sentence")
    assert heard == ["trial 1", "trial 2", "a sentence"]


def test_a_search_is_in_tensorboards_files(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert search_with(["tensorboard"], tmp_path) == []
    events = accumulators.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("trial/speedup")] == [(1, 1.25)]
    assert {"trial/text_summary", "answer/text_summary"} <= {*events.Tags()["tensors"]}


# Weights & Biases


def end_wandb() -> None:
    """End its service, which writes the files in its own time and lasts as long as the interpreter."""
    import wandb

    wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    pytest.importorskip("wandb", reason="pip install wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    folder = tmp_path / "demo-001"
    folder.mkdir()
    yield folder
    end_wandb()


def read_log(content: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run: LevelDB's log format, after a header of seven bytes."""
    place, record = 7, b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", content[place : place + 7])
        record += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of all offline runs in a folder by their kind, as W&B's own reader finds them."""
    from wandb.proto.wandb_internal_pb2 import Record

    end_wandb()
    found: dict[str, list[dict[str, Any]]] = {"history": [], "summary": [], "run": []}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in read_log(file.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                found["run"].append({"id": record.run.run_id, "job": record.run.job_type})
            elif kind in found:
                items = getattr(record, kind)
                pairs = [*items.item] if kind == "history" else [*items.update]
                names = [one.key or "/".join(one.nested_key) for one in pairs]
                found[kind].append({n: json.loads(one.value_json) for n, one in zip(names, pairs, strict=True)})
    return found


def test_a_training_is_a_run_of_wandb_that_is_resumed_as_the_same(offline: Path) -> None:
    log_class, found = find_logger("wandb"), []
    for resumed, steps in ((0, (10, 20)), (10, (20, 30))):
        with log_class(offline, least_seconds=0.0, resumed_step=resumed, config={"config/precision": "bf16"}) as log:
            for step in steps:
                log(make_line(step))
        found.append(read_wandb(offline))
        time.sleep(1.0)  # wandb names the file of an offline run by the second
    first, second = ([(point["step"], point["train/loss"]) for point in one["history"]] for one in found)
    assert first == [(10, 0.2), (20, 0.1)]
    assert second == [*first, (20, 0.1), (30, pytest.approx(2 / 30))]
    assert len({run["id"] for one in found for run in one["run"]}) == 1
    assert {run["job"] for one in found for run in one["run"]} == {"train"}


def test_a_search_is_a_run_of_wandb(offline: Path) -> None:
    assert search_with(["wandb"], offline) == []
    found = read_wandb(offline)
    trials = [point for point in found["history"] if "trial/status" in point]
    assert [(point["step"], point["trial/status"]) for point in trials] == [(1, "completed"), (2, "timed_out")]
    assert any(one.get("answer/verdict") == make_profile().verdict for one in found["summary"])


# MLflow


@pytest.fixture(params=["sqlite:///{}/mlflow.db", "file://{}/mlruns"])
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    mlflow = pytest.importorskip("mlflow", reason="pip install mlflow-skinny")
    if request.param.startswith("sqlite"):
        pytest.importorskip("alembic", reason="MLflow's SQL store needs alembic and sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", request.param.format(tmp_path))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    (tmp_path / "demo-001").mkdir()
    return mlflow.MlflowClient(tracking_uri=request.param.format(tmp_path))


@pytest.mark.filterwarnings("ignore")  # of packages that it is made of
def test_a_training_is_a_run_of_mlflow_that_is_resumed_as_the_same(store: Any, tmp_path: Path) -> None:
    log_class = find_logger("mlflow")
    for resumed, steps in ((0, (10, 20)), (20, (30,))):
        config = {"config/precision": "bf16"}
        with log_class(tmp_path / "demo-001", least_seconds=0.0, resumed_step=resumed, config=config) as log:
            for step in steps:
                log(make_line(step))
    (run,) = store.search_runs([store.get_experiment_by_name("autotune").experiment_id])
    assert (run.info.run_name, run.info.status) == ("demo-001", "FINISHED")
    assert run.data.params == {"config/precision": "bf16"}
    points = store.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in points] == [(10, 0.2), (20, 0.1), (30, pytest.approx(2 / 30))]


@pytest.mark.filterwarnings("ignore")
def test_a_search_is_a_run_of_mlflow(store: Any, tmp_path: Path) -> None:
    assert search_with(["mlflow"], tmp_path / "demo-001") == []
    (run,) = store.search_runs([store.get_experiment_by_name("autotune").experiment_id])
    assert run.data.metrics["trial/speedup"] == 1.25
    assert (run.data.tags["trial/status.0001"], run.data.tags["trial/error.0002"]) == ("completed", "late")
    assert run.data.tags["answer/verdict"] == make_profile().verdict
    assert run.data.params["config/num_workers"] == str(BASELINE.num_workers)
