"""A workload that hangs where HANG_AT says, or leaves something behind that does."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

PLACE = os.environ.get("HANG_AT", "")


def hang() -> None:
    Path(os.environ["HANG_FOLDER"], "reached").touch()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if threading.current_thread() is threading.main_thread():
            signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1000.0)


def at(place: str) -> None:
    if place == PLACE:
        hang()


at("import")


class HangingCompiler(MetaPathFinder):
    """Hangs when the compiler is about to be loaded, which is at the first compilation."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "torch._inductor.compile_fx":
            hang()


if PLACE == "compile":
    sys.meta_path.insert(0, HangingCompiler())


class Points(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        at("first sample")
        if get_worker_info() is not None:
            at("worker")
            at("candidate")
        x = torch.full((8,), float(index % 7))
        return x, x.sum()


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        at("backward")
        return gradient


def leave_behind() -> None:
    """Start what hangs later, or somewhere else."""
    if PLACE == "exit":
        threading.Thread(target=time.sleep, args=(1000.0,)).start()
    if PLACE == "atexit":
        atexit.register(hang)
    if PLACE == "daemon" and os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve("/bin/sleep", ["sleep", "1000"], {})
        os._exit(0)


class Hanging:
    def build_model(self) -> nn.Module:
        at("model")
        leave_behind()
        return nn.Linear(8, 1)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4)

    def train_dataset(self) -> Dataset[Any]:
        at("dataset")
        return Points()

    def collate(self, samples: list[Any]) -> Any:
        at("first batch")
        return torch.utils.data.default_collate(samples)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(model(x).squeeze(1), y)
        return _Backward.apply(loss) if PLACE == "backward" else loss


workload = Hanging()
