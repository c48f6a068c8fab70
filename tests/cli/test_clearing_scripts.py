"""A whole search of a script that begins by clearing its working folder, `.autotune` by its path as well."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.records import Profile

COMMAND = """
import sys
from autotune.isolation import script_starter as scripts
if sys.argv.pop(1) == "copy":
    scripts.permits_overlay = lambda folder, scratch: False
elif not scripts.permits_overlay(scripts.Path.cwd(), scripts.Path(scripts.tempfile.gettempdir())):
    sys.exit(77)
from autotune.__main__ import main
main()
"""

SCRIPT = """
import shutil
shutil.rmtree(".", ignore_errors=True)
shutil.rmtree({state!r}, ignore_errors=True)
import torch
torch.manual_seed(3)
inputs = torch.randn(512, 16)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
while True:
    for x, y in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    open("log.txt", "a").write("an epoch")
"""


BUDGETS = ("2m", "6m")
"""The second where a busy machine makes the first too small."""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Yield a folder elsewhere than the project, as usual: a copy has its fence then. Sockets fit into its path."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def search(folder: Path, temporary: Path, kind: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Search for the script's settings in views of one kind."""
    command = [sys.executable, "-P", "-c", COMMAND, kind, "search", "--max-drift", "5%", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
    for budget in BUDGETS:
        words = [*command, "--budget", budget, "--", sys.executable, "train.py"]
        done = subprocess.run(
            words, cwd=folder, env=environment, capture_output=True, text=True, timeout=500, check=False
        )
        if done.returncode == 77:
            pytest.skip("this system permits no overlay")
        if "too small" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    assert not list(temporary.glob("autotune-*"))
    return done


def read_numbers(folder: Path) -> list[str]:
    """Return the numbers of the trials that have a result."""
    return sorted(path.parent.name for path in folder.glob("trials/*/result.json"))


@pytest.mark.slow
@pytest.mark.fault("F1", injected="a search of a script that removes `.autotune`", outcome="exit 0, resumed, all kept")
@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_script_that_clears_its_folder_is_searched_and_nothing_is_lost(
    tmp_path: Path, temporary: Path, kind: str
) -> None:
    work = tmp_path / "project" / "work"
    state = work / ".autotune"
    (state / "older").mkdir(parents=True)
    state.chmod(0o700)
    (state / "older" / "best.json").write_text("planted")
    (work / "train.py").write_text(SCRIPT.format(state=str(state)))
    search(work, temporary, kind)
    found = max(state.glob("*/search.json"), key=lambda path: path.stat().st_mtime).parent
    lock = (state / "lock").stat()
    numbers = read_numbers(found)
    assert len(numbers) >= 3
    assert Profile.load(work / "best.json").evidence.notes
    assert sorted(path.name for path in work.iterdir()) == [".autotune", "best.json", "report.html", "train.py"]
    again = search(work, temporary, kind, "--resume", "--json")
    assert json.loads(again.stdout)["target"] == json.loads((work / "best.json").read_text())["target"]
    assert {*numbers} <= {*read_numbers(found)}
    assert (state / "lock").stat().st_ino == lock.st_ino
    assert (state / "older" / "best.json").read_text() == "planted"
    with sqlite3.connect(found / "study.db") as study:
        assert study.execute("pragma integrity_check").fetchone() == ("ok",)
    study.close()
