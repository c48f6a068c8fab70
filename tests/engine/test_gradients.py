"""What a recorder notes of optimizer steps, against the same steps taken by hand; and what it puts back."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_workloads import LineWorkload, build
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop, SparseAdam

from autotune.engine.gradients import MOST_ELEMENTS, RecordedStep, StepRecorder, name_parameters
from autotune.records import TrainConfig

LEAST_OF_LAYER = 256

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.1),
    "momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda parameters: Adam(parameters, lr=0.01, foreach=False),
    "foreach": lambda parameters: AdamW(parameters, lr=0.01, foreach=True),
    "fused": lambda parameters: AdamW(parameters, lr=0.01, fused=True),
    "tensor rate": lambda parameters: Adam(parameters, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda parameters: Adagrad(parameters, lr=0.1),
    "rmsprop": lambda parameters: RMSprop(parameters, lr=0.01, momentum=0.5),
}
each_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)
KEEPING_STATE = [kind for kind in OPTIMIZERS if kind not in ("sgd", "adagrad")]  # Adagrad makes its state at once


def watch(recorder: StepRecorder, *optimizers: Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda one, _args, _kwargs: recorder.before(one))
        optimizer.register_step_post_hook(lambda one, _args, _kwargs: recorder.after(one))


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def make_batch(number: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(100 + number))


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).clone() for tensor in tensors])


def weights_of(model: nn.Module) -> Tensor:
    return flatten(list(model.parameters()))


def gradients_of(model: nn.Module) -> Tensor:
    return flatten([parameter.grad for parameter in model.parameters()])


def take_step(model: nn.Module, optimizer: Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(make_batch(number)).square().mean().backward()
    optimizer.step()


def record_step(model: nn.Module, optimizer: Optimizer, number: int = 0) -> RecordedStep:
    """Return what a recorder of its own notes of one step."""
    recorder = StepRecorder()
    watch(recorder, optimizer)
    take_step(model, optimizer, number)
    noted = recorder.take()
    assert noted is not None
    return noted


def step_of(recorder: StepRecorder) -> RecordedStep:
    noted = recorder.take()
    assert noted is not None
    return noted


def give_indices(parameters: Sequence[Tensor]) -> None:
    """Let each element's gradient be its own place in the parameter."""
    for parameter in parameters:
        parameter.grad = torch.arange(parameter.numel(), dtype=torch.float32).reshape(parameter.shape)


# What is noted


@each_optimizer
def test_the_row_is_the_gradient_and_the_update_what_the_optimizer_did(kind: str) -> None:
    model, twin = make_model(), make_model()
    before = weights_of(twin)
    take_step(twin, OPTIMIZERS[kind](twin.parameters()), 0)
    noted = record_step(model, OPTIMIZERS[kind](model.parameters()))
    assert torch.equal(noted.gradient, gradients_of(twin))
    assert torch.equal(noted.update, weights_of(twin) - before)
    assert float(noted.update.abs().max()) > 0.0


class Clipped(LineWorkload):
    gradient_clip_norm = 0.05


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "config",
    [TrainConfig(micro_batch_size=24), TrainConfig(micro_batch_size=8, gradient_accumulation_steps=3)],
    ids=["whole", "accumulated"],
)
def test_the_gradient_is_noted_after_unscaling_and_clipping(precision: Any, config: TrainConfig) -> None:
    noted = []
    for workload in (LineWorkload(24), Clipped(24)):
        training = build(workload, config.replace(precision=precision))
        recorder = StepRecorder()
        watch(recorder, training.optimizer)
        training.step()
        noted.append(step_of(recorder).gradient)
    free, clipped = noted
    assert 0.1 < float(free.norm()) < 100.0  # a loss scale is 65536
    assert float(clipped.norm()) == pytest.approx(0.05, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-3, atol=1e-4)


