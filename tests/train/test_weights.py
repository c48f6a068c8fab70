"""The weights of a finished training as safetensors: the best ones, as the model itself loads them."""

from __future__ import annotations

import importlib.util
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from noisy_workload import Noisy
from torch import nn
from train_world import Workplace

from autotune.engine.loop import Training
from autotune.targets import load
from autotune.train.loop import session
from autotune.train.runs.weights import write_weights


def load_state(checkpoint: str | Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(Path(checkpoint) / "state.pt", weights_only=True)
    return state


def write(folder: Path, monkeypatch: pytest.MonkeyPatch, **state: Any) -> tuple[Path | None, list[str]]:
    """Return the file that is made of a checkpoint with some state, and what was warned of."""
    said: list[str] = []
    monkeypatch.setattr("autotune.train.runs.weights.read_verified", lambda _path: {"averaged": None, **state})
    return write_weights(folder / "best-00000010", folder, said.append), said


def test_a_finished_training_leaves_its_best_weights(workplace: Workplace) -> None:
    from safetensors.torch import load_model

    workplace.save_profile()
    summary = workplace.train(epochs=3, out="run")
    assert Path(summary.weights) == workplace.folder / "run" / "model.safetensors"
    model = Noisy().build_model()
    load_model(model, summary.weights)
    assert summary.best is not None
    best = load_state(summary.best.checkpoint)["model"]
    assert all(torch.equal(value, best[name]) for name, value in model.state_dict().items())
    assert not [*(workplace.folder / "run").glob(".tmp-*")]
    assert not workplace.said


def test_weights_are_read_where_they_lie_when_the_training_is_gone(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[weakref.ref[Training]] = []
    seen: list[tuple[bool, bool]] = []
    load = torch.load

    def build(*parts: Any, **more: Any) -> Training:
        training = Training(*parts, **more)
        training.itself = training  # type: ignore[attr-defined]
        trainings.append(weakref.ref(training))
        return training

    def spy(file: Any, **options: Any) -> Any:
        if isinstance(file, Path):
            seen.append((options["mmap"], trainings[-1]() is not None))
        return load(file, **options)

    monkeypatch.setattr(session, "Training", build)
    monkeypatch.setattr(torch, "load", spy)
    workplace.save_profile()
    workplace.train(epochs=1, out="run")
    workplace.train(epochs=2, out="run", resume=True)
    assert seen == [(True, False), (False, True), (True, False)]


def test_a_stopped_training_leaves_none(workplace: Workplace) -> None:
    workplace.save_profile()
    summary = workplace.train(epochs=3, out="run", stop=lambda: True)
    assert (summary.finished, summary.weights) == (False, "")
    assert not (workplace.folder / "run" / "model.safetensors").exists()


def test_without_the_package_nothing_changes(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "safetensors" else plain(name))
    workplace.save_profile()
    summary = workplace.train(steps=2, out="run")
    assert (summary.finished, summary.weights, workplace.said) == (True, "", [])
    assert not (workplace.folder / "run" / "model.safetensors").exists()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def test_shared_tensors_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_model

    model, other = Tied(), Tied()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)  # which keeps them shared
    file, said = write(tmp_path, monkeypatch, model=state)
    assert (file, said) == (tmp_path / "model.safetensors", [])
    with safe_open(file, framework="pt") as opened:
        assert len([*opened.keys()]) == 1
    load_model(other, str(file))
    assert torch.equal(other.head.weight, model.embedding.weight)


def test_an_average_is_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    averaged = {"n_averaged": torch.tensor(3), "module.weight": torch.ones(2)}
    file, _ = write(tmp_path, monkeypatch, model={"weight": torch.zeros(2)}, averaged=averaged)
    assert file is not None
    assert {name: value.tolist() for name, value in load_file(file).items()} == {"weight": [1.0, 1.0]}


def test_names_are_those_of_the_users_own_module(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import load_file

    module = sys.modules["noisy_workload"]
    monkeypatch.setattr(module.Noisy, "weights_prefix", "0.", raising=False)
    monkeypatch.setattr(load, "_import_module", lambda *_asked, **_named: module)
    workplace.save_profile()
    summary = workplace.train(steps=1, out="run")
    assert sorted(load_file(summary.weights)) == ["3.bias", "3.weight", "bias", "weight"]


def test_what_cannot_be_written_is_said_and_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, said = write(tmp_path, monkeypatch, model={"weight": torch.zeros(2), "extra": "text"})
    assert file is None
    assert said[0].startswith(f"{tmp_path / 'model.safetensors'} was not written: ")
    assert said[0].endswith(f"the weights are in {tmp_path / 'best-00000010'}")
    assert [*tmp_path.iterdir()] == []
    gone: list[str] = []
    monkeypatch.undo()
    assert write_weights(tmp_path / "best-00000010", tmp_path, gone.append) is None
    assert "is not complete" in gone[0]
