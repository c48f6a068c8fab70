"""`autotune search --nproc-per-node 2` as a process: a real small search, and the training with its answer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records import Profile, TrialResult
from autotune.records.codec import read_record
from autotune.records.trial import TrialStatus

WORKLOADS = Path(__file__).with_name("shared_workloads.py")


def run(folder: Path, *words: str) -> tuple[int, str]:
    """Return the exit status of a command, and what it said."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "autotune", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


@pytest.mark.slow
def test_a_search_of_two_processes_ends_with_an_answer_that_is_trained_by_two(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS, tmp_path)
    target = "shared_workloads.py:plain"
    # A few settings: the budget is for the loss check and the proof, where there is one to make.
    settings = [word for name in ("micro_batch_size", "optimizer_implementation") for word in ("--only", name)]
    words = ("--nproc-per-node", "2", "--budget", "4m", "--no-history", *settings)
    status, said = run(tmp_path, "search", target, *words)
    assert status == 0, said
    profile = Profile.load(tmp_path / "best.json")
    assert profile.world_size == 2
    assert profile.verdict != "not-tested"
    assert profile.evidence.baseline_samples_per_second
    (search,) = (tmp_path / ".autotune").glob("shared*")
    trials = [read_record(file, TrialResult) for file in sorted((search / "trials").glob("*/result.json"))]
    timed = [one for one in trials if one.spec.purpose in ("measure", "final") and one.measurement is not None]
    assert len(timed) >= 3
    assert {one.spec.world_size for one in trials} == {2}
    assert all(len(block.rank_seconds) == 2 for one in timed for block in one.measurement.blocks if one.measurement)
    status, said = run(tmp_path, "train", target, "--profile", "best.json", "--steps", "3", "--run-dir", "run")
    assert status == 0, said
    assert "2 processes, each with micro batch" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    if profile.verdict == "improved":
        assert summary["promised_samples_per_second"] == profile.evidence.samples_per_second


@pytest.mark.slow
def test_a_search_tries_a_shard_of_the_model_in_each_process(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS, tmp_path)
    settings = [word for name in ("strategy", "reshard_after_forward") for word in ("--only", name)]
    words = ("--nproc-per-node", "2", "--budget", "4m", "--no-history", *settings)
    status, said = run(tmp_path, "search", "shared_workloads.py:stacked", *words)
    assert status == 0, said
    assert Profile.load(tmp_path / "best.json").verdict != "not-tested"
    (search,) = (tmp_path / ".autotune").glob("shared*")
    trials = [read_record(file, TrialResult) for file in sorted((search / "trials").glob("*/result.json"))]
    sharded = [one for one in trials if one.spec.config and one.spec.config.distributed_strategy == "fsdp"]
    assert sharded
    assert {one.status for one in sharded} == {TrialStatus.COMPLETED}


@pytest.mark.slow
def test_what_several_processes_would_learn_otherwise_is_refused(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS, tmp_path)
    for name, told in (
        ("normed", "several processes would learn something else than one: BatchNorm normalises over the micro batch"),
        ("pairs", "--nproc-per-node 2: several processes would learn something else than one"),
        ("streamed", "an iterable dataset cannot be shared out over processes"),
    ):
        status, said = run(
            tmp_path, "search", f"shared_workloads.py:{name}", "--nproc-per-node", "2", "--budget", "60s"
        )
        assert (status, told in said) == (2, True), said
        assert not (tmp_path / "best.json").exists()
