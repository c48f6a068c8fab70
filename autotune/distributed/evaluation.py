"""An evaluation of a sharded model: all ranks run the whole of it, on the same samples, and the leader's figures count.

Each of its forward passes gathers the blocks one by one, so that a model is evaluated that no device could hold.
"""

from __future__ import annotations

from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command, RankLostError
from autotune.engine.evaluation import evaluate
from autotune.errors import TargetError
from autotune.targets.workload import LoadedWorkload


def lead_evaluation(loaded: LoadedWorkload, training: RankTraining, *, batch_size: int | None) -> dict[str, float]:
    """Have all ranks evaluate, and return the workload's metrics by name.

    Args:
        loaded: the workload.
        training: whose model is evaluated.
        batch_size: for a workload whose `evaluate` takes one.

    Raises:
        TargetError: another rank has failed in it.
        RankLostError: another rank is gone.
        Exception: whatever the workload raises here.
    """
    training.world.tell(Command.EVALUATE)
    training.world.share(batch_size)
    found, error = _evaluate(loaded, training, batch_size)
    others = [told for told in training.world.gather(None)[1:] if told]
    training.announce_pause()
    if error is not None:
        raise error
    if others:
        raise TargetError(f"{loaded.label}: evaluate failed in another process: {others[0]}")
    return found


def follow_evaluation(loaded: LoadedWorkload, training: RankTraining) -> None:
    """Evaluate with the leader; what goes wrong here is for the leader to say.

    Args:
        loaded: the workload.
        training: whose model is evaluated.

    Raises:
        RankLostError: another rank is gone.
    """
    batch_size = training.world.share(None)
    _, error = _evaluate(loaded, training, batch_size)
    training.world.gather(None if error is None else f"{type(error).__name__}: {error}"[:300])


def _evaluate(
    loaded: LoadedWorkload, training: RankTraining, batch_size: int | None
) -> tuple[dict[str, float], Exception | None]:
    try:
        # Not in inference mode: what is gathered in it could be no part of a training afterwards.
        return evaluate(loaded, training, training.config, batch_size=batch_size), None
    except RankLostError:
        raise
    except Exception as error:
        return {}, error
