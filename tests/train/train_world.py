"""What the tests of the final training share: a folder with a workload and a valid profile for it, and runs in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import record_factory
import torch

from autotune.machine.hardware import read_hardware, read_software
from autotune.records.config import TrainConfig
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.run import TrainingSummary
from autotune.targets.source.fingerprint import fingerprint_workload
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.run import run_training

WORKLOAD = "noisy_workload.py"
CONFIG = TrainConfig(micro_batch_size=8, num_threads=1)


def make_profile(folder: Path, label: str, config: TrainConfig = CONFIG, **changes: Any) -> Profile:
    """Return a valid profile, measured here, of a workload whose file lies in a folder."""
    fingerprint = fingerprint_workload(label, folder=folder)
    assert fingerprint is not None
    fields: dict[str, Any] = {
        "config": config,
        "baseline_config": CONFIG,
        "target": ProfileTarget(label=label, fingerprint=fingerprint),
        "hardware": read_hardware(),
        "software": read_software(),
    }
    return record_factory.make_profile(**(fields | changes))


@dataclass
class Workplace:
    """A folder with the workloads and a profile.

    Attributes:
        folder: the working folder.
        toy: which workload is trained.
        said: warnings of the trainings in this process.
    """

    folder: Path
    toy: str = "noisy"
    said: list[str] = field(default_factory=list)

    @property
    def target(self) -> str:
        """The target as a user would name it."""
        return f"{WORKLOAD}:{self.toy}"

    def save_profile(self, config: TrainConfig = CONFIG, **changes: Any) -> Profile:
        """Write best.json and return it."""
        profile = make_profile(self.folder, self.target, config, **changes)
        profile.save(self.folder / "best.json")
        return profile

    def train(
        self, *, stop: Callable[[], bool] = lambda: False, policy: TrainPolicy = TRAIN_POLICY, **options: Any
    ) -> TrainingSummary:
        """Train in this process."""
        return run_training(
            TrainingOptions(**{"profile": "best.json", **options}),
            self.target,
            folder=self.folder,
            callbacks=TrainingCallbacks(should_stop=stop, warn=self.said.append),
            policy=policy,
        )

    def start_command(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `autotune train` in a process group of its own."""
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune", "train", self.target, "--profile", "best.json", *arguments],
            cwd=self.folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_signals,
        )

    def run_command(self, *arguments: str) -> tuple[int, str, str]:
        """Run `autotune train` and return its exit status and what it printed."""
        with self.start_command(*arguments) as process:
            printed, said = process.communicate(timeout=120)
        return process.returncode, printed, said


def _hear_signals() -> None:
    # A test run in the background of a shell, or under nohup, ignores these and hands that down.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def open_workplace(folder: Path, toy: str = "noisy") -> Workplace:
    """Return a workplace in an empty folder, without a profile yet."""
    shutil.copy(Path(__file__).with_name(WORKLOAD), folder)
    return Workplace(folder, toy)


class StopAfter:
    """Asks a training to stop after so many of its steps; each step asks once."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def __call__(self) -> bool:
        self._left -= 1
        return self._left <= 0


def read_state(run: Path) -> dict[str, Any]:
    """Return what the newest checkpoint of a run holds, but for its notes: these count seconds."""
    newest = max((run / "checkpoints").glob("step-*"))
    state: dict[str, Any] = torch.load(newest / "state.pt", weights_only=True)
    del state["notes"]
    return state


def find_differences(left: Any, right: Any, where: str = "") -> list[str]:
    """Return where two states are not the same bit for bit."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
        return [] if same else [where]
    if isinstance(left, dict) and isinstance(right, dict):
        missing = [f"{where}.{key}" for key in left.keys() ^ right.keys()]
        return missing + [
            d for key in left.keys() & right.keys() for d in find_differences(left[key], right[key], f"{where}.{key}")
        ]
    if isinstance(left, list | tuple) and isinstance(right, list | tuple) and len(left) == len(right):
        return [
            d for i, pair in enumerate(zip(left, right, strict=True)) for d in find_differences(*pair, f"{where}[{i}]")
        ]
    return [] if type(left) is type(right) and left == right else [f"{where}: {left!r} != {right!r}"]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def wait_until(condition: Callable[[], object], *, seconds: float = 90.0) -> bool:
    """Return whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
