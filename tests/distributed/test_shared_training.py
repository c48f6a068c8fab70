"""`autotune train --nproc-per-node 2` as a process: the run of one, resumed, killed, hanging, refused."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from autotune.train.options import TrainingOptions
from autotune.train.run import run_training

WORKLOADS = Path(__file__).with_name("shared_workloads.py")
EPOCHS = 3


@dataclass
class Place:
    """A folder with the workloads."""

    folder: Path

    def start(self, name: str, *words: str, ranks: str | None = "2", group: bool = False) -> subprocess.Popen[str]:
        several = [] if ranks is None else ["--nproc-per-node", ranks]
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune", "train", f"shared_workloads.py:{name}", *several, *words],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=group,
            # Where these tests run in the background of a shell, an interrupt is ignored.
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
        )

    def train(self, name: str, *words: str, ranks: str | None = "2") -> tuple[int, str, str]:
        """Return the exit status and what was printed."""
        with self.start(name, *words, ranks=ranks) as process:
            printed, said = process.communicate(timeout=240)
        return process.returncode, printed, said


def make_place(folder: Path) -> Place:
    shutil.copy(WORKLOADS, folder)
    return Place(folder)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


def read_lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def read_losses(run: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(run) if "loss" in line}


def read_state(run: Path) -> dict[str, Any]:
    newest = max((run / "checkpoints").glob("step-*"))
    state: dict[str, Any] = torch.load(newest / "state.pt", weights_only=True)
    return state


def flatten(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf of a state; what is timed is left out."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key != "notes":
                yield from flatten(part, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from flatten(part, f"{name}[{index}]")
    else:
        yield name, value


def find_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    pairs = zip(flatten(first), flatten(second), strict=True)
    return [
        name
        for (name, mine), (other, yours) in pairs
        if name != other or not (torch.equal(mine, yours) if isinstance(mine, torch.Tensor) else mine == yours)
    ]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Return a place whose run `straight`, of two processes with dropout, was never stopped."""
    place = make_place(tmp_path_factory.mktemp("straight"))
    status, _, said = place.train("noisy", "--epochs", str(EPOCHS), "--out", "straight")
    assert status == 0, said
    return place


