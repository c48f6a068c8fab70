"""The hooks on DistributedDataParallel and fully_shard: what a script has by itself, and what a config exchanges."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from process_group import joined_alone
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.engine.hooks.script import ScriptHooks, ScriptSettings
from autotune.probe.sources.script_sharing import find_fixed_sharing, read_sharing
from autotune.records.config import SHARED_KNOBS, TrainConfig

needs_shards_on_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason=f"FSDP2 of torch {torch.__version__} does not run on a CPU"
)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with joined_alone():
        yield


def make_hooks(**changes: Any) -> ScriptHooks:
    settings = ScriptSettings(TrainConfig(**changes), frozenset(changes))
    return ScriptHooks(settings, on_step=lambda _step: None, turn=lambda _is: None, now=lambda: 0.0)


def make_model() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def train(model: nn.Module, *, micro_batches: int = 1) -> list[torch.Tensor]:
    torch.optim.SGD(model.parameters())
    for _ in range(micro_batches):
        model(torch.ones(2, 4)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_the_arguments_of_a_script_are_read_and_stay_as_they_are() -> None:
    hooks = make_hooks()
    with hooks.installed():
        replica = DistributedDataParallel(make_model(), bucket_cap_mb=40, gradient_as_bucket_view=True)
        with replica.no_sync():
            train(replica)
        train(replica)
    assert read_sharing(hooks.sharing, 2) == {
        "bucket_cap_mb": 40,
        "gradient_as_bucket_view": True,
        "static_graph": False,
        "sync_each_micro_batch": False,
    }
    assert replica.gradient_as_bucket_view
    baseline = TrainConfig(**read_sharing(hooks.sharing, 2), gradient_accumulation_steps=2)
    assert set(find_fixed_sharing(hooks.sharing, baseline)) == {"distributed_strategy", "reshard_after_forward"}


def test_a_config_exchanges_the_arguments_and_leaves_no_trace() -> None:
    plain = {name: getattr(DistributedDataParallel, name) for name in ("__init__", "no_sync", "register_comm_hook")}
    hooks = make_hooks(bucket_cap_mb=100, gradient_as_bucket_view=True, static_graph=True)
    with hooks.installed():
        replica = DistributedDataParallel(make_model(), None, bucket_cap_mb=1)
        assert train(replica)
    assert replica.bucket_bytes_cap == 100 * 2**20
    assert (replica.gradient_as_bucket_view, replica.static_graph) == (True, True)
    assert hooks.sharing.bucket_cap_mb == 1  # the script's own
    assert {name: getattr(DistributedDataParallel, name) for name in plain} == plain


def test_pytorch_s_own_bucket_size_is_not_named() -> None:
    with make_hooks(bucket_cap_mb=25).installed():
        replica = DistributedDataParallel(make_model(), bucket_cap_mb=1)
    assert replica.bucket_bytes_cap == DistributedDataParallel(make_model()).bucket_bytes_cap


def test_gradients_of_each_micro_batch_meet_where_that_is_asked_for() -> None:
    hooks = make_hooks(sync_each_micro_batch=True)
    with hooks.installed():
        replica = DistributedDataParallel(make_model())
        with replica.no_sync():
            assert replica.require_backward_grad_sync
    assert hooks.sharing.holds_back


def test_gradients_are_reduced_in_bf16_beside_bf16_alone() -> None:
    torch.manual_seed(0)
    model = make_model()
    gradients = {}
    for precision in ("fp32", "bf16"):
        hooks = make_hooks(precision=precision, reduce_dtype="bf16")
        hooks.models.stop_finding()
        with hooks.installed():
            replica = DistributedDataParallel(model)
            model.zero_grad()
            gradients[precision] = train(replica)[0].clone()
        assert not hooks.sharing.reduces_itself
    assert torch.equal(gradients["bf16"], gradients["bf16"].bfloat16().float())
    assert not torch.equal(gradients["fp32"], gradients["fp32"].bfloat16().float())


@pytest.mark.parametrize(
    ("options", "knob", "word"),
    [
        ({"find_unused_parameters": True}, "static_graph", "find_unused_parameters"),
        ({"bucket_cap_mb": 0.5}, "bucket_cap_mb", "0.5 MiB"),
    ],
)
def test_what_a_script_needs_by_itself_stays(options: dict[str, Any], knob: str, word: str) -> None:
    hooks = make_hooks()
    with hooks.installed():
        DistributedDataParallel(make_model(), **options)
    fixed = find_fixed_sharing(hooks.sharing, TrainConfig(**read_sharing(hooks.sharing, 1)))
    assert word in fixed[knob]


def test_a_communication_hook_of_the_script_s_own_stays() -> None:
    hooks = make_hooks()
    with hooks.installed():
        replica = DistributedDataParallel(make_model())
        replica.register_comm_hook(None, lambda _state, bucket: _done(bucket.buffer()))
    assert "hook of its own" in find_fixed_sharing(hooks.sharing, TrainConfig())["reduce_dtype"]


def _done(value: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def test_a_script_that_accumulates_and_meets_each_time_alone_knows_its_last_micro_batch() -> None:
    hooks = make_hooks()
    with hooks.installed():
        train(DistributedDataParallel(make_model()), micro_batches=2)
    found = read_sharing(hooks.sharing, 2)
    assert found["sync_each_micro_batch"] is True
    assert (
        "last"
        in find_fixed_sharing(hooks.sharing, TrainConfig(**found, gradient_accumulation_steps=2))[
            "sync_each_micro_batch"
        ]
    )


def test_a_script_that_shares_nothing_is_told() -> None:
    hooks = make_hooks()
    with hooks.installed():
        train(make_model())
    assert read_sharing(hooks.sharing, 1) == {}
    assert find_fixed_sharing(hooks.sharing, TrainConfig()).keys() == {*SHARED_KNOBS}


def shard(model: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (1,))
    for block in model.children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    return model


@needs_shards_on_cpu
@pytest.mark.parametrize("own", [True, False])
def test_resharding_is_read_and_exchanged_before_the_first_call(own: bool) -> None:
    hooks = make_hooks()
    with hooks.installed():
        model = shard(make_model(), reshard_after_forward=own)
        train(model)
    assert read_sharing(hooks.sharing, 1) == {
        "distributed_strategy": "fsdp",
        "reshard_after_forward": own,
        "sync_each_micro_batch": False,
    }
    fixed = find_fixed_sharing(hooks.sharing, TrainConfig(**read_sharing(hooks.sharing, 1)))
    assert {*SHARED_KNOBS} - fixed.keys() == {"reshard_after_forward", "sync_each_micro_batch"}
    hooks = make_hooks(reshard_after_forward=not own)
    with hooks.installed():
        train(shard(make_model(), reshard_after_forward=own))
        assert hooks.sharing.read_resharding() is not own


@needs_shards_on_cpu
def test_sharded_gradients_of_each_micro_batch_meet_where_that_is_asked_for() -> None:
    for meets in (True, False):
        hooks = make_hooks(**({"sync_each_micro_batch": True} if meets else {}))
        with hooks.installed():
            model: Any = shard(make_model())
            for is_last in (False, True):
                model.set_requires_gradient_sync(is_last)
                train(model)
                assert all(isinstance(p.grad, torch.Tensor) for p in model.parameters()) == (meets or is_last)
        assert hooks.sharing.holds_back
