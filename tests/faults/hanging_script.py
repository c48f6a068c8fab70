"""A script that hangs where HANG_AT says, or leaves something behind that does."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["HANG_TESTS"])

if os.environ.get("HANG_AT") == "interpreter":
    Path(os.environ["HANG_FOLDER"], "reached").touch()
    while True:
        time.sleep(1000.0)

import hanging_workload as parts
import torch
from torch import nn

if parts.PLACE == "atexit":
    atexit.register(parts.hang)
if parts.PLACE == "programs":
    subprocess.Popen(["sleep", "1000"])
    subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})

workload = parts.Hanging()
model = workload.build_model()
if parts.PLACE == "compile":
    model = torch.compile(model)
optimizer = workload.build_optimizer(model)
steps = 5 if parts.PLACE in ("exit", "atexit") else 10**9
try:
    while steps:
        loader = torch.utils.data.DataLoader(
            workload.train_dataset(),
            batch_size=16,
            collate_fn=workload.collate,
            num_workers=1 if parts.PLACE == "worker" else 0,
        )
        for batch in loader:
            x, y = batch
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            (parts._Backward.apply(loss) if parts.PLACE == "backward" else loss).backward()
            optimizer.step()
            steps -= 1
            if not steps:
                break
finally:
    parts.at("exit")
