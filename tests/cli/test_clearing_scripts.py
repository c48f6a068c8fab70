"""A whole search of a script that begins by clearing its working folder, `.autotune` by its path as well."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records import Profile

COMMAND = """
import sys
from autotune.trial import scripts
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


def run(folder: Path, kind: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    temporary = folder.parents[1] / "temporary"  # elsewhere than the project, as usual: a copy has its fence then
    temporary.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMAND, kind, "search", *arguments, "--", sys.executable, "train.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("this system permits no overlay")
    return done


def read_numbers(search: Path) -> list[str]:
    """Return the numbers of the trials that have a result."""
    return sorted(path.parent.name for path in search.glob("trials/*/result.json"))


@pytest.mark.slow
@pytest.mark.fault("F1", injected="a search of a script that removes `.autotune`", outcome="exit 0, resumed, all kept")
@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_script_that_clears_its_folder_is_searched_and_nothing_is_lost(tmp_path: Path, kind: str) -> None:
    work = tmp_path / "project" / "work"
    state = work / ".autotune"
    (state / "older").mkdir(parents=True)
    state.chmod(0o700)
    (state / "older" / "best.json").write_text("planted")
    (work / "train.py").write_text(SCRIPT.format(state=str(state)))
    done = run(work, kind, "--budget", "90s", "--max-drift", "5%")
    assert done.returncode == 0, done.stderr
    (search,) = (path.parent for path in state.glob("*/search.json"))
    lock = (state / "lock").stat()
    numbers = read_numbers(search)
    assert len(numbers) >= 3
    assert Profile.load(work / "best.json").evidence.notes
    assert sorted(path.name for path in work.iterdir()) == [".autotune", "best.json", "train.py"]
    again = run(work, kind, "--budget", "75s", "--max-drift", "5%", "--resume", "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["target"] == json.loads((work / "best.json").read_text())["target"]
    assert {*numbers} <= {*read_numbers(search)}
    assert (state / "lock").stat().st_ino == lock.st_ino
    assert (state / "older" / "best.json").read_text() == "planted"
    with sqlite3.connect(search / "study.db") as study:
        assert study.execute("pragma integrity_check").fetchone() == ("ok",)
    study.close()
