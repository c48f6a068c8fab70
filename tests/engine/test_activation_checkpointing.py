"""Which blocks are found, that they are really computed again, and that nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_workloads import Block, Patches
from torch import Tensor, nn

from autotune.engine.activation_checkpointing import apply_activation_checkpointing, find_repeated_blocks
from autotune.records import TrainConfig


def residual(width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Stages(nn.Module):
    """As in a ResNet: stages that each hold a list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.first = nn.Sequential(Block(4, 0.0), Block(4, 0.0))
        self.second = nn.Sequential(Block(4, 0.0), Block(4, 0.0), Block(4, 0.0))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, 2)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Nested(nn.Module):
    """Repeated blocks that hold repeated blocks: only the outer ones are checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(residual(), residual()) for _ in range(2))


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (lambda: Patches(0.0), ["Block"] * 2),
        (Stages, ["Block"] * 5),
        (EncoderDecoder, ["TransformerEncoderLayer"] * 3),
        (lambda: Wrapped(Wrapped(Patches(0.0))), ["Block"] * 2),
        (lambda: nn.Sequential(Block(4, 0.0), Block(4, 0.0)), ["Block"] * 2),
        (Nested, ["Sequential"] * 2),
        (lambda: Wrapped(nn.ModuleList([Block(4, 0.0)])), []),
        (lambda: residual(), []),
        (lambda: nn.Linear(2, 2), []),
        (lambda: Wrapped(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])), []),
        (lambda: Wrapped(nn.ModuleList([Block(4, 0.0), residual()])), []),
        (lambda: Wrapped(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))), []),
    ],
)
def test_repeated_blocks_are_found(make: Callable[[], nn.Module], kinds: list[str]) -> None:
    model = make()
    blocks = find_repeated_blocks(model)
    assert [type(block).__name__ for block in blocks] == kinds
    assert len({id(block) for block in blocks}) == len(blocks)


class Tower(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, dropout) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        for block in self.blocks:
            tokens = block(tokens)
        return tokens


def count_calls(model: Tower) -> list[int]:
    """Return a list that grows by one at each pass through a block's perceptron."""
    calls: list[int] = []
    for block in model.blocks:
        block.perceptron.register_forward_pre_hook(lambda *_: calls.append(1))
    return calls


def tower(mode: Any, *, dropout: float = 0.0) -> Tower:
    torch.manual_seed(1)
    model = Tower(dropout)
    apply_activation_checkpointing(model, TrainConfig(activation_checkpointing=mode))
    return model


TOKENS = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("mode", "recomputed"), [("off", 0), ("selective", 3), ("full", 3)])
def test_blocks_are_computed_again_in_the_backward_pass(mode: str, recomputed: int) -> None:
    model = tower(mode)
    calls = count_calls(model)
    loss = model(TOKENS).sum()
    assert len(calls) == 3
    loss.backward()
    assert len(calls) == 3 + recomputed


def test_nothing_is_computed_again_without_gradients_or_in_evaluation() -> None:
    model = tower("full")
    calls = count_calls(model)
    with torch.no_grad():
        model(TOKENS)
    model.eval()
    model(TOKENS.clone().requires_grad_()).sum().backward()
    assert len(calls) == 6


def saved_bytes(mode: str) -> int:
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    model = tower(mode)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(TOKENS).sum()
    loss.backward()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    return sum(size for pointer, size in kept.items() if pointer not in own)


def test_less_is_kept_for_the_backward_pass() -> None:
    assert saved_bytes("full") < 0.3 * saved_bytes("off")


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_matrix_products_are_computed_again_by_full_only(mode: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += function in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
            return function(*args, **(kwargs or {}))

    def products(checkpointing: str) -> int:
        model = tower(checkpointing)
        with Products() as counter:
            model(TOKENS).sum().backward()
        return counter.count

    extra = products(mode) - products("off")
    assert extra == 0 if mode == "selective" else extra >= 6  # three products in each of three blocks


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_gradient_is_the_same_with_and_without(mode: str, dropout: float) -> None:
    def gradients(checkpointing: str) -> list[Tensor]:
        model = tower(checkpointing, dropout=dropout)
        torch.manual_seed(5)
        model(TOKENS).square().mean().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert len(gradients("off")) == len(list(Tower().parameters()))
    assert all(torch.equal(one, two) for one, two in zip(gradients(mode), gradients("off"), strict=True))


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_the_random_stream_goes_on_as_without(mode: str) -> None:
    def draw(checkpointing: str) -> float:
        model = tower(checkpointing, dropout=0.3)
        torch.manual_seed(5)
        model(TOKENS).sum().backward()
        return torch.rand(1).item()

    assert draw(mode) == draw("off")


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_names_of_parameters_stay_and_a_copy_runs_on_its_own_weights(mode: str) -> None:
    model = tower(mode)
    assert list(model.state_dict()) == list(Tower().state_dict())
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.zero_()
    assert torch.equal(average(TOKENS), TOKENS)
    assert not torch.equal(model(TOKENS), TOKENS)
    average(TOKENS).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_arguments_by_name_reach_the_block() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 4))

        def forward(self, tokens: Tensor, *, scale: float, mask: Tensor | None = None) -> tuple[Tensor, float]:
            return self.inner(tokens) * (1.0 if mask is None else mask) * scale, scale

    model = nn.ModuleList([Masked(), Masked()])
    apply_activation_checkpointing(model, TrainConfig(activation_checkpointing="full"))
    tokens, scale = model[0](torch.ones(2, 4), scale=3.0, mask=torch.zeros(4))
    assert scale == 3.0
    assert not tokens.any()
    model[1](torch.ones(2, 4, requires_grad=True), scale=2.0)[0].sum().backward()


class WithSwitch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([residual(), residual()])
        self.switched = 0

    def gradient_checkpointing_enable(self) -> None:
        self.switched += 1


def test_a_models_own_switch_is_used_for_full() -> None:
    model = WithSwitch()
    apply_activation_checkpointing(model, TrainConfig(activation_checkpointing="full"))
    assert model.switched == 1
    assert "forward" not in vars(model.layers[0])
    apply_activation_checkpointing(model, TrainConfig(activation_checkpointing="selective"))
    assert model.switched == 1
    assert "forward" in vars(model.layers[0])


def test_off_touches_nothing() -> None:
    model = WithSwitch()
    apply_activation_checkpointing(model, TrainConfig())
    assert model.switched == 0
    assert "forward" not in vars(model.layers[0])


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_model_without_blocks_is_refused(mode: Any) -> None:
    with pytest.raises(ValueError, match="no repeated blocks"):
        apply_activation_checkpointing(nn.Linear(2, 2), TrainConfig(activation_checkpointing=mode))
