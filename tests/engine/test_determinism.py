"""Dropout switched off everywhere and put back as it was; a model in float64 that takes and returns what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from engine_workloads import PatchWorkload, build
from torch import Tensor, nn

from autotune.engine.determinism import make_reference, without_dropout
from autotune.engine.loop import Training
from autotune.records import TrainConfig

EXCHANGED: tuple[tuple[Any, str], ...] = (
    *((F, name) for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")),
    *((F, name) for name in ("feature_alpha_dropout", "scaled_dot_product_attention")),
    (torch, "dropout"),
    *((kind, "forward") for kind in (nn.RNN, nn.LSTM, nn.GRU)),
)


def lengths(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(5)) + 0.5


def build_modules(kind: Callable[[float], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return one and the same module with dropout and without any."""
    with_dropout, without = kind(0.5), kind(0.0)
    without.load_state_dict(with_dropout.state_dict())
    return with_dropout, without


def attend_by_hand(p: float) -> Callable[..., Tensor]:
    """Return attention whose dropout is an argument by position or by name."""
    return lambda x: (
        F.scaled_dot_product_attention(x, x, x, None, p)
        + F.scaled_dot_product_attention(x, x, x, dropout_p=p)
        + F.scaled_dot_product_attention(x, x, x, dropout_p=p, is_causal=True, scale=0.3)
        + F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6).tril().bool(), p, False)
    )


# name -> what drops out at a rate, and what it is given
FUNCTIONS: dict[str, tuple[Callable[[float], Callable[..., Tensor]], Tensor]] = {
    "F.dropout": (lambda p: lambda x: F.dropout(x, p) + F.dropout(input=x, p=p, training=True), lengths(4, 6)),
    "torch.dropout": (lambda p: lambda x: torch.dropout(x, p, True), lengths(4, 6)),
    "F.dropout1d": (lambda p: lambda x: F.dropout1d(x, p), lengths(4, 6, 8)),
    "F.dropout2d": (lambda p: lambda x: F.dropout2d(x, p), lengths(4, 6, 3, 3)),
    "F.dropout3d": (lambda p: lambda x: F.dropout3d(x, p), lengths(4, 6, 2, 2, 2)),
    "F.alpha_dropout": (lambda p: lambda x: F.alpha_dropout(x, p, training=True), lengths(4, 6)),
    "F.feature_alpha_dropout": (lambda p: lambda x: F.feature_alpha_dropout(x, p, training=True), lengths(4, 6, 3)),
    "attention": (attend_by_hand, lengths(2, 3, 6, 4)),
}
MODULES: dict[str, tuple[Callable[[float], nn.Module], tuple[Tensor, ...], dict[str, Any]]] = {
    "Dropout": (nn.Dropout, (lengths(4, 6),), {}),
    "Dropout in place": (lambda p: nn.Dropout(p, inplace=True), (lengths(4, 6),), {}),
    "Dropout1d": (nn.Dropout1d, (lengths(4, 6, 8),), {}),
    "Dropout2d": (nn.Dropout2d, (lengths(4, 6, 3, 3),), {}),
    "Dropout3d": (nn.Dropout3d, (lengths(4, 6, 2, 2, 2),), {}),
    "AlphaDropout": (nn.AlphaDropout, (lengths(4, 6),), {}),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (lengths(4, 6, 3),), {}),
    "MultiheadAttention": (
        lambda p: nn.MultiheadAttention(8, 2, dropout=p, batch_first=True),
        (lengths(3, 5, 8),) * 3,
        {"need_weights": False},
    ),
    "MultiheadAttention with its weights": (
        lambda p: nn.MultiheadAttention(8, 2, dropout=p, batch_first=True),
        (lengths(3, 5, 8),) * 3,
        {"need_weights": True},
    ),
    "TransformerEncoderLayer": (
        lambda p: nn.TransformerEncoderLayer(8, 2, 16, dropout=p, batch_first=True),
        (lengths(3, 5, 8),),
        {},
    ),
    "RNN": (lambda p: nn.RNN(6, 5, num_layers=2, dropout=p), (lengths(7, 3, 6),), {}),
    "LSTM": (lambda p: nn.LSTM(6, 5, num_layers=3, dropout=p, batch_first=True), (lengths(3, 7, 6),), {}),
    "LSTM both ways": (lambda p: nn.LSTM(6, 5, 2, dropout=p, bidirectional=True), (lengths(7, 3, 6),), {}),
    "GRU": (lambda p: nn.GRU(6, 5, num_layers=2, dropout=p), (lengths(7, 3, 6),), {}),
}


