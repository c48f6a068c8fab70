"""Knobs of several processes that train together: how they share a model, and how their gradients meet.

    ddp    a replica in each process: gradients are summed in buckets while the backward pass goes on
    fsdp   a shard in each: a repeated block's parameters are gathered before it computes, its gradients are scattered

What is shared is a root module that has the model in it. Its own parameters, outside the repeated blocks, are gathered
when it is called, and stay until its backward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from autotune.engine.activation_checkpointing import find_repeated_blocks
from autotune.records.config import TrainConfig

_OWN_BUCKET_MIB = TrainConfig().bucket_cap_mb


def is_sharded(config: TrainConfig) -> bool:
    """Return whether several processes have a shard of the model each."""
    return config.distributed_strategy == "fsdp"


def refuse_sharding(device: torch.device) -> str:
    """Return why a model cannot be sharded over the processes; empty where it can. All of them have to ask.

    Args:
        device: of this process. On a CPU older releases of FSDP2, or of gloo, cannot do it.
    """
    if device.type != "cpu":
        return ""
    if not hasattr(torch.cpu.Stream, "record_event"):
        return f"FSDP2 of torch {torch.__version__} does not run on a CPU"
    size = dist.get_world_size()
    # The older name has a warning since torch 2.13, and the newer one was not there before.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    try:
        scatter(torch.empty(1), torch.zeros(size), op=dist.ReduceOp.AVG)
    except (RuntimeError, NotImplementedError) as error:
        if not any(word in str(error) for word in ("ReduceOp", "support", "implement")):
            raise  # another process is gone
        return f"gloo of torch {torch.__version__} cannot scatter means: {' '.join(str(error).split())[:100]}"
    return ""


def find_unshardable(model: nn.Module, *, finds_unused: bool, has_average: bool) -> str:
    """Return why a model can be replicated, and not sharded; empty where it can be sharded.

    Args:
        model: as its workload builds it.
        finds_unused: some parameters may have no part in a loss.
        has_average: the workload keeps an average of the weights.
    """
    if has_average:
        return "build_averaged_model() keeps whole weights, and each process would have a shard of them"
    if finds_unused:
        return "find_unused_parameters is DistributedDataParallel's alone"
    for name, leaf in model.named_parameters():
        if leaf.ndim == 0:
            return f"{name} is a scalar, which FSDP2 does not shard: give it one dimension"
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            return f"{name} has sparse gradients, which FSDP2 does not scatter"
    return ""


def replicate(root: nn.Module, config: TrainConfig, *, finds_unused: bool) -> DistributedDataParallel:
    """Return a module that leaves the mean gradient over all processes with each of them.

    Args:
        root: called in each step, the model in it.
        config: the settings.
        finds_unused: some parameters may have no part in a loss.
    """
    replica = DistributedDataParallel(
        root,
        # Named, it would be the size of the first bucket too.
        bucket_cap_mb=None if config.bucket_cap_mb == _OWN_BUCKET_MIB else config.bucket_cap_mb,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        # Torch's reducer fails (an assertion of its own) where a first backward pass does not meet the others'.
        static_graph=config.static_graph and _always_meets(config),
        find_unused_parameters=finds_unused,
    )
    if reduces_in_bf16(config):
        # PyTorch's own hook is for NCCL alone.
        replica.register_comm_hook(None, lambda _state, bucket: average_in_bf16(bucket))
    return replica


def _always_meets(config: TrainConfig) -> bool:
    return config.sync_each_micro_batch or config.gradient_accumulation_steps == 1


def reduces_in_bf16(config: TrainConfig) -> bool:
    """Return whether gradients are summed over processes in bf16: beside a forward pass in it, and never else."""
    return config.reduce_dtype == "bf16" and config.precision == "bf16"


def average_in_bf16(bucket: Any) -> torch.futures.Future[Tensor]:
    """Return the mean of a bucket of gradients over all processes, summed in bf16: a hook of DDP's."""
    whole: Tensor = bucket.buffer()
    narrow = whole.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(narrow, async_op=True)
    assert work is not None

    def widen(future: torch.futures.Future[Any]) -> Tensor:
        return whole.copy_(future.value()[0])

    averaged: torch.futures.Future[Tensor] = work.get_future().then(widen)
    return averaged


def find_blocks_to_shard(model: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks that are gathered one by one: each used once, and alone with its parameters."""
    blocks = find_repeated_blocks(model)
    places = {id(module): number for number, block in enumerate(blocks) for module in block.modules()}
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners.setdefault(id(parameter), set()).add(places.get(id(module), -1))
    uses = Counter(id(child) for module in model.modules() for child in module._modules.values())
    return [
        block
        for block in blocks
        if uses[id(block)] == 1 and all(len(owners[id(parameter)]) == 1 for parameter in block.parameters())
    ]


def shard(root: nn.Module, model: nn.Module, config: TrainConfig, device: torch.device) -> None:
    """Keep a shard of each parameter, in place; names stay, parameters are others.

    Autocast stays what does the arithmetic: parameters are gathered as they are.

    Args:
        root: called in each step, with the model in it, which may be on the host: it goes to the device shard by shard.
        model: has the repeated blocks.
        config: the settings.
        device: of this process.
    """
    # Half a second to import, for those who shard alone.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16 if reduces_in_bf16(config) else None)
    share = partial(fully_shard, mesh=mesh, mp_policy=policy)
    for block in find_blocks_to_shard(model):
        # A view that is changed in place loses the hook that gathers the block for its backward pass.
        block.forward = partial(_own_output, block.forward)
        share(block, reshard_after_forward=config.reshard_after_forward)
    share(root, reshard_after_forward=False)  # its backward pass comes at once


def _own_output(plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return tree_map_only(Tensor, lambda one: one.clone() if one._is_view() else one, plain(*arguments, **named))


def meeting(shared: nn.Module, config: TrainConfig, *, is_last: bool) -> AbstractContextManager[None]:
    """Return what a micro batch is computed in: its gradients meet those of the other processes, or stay here.

    Args:
        shared: as `replicate` or `shard` has left it.
        config: the settings.
        is_last: of the micro batches of a step.
    """
    meets = is_last or config.sync_each_micro_batch
    if isinstance(shared, DistributedDataParallel):
        return nullcontext() if meets else shared.no_sync()
    shared.set_requires_gradient_sync(meets)  # type: ignore[operator]
    return nullcontext()


@contextmanager
def gathered_for_a_while(shared: nn.Module) -> Iterator[None]:
    """Let go of what a forward pass has gathered and no backward pass does: later weights are others."""
    try:
        yield
    finally:
        from torch.distributed.fsdp import FSDPModule

        for module in shared.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
