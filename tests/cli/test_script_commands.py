"""The three commands on a script, as a user types them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from record_factory import make_profile
from typer.testing import CliRunner

from autotune.cli import app
from autotune.machine.hardware import read_hardware, read_software
from autotune.records import Profile, ProfileTarget, TrainConfig
from autotune.targets.launch.command import find_launch
from autotune.targets.script import script_label
from autotune.targets.source.fingerprint import fingerprint_script

SCRIPT = """
import argparse, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100000)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--status", type=int, default=0)
options = parser.parse_args()
torch.manual_seed(3)
inputs = torch.randn(512, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
loader = DataLoader(data, batch_size=options.batch_size, shuffle=True)
steps = 0
while steps < options.steps:
    for index, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y) / options.accum
        loss.backward()
        if (index + 1) % options.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if steps >= options.steps:
            break
    print(f"step {steps} loss {loss.item()!r} workers {loader.num_workers}", flush=True)
    open("log.txt", "a").write(f"{loss.item()!r}\\n")
sys.exit(options.status)
"""
SCRIPTS = Path(__file__).parents[1] / "scripts"
FLAGS = ["--batch-size", "{micro_batch_size}", "--accum", "{gradient_accumulation_steps}"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    work = tmp_path / "project" / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text(SCRIPT)
    return work


def run(folder: Path, *arguments: str, seconds: float = 200) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *arguments],
        cwd=folder,
        # `python` is found on PATH, and has to be the one that runs the tests.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def snapshot(folder: Path) -> dict[str, tuple[str, int]]:
    """Return each file of a folder, the tool's own left out, with its content and time of change."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".autotune" not in path.parts)
    return {
        str(path.relative_to(folder)): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in files
        if path.name not in ("best.json", "report.html")
    }


def save_profile(folder: Path, words: list[str], baseline: TrainConfig, **changes: object) -> None:
    launch = find_launch([sys.executable, *(word for word in words[1:] if "{" not in word)], folder=folder)
    make_profile(
        config=baseline.replace(**changes),
        baseline_config=baseline,
        target=ProfileTarget(
            label=script_label(words),
            fingerprint=fingerprint_script(launch, words, folder=folder),
            training_loaders=("TensorDataset[512] by RandomSampler",),
        ),
        hardware=read_hardware(),
        software=read_software(),
    ).save(folder / "best.json")


@pytest.mark.slow
def test_a_probe_of_a_script_says_where_its_step_goes_and_leaves_nothing(folder: Path) -> None:
    before = snapshot(folder.parent)
    done = run(folder, "probe", "--json", "--", "python", "train.py", *FLAGS)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    baseline, phases = report["target"]["baseline"], report["target"]["phases"]
    assert (baseline["micro_batch_size"], baseline["gradient_accumulation_steps"]) == (8, 1)
    assert all(phases[name] > 0 for name in ("data_wait_seconds", "forward_seconds", "backward_seconds"))
    assert report["target"]["training_loaders"] == ["TensorDataset[512] by RandomSampler"]
    assert snapshot(folder.parent) == before
    assert any("log.txt" in sentence for sentence in report["target"]["warnings"])


