"""What of a model is sharded block by block, and what is not sharded at all; the processes are in tests/distributed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autotune.engine.sharing import find_blocks_to_shard, find_unshardable, reduces_in_bf16, refuse_sharding
from autotune.records import TrainConfig


def make_blocks(count: int = 3) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(count)]


def test_repeated_blocks_are_sharded_one_by_one() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList(make_blocks()), nn.Linear(3, 1))
    assert find_blocks_to_shard(model) == list(model[1])
    assert find_blocks_to_shard(nn.Linear(3, 3)) == []


def test_a_block_that_shares_a_parameter_is_gathered_with_the_rest() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ModuleList(make_blocks()))
    model[1][0][0].weight = model[0].weight
    assert find_blocks_to_shard(model) == list(model[1])[1:]
    model[1][1][0].bias = model[1][2][0].bias
    assert find_blocks_to_shard(model) == []


def test_a_block_that_is_used_twice_is_gathered_with_the_rest() -> None:
    one, other = make_blocks(2)
    assert find_blocks_to_shard(nn.Sequential(nn.ModuleList([one, one, other]))) == [other]


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))


@pytest.mark.parametrize(
    ("model", "words", "reason"),
    [
        (nn.Linear(2, 2), {}, ""),
        (nn.Linear(2, 2), {"has_average": True}, "build_averaged_model() keeps whole weights"),
        (nn.Linear(2, 2), {"finds_unused": True}, "find_unused_parameters is DistributedDataParallel's alone"),
        (Scaled(), {}, "scale is a scalar, which FSDP2 does not shard"),
        (nn.Sequential(nn.Embedding(3, 2, sparse=True)), {}, "0 has sparse gradients"),
    ],
)
def test_what_cannot_be_sharded_has_a_reason(model: nn.Module, words: dict[str, bool], reason: str) -> None:
    found = find_unshardable(model, **({"finds_unused": False, "has_average": False} | words))
    assert reason in found
    assert bool(found) == bool(reason)


def test_an_older_release_shards_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "Stream", object)  # torch 2.6's has no `record_event`, which FSDP2 calls
    assert "does not run on a CPU" in refuse_sharding(torch.device("cpu"))
    assert refuse_sharding(torch.device("cuda")) == ""


def test_gradients_are_summed_in_bf16_beside_a_forward_pass_in_it_alone() -> None:
    asked = TrainConfig(reduce_dtype="bf16")
    assert not reduces_in_bf16(asked)
    assert reduces_in_bf16(asked.replace(precision="bf16"))