def test_a_step_of_accumulated_gradients_has_their_sum() -> None:
    model = make_model()
    recorder, optimizer = StepRecorder(), SGD(model.parameters(), lr=0.1)
    watch(recorder, optimizer)
    for number in range(3):
        model(make_batch(number)).square().mean().backward()
    expected = gradients_of(model)
    optimizer.step()
    assert torch.equal(step_of(recorder).gradient, expected)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float32, torch.float32), torch.float32),
        ((torch.bfloat16, torch.bfloat16), torch.float32),
        ((torch.float64, torch.float64), torch.float64),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
def test_rows_are_in_float64_where_a_parameter_is_and_in_float32_else(
    dtypes: tuple[torch.dtype, ...], expected: torch.dtype
) -> None:
    values = [torch.tensor([1.0, 0.1]), torch.tensor([2.0])]
    parameters = [nn.Parameter(one.to(dtype)) for one, dtype in zip(values, dtypes, strict=True)]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 0.1)
    recorder, optimizer = StepRecorder(), SGD(parameters, lr=1.0)
    watch(recorder, optimizer)
    optimizer.step()
    noted = step_of(recorder)
    assert (noted.gradient.dtype, noted.update.dtype) == (expected, expected)
    assert torch.equal(noted.gradient, torch.cat([parameter.grad.to(expected) for parameter in parameters]))


def test_rates_are_those_of_every_group_when_it_stepped() -> None:
    model = make_model()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters()}]
    optimizer = SGD(groups, lr=0.25)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda _step: 1.0])
    recorder = StepRecorder()
    watch(recorder, optimizer)
    rates = []
    for number in range(3):
        take_step(model, optimizer, number)
        schedule.step()
        rates.append(step_of(recorder).learning_rates)
    assert rates == [(0.5, 0.25), (0.25, 0.25), (0.125, 0.25)]


