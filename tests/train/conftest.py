from __future__ import annotations

import sys
from pathlib import Path

import pytest
from train_world import Workplace, open_workplace


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a target puts its folder there
    return open_workplace(tmp_path)
