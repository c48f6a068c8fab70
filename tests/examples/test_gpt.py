from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.errors import TargetError
from autotune.targets.workload import Metric, check_workload

FILE = Path(__file__).parents[2] / "examples" / "gpt" / "workload.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("gpt_example", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt_example"] = module  # where dataclasses look for the annotations
    spec.loader.exec_module(module)
    return module


gpt = load_example()
workload = gpt.workload
WINDOW_LENGTH = gpt.WINDOW_LENGTH

SOURCE_LINE = b"for index, value in enumerate(values):\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two hundred files of 4 kB, and some that do not count."""
    for number in range(200):
        path = tmp_path / ("package" if number % 2 else ".") / f"module_{number}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(SOURCE_LINE * 100 + f"# {number}\n".encode())
    for name in ("site-packages", "__pycache__", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "skipped.py").write_bytes(SOURCE_LINE)
    (tmp_path / "notes.txt").write_text("not Python")
    (tmp_path / "dangling.py").symlink_to(tmp_path / "nowhere")
    return tmp_path


def train_briefly(model: nn.Module, *, steps: int, batch_size: int = 16) -> list[float]:
    optimizer = workload.build_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    dataset = workload.train_dataset()
    losses = []
    for step in range(steps):
        samples = [dataset[(step * batch_size + k) * 37 % len(dataset)] for k in range(batch_size)]
        batch = tuple(torch.stack(part) for part in zip(*samples, strict=True))
        loss = workload.compute_loss(model, (batch[0], batch[1]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), workload.gradient_clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return workload.evaluate(model.eval(), torch.device("cpu"))


def test_it_is_a_workload() -> None:
    loaded = check_workload(workload, label="gpt", fingerprint="0")
    assert loaded.metrics == (Metric(name="bits_per_byte", direction="minimize"),)
    assert loaded.baseline.effective_batch_size == 32
    assert loaded.gradient_clip_norm == 1.0


def test_the_split_is_disjoint_and_repeatable(folder: Path) -> None:
    train, validation = gpt.split_files(folder)
    assert not set(train) & set(validation)
    assert len(train) + len(validation) == 200
    assert 8 <= len(validation) <= 35
    assert gpt.split_files(folder) == (train, validation)


def test_the_split_depends_on_relative_paths_only(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "lib"
    folder.rename(elsewhere)
    moved = [[path.relative_to(elsewhere) for path in part] for part in gpt.split_files(elsewhere)]
    elsewhere.rename(folder)
    assert moved == [[path.relative_to(folder) for path in part] for part in gpt.split_files(folder)]


def test_a_new_file_moves_no_other_between_the_parts(folder: Path) -> None:
    train, validation = gpt.split_files(folder)
    (folder / "added.py").write_bytes(SOURCE_LINE)
    train_after, validation_after = gpt.split_files(folder)
    assert set(train) <= set(train_after)
    assert set(validation) <= set(validation_after)


def test_the_standard_library_is_enough_and_read_once() -> None:
    corpus = workload._read_corpus()
    assert workload._read_corpus() is corpus
    assert 2**17 < len(corpus.train) <= gpt._TRAIN_BYTES
    assert 2**15 < len(corpus.validation) <= gpt._VALIDATION_BYTES


def test_too_little_source_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_bytes(SOURCE_LINE)
    with pytest.raises(TargetError, match="too little of it in") as caught:
        gpt.GptWorkload(tmp_path).train_dataset()
    assert "GptWorkload" in caught.value.hint


@pytest.mark.parametrize("name", ["missing", "python311.zip"])
def test_a_standard_library_that_is_no_folder_is_said_plainly(tmp_path: Path, name: str) -> None:
    (tmp_path / "python311.zip").write_bytes(b"PK\x05\x06" + bytes(18))
    with pytest.raises(TargetError, match=name):
        gpt.GptWorkload(tmp_path / name).train_dataset()


def test_an_unreadable_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(TargetError, match=r"cannot read .*module_\d+\.py: Permission denied"):
        gpt.GptWorkload(folder).train_dataset()


def test_windows_are_adjacent_and_targets_are_one_byte_further() -> None:
    windows = gpt.ByteWindows(torch.arange(3 * WINDOW_LENGTH + 1, dtype=torch.uint8))
    assert len(windows) == 3
    for index in range(3):
        tokens, targets = windows[index]
        assert tokens.dtype == torch.int64
        assert tokens.tolist() == list(range(index * WINDOW_LENGTH, (index + 1) * WINDOW_LENGTH))
        assert torch.equal(targets, tokens + 1)
    with pytest.raises(IndexError):
        windows[3]


def test_samples_draw_no_random_numbers() -> None:
    before = torch.get_rng_state()
    dataset = workload.train_dataset()
    first = [dataset[index] for index in (0, 7, len(dataset) - 1)]
    assert torch.equal(before, torch.get_rng_state())
    again = [dataset[index] for index in (0, 7, len(dataset) - 1)]
    assert all(torch.equal(a, b) for one, two in zip(first, again, strict=True) for a, b in zip(one, two, strict=True))


def test_weights_come_from_the_global_generator() -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        weights.append(workload.build_model().state_dict()["head.weight"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_position_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    model = gpt.ByteGPT().eval()
    tokens = torch.randint(256, (2, WINDOW_LENGTH))
    changed = tokens.clone()
    changed[:, 40:] = 0
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_only_matrices_decay_and_no_parameter_is_forgotten() -> None:
    model = workload.build_model()
    decaying, plain = workload.build_optimizer(model).param_groups
    assert decaying["weight_decay"] > 0
    assert plain["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decaying["params"])
    assert all(parameter.ndim < 2 for parameter in plain["params"])
    assert len(decaying["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_the_learning_rate_rises_then_falls_to_its_floor() -> None:
    factors = [gpt.learning_rate_factor(step, total_steps=1000) for step in range(1200)]
    peak = factors.index(1.0)
    assert 0 < factors[0] <= 0.05
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak + 1 :] == sorted(factors[peak + 1 :], reverse=True)
    assert factors[1000] == factors[-1] == pytest.approx(0.1)


def test_the_schedule_lasts_one_epoch_of_optimizer_steps() -> None:
    optimizer = workload.build_optimizer(workload.build_model())
    scheduler = workload.build_scheduler(optimizer)
    steps = len(workload.train_dataset()) // 32
    assert scheduler.lr_lambdas[0](steps) == pytest.approx(0.1)
    assert scheduler.lr_lambdas[0](steps // 2) > 0.4


@pytest.mark.slow
def test_it_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "_EVALUATED_WINDOWS", 96)
    torch.manual_seed(0)
    model = workload.build_model()
    before = evaluate(model)
    assert 7.8 < before < 8.4
    losses = train_briefly(model.train(), steps=25)
    assert losses[0] == pytest.approx(before * math.log(2), abs=0.2)
    assert losses[-1] < 0.7 * losses[0]
    assert evaluate(model) < 0.7 * before


def test_evaluation_weighs_every_window_alike(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    small = gpt.GptWorkload(folder)
    monkeypatch.setattr(gpt, "_EVALUATED_WINDOWS", 40)
    torch.manual_seed(0)
    model = nn.Embedding(256, 256).requires_grad_(False)
    text = torch.frombuffer(bytearray(b"\0".join([*_texts(gpt.split_files(folder)[1]), b""])), dtype=torch.uint8)
    windows = gpt.ByteWindows(text)
    chosen = range(0, len(windows), math.ceil(len(windows) / 40))
    assert len(chosen) % 32 != 0  # the last batch is short
    alone = [float(small.compute_loss(model, (x[None], y[None]))) for x, y in (windows[index] for index in chosen)]
    bits = small.evaluate(model, torch.device("cpu"))
    assert bits == pytest.approx(sum(alone) / len(alone) / math.log(2), rel=1e-5)
    assert bits == small.evaluate(model, torch.device("cpu"))


def _texts(paths: list[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]