def first_tensor(returned: Any) -> Tensor:
    tensor: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return tensor


def draws(function: Callable[[], object]) -> bool:
    """Return whether a call draws from torch's generator."""
    before = torch.get_rng_state()
    function()
    return not torch.equal(before, torch.get_rng_state())


def exchanged_functions() -> list[Any]:
    return [getattr(owner, name) for owner, name in EXCHANGED]


# Without dropout


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_drops_out_lets_everything_pass(name: str) -> None:
    make, given = FUNCTIONS[name]
    expected = make(0.0)(given.clone())
    assert draws(lambda: make(0.5)(given.clone()))
    with without_dropout():
        assert not draws(lambda: make(0.5)(given.clone()))
        torch.testing.assert_close(make(0.5)(given.clone()), expected)
    assert draws(lambda: make(0.5)(given.clone()))


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_drops_out_lets_everything_pass(name: str) -> None:
    kind, given, options = MODULES[name]
    module, exact = build_modules(kind)
    assert module.training
    expected = first_tensor(exact(*(one.clone() for one in given), **options))

    def call() -> Tensor:
        return first_tensor(module(*(one.clone() for one in given), **options))

    assert draws(call)
    with without_dropout():
        assert not draws(call)
        torch.testing.assert_close(call(), expected)
    assert draws(call)


@pytest.mark.parametrize("name", [name for name in MODULES if "Attention" in name or "STM" in name])
def test_gradients_too_are_those_without_dropout(name: str) -> None:
    kind, given, options = MODULES[name]
    module, exact = build_modules(kind)
    first_tensor(exact(*given, **options)).square().sum().backward()
    with without_dropout():
        first_tensor(module(*given, **options)).square().sum().backward()
    for parameter, other in zip(module.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)


def test_a_model_goes_on_training_as_it_was_afterwards() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LSTM(6, 5, num_layers=2, dropout=0.25))
    before = exchanged_functions()
    with without_dropout():
        assert all(one is not other for one, other in zip(exchanged_functions(), before, strict=True))
        model(lengths(7, 6))
        assert all(module.training for module in model.modules())
    assert all(one is other for one, other in zip(exchanged_functions(), before, strict=True))
    assert (model[1].p, model[2].dropout) == (0.5, 0.25)


def test_everything_is_put_back_after_an_exception() -> None:
    before = exchanged_functions()
    recurrent = nn.LSTM(6, 5, num_layers=2, dropout=0.25)
    with pytest.raises(RuntimeError, match=r"input\.size"), without_dropout():
        recurrent(lengths(7, 3, 9))
    assert all(one is other for one, other in zip(exchanged_functions(), before, strict=True))
    assert recurrent.dropout == 0.25


def test_one_inside_another_is_undone_step_by_step() -> None:
    dropout = nn.Dropout(0.5)
    with without_dropout():
        with without_dropout():
            pass
        assert not draws(lambda: dropout(lengths(4, 6)))
    assert draws(lambda: dropout(lengths(4, 6)))


def test_batch_norm_still_normalises_by_the_batch() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6))
    given = 3.0 + lengths(16, 6)
    with without_dropout():
        returned = model(given)
    torch.testing.assert_close(returned.mean(0), torch.zeros(6), rtol=0.0, atol=1e-5)
    assert float(model[1].running_mean.abs().min()) > 0.1  # updated, as in training


