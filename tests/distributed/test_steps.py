"""Two processes that meet over gloo take the steps of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from steps_program import CAN_SHARD, COMPILED, KNOBS

from autotune.machine.toolchain import has_cpp_compiler

HERE = Path(__file__).parent
PROGRAM = HERE / "steps_program.py"
TOGETHER = ("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node")


def run(*words: str, ranks: int = 1) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    paths = [str(HERE), str(HERE.parent.parent), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    together = [*TOGETHER, str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *together, *words], capture_output=True, text=True, timeout=240, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what one process, and each of two, found."""
    return take_steps(tmp_path_factory.mktemp("steps"), "quick", ranks=2)


def take_steps(folder: Path, *words: str, ranks: int) -> dict[str, dict[str, Any]]:
    """Return what one process, and each of several, found."""
    run(str(PROGRAM), str(folder), *words)
    run(str(PROGRAM), str(folder), *words, ranks=ranks)
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


def find_band(name: str) -> float:
    """Return how far losses may be off, relatively: bands of tests/engine/test_knob_contract.py."""
    return 4e-3 if "bf16" in name else 5e-4 if "fp16" in name else 1e-5


EXACT = (("views", "plain"), ("fsdp, gathered", "fsdp"))


def require_same_steps(found: dict[str, dict[str, Any]], ranks: int) -> None:
    """Make sure that the steps are those of one process with all settings, and the same to the bit where they are."""
    knobs = found["rank-0"]["knobs"]
    for name, shared in knobs.items():
        assert shared["losses"] == pytest.approx(found["alone"]["knobs"][name]["losses"], rel=find_band(name))
        for rank in range(1, ranks):
            assert torch.equal(found[f"rank-{rank}"]["knobs"][name]["weights"], shared["weights"])
    for name, other in EXACT:
        if {name, other} <= knobs.keys():
            assert torch.equal(knobs[name]["weights"], knobs[other]["weights"])


def test_settings_of_several_processes_train_as_one(found: dict[str, dict[str, Any]]) -> None:
    require_same_steps(found, 2)
    knobs = found["rank-0"]["knobs"]
    assert not torch.equal(knobs["each"]["weights"], knobs["plain"]["weights"])
    if CAN_SHARD:
        assert not knobs["fsdp"]["is_gathered"]
        assert knobs["fsdp, gathered"]["is_gathered"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_settings_of_several_processes_train_as_one(tmp_path: Path, ranks: int) -> None:
    found = take_steps(tmp_path, "knobs", ranks=ranks)
    require_same_steps(found, ranks)
    knobs = found["rank-0"]["knobs"]
    assert knobs.keys() == KNOBS.keys()
    if ranks == 2:  # a step has two micro batches, of which only the last meets: the graph is not called static
        assert torch.equal(knobs["static without meetings"]["weights"], knobs["plain"]["weights"])
    for name, other in (("bf16, reduced", "bf16"), ("fsdp, bf16, reduced", "fsdp, bf16")):
        assert not torch.equal(knobs[name]["weights"], knobs[other]["weights"])


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="torch.compile on a CPU needs a C++ compiler on PATH")
def test_compiled_blocks_of_a_sharded_model_train_as_one_process(tmp_path: Path) -> None:
    found = take_steps(tmp_path, "compiled", ranks=2)
    for name in COMPILED:
        alone, shared = found["alone"]["knobs"][name], found["rank-0"]["knobs"][name]
        assert shared["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert shared["graphs"] > 0


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("normed", "BatchNorm (2) takes its statistics from the samples of one process"),
        ("streamed", "an iterable dataset cannot be shared out over processes"),
        ("unsaid", "a parameter of the model has no part in the loss"),
        ("averaged", "distributed_strategy fsdp: build_averaged_model() keeps whole weights"),
        (
            "reaching",
            "a parameter of a repeated block is used outside of its forward"
            if CAN_SHARD
            else f"distributed_strategy fsdp: FSDP2 of torch {torch.__version__} does not run on a CPU",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused(found: dict[str, dict[str, Any]], name: str, sentence: str) -> None:
    assert sentence in found["rank-0"][name]
    assert sentence in found["rank-1"][name]


def test_plain_data_goes_from_one_to_another(found: dict[str, dict[str, Any]]) -> None:
    assert found["rank-0"]["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert [found[f"rank-{rank}"]["shared"] for rank in (0, 1)] == ["the leader's"] * 2
