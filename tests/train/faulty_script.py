"""A training script that fails in the ways that training scripts do, as its flags say."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--fault", default="")
parser.add_argument("--at", type=int, default=0, help="optimizer steps before the fault")
parser.add_argument("--once", action="store_true", help="only when it is started for the first time")
parser.add_argument("--own-checkpoint", action="store_true")
options = parser.parse_args()

starts = Path("starts.txt")
first = not starts.exists()
with starts.open("a") as file:
    file.write(f"{options.batch_size} {options.accum} {options.workers}\n")
armed = first or not options.once


class Squares(Dataset):
    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> torch.Tensor:
        if options.fault == "worker" and armed and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((4,), index / 256.0)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if armed and steps >= options.at:
            fail(inputs)
        return self.layer(inputs).square().mean()


def fail(inputs: torch.Tensor) -> None:
    if options.fault == "oom" and len(inputs) > 16:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if options.fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if options.fault == "own":
        raise ValueError("a bug of its own")
    if options.fault == "exit":
        sys.exit(11)


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(Squares(), batch_size=options.batch_size, num_workers=options.workers, shuffle=True)
steps = 0
if options.own_checkpoint and Path("own.pt").exists():
    steps = torch.load("own.pt")["steps"]
while steps < options.steps:
    for index, batch in enumerate(loader):
        loss = model(batch) / options.accum
        if options.fault == "nan" and steps >= options.at:
            loss = loss * float("nan")
        loss.backward()
        if (index + 1) % options.accum == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if options.own_checkpoint and steps % 5 == 0:
                torch.save({"steps": steps}, "own.pt")
        if steps >= options.steps:
            break
print(f"done {steps} {loss.item()!r} workers {loader.num_workers}", flush=True)
