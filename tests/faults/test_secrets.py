"""Secrets in the environment and in a script's command reach the script, and no file of ours."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_factory import make_spec, make_state, make_target

from autotune.errors import UsageError
from autotune.isolation.runner import TrialRunner
from autotune.records import Profile, TrainConfig, read_record
from autotune.records.run import RunPlan
from autotune.records.secrets import MASK
from autotune.records.trial import Target, TrialSpec, TrialStatus
from autotune.search.store.folder import create_search_folder, find_search_folder
from autotune.search.store.seal import seal_search
from autotune.targets.script import read_script, script_label
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.train.settings.target import resolve_training_target

TOKEN = "tkPLANTEDfirst7391"
USER_INFO = "me:pwPLANTEDsecond2846"
KEY = "kyPLANTEDthird5127"
ENVIRONMENT = "evPLANTEDfourth8263"
PLANTED = ("PLANTEDfirst", "PLANTEDsecond", "PLANTEDthird", "PLANTEDfourth")

WORDS = ["--token", TOKEN, f"--wandb-key={KEY}", "--url", f"https://{USER_INFO}@host/data"]

DIGEST = hashlib.sha256(" ".join([TOKEN, KEY, WORDS[-1], ENVIRONMENT]).encode()).hexdigest()

SCRIPT = f"""
import argparse, hashlib, os, sys
import torch
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name in ("--token", "--wandb-key", "--url"):
    parser.add_argument(name)
parser.add_argument("--steps", type=int, default=100000)
options = parser.parse_args()
given = " ".join([options.token, options.wandb_key, options.url, os.environ["SERVICE_TOKEN"]])
assert hashlib.sha256(given.encode()).hexdigest() == {DIGEST!r}
assert "AUTOTUNE_HIDDEN_WORDS" not in os.environ
torch.manual_seed(3)
inputs = torch.randn(512, 16)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(data, batch_size=8, shuffle=True)
steps = 0
while steps < options.steps:
    for x, y in loader:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        if steps >= options.steps:
            break
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("home", "tmp", "work"):
        (tmp_path / name).mkdir()
    (tmp_path / "work" / "train.py").write_text(SCRIPT)
    return tmp_path / "work"


def surroundings(folder: Path) -> dict[str, str]:
    """Return an environment whose home and temporary folder are the test's own, with a secret in it."""
    return {
        **os.environ,
        "HOME": str(folder.parent / "home"),
        "XDG_CACHE_HOME": str(folder.parent / "home" / ".cache"),
        "TMPDIR": str(folder.parent / "tmp"),
        "SERVICE_TOKEN": ENVIRONMENT,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *arguments],
        cwd=folder,
        env=surroundings(folder),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def find_planted(folder: Path) -> Iterator[str]:
    """Yield each file of a folder, its name included, in which one of the planted secrets is."""
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        for planted in PLANTED:
            if planted in path.name or planted.encode() in content:
                yield f"{path}: {planted}"


def make_script(folder: Path, *words: str) -> Target:
    script = read_script((sys.executable, "train.py", *words))
    return make_target(script_label(script.command), folder, script=script)


def make_script_spec(folder: Path, *words: str) -> TrialSpec:
    config = TrainConfig(num_threads=1, optimizer_implementation="for-loop")
    return make_spec(
        config,
        number=0,
        purpose="quality",
        target=make_script(folder, *words),
        baseline=config,
        device="cpu",
        quality_steps=3,
        time_limit_seconds=120.0,
    )


