"""Take some steps of several trainings, alone or as one of several processes, and write down what came of them.

python steps_program.py FOLDER
python -m torch.distributed.run --standalone --nproc-per-node 2 steps_program.py FOLDER
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
from autotune.engine.loop import Training
from autotune.errors import AutotuneError
from autotune.records.config import spread_config
from autotune.targets.workload import LoadedWorkload, check_workload

STEPS = 9
SHARED = ("counted", "plain", "uneven", "partial")
REFUSED = ("unsaid", "normed", "streamed")


def build(loaded: LoadedWorkload, world: World | None) -> Training:
    """Return the training of one process, or its part in that of several."""
    if world is None:
        return Training(loaded, loaded.baseline, device=torch.device("cpu"), seed=3)
    return RankTraining(loaded, spread_config(loaded.baseline, world.size), world=world, seed=3)


def take_steps(name: str, world: World | None) -> dict[str, Any]:
    """Return the losses, samples and ends of epochs of some steps, and the weights after them."""
    loaded = check_workload(getattr(shared_workloads, name), label=name, fingerprint="")
    training = build(loaded, world)
    losses, samples, ends = [], [], []
    for _ in range(STEPS):
        if world is not None and not world.leads:
            assert world.hear() == Command.STEP
        outcome = training.step()
        losses.append(float(outcome.loss))
        samples.append(outcome.samples)
        ends.append(outcome.ends_epoch)
    weights = torch.cat([parameter.detach().flatten() for parameter in training.model.parameters()])
    return {"losses": losses, "samples": samples, "ends": ends, "weights": weights}


def refuse(name: str, world: World) -> str:
    """Return the error that a training is refused with, on this process."""
    try:
        take_steps(name, world)
    except RankLostError:
        raise
    except AutotuneError as error:
        return error.message
    return ""


def main(folder: Path) -> None:
    """Write what this process found into `rank-N.pt`, or `alone.pt`."""
    torch.set_num_threads(1)
    alone = "RANK" not in os.environ
    with nullcontext() if alone else joined_world(folder / "meeting", 30.0) as world:
        found: dict[str, Any] = {name: take_steps(name, world) for name in SHARED}
        if world is not None:
            found |= {name: refuse(name, world) for name in REFUSED}
            found["gathered"] = world.gather({"rank": world.rank})
            found["shared"] = world.share("the leader's" if world.leads else None)
        torch.save(found, folder / ("alone.pt" if world is None else f"rank-{world.rank}.pt"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