class Doubling(Optimizer):
    """Doubles its parameters; there is no learning rate to it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(2.0)


def test_an_optimizer_without_a_rate_has_none() -> None:
    model = make_model()
    before = weights_of(model)
    noted = record_step(model, Doubling(model.parameters()))
    assert noted.learning_rates == ()
    assert torch.equal(noted.update, before)


def test_parameters_are_called_by_their_names_or_by_their_place() -> None:
    model = make_model()
    extra = nn.Parameter(torch.ones(3, 1))
    recorder = StepRecorder(lambda: name_parameters(model))
    optimizer = SGD([*model[2].parameters(), extra], lr=0.1)
    watch(recorder, optimizer)
    optimizer.step()
    assert recorder.layers == [("2.weight", 12, 12), ("2.bias", 2, 2), ("parameter 2 of shape [3, 1]", 3, 3)]
    assert [id(one) for one in recorder.parameters] == [id(one) for one in (*model[2].parameters(), extra)]


@pytest.mark.parametrize("split", [False, True], ids=["one optimizer", "one for each"])
def test_a_step_is_noted_in_the_models_order_whatever_the_optimizers(split: bool) -> None:
    """What is given to them as a set comes in another order in each process."""
    noted, layers = [], []
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        model = make_model()
        parameters = list(model.parameters())
        shuffled = [parameters[at] for at in order]
        recorder = StepRecorder(lambda model=model: name_parameters(model))
        optimizers = [Adam([one]) for one in shuffled] if split else [Adam(shuffled)]
        watch(recorder, *optimizers)
        model(make_batch(0)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        step = recorder.take()
        assert step is not None
        assert torch.equal(step.gradient, gradients_of(model))
        assert [id(one) for one in recorder.parameters] == [id(one) for one in parameters]
        noted.append(step)
        layers.append(recorder.layers)
    assert layers[0] == layers[1]
    assert torch.equal(noted[0].update, noted[1].update)


def test_models_that_share_names_are_told_apart() -> None:
    one, two = make_model(), make_model(1)
    recorder = StepRecorder(lambda: name_parameters(one, two))
    ours, theirs = SGD(two.parameters(), lr=0.1), SGD(one.parameters(), lr=0.1)
    watch(recorder, ours, theirs)
    ours.step()
    theirs.step()
    assert [name for name, _, _ in recorder.layers][::4] == ["0.0.weight", "1.0.weight"]
    assert [id(parameter) for parameter in recorder.parameters] == [*map(id, (*one.parameters(), *two.parameters()))]


# What has no gradient, and what has an odd one


def test_a_parameter_without_a_gradient_is_noted_as_zeros() -> None:
    model = make_model()
    model[0].bias.grad = torch.ones(6)
    recorder, optimizer = StepRecorder(lambda: name_parameters(model)), Adam(model.parameters(), lr=0.1)
    watch(recorder, optimizer)
    optimizer.step()
    noted = step_of(recorder)
    expected = torch.zeros(24 + 6 + 12 + 2)
    expected[24:30] = 1.0
    assert torch.equal(noted.gradient, expected)
    assert torch.equal(noted.update != 0.0, expected != 0.0)


def test_a_frozen_parameter_is_left_out() -> None:
    model = make_model()
    model[0].requires_grad_(False)
    recorder, optimizer = StepRecorder(lambda: name_parameters(model)), SGD(model.parameters(), lr=0.1)
    watch(recorder, optimizer)
    take_step(model, optimizer, 0)
    assert [name for name, _, _ in recorder.layers] == ["2.weight", "2.bias"]
    assert step_of(recorder).gradient.shape == (14,)


@pytest.mark.parametrize("make", [lambda p: SGD(p, lr=0.1), lambda p: SparseAdam(p, lr=0.1)], ids=["sgd", "adam"])
def test_sparse_gradients_are_noted_as_dense_ones(make: Callable[[Any], Optimizer]) -> None:
    torch.manual_seed(0)
    sparse, dense = nn.Embedding(10, 3, sparse=True), nn.Embedding(10, 3)
    dense.load_state_dict(sparse.state_dict())
    words = torch.tensor([1, 4, 1, 9])
    for one in (sparse, dense):
        one(words).square().sum().backward()
    before = sparse.weight.detach().clone()
    recorder, optimizer = StepRecorder(), make(sparse.parameters())
    watch(recorder, optimizer)
    optimizer.step()
    noted = step_of(recorder)
    assert torch.equal(noted.gradient, dense.weight.grad.reshape(-1))
    assert {*noted.update.reshape(10, 3).abs().sum(1).nonzero().flatten().tolist()} == {1, 4, 9}
    assert torch.equal(sparse.weight.detach(), before)


def test_the_layout_in_memory_changes_nothing() -> None:
    rows = []
    for layout in (torch.contiguous_format, torch.channels_last):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 2)).to(memory_format=layout)
        images = torch.randn(4, 3, 6, 6)
        recorder, optimizer = StepRecorder(), SGD(model.parameters(), lr=0.1)
        watch(recorder, optimizer)
        model(images).square().mean().backward()
        optimizer.step()
        assert model[0].weight.is_contiguous(memory_format=layout)
        rows.append(step_of(recorder))
    torch.testing.assert_close(rows[1].gradient, rows[0].gradient, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(rows[1].update, rows[0].update, rtol=1e-4, atol=1e-5)
    kernel = rows[0].gradient[: 8 * 27].reshape(8, 3, 3, 3)
    assert not torch.allclose(kernel, kernel.permute(0, 2, 3, 1).reshape(8, 3, 3, 3))  # another order would show


def test_an_empty_parameter_and_a_scalar_are_layers_like_others() -> None:
    parameters = [nn.Parameter(torch.zeros(0)), nn.Parameter(torch.tensor(3.0))]
    give_indices(parameters)
    recorder, optimizer = StepRecorder(), SGD(parameters, lr=1.0)
    watch(recorder, optimizer)
    parameters[1].grad += 2.0
    optimizer.step()
    assert [layer[1:] for layer in recorder.layers] == [(0, 0), (1, 1)]
    assert step_of(recorder).gradient.tolist() == [2.0]


# Which elements


def chosen_elements(sizes: Sequence[int]) -> tuple[list[tuple[str, int, int]], list[Tensor]]:
    """Return the layers of a recorder and which elements of each it notes."""
    parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
    give_indices(parameters)
    recorder, optimizer = StepRecorder(), SGD(parameters, lr=0.0)
    watch(recorder, optimizer)
    optimizer.step()
    widths = [width for _, width, _ in recorder.layers]
    return recorder.layers, list(step_of(recorder).gradient.long().split(widths))


LARGE = (3 * MOST_ELEMENTS, 500, 100, MOST_ELEMENTS // 2 + 1)


def test_every_element_of_a_small_model_is_noted() -> None:
    sizes = (MOST_ELEMENTS - 300, 200, 100)
    layers, chosen = chosen_elements(sizes)
    assert [layer[1:] for layer in layers] == [(size, size) for size in sizes]
    assert all(torch.equal(one, torch.arange(size)) for one, size in zip(chosen, sizes, strict=True))


def test_of_a_large_model_a_share_of_each_layer_is_noted_and_at_least_some() -> None:
    layers, chosen = chosen_elements(LARGE)
    widths = [len(one) for one in chosen]
    assert [layer[1:] for layer in layers] == list(zip(widths, LARGE, strict=True))
    assert widths[1:3] == [LEAST_OF_LAYER, 100]
    assert sum(widths) <= MOST_ELEMENTS + len(LARGE) * LEAST_OF_LAYER
    assert sum(widths) >= 0.95 * MOST_ELEMENTS
    assert widths[0] / widths[3] == pytest.approx(LARGE[0] / LARGE[3], rel=1e-3)


def test_one_element_of_each_equal_part_is_noted() -> None:
    _, chosen = chosen_elements(LARGE)
    for elements, size in zip(chosen, LARGE, strict=True):
        width = len(elements)
        starts = torch.arange(width + 1) * size // width
        assert bool((starts[:-1] <= elements).all())
        assert bool((elements < starts[1:]).all())


def test_the_place_within_a_part_is_drawn_at_random() -> None:
    part = 20
    (elements,) = chosen_elements((part * MOST_ELEMENTS,))[1]
    places = elements - part * torch.arange(len(elements))
    assert {*places.tolist()} == {*range(part)}
    assert float(places.double().mean()) == pytest.approx((part - 1) / 2, rel=0.01)


def test_two_recorders_note_the_same_elements() -> None:
    first, second = chosen_elements(LARGE)[1], chosen_elements(LARGE)[1]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_layers_of_one_size_have_elements_of_their_own() -> None:
    _, chosen = chosen_elements((MOST_ELEMENTS, MOST_ELEMENTS))
    assert not torch.equal(*chosen)


def test_which_elements_are_noted_does_not_hang_on_the_random_numbers_of_the_training() -> None:
    torch.manual_seed(1)
    first = chosen_elements(LARGE)[1]
    state = torch.get_rng_state()
    second = chosen_elements(LARGE)[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


# What is put back


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().numpy().tobytes()


@each_optimizer
def test_held_weights_and_a_fresh_state_are_put_back_bit_for_bit(kind: str) -> None:
    model = make_model()
    with torch.no_grad():
        model[0].bias[:3] = torch.tensor([-0.0, 1e-42, float("inf")])
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = bits(weights_of(model))
    recorder = StepRecorder()
    watch(recorder, optimizer)
    for number in range(3):
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + number)
        optimizer.step()
        assert bits(weights_of(model)) == before
    if kind != "adagrad":
        assert dict(optimizer.state) == {}


@pytest.mark.parametrize("kind", KEEPING_STATE)
def test_each_held_step_is_the_first_one_of_its_optimizer(kind: str) -> None:
    model = make_model()
    optimizer, recorder = OPTIMIZERS[kind](model.parameters()), StepRecorder()
    watch(recorder, optimizer)
    for number in range(4):
        take_step(model, optimizer, number)
        alone = make_model()
        expected = record_step(alone, OPTIMIZERS[kind](alone.parameters()), number)
        noted = step_of(recorder)
        assert torch.equal(noted.gradient, expected.gradient)
        assert torch.equal(noted.update, expected.update)


@each_optimizer
def test_weights_that_are_not_held_go_on_as_without_a_recorder(kind: str) -> None:
    model, alone = make_model(), make_model()
    optimizer, plain = OPTIMIZERS[kind](model.parameters()), OPTIMIZERS[kind](alone.parameters())
    recorder = StepRecorder()
    recorder.holds = False
    watch(recorder, optimizer)
    for number in range(3):
        take_step(model, optimizer, number)
        take_step(alone, plain, number)
        assert recorder.take() is None
    assert torch.equal(weights_of(model), weights_of(alone))
    assert not torch.equal(weights_of(model), weights_of(make_model()))


@pytest.mark.parametrize("kind", ["momentum", "adam", "foreach", "fused"])
def test_held_weights_are_put_back_after_a_training_has_gone_on(kind: str) -> None:
    model = make_model()
    optimizer, recorder = OPTIMIZERS[kind](model.parameters()), StepRecorder()
    watch(recorder, optimizer)
    recorder.holds = False
    for number in range(3):
        take_step(model, optimizer, number)
    assert recorder.take() is None
    recorder.holds = True
    before = bits(weights_of(model))
    for number in range(2):
        take_step(model, optimizer, number)
        assert step_of(recorder).update.abs().max() > 0.0
        assert bits(weights_of(model)) == before
    assert len(optimizer.state) == 4  # what it has learned of the gradients by now is not thrown away


def test_what_is_held_between_two_points_of_a_training_leaves_no_trace() -> None:
    model, alone = make_model(), make_model()
    optimizer, plain = OPTIMIZERS["adam"](model.parameters()), OPTIMIZERS["adam"](alone.parameters())
    recorder = StepRecorder()
    watch(recorder, optimizer)
    for number in range(3):
        take_step(model, optimizer, number)
    recorder.holds = False
    for number in range(3):
        take_step(model, optimizer, 10 + number)
        take_step(alone, plain, 10 + number)
    assert torch.equal(weights_of(model), weights_of(alone))


def train_by_hand(model: nn.Module, recorder: StepRecorder, number: int) -> None:
    """Take a step without an optimizer: the weights are changed after the backward pass."""
    recorder.put_back()
    model.zero_grad()
    model(make_batch(number)).square().mean().backward()
    recorder.note_backward(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def test_a_training_without_optimizers_is_noted_at_weights_that_are_put_back() -> None:
    model, alone, recorder = make_model(), make_model(), StepRecorder()
    before, optimizer = bits(weights_of(model)), SGD(alone.parameters(), lr=0.1)
    for number in range(3):
        train_by_hand(model, recorder, number)
        still = make_model()
        take_step(still, SGD(still.parameters(), lr=0.1), number)
        noted = step_of(recorder)
        assert torch.equal(noted.gradient, gradients_of(still))
        assert (noted.update.numel(), noted.learning_rates) == (0, ())
    recorder.put_back()
    assert bits(weights_of(model)) == before
    recorder.holds = False
    for number in range(3):
        train_by_hand(model, recorder, number)
        take_step(alone, optimizer, number)
        assert recorder.take() is None
    assert torch.allclose(weights_of(model), weights_of(alone))
    recorder.hold()
    before = bits(weights_of(model))
    train_by_hand(model, recorder, 3)
    assert bits(weights_of(model)) != before
    recorder.put_back()
    assert bits(weights_of(model)) == before
    assert [elements for _, _, elements in recorder.layers] == [one.numel() for one in model.parameters()]


def test_a_backward_pass_before_there_is_an_optimizer_is_forgotten() -> None:
    model, alone, recorder = make_model(), make_model(), StepRecorder()
    train_by_hand(model, recorder, 0)
    recorder.put_back()
    optimizer = SGD(model.parameters(), lr=0.1)
    watch(recorder, optimizer)
    take_step(model, optimizer, 1)
    noted = step_of(recorder)
    take_step(alone, SGD(alone.parameters(), lr=0.1), 1)
    assert torch.equal(noted.gradient, gradients_of(alone))
    assert len(recorder.layers) == len([*model.parameters()])


def test_a_training_that_leaves_no_gradient_with_its_model_gives_nothing() -> None:
    model, recorder = make_model(), StepRecorder()
    torch.autograd.grad(model(make_batch(0)).square().mean(), list(model.parameters()))
    recorder.note_backward(model)
    assert recorder.take() is None


def test_a_noted_step_is_given_out_once_and_is_a_copy() -> None:
    model = make_model()
    optimizer, recorder = SGD(model.parameters(), lr=0.1), StepRecorder()
    watch(recorder, optimizer)
    assert recorder.take() is None
    take_step(model, optimizer, 0)
    noted = step_of(recorder)
    kept = copy.deepcopy(noted)
    assert recorder.take() is None
    take_step(model, optimizer, 1)
    assert torch.equal(noted.gradient, kept.gradient)
    assert not torch.equal(step_of(recorder).gradient, kept.gradient)


# Several optimizers


def make_gan() -> tuple[nn.Module, nn.Module, Optimizer, Optimizer, StepRecorder]:
    critic, maker = make_model(1), make_model(2)
    optimizers = SGD(critic.parameters(), lr=0.1), SGD(maker.parameters(), lr=0.2)
    recorder = StepRecorder()
    watch(recorder, *optimizers)
    return critic, maker, *optimizers, recorder


def test_two_optimizers_make_one_row_in_the_order_of_their_first_steps() -> None:
    critic, maker, of_critic, of_maker, recorder = make_gan()
    take_step(critic, of_critic, 0)
    take_step(maker, of_maker, 0)
    assert recorder.take() is not None
    take_step(maker, of_maker, 1)  # the other way round this time
    take_step(critic, of_critic, 2)
    noted = step_of(recorder)
    assert torch.equal(noted.gradient, torch.cat([gradients_of(critic), gradients_of(maker)]))
    torch.testing.assert_close(noted.update[:44], -0.1 * gradients_of(critic), rtol=1e-3, atol=1e-6)
    assert noted.learning_rates == (0.1, 0.2)
    assert len(recorder.layers) == 8
    assert len(recorder.parameters) == 8


@pytest.mark.parametrize("who", ["critic", "maker"])
def test_a_cycle_in_which_one_optimizer_did_not_step_gives_nothing(who: str) -> None:
    critic, maker, of_critic, of_maker, recorder = make_gan()
    take_step(critic, of_critic, 0)
    take_step(maker, of_maker, 0)
    assert recorder.take() is not None
    take_step(*((critic, of_critic) if who == "critic" else (maker, of_maker)), 1)
    assert recorder.take() is None
    take_step(critic, of_critic, 2)
    take_step(maker, of_maker, 2)
    noted = step_of(recorder)  # what the broken cycle left behind does not get in
    assert torch.equal(noted.gradient, torch.cat([gradients_of(critic), gradients_of(maker)]))


def test_of_several_steps_of_one_optimizer_in_a_cycle_the_last_is_noted() -> None:
    critic, maker, of_critic, of_maker, recorder = make_gan()
    for number in range(3):
        take_step(critic, of_critic, number)
    take_step(maker, of_maker, 0)
    assert torch.equal(step_of(recorder).gradient[:44], gradients_of(critic))


# Loss scaling


def take_scaled_step(model: nn.Module, optimizer: Optimizer, scaler: torch.amp.GradScaler, factor: float) -> None:
    optimizer.zero_grad()
    scaler.scale(factor * model(make_batch(0)).square().mean()).backward()
    scaler.step(optimizer)


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("kind", ["adam", "fused"])
def test_a_loss_scale_is_taken_off_whoever_does_it(kind: str, unscales: bool) -> None:
    model = make_model()
    optimizer, recorder = OPTIMIZERS[kind](model.parameters()), StepRecorder()
    watch(recorder, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(make_batch(0)).square().mean()).backward()
    if unscales:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    noted = step_of(recorder)
    exact = make_model()
    expected = record_step(exact, OPTIMIZERS[kind](exact.parameters()))
    torch.testing.assert_close(noted.gradient, expected.gradient, rtol=1e-6, atol=0.0)
    torch.testing.assert_close(noted.update, expected.update, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", ["adam", "fused"])
def test_a_step_that_the_scaler_leaves_out_is_not_noted(kind: str) -> None:
    model = make_model()
    optimizer, recorder = OPTIMIZERS[kind](model.parameters()), StepRecorder()
    watch(recorder, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights_of(model)
    take_scaled_step(model, optimizer, scaler, factor=1e38)
    assert not torch.isfinite(gradients_of(model)).all()
    assert recorder.take() is None
    scaler.update()
    take_scaled_step(model, optimizer, scaler, factor=1.0)
    assert torch.isfinite(step_of(recorder).gradient).all()
    assert torch.equal(weights_of(model), before)
    assert dict(optimizer.state) == {}


def test_an_overflow_without_a_scaler_is_noted_as_it_is() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.tensor([1.0, float("inf"), float("nan")])
    recorder, optimizer = StepRecorder(), SGD([parameter], lr=0.1)
    watch(recorder, optimizer)
    optimizer.step()
    noted = step_of(recorder)
    assert torch.equal(noted.gradient.isfinite(), torch.tensor([True, False, False]))
    assert torch.equal(parameter.detach(), torch.zeros(3))


def test_a_mean_loss_of_a_whole_batch_is_the_row_of_its_step() -> None:
    workload = LineWorkload(24)
    training = build(workload, TrainConfig(micro_batch_size=8, gradient_accumulation_steps=3))
    recorder = StepRecorder(lambda: name_parameters(training.model))
    watch(recorder, training.optimizer)
    training.step()
    noted = step_of(recorder)
    numbers = workload.train_dataset()
    loss = F.mse_loss(training.model(numbers.features).squeeze(-1), numbers.targets)
    expected = flatten(torch.autograd.grad(loss, list(training.model.parameters())))
    torch.testing.assert_close(noted.gradient, expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _, _ in recorder.layers] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_both_parts_of_a_complex_gradient_are_noted() -> None:
    parameter = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    recorder, optimizer = StepRecorder(), SGD([parameter], lr=0.1)
    watch(recorder, optimizer)
    parameter.grad = torch.tensor([2.0 + 3.0j])
    optimizer.step()
    assert 3.0 in step_of(recorder).gradient.tolist()


@pytest.mark.parametrize("joins", ["a new group", "unfrozen"])
def test_parameters_that_join_a_training_late_are_held_too(joins: str) -> None:
    model = make_model()
    model[2].requires_grad_(joins != "unfrozen")
    early = model[0].parameters() if joins == "a new group" else model.parameters()
    recorder, optimizer = StepRecorder(), SGD(early, lr=0.1)
    watch(recorder, optimizer)
    take_step(model, optimizer, 0)
    model[2].requires_grad_(True)
    if joins == "a new group":
        optimizer.add_param_group({"params": model[2].parameters()})
    before = weights_of(model)
    take_step(model, optimizer, 1)
    assert torch.equal(weights_of(model), before)
