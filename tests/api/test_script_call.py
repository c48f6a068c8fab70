"""A script that is trained from Python."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import autotune
from autotune.errors import ProfileError, TargetError, UsageError

SCRIPT = """
import sys
import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for batch in torch.utils.data.DataLoader(torch.randn(40, 3), batch_size=8):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_a_script_is_trained_to_its_end(folder: Path) -> None:
    said: list[str] = []
    callbacks = autotune.TrainingCallbacks(say=said.append)
    summary = autotune.run_training(None, [sys.executable, "train.py", 0], folder=folder, callbacks=callbacks)
    assert (summary.finished, summary.steps) == (True, 5)
    assert Path(summary.folder).parent == folder / "runs"
    assert repr(summary).startswith("<TrainingSummary finished after 5 steps, loss ")
    assert any("5 steps" in one for one in said)


@pytest.mark.slow
def test_a_script_that_fails_is_our_error(folder: Path) -> None:
    with pytest.raises(TargetError, match=r"train\.py 3 ended with exit status 3"):
        autotune.run_training(None, f"{sys.executable} train.py 3", folder=folder)


def test_what_only_its_own_command_can_set_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--epochs is for a workload"):
        autotune.run_training(autotune.TrainingOptions(epochs=3), [sys.executable, "train.py", "0"], folder=folder)
    with pytest.raises(ProfileError, match="there is no answer"):
        autotune.run_training("best.json", [sys.executable, "train.py", "0"], folder=folder)