def bound_early() -> Callable[[Tensor], Tensor]:
    """Return what a module does that has said `from torch.nn.functional import dropout` when it was loaded."""
    from torch.nn.functional import dropout

    return lambda x: dropout(x, 0.5)


@pytest.mark.xfail(strict=True, reason="only the functions' own names are exchanged, not those bound before")
def test_a_function_that_was_imported_by_its_name_lets_everything_pass_too() -> None:
    drop = bound_early()
    with without_dropout():
        assert not draws(lambda: drop(lengths(4, 6)))


def test_random_numbers_that_are_no_dropout_are_still_drawn() -> None:
    with without_dropout():
        assert draws(lambda: F.rrelu(lengths(4, 6) - 1.0, training=True))
        assert draws(lambda: torch.randn(3))


@pytest.mark.parametrize("checkpointing", ["off", "selective", "full"])
def test_a_step_without_dropout_draws_nothing_and_is_that_of_a_model_without(checkpointing: Any) -> None:
    config = TrainConfig(micro_batch_size=8, activation_checkpointing=checkpointing)
    dropping, exact = (build(PatchWorkload(dropout=rate), config) for rate in (0.4, 0.0))
    expected = float(exact.step().loss)
    with without_dropout():
        before = torch.get_rng_state()
        assert float(dropping.step().loss) == pytest.approx(expected, rel=1e-6)
        assert torch.equal(torch.get_rng_state(), before)
    assert draws(dropping.step)


# In float64


class Watched(nn.Module):
    """A perceptron that remembers the types that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.full((3,), 0.1))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        returned = self.inner(x) + self.shift
        self.seen += [x.dtype, returned.dtype] + ([] if scale is None else [scale.dtype])
        return returned if scale is None else returned * scale


def make_watched() -> Watched:
    torch.manual_seed(0)
    return Watched()


def test_a_reference_computes_in_float64_and_returns_float32() -> None:
    model = make_watched()
    make_reference(model)
    returned = model(torch.ones(2, 4))
    assert model.seen == [torch.float64, torch.float64]
    assert returned.dtype == torch.float32
    assert {one.dtype for one in (*model.parameters(), *model.buffers())} == {torch.float64}


class Recurrent(nn.Module):
    """Makes its first state for itself, as scripts do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(1, len(x), 8)
        return self.inner(x, (state, state))[0]  # type: ignore[no-any-return]


def test_what_the_forward_of_a_reference_makes_is_in_float64_too() -> None:
    model, given = Recurrent(), torch.ones(2, 3, 4)
    plain = model(given)
    make_reference(model)
    assert torch.allclose(model(given), plain)
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(TypeError):
        model(None)
    assert torch.get_default_dtype() == torch.float32


