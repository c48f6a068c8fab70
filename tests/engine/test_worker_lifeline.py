"""A data loading worker ends with its training, even when the training dies while the worker is still starting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

TRAINING = """
import os, pathlib, signal, sys, time
import torch
from torch.utils.data._utils import signal_handling
from autotune.engine.dataloader import Order, build_loader
from autotune.records.config import TrainConfig

def start_slowly():
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    while os.getppid() == training:
        time.sleep(0.01)

training = os.getpid()
signal_handling._set_worker_signal_handlers = start_slowly  # the first thing that a worker calls
order = Order(seed=0, shuffle=False, drop_last=False)
dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
loader, _ = build_loader(dataset, TrainConfig(micro_batch_size=4, num_workers=1), order, collate=None)
batches = iter(loader)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.01)
os.kill(training, signal.SIGKILL)
"""


def is_running(process: int) -> bool:
    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.fault("20", injected="SIGKILL to a training while its loader worker starts", outcome="the worker is gone")
def test_a_worker_whose_training_died_during_its_start_ends(tmp_path: Path) -> None:
    worker_file = tmp_path / "worker"
    subprocess.run([sys.executable, "-c", TRAINING, str(worker_file)], timeout=120, check=False)
    worker = int(worker_file.read_text())
    deadline = time.monotonic() + 30
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    outlived = is_running(worker)
    if outlived:
        os.kill(worker, signal.SIGKILL)
    assert not outlived
