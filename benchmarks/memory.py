"""How well the probe predicts the peak memory of trainings it has not run: one table, on the CPU.

    fresh process: look_at_memory ── a line for each mode       fresh process each: three steps ── true peak (VmHWM)

    python benchmarks/memory.py [--only NAME ...] [--factors 2 4 8] [--json FILE]

A training runs alone in its process, at two, four and eight times the baseline's micro batch in every mode that was
predicted. The whole table takes about twenty minutes on two CPU cores, and 4 GiB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, TensorDataset

from autotune.engine.activation_checkpointing import can_checkpoint
from autotune.engine.loop import Training, backend_settings
from autotune.measure.memory import peak_host_bytes, resident_bytes
from autotune.probe.memory.look import look_at_memory
from autotune.probe.memory.workload import WorkloadMemory
from autotune.records.config import Precision, TrainConfig
from autotune.records.facts import MemoryFacts
from autotune.targets.load import load_workload

CPU = torch.device("cpu")
LIMIT_BYTES = 8 * 2**30
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")
STEPS = 3
BUDGET_SECONDS = 8.0


class Residual(nn.Module):
    """Adds what a body makes of its input to it."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the input with the body's part added."""
        added: Tensor = hidden + self.body(hidden)
        return added


class Recurrent(nn.Module):
    """An LSTM over sequences and a layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 256, num_layers=2, batch_first=True)
        self.head = nn.Linear(256, 10)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the logits of each sequence."""
        logits: Tensor = self.head(self.lstm(sequences)[0][:, -1])
        return logits


class Text(nn.Module):
    """PyTorch's own Transformer encoder over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(1000, 192)
        layer = nn.TransformerEncoderLayer(192, 4, 768, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits at every position, the classes second."""
        logits: Tensor = self.head(self.encoder(self.embedding(tokens)))
        return logits.transpose(1, 2)


def build_mlp() -> nn.Module:
    """Return eight residual blocks of two layers."""
    blocks = [Residual(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)) for _ in range(8)]
    return nn.Sequential(nn.Linear(256, 512), nn.Sequential(*blocks), nn.Linear(512, 10))


