"""Time the training loop of `autotune train` against a bare hand-written one with the same settings, in pairs.

    python benchmarks/overhead.py [--pairs 12] [--seconds 6] [--only NAME ...] [--json overhead.json]

The bare loop is what a tutorial shows: a plain DataLoader, forward, backward, clipping, optimizer, scheduler, nothing
else: no logging, no checks, no checkpoint. Ours draws a resumable order, seeds each sample that draws random numbers,
times itself, looks at losses every ten steps, writes metrics.jsonl, reports, and watches the loss. Looks at gradients
pay for themselves over longer stretches than these (benchmarks/guard.py has their share); checkpoints and evaluations
are in neither: they are the user's choice of how often. Both arms of a pair train the same
number of steps, one right after the other, in an order that alternates; what is printed is the ratio of their times.
Let nothing else run beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autotune.engine.dataloader import find_random_sources
from autotune.engine.device import choose_device
from autotune.engine.loop import backend_settings
from autotune.engine.optimizer import apply_optimizer_implementation
from autotune.engine.precision import autocast
from autotune.measure.confidence import paired_ratio
from autotune.records import TrainConfig
from autotune.records.measurement import Interval
from autotune.records.profile import ProfileTarget
from autotune.records.run import RunPlan
from autotune.targets.demo import DemoWorkload
from autotune.targets.workload import LoadedWorkload, check_workload
from autotune.train.loop.deadline import Deadline
from autotune.train.loop.session import Session
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.runs.folder import RunFolder

DIGITS = Path(__file__).parent.parent / "examples" / "digits"


class SmallPerceptron:
    """A model whose steps take about a millisecond: what is added to one weighs most here."""

    baseline = TrainConfig(micro_batch_size=128)

    def build_model(self) -> nn.Module:
        """Return three linear layers."""
        return nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_dataset(self) -> Dataset[Any]:
        """Return vectors labelled by the largest of their first ten entries."""
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(16384, 128, generator=generator)
        return TensorDataset(inputs, inputs[:, :10].argmax(dim=1))

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the cross entropy."""
        inputs, labels = batch
        return nn.functional.cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class Case:
    """A training to time.

    Attributes:
        name: in the table.
        build: makes the workload.
        changes: of its baseline, which both arms train with.
    """

    name: str
    build: Callable[[], Any]
    changes: dict[str, Any]


def build_digits() -> Any:
    """Return the example's workload."""
    sys.path.insert(0, str(DIGITS))
    from workload import workload  # type: ignore[import-not-found]

    return workload


CASES = (
    Case("drawn figures, a small convolutional network (demo)", DemoWorkload, {"optimizer_implementation": "fused"}),
    Case("digits, small residual network, augmented", build_digits, {"optimizer_implementation": "fused"}),
    Case("perceptron, steps of a millisecond", SmallPerceptron, {"optimizer_implementation": "fused"}),
)


def train_bare(loaded: LoadedWorkload, config: TrainConfig, device: torch.device, steps: int) -> float:
    """Return the seconds that a hand-written loop takes for so many steps."""
    workload = loaded.workload
    torch.manual_seed(0)
    model = workload.build_model().to(device)
    optimizer = workload.build_optimizer(model)
    apply_optimizer_implementation(optimizer, config)
    scheduler = loaded.build_scheduler(optimizer)
    loader = DataLoader(
        workload.train_dataset(), batch_size=config.micro_batch_size, shuffle=True, collate_fn=loaded.collate
    )
    model.train()
    began = time.perf_counter()
    for batch in _take(loader, steps):
        placed = [part.to(device) for part in batch]
        with autocast(config, device):
            returned = workload.compute_loss(model, placed)
        loss = returned[0] if isinstance(returned, tuple) else returned
        loss.backward()  # type: ignore[no-untyped-call]
        if loaded.gradient_clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), loaded.gradient_clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
    float(loss.detach())
    return time.perf_counter() - began


def train_ours(loaded: LoadedWorkload, config: TrainConfig, device: torch.device, steps: int) -> float:
    """Return the seconds that the steps of a final training take."""
    target = ProfileTarget(label=loaded.label, fingerprint=loaded.fingerprint)
    plan = RunPlan(
        target=target,
        asked_config=config,
        config=config,
        baseline_config=loaded.baseline,
        seed=0,
        steps=steps,
        epochs=None,
    )
    sources = find_random_sources(loaded.workload.train_dataset(), loaded.collate)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(
            loaded=loaded,
            folder=RunFolder(Path(folder), plan),
            options=TrainingOptions(checkpoint_seconds=3600.0),
            callbacks=TrainingCallbacks(),
            device=device,
            began=time.monotonic(),
            deadline=Deadline(),
            random_sources=sources,
        )
        session.run()
    return session.meters.training_seconds


def compare(case: Case, *, pairs: int, seconds: float) -> tuple[Interval, float, float]:
    """Return the ratio of ours to the bare loop's time, the share that the guard took, and a bare step's seconds."""
    loaded = check_workload(case.build(), label=case.name, fingerprint="0" * 12)
    loaded = _without_evaluation(loaded)
    config = loaded.baseline.replace(**case.changes)
    device = choose_device("auto")
    ours, bare = [], []
    with backend_settings(config):
        step_seconds = train_bare(loaded, config, device, 50) / 50
        steps = max(60, round(seconds / step_seconds))
        for number in range(pairs):
            for arm in ("ours", "bare") if number % 2 else ("bare", "ours"):
                if arm == "ours":
                    ours.append(train_ours(loaded, config, device, steps))
                else:
                    bare.append(train_bare(loaded, config, device, steps))
    return paired_ratio(ours, bare, confidence_level=0.95), step_seconds, statistics.median(bare) / steps


def main() -> None:
    """Compare and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=6.0, help="of one arm")
    parser.add_argument("--only", nargs="*", default=[], help="words of the cases to run")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    found = []
    print("| training | bare step | ours / bare (95 %) |\n| --- | --- | --- |", flush=True)
    for case in CASES:
        if options.only and not any(word in case.name for word in options.only):
            continue
        ratio, _, step = compare(case, pairs=options.pairs, seconds=options.seconds)
        shown = f"{ratio.estimate:.4f} ({ratio.low:.4f} to {ratio.high:.4f})"
        print(f"| {case.name} | {1000 * step:.2f} ms | {shown} |", flush=True)
        found.append({"training": case.name, "bare_step_seconds": step, "ratio": ratio.model_dump(mode="json")})
    if options.json is not None:
        options.json.write_text(json.dumps({"pairs": options.pairs, "cases": found}, indent=2) + "\n")


def _take(loader: DataLoader[Any], steps: int) -> Iterator[Any]:
    taken = 0
    while True:
        for batch in loader:
            yield batch
            taken += 1
            if taken == steps:
                return


def _without_evaluation(loaded: LoadedWorkload) -> LoadedWorkload:
    import dataclasses

    return dataclasses.replace(loaded, metrics=())


if __name__ == "__main__":
    main()