@pytest.mark.slow
def test_a_resumed_run_ends_bit_for_bit_as_one_never_stopped(straight: Place) -> None:
    status, _, said = straight.train("noisy", "--steps", "6", "--out", "resumed")
    assert status == 0, said
    # As many processes as before, without a word.
    status, _, said = straight.train("noisy", "--epochs", str(EPOCHS), "--out", "resumed", "--resume", ranks=None)
    assert status == 0, said
    states = [read_state(straight.folder / name) for name in ("straight", "resumed")]
    assert states[0]["world_size"] == 2
    assert len(states[0]["others"]) == 1
    assert not torch.equal(states[0]["torch_rng"], states[0]["others"][0]["torch_rng"])  # masks of their own
    assert find_differences(*states) == []
    summary = json.loads((straight.folder / "resumed" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["samples"] == 37 * EPOCHS
    steps = [line["step"] for line in read_lines(straight.folder / "resumed") if "loss" in line]
    assert steps == sorted(set(steps))  # one process writes


@pytest.mark.slow
def test_the_loss_curve_is_that_of_one_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_training(TrainingOptions(epochs=EPOCHS, out="one"), "shared_workloads.py:counted", folder=place.folder)
    status, _, said = place.train("counted", "--epochs", str(EPOCHS), "--out", "two")
    assert status == 0, said
    assert "2 processes, each with micro batch 6, accumulation 1: effective batch 12" in said
    one, two = (read_losses(place.folder / name) for name in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
    assert one
    metrics = [
        [line["error"] for line in read_lines(place.folder / name) if "error" in line] for name in ("one", "two")
    ]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-3)


@pytest.mark.slow_cases("counted-5", "normed", "pairs")
@pytest.mark.parametrize(
    ("name", "ranks", "sentence", "hint"),
    [
        ("counted", "5", "an effective batch of 12 samples cannot be shared out evenly over 5 processes", "10 or 15"),
        ("normed", "2", "BatchNorm (2) takes its statistics from the samples of one process", "SyncBatchNorm"),
        ("pairs", "2", "the gradient of a batch is not that of its parts", "return (mean loss, count)"),
        ("counted", "two", "--nproc-per-node two: no number of processes", "gpu"),
    ],
)
def test_what_would_learn_something_else_is_refused_before_a_run_is_opened(
    place: Place, name: str, ranks: str, sentence: str, hint: str
) -> None:
    status, _, said = place.train(name, ranks=ranks)
    assert status == 2
    assert sentence in said
    assert hint in said
    assert "Traceback" not in said
    assert not (place.folder / "runs").exists()


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there_are_told(place: Place) -> None:
    status, _, said = place.train("counted", ranks="gpu")
    assert (status, "PyTorch sees no GPU here" in said) == (2, True)


@pytest.mark.slow
@pytest.mark.fault("42", injected="2, 1, 2 processes", outcome="the loss curve of one process; said")
def test_a_run_goes_on_with_another_number_of_processes(place: Place) -> None:
    status, _, said = place.train("counted", "--epochs", "6", "--out", "straight", ranks="1")
    assert status == 0, said
    for ranks, epochs in (("2", 2), ("1", 4), ("2", 6)):
        more = [] if epochs == 2 else ["--resume"]
        status, _, said = place.train("counted", "--epochs", str(epochs), "--out", "moved", *more, ranks=ranks)
        assert status == 0, said
        assert ("not bit for bit" in said) == bool(more)
    straight, moved = (read_losses(place.folder / name) for name in ("straight", "moved"))
    assert moved == {step: pytest.approx(straight[step], rel=1e-3) for step in moved}
    assert max(moved) == max(straight)


def find_rank(main: subprocess.Popen[str], rank: int) -> psutil.Process:
    for process in psutil.Process(main.pid).children(recursive=True):
        if process.environ().get("RANK") == str(rank) and "autotune" in process.cmdline():
            return process
    raise AssertionError(f"rank {rank} is not there")


def await_steps(run: Path, steps: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (run / "metrics.jsonl").exists() and max(read_losses(run), default=0) >= steps:
            return
        time.sleep(0.05)
    raise AssertionError(f"no step {steps}: {process.poll()}")


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.fault(
    "41", injected="SIGKILL to one of two processes that train together", outcome="named; fresh ones go on"
)
def test_a_killed_process_ends_the_others_and_fresh_ones_go_on(place: Place, rank: int) -> None:
    process = place.start("slow", "--epochs", "8", "--out", "run")
    await_steps(place.folder / "run", 8, process)
    processes = psutil.Process(process.pid).children(recursive=True)
    listening = [one for each in processes for one in each.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    assert {one.laddr.ip for one in listening} <= {"127.0.0.1", "::1"}
    find_rank(process, rank).kill()
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    assert f"process {rank} of 2 was killed by SIGKILL" in said
    summary = json.loads((place.folder / "run" / "summary.json").read_text())
    assert [one["action"] for one in summary["step_downs"]] == ["again"]
    assert not any(one.is_running() for one in processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "stops",
    [
        pytest.param("0:loss:6", id="the leader in a step"),
        pytest.param("1:loss:6", id="a follower in a step"),
        pytest.param("1:optimizer:4", id="a follower before a checkpoint"),
    ],
)
@pytest.mark.fault("41", injected="one of two processes that train together is stopped", outcome="named; --resume")
def test_a_hanging_process_ends_the_training_within_its_limit(
    place: Place, stops: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPS", stops)
    process = place.start("stopping", "--epochs", "3", "--out", "run", "--rank-timeout", "3s", group=True)
    try:
        _, said = process.communicate(timeout=150)
    finally:
        processes = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        for one in processes:
            one.kill()
    assert processes == []
    assert process.returncode == 5, said
    assert f"process {stops[0]} of 2 has not answered within 3 s; the training was ended" in said
    assert "go on with --resume --run-dir" in said
    assert "Traceback" not in said
    assert not [one for one in psutil.process_iter() if str(place.folder) in _read_folder(one)]
    monkeypatch.delenv("STOPS")
    status, _, said = place.train("stopping", "--epochs", "3", "--out", "run", "--resume", ranks=None)
    assert status == 0, said
    assert max(read_losses(place.folder / "run")) == 12


def _read_folder(process: psutil.Process) -> str:
    try:
        return process.cwd()
    except psutil.Error:
        return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True), (signal.SIGUSR1, False)]
)
def test_a_signal_stops_all_at_the_end_of_a_step(place: Place, number: signal.Signals, to_group: bool) -> None:
    process = place.start("slow", "--epochs", "90", "--out", "run", group=True)
    await_steps(place.folder / "run", 4, process)
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + number, said
    assert "--resume" in said
    assert "Traceback" not in said
    assert read_state(place.folder / "run")["step"] >= 4


@pytest.mark.slow
def test_a_process_without_memory_makes_the_batch_of_all_smaller(place: Place) -> None:
    status, _, said = place.train("large", "--epochs", "1", "--out", "run")
    assert status == 0, said
    summary = json.loads((place.folder / "run" / "summary.json").read_text())
    assert [one["cause"] for one in summary["step_downs"]] == ["oom-device"]
    assert summary["config"]["micro_batch_size"] == 3
    assert summary["config"]["gradient_accumulation_steps"] == 2


@pytest.mark.slow
def test_a_mistake_on_one_process_is_told_as_the_target_s(place: Place) -> None:
    status, _, said = place.train("mistaken", "--epochs", "3", "--out", "run")
    assert status == 4
    assert "process 1: shared_workloads.py:mistaken: a step raised ValueError: no such word" in said
    assert "Traceback" not in said