def build_cnn() -> nn.Module:
    """Return a small residual network with BatchNorm."""

    def convolve(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]

    first = [Residual(*convolve(32, 32), *convolve(32, 32)) for _ in range(3)]
    second = [Residual(*convolve(64, 64), *convolve(64, 64)) for _ in range(3)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    return nn.Sequential(*convolve(3, 32), nn.Sequential(*first), *convolve(32, 64, 2), nn.Sequential(*second), *head)


class Vision(nn.Module):
    """A small vision Transformer over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 128, 4, 4)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of each image."""
        logits: Tensor = self.head(self.encoder(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


def build_segmenter() -> nn.Module:
    """Return an encoder and a decoder of convolutions with GroupNorm: a class for every pixel."""
    down = [nn.Conv2d(3, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.SiLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.SiLU()]
    blocks = [Residual(nn.Conv2d(64, 64, 3, 1, 1), nn.GroupNorm(8, 64), nn.SiLU()) for _ in range(4)]
    up = [nn.ConvTranspose2d(64, 32, 2, 2), nn.GroupNorm(4, 32), nn.SiLU(), nn.ConvTranspose2d(32, 10, 2, 2)]
    return nn.Sequential(*down, nn.Sequential(*blocks), *up)


@dataclass
class Benchmarked:
    """A workload of random samples.

    Attributes:
        build: returns the model.
        inputs: shape of a sample; whole numbers below 1000 when `tokens`.
        targets: number of classes, and shape of a sample's labels.
        baseline: its own settings.
        tokens: samples are tokens.
        momentum: trained by SGD instead of AdamW.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[int, ...]
    baseline: TrainConfig
    targets: tuple[int, tuple[int, ...]] = (10, ())
    tokens: bool = False
    momentum: bool = False

    def build_model(self) -> nn.Module:
        """Return a fresh model."""
        return self.build()

    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """Return SGD with momentum, or AdamW."""
        if self.momentum:
            return SGD(model.parameters(), lr=0.01, momentum=0.9)
        return AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Dataset[Any]:
        """Return random samples."""
        generator = torch.Generator().manual_seed(0)
        count, (classes, labels) = 16 * self.baseline.micro_batch_size, self.targets
        shape = (count, *self.inputs)
        random = torch.randint(1000, shape, generator=generator) if self.tokens else torch.randn(shape)
        return TensorDataset(random, torch.randint(classes, (count, *labels), generator=generator))

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross-entropy."""
        inputs, labels = batch
        return F.cross_entropy(model(inputs).float(), labels)


def small(size: int) -> TrainConfig:
    """Return a baseline with a micro batch of a size."""
    return TrainConfig(micro_batch_size=size, num_threads=torch.get_num_threads())


mlp = Benchmarked(build_mlp, (256,), small(512))
cnn = Benchmarked(build_cnn, (3, 64, 64), small(8), momentum=True)
lstm = Benchmarked(Recurrent, (128, 64), small(32))
encoder = Benchmarked(Text, (96,), small(8), targets=(1000, (96,)), tokens=True)
vision = Benchmarked(Vision, (3, 48, 48), small(8))
segmenter = Benchmarked(build_segmenter, (3, 96, 96), small(8), targets=(10, (96, 96)))

HELD_OUT = ("segmenter", "vision")
"""Had no part in the choice of the correction in `autotune/probe/memory/lines.py`; the other five had."""
WORKLOADS = {name: f"{Path(__file__).name}:{name}" for name in ("mlp", "cnn", "lstm", "encoder", *HELD_OUT)}
WORKLOADS["demo"] = "autotune.targets.demo:workload"


@dataclass(frozen=True)
class Outcome:
    """One prediction and what became of it.

    Attributes:
        name: of the workload.
        mode: as `precision, checkpointing`.
        micro_batch: samples.
        predicted: peak in bytes.
        measured: true peak in bytes.
    """

    name: str
    mode: str
    micro_batch: int
    predicted: float
    measured: int

    @property
    def error(self) -> float:
        """Prediction over truth, less one."""
        return self.predicted / self.measured - 1.0


def predict(name: str) -> None:
    """Print what the probe's procedure finds, in this process alone, and the seconds it took."""
    loaded = load_workload(WORKLOADS[name], folder=Path(__file__).parent)
    dataset = loaded.workload.train_dataset()
    base_bytes = resident_bytes()
    del dataset
    with backend_settings(loaded.baseline):
        training = Training(loaded, loaded.baseline, device=CPU, seed=0)
        for _ in range(STEPS):
            training.step()
        checkpoints = can_checkpoint(training.model)
        del training
        began = time.monotonic()
        facts = look_at_memory(
            WorkloadMemory(loaded, CPU, seed=0, room_bytes=LIMIT_BYTES),
            loaded.baseline,
            CPU,
            base_bytes=base_bytes,
            limit_bytes=LIMIT_BYTES,
            supported=PRECISIONS,
            checkpoints=checkpoints,
            budget_seconds=BUDGET_SECONDS,
        )
    print(json.dumps({"seconds": time.monotonic() - began, "facts": facts.model_dump(mode="json")}))


def train(name: str, precision: str, checkpointing: str, size: int) -> None:
    """Train a few steps and print the peak."""
    loaded = load_workload(WORKLOADS[name], folder=Path(__file__).parent)
    config = loaded.baseline.replace(precision=precision, activation_checkpointing=checkpointing, micro_batch_size=size)
    with backend_settings(config):
        training = Training(loaded, config, device=CPU, seed=0)
        for _ in range(STEPS):
            training.step()
    print(json.dumps(peak_host_bytes()))


def run_alone(*arguments: str) -> Any:
    """Return what a fresh process of this file printed last."""
    command = [sys.executable, __file__, *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return json.loads(finished.stdout.splitlines()[-1])


def compare(name: str, factors: list[int]) -> list[Outcome]:
    """Return a workload's predictions and what became of them, printed as they come."""
    found = run_alone("--predict", name)
    facts = MemoryFacts.model_validate_json(json.dumps(found["facts"]))
    error = facts.calibration_error
    print(
        f"{name}: {len(facts.modes)} modes in {found['seconds']:.1f} s, calibrated at "
        f"{facts.calibrated_micro_batch_size}, shapes alone {100 * (error or 0.0):+.0f} % {facts.missing}",
        flush=True,
    )
    outcomes = []
    for mode in facts.modes:
        for factor in factors:
            size = factor * facts_baseline(name).micro_batch_size
            words = (mode.precision, mode.activation_checkpointing, str(size))
            measured = run_alone("--train", name, *words)
            outcomes.append(Outcome(name, ", ".join(words[:2]), size, mode.predict_bytes(size), measured))
        row = [one for one in outcomes if one.mode == f"{mode.precision}, {mode.activation_checkpointing}"]
        cells = " | ".join(f"{one.measured / 2**20:.0f} MiB {100 * one.error:+.0f} %" for one in row)
        print(f"| {name} | {row[0].mode} | {cells} |", flush=True)
    return outcomes


def facts_baseline(name: str) -> TrainConfig:
    """Return a workload's own settings."""
    return load_workload(WORKLOADS[name], folder=Path(__file__).parent).baseline


def main() -> None:
    """Print the table, or do one process's part of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(WORKLOADS), default=sorted(WORKLOADS))
    parser.add_argument("--factors", nargs="+", type=int, default=[2, 4, 8])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--predict", help=argparse.SUPPRESS)
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.predict:
        predict(options.predict)
    elif options.train:
        name, precision, checkpointing, size = options.train
        train(name, precision, checkpointing, int(size))
    else:
        began = time.monotonic()
        outcomes = [one for name in options.only for one in compare(name, options.factors)]
        errors = [abs(one.error) for one in outcomes]
        print(
            f"{len(errors)} predictions, mean error {100 * statistics.fmean(errors):.1f} %, "
            f"worst {100 * max(errors):.0f} %, {time.monotonic() - began:.0f} s"
        )
        if options.json:
            rows = [{**asdict(one), "error": one.error} for one in outcomes]
            options.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
