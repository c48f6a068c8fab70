"""Two processes that meet over gloo take the steps of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
PROGRAM = HERE / "steps_program.py"
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2")


def run(*words: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(HERE), str(HERE.parent.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what one process, and each of two, found."""
    folder = tmp_path_factory.mktemp("steps")
    run(str(PROGRAM), str(folder))
    run(*TOGETHER, str(PROGRAM), str(folder))
    return {path.stem: torch.load(path, weights_only=True) for path in folder.glob("*.pt")}


@pytest.mark.parametrize("name", ["counted", "plain", "uneven", "partial"])
def test_the_steps_are_those_of_one_process(found: dict[str, dict[str, Any]], name: str) -> None:
    alone = found["alone"][name]
    assert not all(alone["samples"][0] == samples for samples in alone["samples"])  # a short step is among them
    for rank in ("rank-0", "rank-1"):
        shared = found[rank][name]
        assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        torch.testing.assert_close(shared["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
        assert (shared["samples"], shared["ends"]) == (alone["samples"], alone["ends"])


@pytest.mark.parametrize("name", ["counted", "plain", "uneven", "partial"])
def test_all_processes_have_the_same_weights_to_the_bit(found: dict[str, dict[str, Any]], name: str) -> None:
    assert torch.equal(found["rank-0"][name]["weights"], found["rank-1"][name]["weights"])


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("normed", "BatchNorm (2) takes its statistics from the samples of one process"),
        ("streamed", "an iterable dataset cannot be shared out over processes"),
        ("unsaid", "a parameter of the model has no part in the loss"),
    ],
)
def test_what_cannot_be_shared_is_refused(found: dict[str, dict[str, Any]], name: str, sentence: str) -> None:
    assert sentence in found["rank-0"][name]
    assert sentence in found["rank-1"][name]


def test_plain_data_goes_from_one_to_another(found: dict[str, dict[str, Any]]) -> None:
    assert found["rank-0"]["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert [found[f"rank-{rank}"]["shared"] for rank in (0, 1)] == ["the leader's"] * 2
