"""What of the user's own objects is put back: a class counts as the user's wherever its file's module is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from autotune.drift.record.object_state import snapshot_objects
from autotune.targets.load import load_workload

SOURCE = """
class Helper:
    def __init__(self): self.calls = 0

class Training:
    def __init__(self): self.helper = Helper()
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def compute_loss(self, model, batch): ...

workload = Training()
"""


@pytest.fixture(autouse=True)
def restored_imports() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]


@pytest.mark.parametrize("file", ["owned_train.py", "random.py"])
def test_a_helper_of_the_users_is_put_back_whatever_its_file_is_called(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_text(SOURCE)
    workload = load_workload(f"{file}:workload", folder=tmp_path).workload
    back = list(snapshot_objects(nn.Linear(1, 1), workload, ()))
    workload.helper.calls = 3  # type: ignore[attr-defined]
    for revert_knobs in back:
        revert_knobs()
    assert workload.helper.calls == 0  # type: ignore[attr-defined]
