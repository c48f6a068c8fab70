"""Is the gradient of a batch that of its parts? Asked before it is shared out over processes, or cut smaller."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from autotune.distributed.training import require_shards, require_shareable
from autotune.engine.device import choose_device
from autotune.engine.sharing import is_sharded
from autotune.errors import UsageError
from autotune.format import format_percent
from autotune.probe.additivity import measure_additivity
from autotune.probe.model import keeps_statistics
from autotune.records.config import TrainConfig
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.user_code import blame_target

_FEW_SAMPLES = 8
"""Split into three parts of unequal sizes."""


def require_same_learning(
    loaded: LoadedWorkload,
    before: TrainConfig,
    after: TrainConfig,
    *,
    world_size: int,
    sources: tuple[str, ...],
    note: Callable[[str], None],
) -> None:
    """Make sure that the gradient of a batch stays what it is when it is shared out over processes.

    Args:
        loaded: the workload.
        before: settings of a process whose gradient is known to be right.
        after: settings of each of the processes.
        world_size: how many there are.
        sources: global generators that the samples draw from.
        note: told what could not be found out.

    Raises:
        UsageError: it does not.
        TargetError: a part of the workload raises something, or returns something of the wrong type.
    """
    with blame_target(f"{loaded.label}: comparing the gradient of a batch with that of its parts"):
        model = loaded.workload.build_model()
        require_shareable(model, loaded.label, world_size, has_fillers=False)
        if is_sharded(after):
            require_shards(loaded, model, after, has_average=loaded.build_averaged_model(model) is not None)
        if after.micro_batch_size == before.micro_batch_size:
            return
        # Its statistics are then of the same samples as in one process.
        is_synchronised = any(isinstance(one, nn.SyncBatchNorm) for one in model.modules())
        if is_synchronised and after.micro_batch_size * world_size == before.micro_batch_size:
            return
        found = measure_additivity(loaded, before, choose_device("auto"), seed=0, random_sources=sources)
    if found is None:
        note("whether the gradient of a batch is that of its parts could not be found out")
    elif not found.holds:
        raise UsageError(
            f"{loaded.label}: the gradient of a batch is not that of its parts (it differs by "
            f"{format_percent(found.error)}, by {format_percent(found.reordering)} for rounding alone), so that "
            "several processes would learn something else than one",
            hint="return (mean loss, count) where the loss is no mean over samples; BatchNorm and losses over pairs "
            "within a batch need one process",
        )


def is_same_split(
    loaded: LoadedWorkload, config: TrainConfig, device: torch.device, *, sources: tuple[str, ...]
) -> bool | None:
    """Return whether a batch learns the same in smaller micro batches; None where that could not be found out.

    Asked of a few samples: memory is short, and a process that is killed for want of it could not tell any more.

    Args:
        loaded: the workload.
        config: settings of each process, with the smaller micro batch.
        device: where to compute.
        sources: global generators that the samples draw from.
    """
    model = loaded.workload.build_model()
    model.train()  # which some do not hand on to all of their layers
    if keeps_statistics(model):
        return False
    few = min(_FEW_SAMPLES, config.effective_batch_size)
    config = config.replace(micro_batch_size=few, gradient_accumulation_steps=1)
    try:
        found = measure_additivity(loaded, config, device, seed=0, random_sources=sources, windows=1)
    except Exception:  # whatever it is, the training itself will meet it too
        return None
    return None if found is None else found.holds