@pytest.mark.fault("F16", injected="tokens in the command of a trial", outcome="the script has them, no file does")
def test_a_trial_is_given_the_secrets_of_its_command_and_writes_none(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVICE_TOKEN", ENVIRONMENT)
    with TrialRunner(folder / "trials", warm=False) as runner:
        result = runner(make_script_spec(folder, *WORDS))
    assert (result.status, result.error) == (TrialStatus.COMPLETED, "")
    assert result.spec.target.script is not None
    assert MASK in result.spec.target.script.command
    assert [*find_planted(folder / "trials")] == []


@pytest.mark.fault("F16", injected="a script that prints its token and fails", outcome="*** in its error")
def test_an_error_that_tells_the_arguments_is_kept_without_secrets(folder: Path) -> None:
    (folder / "train.py").write_text("import sys\nraise ValueError('bad arguments: ' + ' '.join(sys.argv))\n")
    with TrialRunner(folder / "trials", warm=False) as runner:
        result = runner(make_script_spec(folder, *WORDS))
    assert "bad arguments: train.py --token ***" in result.error
    told = [line for line in find_planted(folder / "trials") if "log.txt" not in line]  # the script's own words
    assert told == []


@pytest.mark.fault("F16", injected="another token when a search goes on", outcome="it is the same search")
def test_another_secret_is_the_same_target(folder: Path) -> None:
    first, second = make_script(folder, "--token", "one1one"), make_script(folder, "--token", "two2two")
    other = make_script(folder, "--steps", "3")
    assert first.spec == second.spec
    assert fingerprint_target(first) == fingerprint_target(second) != fingerprint_target(other)
    assert first.model_dump() == second.model_dump() != other.model_dump()


@pytest.mark.fault("F16", injected="train without the command that had a secret", outcome="asked for it, exit 2")
def test_a_remembered_command_without_its_secrets_is_asked_for(folder: Path) -> None:
    for words in ((), tuple(WORDS)):
        target = make_script(folder, *words)
        search = create_search_folder(folder, target.spec)
        search.write_state(make_state(target=target))
        assert seal_search(search)
        if not words:
            assert resolve_training_target(None, folder).origin == "search"
            for state in folder.glob(".autotune/*/search.json"):
                os.utime(state, (0, 0))
    with pytest.raises(UsageError, match=r"has no secrets in its records: .* --token '\*\*\*'") as caught:
        resolve_training_target(None, folder)
    assert "name the command again" in caught.value.hint
    named = make_script(folder, *WORDS).script
    assert resolve_training_target(named, folder).target.script == named


@pytest.mark.slow
@pytest.mark.fault("F16", injected="tokens in the command of a training", outcome="none in runs/, files of mode 0600")
def test_a_training_writes_no_secret_and_no_file_that_others_read(folder: Path) -> None:
    done = run(folder, "train", "--", "python", "train.py", *WORDS, "--steps", "20")
    assert done.returncode == 0, done.stderr
    plan = read_record(folder / "runs/train-001/script.json", RunPlan)
    assert "--token '***' '--wandb-key=***' --url 'https://***@host/data'" in plan.target.label
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("runs/*/*.json")} == {0o600}
    assert [*find_planted(folder.parent)] == []
    assert not any(planted in done.stdout + done.stderr for planted in PLANTED)


@pytest.mark.slow
@pytest.mark.fault("F16", injected="tokens in the environment and in a search's command", outcome="in no file at all")
def test_a_search_a_training_and_a_report_write_no_secret(folder: Path) -> None:
    command = ["--", "python", "train.py", *WORDS]
    done = run(folder, "probe", *command)
    assert done.returncode == 0, done.stderr
    for options in ([], ["--resume"]):
        done = run(folder, "search", "--budget", "75s", "--max-drift", "5%", *options, *command)
        assert done.returncode in (0, 3), done.stderr
    assert MASK in Profile.load(folder / "best.json").target.label
    place = find_search_folder(folder)
    assert place is not None
    assert stat.S_IMODE(place.path.stat().st_mode) == 0o700
    trained = run(folder, "train", "--profile", "best.json", *command, "--steps", "20")
    assert trained.returncode == 0, trained.stderr
    forgotten = run(folder, "train", "--profile", "best.json")
    assert forgotten.returncode == 2
    assert "name the command again" in forgotten.stderr
    assert run(folder, "report").returncode == 0
    assert [*find_planted(folder.parent)] == []
