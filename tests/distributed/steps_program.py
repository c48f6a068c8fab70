"""Take some steps of several trainings, alone or as one of several processes, and write down what came of them.

python steps_program.py FOLDER quick|knobs|compiled
python -m torch.distributed.run --standalone --nproc-per-node 2 steps_program.py FOLDER quick|knobs|compiled
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import shared_workloads
import torch

from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command, RankLostError, World, joined_world
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.loop import Training
from autotune.engine.shards import whole
from autotune.errors import AutotuneError
from autotune.isolation.prepare import exit_at_once
from autotune.records.config import spread_config
from autotune.targets.workload import LoadedWorkload, check_workload

STEPS = 9
SHARED = ("counted", "plain", "uneven", "partial")
REFUSED = ("unsaid", "normed", "streamed", "averaged", "reaching")
KNOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "buckets": {"bucket_cap_mb": 1},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True, "sync_each_micro_batch": True},
    "static without meetings": {"static_graph": True},
    "each": {"sync_each_micro_batch": True},
    "fsdp": {"distributed_strategy": "fsdp"},
    "fsdp, gathered": {"distributed_strategy": "fsdp", "reshard_after_forward": False},
    "fsdp, each": {"distributed_strategy": "fsdp", "sync_each_micro_batch": True},
    "fsdp, checkpointed": {"distributed_strategy": "fsdp", "activation_checkpointing": "full"},
    "fsdp, selective": {"distributed_strategy": "fsdp", "activation_checkpointing": "selective"},
    "fsdp, fp16": {"distributed_strategy": "fsdp", "precision": "fp16"},
    "bf16": {"precision": "bf16"},
    "bf16, reduced": {"precision": "bf16", "reduce_dtype": "bf16"},
    "fsdp, bf16": {"distributed_strategy": "fsdp", "precision": "bf16"},
    "fsdp, bf16, reduced": {"distributed_strategy": "fsdp", "precision": "bf16", "reduce_dtype": "bf16"},
}
"""Of several processes, and what goes with them."""
CAN_SHARD = hasattr(torch.cpu.Stream, "record_event")
"""FSDP2 of torch 2.6 does not run on a CPU."""
QUICK = {
    name: KNOBS[name]
    for name in ("plain", "views", "each", "fsdp", "fsdp, gathered", "fsdp, bf16, reduced")
    if CAN_SHARD or "fsdp" not in name
}
COMPILED: dict[str, dict[str, Any]] = {
    "fsdp, compiled": {"distributed_strategy": "fsdp", "compile_mode": "default"},
    "fsdp, compiled, checkpointed": {
        "distributed_strategy": "fsdp",
        "compile_mode": "default",
        "activation_checkpointing": "full",
    },
}
"""Of them the slow ones."""


def build(loaded: LoadedWorkload, world: World | None, changes: dict[str, Any]) -> Training:
    """Return the training of one process, or its part in that of several."""
    config = loaded.baseline.replace(**changes)
    if world is None:
        return Training(loaded, config, device=torch.device("cpu"), seed=3)
    return RankTraining(loaded, spread_config(config, world.size), world=world, seed=3)


def take_steps(name: str, world: World | None, **changes: Any) -> dict[str, Any]:
    """Return the losses, samples and ends of epochs of some steps, and the weights after them."""
    loaded = check_workload(getattr(shared_workloads, name), label=name, fingerprint="")
    training = build(loaded, world, changes)
    losses, samples, ends = [], [], []
    for _ in range(STEPS):
        if world is not None and not world.leads:
            assert world.hear() == Command.STEP
        outcome = training.step()
        losses.append(float(outcome.loss))
        samples.append(outcome.samples)
        ends.append(outcome.ends_epoch)
    weights = torch.cat([whole(parameter.detach()).flatten() for parameter in training.model.parameters()])
    return {
        "losses": losses,
        "samples": samples,
        "ends": ends,
        "weights": weights,
        "is_gathered": getattr(loaded.workload, "is_gathered", None),
        "graphs": compiled_graph_count() if changes.get("compile_mode", "off") != "off" else 0,
    }


def refuse(name: str, world: World) -> str:
    """Return the error that a training is refused with, on this process."""
    try:
        take_steps(name, world)
    except RankLostError:
        raise
    except AutotuneError as error:
        return error.message
    return ""


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    """Write what this process found into `rank-N.pt`, or `alone.pt`.

    Args:
        folder: to write into.
        cases: settings to try.
    """
    torch.set_num_threads(1)
    alone = "RANK" not in os.environ
    with nullcontext() if alone else joined_world(folder / "meeting", 30.0) as world:
        shared = SHARED if cases is QUICK else ()
        found: dict[str, Any] = {name: take_steps(name, world) for name in shared}
        found["knobs"] = {name: take_steps("stacked", world, **changes) for name, changes in cases.items()}
        if world is not None and cases is QUICK:
            found |= {name: refuse(name, world) for name in REFUSED}
            found["gathered"] = world.gather({"rank": world.rank})
            found["shared"] = world.share("the leader's" if world.leads else None)
        torch.save(found, folder / ("alone.pt" if world is None else f"rank-{world.rank}.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]), {"quick": QUICK, "knobs": KNOBS, "compiled": COMPILED}[sys.argv[2]])
    exit_at_once(0)  # as all ranks do: a thread of gloo that lets go of a tensor while Python ends would abort it
