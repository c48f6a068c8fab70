from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.probe import probe
from autotune.lock import Holder
from autotune.records import Profile
from autotune.records.codec import read_record
from autotune.search.store.folder import lock_searches

COMMAND = [sys.executable, "-P", "-m", "autotune"]


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=900,  # against a hang alone: a budget grows with how busy the machine is
        check=False,
    )


def test_without_a_command_the_help_is_shown(tmp_path):
    shown = run(folder=tmp_path)
    for name in ("probe", "search", "train", "compare", "export", "report"):
        assert name in shown.stdout + shown.stderr


def test_the_version_names_what_matters(tmp_path):
    shown = run("--version", folder=tmp_path)
    assert shown.returncode == 0
    assert "torch" in shown.stdout
    assert "optuna 5" in shown.stdout


@pytest.mark.fault("49", injected="--budget 20, 5s", outcome="exit 2, one line with what to do")
def test_a_wrong_argument_is_one_line_with_what_to_do(tmp_path):
    shown = run("search", "--budget", "20", folder=tmp_path)
    assert shown.returncode == 2
    assert "--budget '20' is not a duration with a unit" in shown.stderr
    assert "20m or 20s?" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert shown.stdout == ""


def test_errors_are_json_too(tmp_path):
    shown = run("search", "--budget", "20", "--json", folder=tmp_path)
    assert shown.returncode == 2
    error = json.loads(shown.stdout)["error"]
    assert error["code"] == 2
    assert error["kind"] == "UsageError"
    assert "20m or 20s?" in error["hint"]


WORKLOAD = '''
import torch
from torch import nn


class Toy:
    """A tiny regression."""

    metric = ("error", "minimize")

    def build_model(self):
        return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 1))

    def build_optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self):
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 64, generator=generator)
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))

    def compute_loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def evaluate(self, model, device):
        inputs = torch.ones(8, 64)
        return float(nn.functional.mse_loss(model(inputs.to(device)), inputs.sum(1, keepdim=True).to(device)))


workload = Toy()
'''


def test_the_three_commands_in_order_in_one_folder(tmp_path):
    """The main job as a user runs it: settings in pyproject.toml, no argument but the budget and the profile."""
    (tmp_path / "toy.py").write_text(WORKLOAD)
    settings = '[tool.autotune]\ntarget = "toy.py:workload"\n'
    (tmp_path / "pyproject.toml").write_text(settings)

    probed = run("probe", "--json", folder=tmp_path)
    assert probed.returncode == 0, probed.stderr
    report = json.loads(probed.stdout)
    assert report["target"]["label"] == "toy.py:workload"
    # Enough on this machine as busy as it is now, which also decides how late the last process may end.
    budget = round(max(20, 1.5 * report["elapsed_seconds"]))
    (tmp_path / "pyproject.toml").write_text(f'{settings}budget = "{budget}s"\n')

    searched = run("search", folder=tmp_path)
    assert searched.returncode == 0, searched.stderr
    assert "\r" not in searched.stderr
    assert "\x1b" not in searched.stderr + searched.stdout
    assert "best.json written; " in searched.stderr
    profile = Profile.load(tmp_path / "best.json")
    assert profile.one_off.search_seconds <= budget + 2 + report["elapsed_seconds"] / 5
    assert profile.verdict in ("improved", "keep", "inconclusive")

    trained = run("train", "--profile", "best.json", "--steps", "20", "--json", folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    summary = json.loads(trained.stdout)
    assert summary["steps"] == 20
    assert summary["metrics"]["error"] is not None
    assert len((Path(summary["folder"]) / "metrics.jsonl").read_text().splitlines()) >= 3

    exported = run("export", "--profile", "best.json", "--to", "torch", folder=tmp_path)
    assert exported.returncode == 0
    compile(exported.stdout, "exported.py", "exec")

    reported = run("report", folder=tmp_path)
    assert reported.returncode == 0
    assert "toy.py:workload" in (tmp_path / "report.html").read_text()
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    assert run("report", "-o", "mine.html", folder=tmp_path).returncode == 2  # what is not ours stays


@pytest.mark.fault("F18", injected="a probe beside a running search", outcome="one line says that both are disturbed")
def test_a_probe_beside_a_search_says_that_its_figures_are_disturbed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autotune.probe.run.run_machine_probe", lambda **_: pytest.fail("probed", pytrace=False))

    def probe_and_read() -> str:
        with pytest.raises(pytest.fail.Exception, match="probed"):
            probe()
        return capsys.readouterr().err

    assert probe_and_read() == ""
    with lock_searches(tmp_path):
        started = read_record(tmp_path / ".autotune/holder.json", Holder).started
        assert probe_and_read() == (
            f"warning: a search is at work in this folder (process {os.getpid()} on {socket.gethostname()}, since "
            f"{started}): each disturbs the figures of the other\n"
        )


@pytest.mark.slow
def test_a_probe_without_a_target_is_about_the_machine(tmp_path):
    shown = run("probe", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("machine")
    assert "GFLOP/s" in shown.stdout
    assert "autotune probe demo" in shown.stdout
    assert "report: .autotune/probe.json" in shown.stderr
    again = run("probe", "--json", folder=tmp_path)
    report = json.loads(again.stdout)
    assert report == json.loads((tmp_path / ".autotune/probe.json").read_text())
    assert "target" not in report
    assert report["ceilings"]["matmul"]


@pytest.mark.slow
@pytest.mark.fault(
    "33", injected="a file in place of .autotune", outcome="probed and printed; not saved, and that is said"
)
def test_a_report_that_cannot_be_saved_is_printed_all_the_same(tmp_path):
    (tmp_path / ".autotune").write_text("not a folder")
    shown = run("probe", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["ceilings"]
    assert "could not be saved" in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
@pytest.mark.fault("48", injected="autotune probe | head -1", outcome="no traceback")
def test_a_closed_pipe_is_no_error(tmp_path):
    (tmp_path / "toy.py").write_text(WORKLOAD)
    command = " ".join([*COMMAND, "probe", "toy.py:workload", "|", "head", "-1"])
    shown = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert shown.stdout.startswith("toy.py:workload")
    assert "Traceback" not in shown.stderr
    assert "BrokenPipe" not in shown.stderr
