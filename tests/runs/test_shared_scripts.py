"""Trials of scripts that several processes train: what the knobs change, whose memory counts, who is named."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_script_trials import BASELINE, TORCHRUN, Project, losses_of, open_project

from autotune.records.trial import TrialStatus

SHARED = """
import os, signal, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

rank, step = int(os.environ["RANK"]), 0
dist.init_process_group("gloo")
torch.manual_seed(0)
ballast = torch.ones(int(os.environ.get("BALLAST", "0")) if rank else 1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), bucket_cap_mb=7)
print(f"rank {rank}: {model.bucket_bytes_cap >> 20} MiB, static {model.static_graph}", flush=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    loss = model(torch.full((4, 8), 0.1 * (rank + 1))).square().mean()
    step += 1
    if rank and step == 5:
        what = os.environ.get("FAULT")
        if what in ("SIGKILL", "SIGSTOP"):
            os.kill(os.getpid(), getattr(signal, what))
        if what == "raise":
            raise ValueError("no such word")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with open_project(tmp_path) as project:
        project.write(SHARED)
        yield project


def told_by_ranks(project: Project) -> list[str]:
    """Return what each process printed; lines of two may come to stand in one."""
    return sorted(re.findall(r"rank \d: \d+ MiB, static (?:True|False)", project.log()))


@pytest.mark.slow
def test_the_knobs_of_ddp_reach_every_process_of_a_script(project: Project) -> None:
    own = losses_of(project.run(*TORCHRUN, "train.py"))
    assert told_by_ranks(project) == [
        "rank 0: 7 MiB, static False",
        "rank 1: 7 MiB, static False",
    ]
    changes: dict[str, Any] = {"bucket_cap_mb": 50, "static_graph": True, "gradient_as_bucket_view": True}
    changed = losses_of(project.run(*TORCHRUN, "train.py", config=BASELINE.replace(**changes)))
    assert told_by_ranks(project) == [
        "rank 0: 50 MiB, static True",
        "rank 1: 50 MiB, static True",
    ]
    assert changed == pytest.approx(own, rel=1e-5)


@pytest.mark.slow
def test_the_memory_of_all_processes_counts(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    for numbers in (0, 2**27):
        monkeypatch.setenv("BALLAST", str(numbers))
        result = project.run(*TORCHRUN, "train.py", purpose="measure")
        assert result.measurement is not None, result.error
        held.append(result.measurement.peak_memory.host_bytes)
    assert held[1] - held[0] > 0.9 * 4 * 2**27


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "status", "cause", "sentence"),
    [
        ("SIGKILL", TrialStatus.CRASHED, "crash-signal", "process 1 was killed by SIGKILL"),
        ("raise", TrialStatus.CRASHED, "user-error", "process 1 of 2: ValueError: no such word"),
        ("SIGSTOP", TrialStatus.TIMED_OUT, "timeout", ""),
    ],
)
@pytest.mark.fault(
    "41", injected="a process of torchrun dies, raises or is stopped in a trial", outcome="named; in time"
)
def test_a_process_that_dies_or_hangs_ends_the_trial(
    project: Project, monkeypatch: pytest.MonkeyPatch, fault: str, status: TrialStatus, cause: str, sentence: str
) -> None:
    monkeypatch.setenv("FAULT", fault)
    result = project.run(*TORCHRUN, "train.py", purpose="measure", seconds=40.0)
    assert (result.status, result.cause) == (status, cause), result.error
    assert sentence in result.error


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch_trains_alone_and_with_two_processes(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(project.folder.parent / "hf"))
    alone = ("-m", "accelerate.commands.launch", "--cpu", "accelerated.py")
    assert losses_of(project.run(*alone)) == losses_of(project.run("accelerated.py"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    two = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "accelerated.py")
    probe = project.run(*two, purpose="probe", config=None, baseline=None)
    assert probe.facts is not None, probe.error
    assert probe.facts.launched_processes == 2
    assert probe.facts.baseline.distributed_strategy == "ddp"
    assert "bucket_cap_mb" not in probe.facts.fixed
    assert (probe.facts.baseline.gradient_accumulation_steps, probe.facts.baseline.sync_each_micro_batch) == (2, False)


def write_deepspeed(folder: Path) -> Path:
    program = folder / "deepspeed"
    program.write_text(f"#!{sys.executable}\n")
    program.chmod(0o755)
    return program


@pytest.mark.slow
def test_deepspeed_tells_each_process_its_local_rank(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    text = SHARED.replace('print(f"rank {rank}:', 'import sys; print(f"rank {rank}: {sys.argv[1:]}')
    project.write(text, "told.py")
    monkeypatch.setenv("PATH", f"{write_deepspeed(project.folder.parent).parent}:{os.environ['PATH']}")
    losses_of(project.run(str(project.folder.parent / "deepspeed"), "--num_gpus", "2", "told.py", "--x"))
    told = re.findall(r"rank (\d): \['--local_rank=(\d)', '--x'", project.log())  # two write at once
    assert {*told} == {("0", "0"), ("1", "1")}
