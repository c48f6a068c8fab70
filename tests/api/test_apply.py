"""An answer applied to a loop of one's own: with settings that are exact it trains bit for bit as without them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from record_factory import make_profile
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import autotune
from autotune.engine.live import Applied, apply_live
from autotune.errors import UsageError
from autotune.records import TrainConfig

EPOCHS = 3
BASELINE = TrainConfig(micro_batch_size=8)
EXACT = BASELINE.replace(
    num_workers=2,
    persistent_workers=True,
    prefetch_factor=4,
    activation_checkpointing="full",
    optimizer_implementation="foreach",
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.3)

    def forward(self, features: Tensor) -> Tensor:
        return features + self.dropout(torch.relu(self.linear(features)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(6, 1)

    def forward(self, features: Tensor) -> Tensor:
        output: Tensor = self.head(self.blocks(features))
        return output


def make_parts(net: type[nn.Module] = Net, **loader: Any) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any]]:
    """Return what a script builds; its loader draws from the generator that dropout draws from."""
    torch.manual_seed(3)
    features = torch.randn(44, 6)
    data = TensorDataset(features, features.sum(dim=1, keepdim=True))
    model = net()
    return model, torch.optim.Adam(model.parameters(), lr=0.02), DataLoader(data, 8, shuffle=True, **loader)


def train(applied: Applied) -> list[Tensor]:
    """Return the losses of a loop as the page of docs shows it."""
    assert applied.loader is not None
    assert applied.optimizer is not None
    losses = []
    with applied.settings():
        for _ in range(EPOCHS):
            for batch in applied.loader:
                features, labels = applied.place(batch)
                with applied.autocast():
                    loss = nn.functional.mse_loss(applied.model(features), labels)
                applied.scaler.scale(loss).backward()
                applied.scaler.step(applied.optimizer)
                applied.scaler.update()
                applied.optimizer.zero_grad()
                losses.append(loss.detach())
    return losses


def train_plainly(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader[Any]) -> list[Tensor]:
    losses = []
    for _ in range(EPOCHS):
        for features, labels in loader:
            loss = nn.functional.mse_loss(model(features), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses


def apply(config: TrainConfig, *parts: Any, baseline: TrainConfig = BASELINE) -> Applied:
    model, optimizer, loader = parts or make_parts()
    profile = autotune.Profile.of(make_profile(config=config, baseline_config=baseline))
    return profile.apply(model=model, optimizer=optimizer, loader=loader)


@pytest.mark.parametrize("own", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_exact_settings_train_as_without_them(own: dict[str, Any]) -> None:
    plain = train_plainly(*make_parts(**own))
    baseline = BASELINE.replace(**own)
    applied = apply(EXACT, *make_parts(**own), baseline=baseline)
    assert set(applied.changed) >= {"num_workers", "prefetch_factor", "activation_checkpointing"}
    assert applied.left_out == ()
    assert applied.loader is not None
    assert (applied.loader.num_workers, applied.loader.prefetch_factor) == (2, 4)
    assert torch.equal(torch.stack(train(applied)), torch.stack(plain))


def test_the_settings_are_at_work() -> None:
    parts = make_parts()
    seen: list[Any] = []
    applied = apply(EXACT.replace(precision="bf16", num_threads=1, memory_format="channels_last"), *parts)
    model, optimizer, loader = parts
    assert applied.model is model
    assert applied.optimizer is optimizer
    assert [group["foreach"] for group in optimizer.param_groups] == [True]
    assert loader.num_workers == 0  # the one that was given stays as it is
    before = torch.get_num_threads()
    model.head.register_forward_hook(  # type: ignore[union-attr]
        lambda _module, _inputs, output: seen.append((output.dtype, torch.get_num_threads()))
    )
    with applied.settings(), applied.autocast():
        applied.model(torch.zeros(2, 6))
    assert seen == [(torch.bfloat16, 1)]
    assert torch.get_num_threads() == before
    assert not applied.scaler.is_enabled()
    image = applied.place({"image": torch.zeros(2, 3, 4, 4)})["image"]
    assert image.is_contiguous(memory_format=torch.channels_last)


def test_a_loss_scaler_comes_with_fp16_alone() -> None:
    assert apply(BASELINE.replace(precision="fp16")).scaler.is_enabled()
    own = BASELINE.replace(precision="fp16")
    assert not apply(own.replace(num_workers=2), *make_parts(), baseline=own).scaler.is_enabled()


def test_a_compiled_model_is_the_same_object() -> None:
    parts = make_parts()
    applied = apply(BASELINE.replace(compile_mode="default"), *parts)
    assert applied.model is parts[0]
    assert applied.changed == ("compile_mode",)
    again = apply(BASELINE.replace(compile_mode="default"), *parts)
    assert again.left_out == ("compile_mode: the model is compiled already: leave that out where you build it",)


def test_nothing_is_changed_where_nothing_is_to_be() -> None:
    parts = make_parts()
    applied = apply(BASELINE, *parts)
    assert (applied.loader, applied.changed, applied.left_out) == (parts[2], (), ())
    assert repr(applied) == "<Applied: nothing>"


def test_what_cannot_be_applied_any_more_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    config = EXACT.replace(
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        host_allocator="glibc-tuned",
        device_allocator="expandable-segments",
        user_knobs={"depth": 3},
    )
    model, optimizer = nn.Linear(6, 1), torch.optim.LBFGS([nn.Parameter(torch.zeros(1))])
    applied = apply_live(config, BASELINE, model=model, optimizer=optimizer)
    start = "a process has its allocators from its start: export"
    mallocs = "MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=1073741824"
    assert applied.left_out == (
        "micro_batch_size: build the loader with batch_size=4",
        "gradient_accumulation_steps: take an optimizer step once in 2 batches, each loss divided by that number",
        "activation_checkpointing: the model has no repeated blocks to recompute",
        "optimizer_implementation: LBFGS has no foreach or fused switch",
        f"host_allocator: {start} {mallocs}, and start it again",
        f"device_allocator: {start} PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, and start it again",
        "num_workers: no loader was given",
        "prefetch_factor: no loader was given",
        "persistent_workers: no loader was given",
        "depth: set it in your own code",
    )
    assert repr(applied) == "<Applied: nothing, 10 left out: see left_out>"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert apply_live(config, BASELINE, model=model).changed == ("device_allocator",)


def test_what_several_processes_share_is_left_to_who_shares_it_out() -> None:
    applied = apply_live(BASELINE.replace(distributed_strategy="fsdp", bucket_cap_mb=100), BASELINE, model=Net())
    assert applied.changed == ()
    assert applied.left_out == (
        "distributed_strategy: set it where you share the model out over processes",
        "bucket_cap_mb: set it where you share the model out over processes",
    )


def test_a_library_that_is_not_here_is_named() -> None:
    config = BASELINE.replace(host_allocator="jemalloc")
    left = apply_live(config, BASELINE, model=Net(), host_allocators={}).left_out
    assert left == ("host_allocator: host_allocator 'jemalloc' is not installed on this machine",)
    left = apply_live(config, BASELINE, model=Net(), host_allocators={"jemalloc": "/lib/a b.so"}).left_out
    assert "export LD_PRELOAD='/lib/a b.so'" in left[0]


def test_what_a_model_was_built_with_stays() -> None:
    own = BASELINE.replace(memory_format="channels_last", optimizer_implementation="fused", host_allocator="jemalloc")
    left = apply_live(BASELINE, own, model=Net(), optimizer=make_parts()[1]).left_out
    names = [one.partition(":")[0] for one in left]
    assert names == ["optimizer_implementation", "memory_format", "host_allocator"]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield torch.zeros(6)


class OwnLoader(DataLoader[Any]):
    def __iter__(self) -> Any:
        yield from super().__iter__()


def test_loaders_that_cannot_be_changed_are_left_alone() -> None:
    model, _, loader = make_parts()
    for own, word in ((DataLoader(Stream()), "iterable"), (OwnLoader(loader.dataset), "OwnLoader iterates")):
        applied = apply_live(BASELINE.replace(num_workers=2), BASELINE, model=model, loader=own)
        assert applied.loader is own
        assert word in applied.left_out[0]


def test_an_optimizer_that_has_stepped_stays_as_it_is() -> None:
    model, optimizer, loader = make_parts()
    train_plainly(model, optimizer, loader)
    applied = apply_live(EXACT, BASELINE, model=model, optimizer=optimizer, loader=loader)
    assert "taken steps already" in applied.left_out[0]


@pytest.mark.parametrize("wrong", [{"model": None}, {"model": 42}, {"optimizer": "adam"}, {"loader": [1, 2]}])
def test_what_is_no_part_of_a_training_is_our_error(wrong: dict[str, Any]) -> None:
    model, optimizer, loader = make_parts()
    given: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader}
    with pytest.raises(UsageError, match=f"{next(iter(wrong))} is") as caught:
        autotune.Profile.of(make_profile()).apply(**(given | wrong))
    assert "give a torch." in caught.value.hint