class Grouped(nn.Module):
    """Keeps a constant, an index and a tensor that is trained beside its parameters, none of them registered."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.groups = torch.eye(4)
        self.order = torch.tensor([3, 1, 0, 2])
        self.scale = torch.ones(4, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(self.inner(x)[:, self.order], self.groups) * self.scale


def test_constants_that_a_reference_keeps_as_plain_attributes_are_in_float64_too() -> None:
    model, given = Grouped(), torch.ones(2, 4)
    groups, scale, plain = model.groups, model.scale, model(given)
    make_reference(model)
    assert torch.allclose(model(given), plain)
    assert (model.groups.dtype, model.order.dtype) == (torch.float64, torch.int64)
    assert groups.dtype == torch.float32  # a script that has it as well has what it had
    assert model.scale is scale  # an optimizer may step it


def test_a_reference_is_nearer_to_the_truth_than_the_model_and_near_to_it() -> None:
    given = lengths(64, 4)
    plain, reference = make_watched(), make_watched()
    make_reference(reference)
    with torch.no_grad():
        exact = make_watched().double()(given.double())
        rounded, narrowed = (float((one(given) - exact).norm() / exact.norm()) for one in (plain, reference))
    assert 0.0 < rounded < 1e-6
    assert narrowed < 6e-8  # no more than the rounding of what it returns


def test_gradients_of_a_reference_are_in_float64_and_those_of_the_model() -> None:
    given = lengths(64, 4)
    plain, reference = make_watched(), make_watched()
    make_reference(reference)
    for model in (plain, reference):
        model(given).square().mean().backward()
    for parameter, other in zip(reference.parameters(), plain.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float64
        torch.testing.assert_close(parameter.grad.float(), other.grad, rtol=1e-4, atol=1e-7)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass(frozen=True)
class Output:
    logits: Tensor
    count: int


class Nested(nn.Module):
    """Takes and returns tensors in whatever there is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.words = nn.Embedding(10, 3)

    def forward(self, batch: dict[str, Any], pair: Pair, *, mask: Tensor, label: str) -> dict[str, Any]:
        assert batch["x"].dtype == pair.left.dtype == torch.float64
        assert (batch["ids"].dtype, mask.dtype, label) == (torch.int64, torch.bool, "train")
        logits = self.words(batch["ids"]) + self.weight * batch["x"] * mask
        return {"output": Output(logits, 2), "ids": batch["ids"], "list": [logits, None], "pair": Pair(logits, mask)}


def test_what_is_nested_is_widened_and_narrowed_and_the_rest_is_left() -> None:
    model = Nested()
    make_reference(model)
    ids, mask = torch.tensor([1, 2]), torch.tensor([True, False, True])
    pair = Pair(torch.ones(2), torch.ones(2))
    returned = model({"x": torch.ones(2, 3), "ids": ids}, pair, mask=mask, label="train")
    assert isinstance(returned["output"], Output)
    assert isinstance(returned["pair"], Pair)
    assert returned["output"].logits.dtype == returned["list"][0].dtype == returned["pair"].left.dtype == torch.float32
    assert (returned["output"].count, returned["list"][1]) == (2, None)
    assert torch.equal(returned["ids"], ids)
    assert torch.equal(returned["pair"].right, mask)
    assert pair.left.dtype == torch.float32  # what it was given is as it was


def test_arguments_by_name_are_widened_too() -> None:
    model = make_watched()
    make_reference(model)
    returned = model(x=torch.ones(2, 4), scale=torch.tensor(2.0))
    assert model.seen == [torch.float64] * 3
    assert returned.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_narrow_inputs_are_taken_as_well(dtype: torch.dtype) -> None:
    model = make_watched()
    make_reference(model)
    assert model(torch.ones(2, 4, dtype=dtype)).dtype == torch.float32
    assert model.seen[0] == torch.float64


def reference_step(config: TrainConfig, optimizer: dict[str, Any]) -> tuple[Training, float]:
    training = build(PatchWorkload(optimizer=optimizer), config)
    make_reference(training.model)
    return training, float(training.step().loss)


@pytest.mark.parametrize("optimizer", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_a_training_goes_on_with_a_reference(optimizer: dict[str, Any], layout: Any) -> None:
    config = TrainConfig(micro_batch_size=8, memory_format=layout)
    training, loss = reference_step(config, optimizer)
    plain = build(PatchWorkload(optimizer=optimizer), config)
    assert loss == pytest.approx(float(plain.step().loss), rel=1e-5)
    trained = [one for group in training.optimizer.param_groups for one in group["params"]]
    assert {id(one) for one in trained} == {id(one) for one in training.model.parameters()}
    assert {one.dtype for one in trained} == {torch.float64}
    weights, others = (torch.cat([w.reshape(-1) for w in one.model.parameters()]) for one in (training, plain))
    assert float(((weights - others).abs() > 1e-5).double().mean()) < 0.02  # Adam makes full steps of mere rounding
