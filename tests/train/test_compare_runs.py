"""Two runs side by side: from planted run folders, whole, stopped, killed, damaged, and no runs at all."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from compared_runs import DOWN, FAST, PLAIN, TARGET, make_log, plant_run
from rich.console import Console

from autotune.cli.pages import layout as pages
from autotune.cli.pages.comparison import print_comparison
from autotune.errors import AutotuneError, UsageError
from autotune.records.codec import parse_record
from autotune.records.comparison import RunComparison
from autotune.train.runs.compare import compare_runs, pair_losses

ONE_PAIR = "one pair of runs: no interval"
FASTER: dict[str, Any] = {"samples_per_second": 140.0, "training_seconds": 6.0, "mfu": None}


def show(comparison: RunComparison, monkeypatch: pytest.MonkeyPatch, *, width: int | None = None) -> str:
    """Return the page as in a pipe, or as on a terminal of some width without colours."""
    stream = io.StringIO()
    is_terminal = width is not None
    console = Console(
        file=stream, width=width, force_terminal=is_terminal, color_system=None, highlight=False,
        soft_wrap=not is_terminal, _environ={"TERM": "xterm"},
    )  # fmt: skip
    monkeypatch.setattr(pages, "result_console", lambda: console)
    print_comparison(comparison)
    return stream.getvalue()


def test_two_finished_runs_are_held_against_each_other(tmp_path: Path) -> None:
    first = plant_run(tmp_path / "a")
    second = plant_run(tmp_path / "b", config=FAST, log=make_log(100, final=0.75), summary=FASTER)
    found = compare_runs(first, second)
    assert (found.first.state, found.second.state) == ("finished", "finished")
    assert (found.first.folder, found.first.steps, found.first.samples) == (str(first), 100, 800)
    assert [(pair.name, pair.first, pair.second) for pair in found.settings] == [
        ("precision", "fp32", "bf16"),
        ("num_workers", 0, 2),
    ]
    assert found.throughput_ratio == pytest.approx(1.4)
    assert found.training_time_ratio == pytest.approx(0.75)
    assert found.loss is not None
    assert (found.loss.from_samples, found.loss.to_samples) == (720, 800)
    assert (found.loss.first, found.loss.second) == (0.5, 0.75)
    assert found.notes == (ONE_PAIR,)
    assert parse_record(found.to_json(), RunComparison, name="the comparison") == found


def test_losses_are_compared_where_both_runs_were(tmp_path: Path) -> None:
    first = plant_run(tmp_path / "a")
    log = make_log(400, batch=4, every=5, final=0.0)
    second = plant_run(tmp_path / "b", log=log, summary={"steps": 400, "samples": 1600})
    found = compare_runs(first, second)
    assert found.loss is not None
    assert (found.loss.from_samples, found.loss.to_samples) == (720, 800)
    assert (found.loss.first_lines, found.loss.second_lines) == (1, 4)
    # Lines at 740, 760, 780 and 800 samples: steps 185, 190, 195 and 200 of 400.
    assert found.loss.second == pytest.approx(sum((400 - step) / 400 for step in (185, 190, 195, 200)) / 4)
    assert found.training_time_ratio is None
    assert "the runs are not equally long (800 and 1,600 samples)" in found.notes


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([], [(8, 1.0)], None),
        ([(8, 1.0)], [], None),
        ([(100, 1.0)], [(8, 2.0)], None),
        ([(8, 1.0)], [(8, 2.0)], (7, 8, 1.0, 2.0)),
        ([(50, 3.0), (100, 1.0)], [(10, 9.0), (60, 2.0)], (54, 60, 3.0, 2.0)),
    ],
)
def test_runs_with_few_lines(first: Any, second: Any, expected: Any) -> None:
    found = pair_losses(first, second)
    shown = None if found is None else (found.from_samples, found.to_samples, found.first, found.second)
    assert shown == expected


def test_a_killed_run_is_described_by_its_log(tmp_path: Path) -> None:
    plan = {"step_downs": (DOWN,)}
    killed = plant_run(tmp_path / "b", config=FAST, log=make_log(50, rate=200.0), plan=plan, is_killed=True)
    with (killed / "metrics.jsonl").open("a") as file:
        file.write('{"step": 60, "epoch": 1, "samp')
    found = compare_runs(plant_run(tmp_path / "a"), killed)
    side = found.second
    assert (side.state, side.steps, side.epochs, side.samples, side.loss) == ("unfinished", 50, 1, 400, 0.5)
    assert (side.samples_per_second, side.training_seconds) == (pytest.approx(200.0), pytest.approx(2.0))
    assert (side.metrics, side.best, side.peak_memory_bytes) == ({"error": 0.05}, None, None)
    assert (side.config, side.step_downs) == (DOWN.config, (DOWN,))
    assert found.throughput_ratio == pytest.approx(2.0)
    assert found.notes[0] == "b is not finished: its log goes to step 50, and its figures are from that log"
    assert found.notes[-1] == ONE_PAIR


def test_a_run_that_went_on_after_its_summary_is_described_by_its_log(tmp_path: Path) -> None:
    early = {"steps": 40, "samples": 320, "finished": False}
    found = compare_runs(plant_run(tmp_path / "a", summary=early), plant_run(tmp_path / "b"))
    assert (found.first.state, found.first.steps) == ("unfinished", 100)


def test_a_stopped_run_is_said(tmp_path: Path) -> None:
    log = make_log(100)[:4]
    early = {"steps": 40, "samples": 320, "finished": False}
    found = compare_runs(plant_run(tmp_path / "a", log=log, summary=early), plant_run(tmp_path / "b"))
    assert (found.first.state, found.first.steps) == ("stopped", 40)
    assert "a is not finished: it was stopped at step 40 and can be resumed" in found.notes


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"label": "other.py:net"}, "the targets differ (train.py:net and other.py:net)"),
        ({"fingerprint": "999999999999"}, "train.py:net was changed between the two runs"),
        ({"data_fingerprint": "999999999999"}, "they were trained on other data"),
    ],
)
def test_runs_of_different_targets_are_shown_and_said(tmp_path: Path, changes: dict[str, str], note: str) -> None:
    plan = {"target": TARGET.replace(**changes)}
    found = compare_runs(plant_run(tmp_path / "a"), plant_run(tmp_path / "b", plan=plan))
    assert found.loss is not None
    assert len(found.notes) == 2
    assert found.notes[0].startswith(note)


def test_data_that_cannot_be_told_are_not_called_other(tmp_path: Path) -> None:
    plan = {"target": TARGET.replace(data_fingerprint=None), "seed": 3}
    found = compare_runs(plant_run(tmp_path / "a"), plant_run(tmp_path / "b", plan=plan))
    assert found.notes == ("the seeds differ (0 and 3)", ONE_PAIR)


def test_lines_that_are_odd_are_passed_over(tmp_path: Path) -> None:
    good = make_log(20)
    odd: list[Any] = [
        [],
        "text",
        {"step": "5"},
        {"epoch": 1},
        {"step": -1, "samples": 8, "loss": 1.0},
        {"step": True, "samples": 8, "loss": 1.0},
        {"step": 15, "epoch": 0, "samples": 120, "loss": "low"},
        {"step": 15, "epoch": 0, "samples": 120, "loss": float("nan"), "samples_per_second": 0.0},
        {"step": 15, "epoch": 0, "error": "text"},
    ]
    run = plant_run(tmp_path / "a", log=[*odd[:-1], *good, odd[-1]], is_killed=True)
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\n[" * 3 + (run / "metrics.jsonl").read_bytes())
    found = compare_runs(run, plant_run(tmp_path / "b"))
    assert (found.first.steps, found.first.loss, found.first.metrics) == (20, 0.5, {"error": 0.05})


def test_steps_that_were_trained_again_count_once(tmp_path: Path) -> None:
    again = [*make_log(100)[:10], *make_log(100, final=2.0)[6:]]
    found = compare_runs(plant_run(tmp_path / "a", log=again, is_killed=True), plant_run(tmp_path / "b"))
    assert found.first.samples == 800
    assert found.first.training_seconds == pytest.approx(8.0)
    assert found.first.loss == 2.0
    assert found.loss is not None
    assert (found.loss.first, found.loss.first_lines) == (2.0, 1)


def test_a_run_without_a_log_has_its_summary(tmp_path: Path) -> None:
    first = plant_run(tmp_path / "a")
    (first / "metrics.jsonl").unlink()
    found = compare_runs(first, plant_run(tmp_path / "b"))
    assert (found.first.steps, found.loss) == (100, None)


def test_a_folder_without_a_run_is_said_by_name(tmp_path: Path) -> None:
    run = plant_run(tmp_path / "a")
    for other in (tmp_path / "nothing", tmp_path, run / "run.json"):
        with pytest.raises(UsageError, match="holds no run") as caught:
            compare_runs(run, other)
        assert str(other) in caught.value.message


@pytest.mark.parametrize("name", ["run.json", "summary.json"])
def test_a_damaged_file_is_said_by_name(tmp_path: Path, name: str) -> None:
    run = plant_run(tmp_path / "a")
    (run / name).write_text("{")
    with pytest.raises(AutotuneError, match=name):
        compare_runs(run, plant_run(tmp_path / "b"))


def test_runs_of_scripts_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = {"steps": None, "epochs": None}
    first = plant_run(tmp_path / "a", plan=script)
    second = plant_run(tmp_path / "b", plan=script, summary={"checkpoint": "", "guard": None, "config": None})
    for folder in (first, second):
        (folder / "run.json").rename(folder / "script.json")
        (folder / "metrics.jsonl").unlink()
    found = compare_runs(first, second)
    assert (found.first.state, found.second.steps, found.loss) == ("finished", 100, None)
    assert found.throughput_ratio == pytest.approx(1.0)
    shown = show(found, monkeypatch)
    assert "steps: a 100, b 100" in shown
    assert "planned" not in shown


# The page


def test_the_page_has_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    down = {**FASTER, "step_downs": (DOWN,), "config": DOWN.config, "skipped_steps": 2}
    first = plant_run(tmp_path / "a", plan={"origin": "baseline"})
    found = compare_runs(first, plant_run(tmp_path / "b", config=FAST, log=make_log(100, final=0.75), summary=down))
    shown = show(found, monkeypatch)
    assert shown.isascii()
    for words in (
        f"a               {first} (finished)",
        "target: a train.py:net, b the same",
        "settings from: a baseline, b profile",
        "micro_batch: a 8, b 4",
        "accumulation: a 1, b 2",
        "planned: a 100 steps, b 100 steps",
        "samples: a 800, b 800",
        "throughput: a 100 samples/s, b 140 samples/s, b to a 1.40x",
        "promised: a 110 samples/s, b 110 samples/s",
        "time in steps: a 8.0s, b 6.0s, b to a 0.75x",
        "data wait: a 25 %, b 25 %",
        "MFU: a 12 %, b -",
        "peak memory: a 1 GiB, b 1 GiB",
        "learning (loss: mean from 720 to 800 samples)",
        "loss: a 0.5000, b 0.7500, b to a +50.00%",
        "error: a 0.0500, b 0.0500, b to a +0.00%",
        "best error: a 0.0500 at step 100, b 0.0500 at step 100",
        "steps down: a none, b oom-device at step 40",
        "drift guard: a 10 checks, 0 alarms, b 10 checks, 0 alarms",
        "skipped steps: a 0, b 2",
    ):
        assert words in shown
    assert "allocator retries" not in shown
    assert shown.endswith(f"notes\n  {ONE_PAIR}\n\nin short\n  b is 1.40x faster than a; the loss of b is +50.00%\n")


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_page_fits_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    found = compare_runs(plant_run(tmp_path / "a"), plant_run(tmp_path / "b", is_killed=True))
    shown = show(found, monkeypatch, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert "None" not in shown


def test_runs_of_different_metrics_have_a_row_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    second = plant_run(tmp_path / "b", summary={"metrics": {"accuracy": 0.0, "f1": None}, "best": None})
    found = compare_runs(plant_run(tmp_path / "a"), second)
    shown = show(found, monkeypatch)
    assert "error: a 0.0500, b -, b to a -\n" in shown
    assert "accuracy: a -, b 0.0000, b to a -\n" in shown
    assert "f1: a -, b not finite, b to a -\n" in shown


# The command


def run_command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "autotune", "compare", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_command_prints_a_page_or_json(tmp_path: Path) -> None:
    plant_run(tmp_path / "a", config=PLAIN)
    plant_run(tmp_path / "b", config=FAST)
    printed = run_command(tmp_path, "a", "b")
    assert (printed.returncode, printed.stderr) == (0, "")
    assert "precision: a fp32, b bf16" in printed.stdout
    as_json = run_command(tmp_path, "a", "b", "--json")
    assert as_json.returncode == 0
    found = parse_record(as_json.stdout, RunComparison, name="stdout")
    assert found.throughput_ratio == 1.0


def test_the_command_names_what_is_no_run_in_one_line(tmp_path: Path) -> None:
    plant_run(tmp_path / "a")
    failed = run_command(tmp_path, "a", "nowhere")
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[0] == "error: nowhere holds no run"
    assert len(failed.stderr.splitlines()) == 2
    as_json = run_command(tmp_path, "a", "nowhere", "--json")
    assert json.loads(as_json.stdout)["error"]["message"] == "nowhere holds no run"
