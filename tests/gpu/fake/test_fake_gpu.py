"""The fake GPU keeps its books as a GPU does, and autotune's GPU paths run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import find_compiler, is_supported, make_environment

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
MIB = 2**20

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
    pytest.mark.skipif(not is_supported(), reason="the fake GPU is written for a CPU build of torch 2.13"),
]


def run_python(*words: str, folder: Path, seconds: float = 300.0, **settings: str) -> str:
    """Run Python where there is the fake GPU; return what it printed."""
    ended = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=make_environment(**settings),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-3000:]
    return ended.stdout


def train(*words: str, folder: Path, **settings: str) -> dict[str, Any]:
    told = run_python("-m", "autotune", "train", "--json", *words, folder=folder, **settings)
    summary: dict[str, Any] = json.loads(told)
    return summary


def test_known_programs_do_what_they_do_on_a_gpu() -> None:
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "programs.py"))
    assert " passed" in run_python(*words, folder=ROOT)


def test_a_process_without_a_gpu_finds_none() -> None:
    told = run_python("-c", "import torch; print(torch.cuda.is_available())", folder=ROOT, FAKE_GPU_COUNT="0")
    assert told.split() == ["False"]


ASKS = """
import torch
from autotune.probe.step.syncs import SyncFinder

ones = torch.ones(4, device="cuda")
host, pinned = torch.empty(4), torch.empty(4, pin_memory=True)
with SyncFinder(ones.device) as finder:
    for _ in range(3):
        ones.cpu()
    for _ in range(2):
        host.copy_(ones)
    ones.tolist()
    torch.ones(4).to("cuda")
    pinned.copy_(ones, non_blocking=True)
    ones.to(torch.float64)
print(*finder.places)
"""


def test_lines_that_copy_to_the_host_are_found(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    assert run_python("asks.py", folder=tmp_path).split() == ["asks.py:9", "asks.py:11", "asks.py:12"]


LARGE = """
from autotune.records import TrainConfig
from autotune.targets.demo import workload as demo


class Large:
    baseline = TrainConfig(micro_batch_size=512)

    def __getattr__(self, name):
        return getattr(demo, name)


workload = Large()
"""


def test_a_training_is_made_to_fit_the_memory_there_is(tmp_path: Path) -> None:
    (tmp_path / "large.py").write_text(LARGE)
    room = 48 * MIB
    sizes = {"FAKE_GPU_CONTEXT": str(256 * MIB), "FAKE_GPU_MEMORY": str(256 * MIB + room)}
    summary = train("large.py:workload", "--steps", "4", folder=tmp_path, **sizes)
    assert {(one["cause"], one["action"]) for one in summary["step_downs"]} == {("oom-device", "fewer-samples")}
    config = summary["config"]
    assert config["micro_batch_size"] * config["gradient_accumulation_steps"] == 512
    assert config["gradient_accumulation_steps"] == 2 ** len(summary["step_downs"])
    assert 0 < summary["peak_memory_bytes"] <= room


def test_a_checkpoint_is_taken_up_where_there_are_fewer_gpus(tmp_path: Path) -> None:
    train("demo", "--steps", "4", "--run-dir", "run", folder=tmp_path, FAKE_GPU_COUNT="2")
    summary = train("demo", "--steps", "8", "--run-dir", "run", "--resume", folder=tmp_path, FAKE_GPU_COUNT="1")
    assert summary["steps"] == 8


def test_an_amd_gpu_of_which_no_driver_tells_is_used_all_the_same(tmp_path: Path) -> None:
    """There is a `cuda` device, and no NVML."""
    told = run_python("-m", "autotune", "probe", "--json", folder=tmp_path, LD_LIBRARY_PATH="")
    report = json.loads(told)
    assert report["hardware"]["gpus"] == []
    assert report["ceilings"]["device"] in ("cuda", None)
    assert report["ceilings"]["copy_to_device_bytes_per_second"] > 0.0


def test_a_gpu_that_is_there_is_left_alone_where_the_cpu_was_asked_for(tmp_path: Path) -> None:
    summary = train("demo", "--steps", "3", "--device", "cpu", folder=tmp_path)
    assert summary["peak_memory_bytes"] > 100 * MIB  # of the host: a process with torch in it
