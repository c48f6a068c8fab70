"""The final training as a command: killed while it saves, with bad checkpoints alone, with code that interferes."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from bench import Bench, Done, find_living, list_family, open_bench, wait_until
from train_world import find_differences, read_metrics, read_state

from autotune.errors import CheckpointError
from autotune.records.codec import read_record, write_record
from autotune.records.run import CheckpointManifest

pytestmark = pytest.mark.slow

WORKLOADS = Path(__file__).parents[1] / "train"

SLOW_TO_SAVE = '''
"""Takes a minute to hand over its state, once there is a file that says so."""

import os
import time
from pathlib import Path

from noisy_workload import Slow


class SlowToSave(Slow):
    def build_model(self):
        model = super().build_model()
        model.register_state_dict_post_hook(wait)
        return model


def wait(*_):
    if Path("slow").exists():
        Path("saving").touch()
        time.sleep(60)


workload = SlowToSave()
'''

INTERFERES = '''
"""Changes its own process in every step, as libraries do, and worse."""

import os
import signal
import sys

from noisy_workload import Slow


class Interferes(Slow):
    def compute_loss(self, model, batch):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.chdir("/")
        os.environ.clear()
        sys.excepthook = sys.unraisablehook = lambda *_: os._exit(7)
        return super().compute_loss(model, batch)


workload = Interferes()
'''


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    found = open_bench(tmp_path)
    shutil.copy(WORKLOADS / "noisy_workload.py", found.folder)
    return found


def train(bench: Bench, target: str, *words: str) -> Done:
    return bench.run("train", target, *words)


def has_checkpoints(run: Path, count: int) -> bool:
    return len(list(run.glob("checkpoints/step-*/manifest.json"))) >= count


def end_of(run: Path) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """Return the last state of a run, and what its lines tell but for what counts seconds."""
    keys = ("step", "samples", "loss", "error")
    return read_state(run), [tuple(line.get(key) for key in keys) for line in read_metrics(run)]


@pytest.mark.fault(
    "40",
    injected="SIGKILL while the checkpoint that SIGTERM asked for is written",
    outcome="the one before it is used; the end is bit for bit the same",
)
def test_a_kill_while_the_last_checkpoint_is_written_costs_one_interval(bench: Bench) -> None:
    (bench.folder / "slow_to_save.py").write_text(SLOW_TO_SAVE)
    target, words = "slow_to_save.py:workload", ("--epochs", "6")
    assert train(bench, target, *words, "--run-dir", "straight").status == 0
    run = bench.folder / "run"
    process = bench.start("train", target, *words, "--run-dir", "run")
    assert wait_until(lambda: has_checkpoints(run, 1)), process.poll()
    (bench.folder / "slow").touch()
    process.send_signal(signal.SIGTERM)
    assert wait_until((bench.folder / "saving").exists)
    family = list_family(process.pid)
    process.kill()
    process.communicate(timeout=60)
    assert wait_until(lambda: not find_living(family), seconds=15)
    (bench.folder / "slow").unlink()
    resumed = train(bench, target, "--resume", "--run-dir", "run")
    assert resumed.status == 0, resumed.said
    (straight, lines), (state, others) = end_of(bench.folder / "straight"), end_of(run)
    assert find_differences(straight, state) == []
    assert lines == others


def forge(checkpoint: Path, marker: Path) -> None:
    """Put a pickle that runs a command in place of a state, under a manifest that fits."""

    class Malicious:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {marker}",)

    state = checkpoint / "state.pt"
    state.write_bytes(pickle.dumps({"model": Malicious()}))
    manifest = read_record(checkpoint / "manifest.json", CheckpointManifest)
    checksum = hashlib.sha256(state.read_bytes()).hexdigest()
    write_record(checkpoint / "manifest.json", manifest.replace(bytes=state.stat().st_size, sha256=checksum))


@pytest.mark.parametrize("kind", ["malicious", "torn"])
@pytest.mark.fault(
    "36",
    injected="a pickle that runs a command in place of every state.pt, with the right checksum",
    outcome="exit 9 in one line; nothing is run",
)
@pytest.mark.fault("35", injected="every state.pt cut in half", outcome="exit 9 in one line")
def test_with_nothing_but_bad_checkpoints_a_resume_is_refused(bench: Bench, kind: str) -> None:
    assert train(bench, "noisy_workload.py:noisy", "--epochs", "2", "--run-dir", "run").status == 0
    marker = bench.folder / "executed"
    checkpoints = list((bench.folder / "run" / "checkpoints").glob("*-[0-9]*"))
    assert len(checkpoints) >= 2
    for checkpoint in checkpoints:
        state = checkpoint / "state.pt"
        if kind == "malicious":
            forge(checkpoint, marker)
        else:
            state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    done = train(bench, "noisy_workload.py:noisy", "--resume", "--run-dir", "run", "--epochs", "3")
    assert done.status == CheckpointError.exit_code, done.said
    assert sum(line.startswith("error: ") for line in done.said.splitlines()) == 1
    assert "Traceback" not in done.said
    assert not marker.exists()


@pytest.mark.fault(
    "50",
    injected="signals ignored, environment cleared, folder and hooks changed in each step of a training",
    outcome="signals are heard all the same; the end is bit for bit that of a training without",
)
def test_a_training_hears_signals_whatever_its_code_does(bench: Bench) -> None:
    (bench.folder / "interferes.py").write_text(INTERFERES)
    assert train(bench, "noisy_workload.py:slow", "--epochs", "4", "--run-dir", "straight").status == 0
    run = bench.folder / "run"
    process = bench.start("train", "interferes.py:workload", "--epochs", "4", "--run-dir", "run")
    assert wait_until(lambda: has_checkpoints(run, 1)), process.poll()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, said
    resumed = train(bench, "interferes.py:workload", "--resume", "--run-dir", "run")
    assert resumed.status == 0, resumed.said
    assert find_differences(read_state(bench.folder / "straight"), read_state(run)) == []