@pytest.mark.slow
def test_a_search_of_a_script_and_the_training_with_its_answer(folder: Path) -> None:
    before = snapshot(folder.parent)
    words = ["python", "train.py", *FLAGS]
    for budget in ("75s", "5m"):  # the second where a busy machine makes the first too small
        done = run(folder, "search", "--budget", budget, "--json", "--max-drift", "5%", "--", *words, seconds=400)
        if done.returncode != 2:
            break
    assert done.returncode == 0, done.stderr
    assert snapshot(folder.parent) == before
    profile = Profile.load(folder / "best.json")
    assert profile.target.label == script_label(words)
    assert sum(profile.evidence.trials.values()) >= 3
    assert any("log.txt" in note for note in profile.evidence.notes)
    trained = run(folder, "train", "--profile", "best.json")
    assert trained.returncode != 0 or "steps" in trained.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_search_of_what_accelerate_launches_and_the_training_with_its_answer(
    folder: Path, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setenv("HF_HOME", str(folder.parent / "hf"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    shutil.copy(SCRIPTS / "accelerated.py", folder)
    options = ["--cpu"] if processes == 1 else ["--multi_gpu", "--num_processes", str(processes)]
    words = ["accelerate", "launch", *options, "accelerated.py", "--epochs"]
    only = ["--only", "num_workers", *(["--only", "bucket_cap_mb"] if processes > 1 else [])]
    for budget in ("60s", "5m"):  # the second where a busy machine makes the first too small
        done = run(folder, "search", "--budget", budget, "--json", *only, "--", *words, "1000", seconds=400)
        if done.returncode != 2:
            break
    assert done.returncode == 0, done.stderr
    profile = Profile.load(folder / "best.json")
    assert sum(profile.evidence.trials.values()) >= 2
    trained = run(folder, "train", "--profile", "best.json", "--", *words, "1")
    assert trained.returncode == 0, trained.stderr
    assert "accuracy" in trained.stdout


def test_the_final_training_is_the_script_itself_with_the_settings_hung_on_it(folder: Path) -> None:
    words = ["python", "train.py", "--steps", "130", "--status", "3"]
    baseline = TrainConfig(micro_batch_size=8)
    save_profile(folder, words, baseline, num_workers=1, persistent_workers=True)
    plain = subprocess.run([sys.executable, *words[1:]], cwd=folder, capture_output=True, text=True, check=False)
    tuned = run(folder, "train", "--profile", "best.json", "--", *words)
    assert tuned.returncode == plain.returncode == 3
    assert "workers 1" in tuned.stdout
    # Losses bit for bit, over three epochs; the summary comes after the script's own words.
    assert tuned.stdout.replace("workers 1", "workers 0").startswith(plain.stdout + "stopped (python train.py")
    assert "130 steps" in tuned.stderr
    assert "of the expected 1,300" in tuned.stderr
    assert "autotune: trains with workers=1" in tuned.stderr
    assert len((folder / "log.txt").read_text().splitlines()) == 6
    assert sorted(path.name for path in folder.glob("runs/train-001/*")) == ["script.json", "summary.json"]


@pytest.mark.slow
def test_the_summary_alone_is_on_standard_output_with_json(folder: Path) -> None:
    words = ["python", "train.py", "--steps", "20"]
    save_profile(folder, words, TrainConfig(micro_batch_size=8), precision="bf16")
    done = run(folder, "train", "--profile", "best.json", "--json", "--", *words)
    summary = json.loads(done.stdout)
    assert (summary["finished"], summary["steps"], summary["config"]["precision"]) == (True, 20, "bf16")
    assert "step 20" in done.stderr


@pytest.mark.slow
def test_placeholders_are_filled_in_for_the_final_training(folder: Path) -> None:
    words = ["python", "train.py", "--steps", "5", *FLAGS]
    save_profile(folder, words, TrainConfig(micro_batch_size=8), micro_batch_size=4, gradient_accumulation_steps=2)
    done = run(folder, "train", "--profile", "best.json", "--json", "--", *words)
    assert done.returncode == 0, done.stderr
    config = json.loads(done.stdout)["config"]
    assert (config["micro_batch_size"], config["gradient_accumulation_steps"]) == (4, 2)
    # Another command is another target: it would be measured again first.
    missing = run(
        folder, "train", "--profile", "best.json", "--skip-verification", "--", "python", "train.py", "--steps", "5"
    )
    assert missing.returncode == 7
    assert "the command has no {micro_batch_size}" in missing.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train", "--profile", "best.json", "--", "python", "other.py"], 7, "the profile was measured on"),
        (
            ["train", "--profile", "best.json", "--steps", "3", "--", "python", "train.py"],
            2,
            "--steps is for a workload",
        ),
        (["search", "--", "python", "missing.py"], 2, "missing.py"),
        (["search", "--", "python", "train.py", "--lr", "{rate}"], 2, "{rate}"),
        (["search", "--knob", "lr=0.1,0.2", "--", "python", "train.py"], 2, "lr"),
        (["search", "--knob", "lr=0.1,0.2", "a.py:b"], 2, "--knob is for a script"),
        (["search", "--metric-key", "acc", "--", "python", "train.py"], 2, "--direction"),
        (["search", "--direction", "maximize", "a.py:b"], 2, "--direction is for a script"),
        (["search", "--", "bash", "train.sh"], 2, "bash"),
        pytest.param(
            ["probe", "--", "python", "train.py", "--no-such-flag"], 4, "exit status 2", marks=pytest.mark.slow
        ),
        pytest.param(["probe", "--", "python", "train.py", "--steps", "2"], 4, "too few", marks=pytest.mark.slow),
    ],
)
def test_what_cannot_work_is_said_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(folder)
    shutil.copy(folder / "train.py", folder / "other.py")
    if arguments[0] == "train":
        save_profile(folder, ["python", "train.py"], TrainConfig(micro_batch_size=8))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_interpreter_without_the_package_is_named(folder: Path) -> None:
    bare = folder / "bare" / "python"
    bare.parent.mkdir()
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    done = run(folder, "probe", "--", "./bare/python", "train.py")
    assert done.returncode == 2
    assert "cannot import torch" in done.stderr
    assert "-m pip install torch" in done.stderr
