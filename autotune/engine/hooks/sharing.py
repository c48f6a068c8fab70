"""Hooks on how a script shares its model over processes: what it does by itself, and the knobs of it.

    DistributedDataParallel(model)    arguments that a config changes are exchanged when the model is wrapped
    fully_shard(module)               set at the first training call, before anything was gathered
    no_sync, set_requires_gradient_sync(False)    without effect where the gradients of each micro batch are to meet

Every process of the training has these hooks, so that all of them do the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.engine.sharing import average_in_bf16, reduces_in_bf16
from autotune.records.config import TrainConfig

DDP_ARGUMENTS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
"""Knobs that are arguments of DistributedDataParallel."""

_PLAIN = TrainConfig()


class SharingHooks:
    """Follows how a script shares its models.

    Attributes:
        replicas: what it has wrapped in DistributedDataParallel.
        bucket_cap_mb: of the first of these, as the script has it; None for PyTorch's own.
        finds_unused: the script says that parameters may have no part in a loss.
        reduces_itself: it has registered a communication hook of its own.
        holds_back: it keeps the gradients of some micro batches from meeting.
        shards: modules that it has sharded by fully_shard, outermost first, found at the first training call.
    """

    def __init__(self, config: TrainConfig, changed: Collection[str]) -> None:
        self.replicas: list[DistributedDataParallel] = []
        self.bucket_cap_mb: float | None = None
        self.finds_unused = self.reduces_itself = self.holds_back = False
        self.shards: list[nn.Module] = []
        self._config, self._changed = config, frozenset(changed)
        self._stack = ExitStack()

    @property
    def _meets_each_time(self) -> bool:
        return "sync_each_micro_batch" in self._changed and self._config.sync_each_micro_batch

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Hook what shares a model."""
        with self._stack as stack:
            for name, hooked in (
                ("__init__", self._wrap),
                ("no_sync", self._hold_back),
                ("register_comm_hook", self._note_reduction),
            ):
                _patch(stack, DistributedDataParallel, name, hooked)
            yield

    def prepare(self, root: nn.Module) -> None:
        """Apply the knobs of fully_shard to a model that is about to be called for the first time in training."""
        found = [module for module in root.modules() if _is_sharded(module)]
        if not found:
            return
        if not self.shards:
            owner = next(one for one in type(found[0]).__mro__ if one.__name__ == "FSDPModule")
            _patch(self._stack, owner, "set_requires_gradient_sync", self._set_sync)
        self.shards += found
        if not all(_reduces_gradients(module) for module in found):
            self.holds_back = True
            if self._meets_each_time:
                found[0].set_requires_gradient_sync(True)  # type: ignore[operator]
        if "reshard_after_forward" in self._changed:
            for module in found[1:]:
                module.set_reshard_after_forward(self._config.reshard_after_forward, recurse=False)  # type: ignore[operator]

    def read_resharding(self) -> bool | None:
        """Return whether the sharded blocks let go of their parameters after the forward pass; None if only some do."""
        found = {_reshards(module) for module in self.shards[1:]}
        return found.pop() if len(found) == 1 else None

    def _wrap(self, plain: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(plain)

        def build(replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(replica, *args, **kwargs)
            if not self.replicas:
                self.bucket_cap_mb = given.arguments.get("bucket_cap_mb")
                self.finds_unused = bool(given.arguments.get("find_unused_parameters"))
            for name in DDP_ARGUMENTS:
                if name in self._changed and name in signature.parameters:
                    given.arguments[name] = getattr(self._config, name)
            if given.arguments.get("bucket_cap_mb") == _PLAIN.bucket_cap_mb and "bucket_cap_mb" in self._changed:
                del given.arguments["bucket_cap_mb"]  # named, it would be the size of the first bucket too
            plain(*given.args, **given.kwargs)
            self.replicas.append(replica)
            if "reduce_dtype" in self._changed and reduces_in_bf16(self._config):
                self._plain_register(replica, None, lambda _state, bucket: average_in_bf16(bucket))

        return build

    def _note_reduction(self, plain: Callable[..., None]) -> Callable[..., None]:
        self._plain_register = plain

        def register(replica: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            self.reduces_itself = True
            plain(replica, *args, **kwargs)

        return register

    def _hold_back(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def no_sync(replica: DistributedDataParallel) -> Any:
            self.holds_back = True
            return nullcontext() if self._meets_each_time else plain(replica)

        return no_sync

    def _set_sync(self, plain: Callable[..., None]) -> Callable[..., None]:
        def set_sync(module: nn.Module, requires_gradient_sync: bool, **kwargs: Any) -> None:
            self.holds_back = self.holds_back or not requires_gradient_sync
            plain(module, requires_gradient_sync or self._meets_each_time, **kwargs)

        return set_sync


def _patch(stack: ExitStack, owner: Any, name: str, hooked: Callable[[Any], Any]) -> None:
    plain = getattr(owner, name)
    stack.callback(setattr, owner, name, plain)
    setattr(owner, name, hooked(plain))


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


def _list_groups(module: Any) -> list[Any]:
    """Return what a sharded module gathers at once; where torch keeps it differs from release to release."""
    state = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    found = several if several is not None else [getattr(state, "_fsdp_param_group", None)]
    return [group for group in found if group is not None]


def _reshards(module: nn.Module) -> bool:
    return all(group.post_forward_mesh_info is not None for group in _list_groups(module))


def _reduces_gradients(module: nn.Module) -> bool:
    return all(group.reduce_grads for group in _list_groups(module))
