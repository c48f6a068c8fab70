"""How a script shares its model over processes by itself, and which knobs of it must stay as it has them."""

from __future__ import annotations

from typing import Any

from autotune.engine.hooks.sharing import DDP_ARGUMENTS, SharingHooks
from autotune.records.config import SHARED_KNOBS, TrainConfig

_LARGEST_BUCKET_MIB = 2**16


def read_sharing(sharing: SharingHooks, micro_batches: int) -> dict[str, Any]:
    """Return a script's own values of the knobs of several processes; nothing where it shares no model.

    Args:
        sharing: hooks that have seen it.
        micro_batches: of a step.
    """
    found: dict[str, Any] = {"sync_each_micro_batch": micro_batches > 1 and not sharing.holds_back}
    if sharing.shards:
        resharding = sharing.read_resharding()
        return found | {"distributed_strategy": "fsdp", "reshard_after_forward": resharding is not False}
    if not sharing.replicas:
        return {}
    replica = sharing.replicas[0]
    size = sharing.bucket_cap_mb
    if size is not None and 1 <= size <= _LARGEST_BUCKET_MIB:
        found["bucket_cap_mb"] = round(size)
    return found | {
        "gradient_as_bucket_view": bool(replica.gradient_as_bucket_view),
        "static_graph": bool(replica.static_graph),
    }


def find_fixed_sharing(sharing: SharingHooks, baseline: TrainConfig) -> dict[str, str]:
    """Return the knobs of several processes that must stay as a script has them, with reasons.

    Args:
        sharing: hooks that have seen it.
        baseline: its own settings.
    """
    if not sharing.shards and not sharing.replicas:
        return dict.fromkeys(SHARED_KNOBS, "the script uses neither DistributedDataParallel nor fully_shard")
    fixed = {"distributed_strategy": "the script shares its model by itself"}
    if baseline.gradient_accumulation_steps > 1 and not sharing.holds_back:
        fixed["sync_each_micro_batch"] = "the script alone knows which micro batch of a step is the last"
    if sharing.shards:
        fixed |= dict.fromkeys(DDP_ARGUMENTS, "it is DistributedDataParallel's, and the script uses fully_shard")
        fixed["reduce_dtype"] = "it is in the policy that the script hands to fully_shard"
        if sharing.read_resharding() is None:
            fixed["reshard_after_forward"] = "the script has it differ from block to block, or shards no block"
        return fixed
    fixed["reshard_after_forward"] = "it is fully_shard's, and the script uses DistributedDataParallel"
    size = sharing.bucket_cap_mb
    if size is not None and size != baseline.bucket_cap_mb:
        fixed["bucket_cap_mb"] = f"the script's buckets are of {size:g} MiB"
    if sharing.finds_unused:
        fixed["static_graph"] = "the script says that parameters may have no part in a loss (find_unused_parameters)"
    if sharing.reduces_itself:
        fixed["reduce_dtype"] = "the script has a communication hook of its own"
    return fixed
