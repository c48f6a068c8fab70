"""The training step: its gradients against those computed by hand, and what it does around them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_workloads import CPU, AugmentedImages, LineWorkload, NumberStream, PatchWorkload, build, load
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.evaluation import evaluate
from autotune.engine.loop import Training, seed_everything
from autotune.errors import TargetError
from autotune.records import TrainConfig

MICRO = TrainConfig(micro_batch_size=8, gradient_accumulation_steps=3)


def gradient_of_a_step(training: Training) -> Tensor:
    """Return what the optimizer is given, as one vector."""
    seen: list[Tensor] = []

    def note(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten().clone() for p in training.model.parameters()]))

    handle = training.optimizer.register_step_pre_hook(note)
    training.step()
    handle.remove()
    assert len(seen) == 1
    return seen[0]


def gradient_by_hand(training: Training, loss_of: Callable[[nn.Module], Tensor]) -> Tensor:
    gradients = torch.autograd.grad(loss_of(training.model), list(training.model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value - expected).norm() / expected.norm())


@pytest.mark.parametrize(("micro", "steps"), [(24, 1), (12, 2), (8, 3), (5, 5), (7, 4), (1, 24), (23, 2)])
def test_accumulation_gives_the_gradient_of_the_whole_batch(micro: int, steps: int) -> None:
    config = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=steps)
    training = build(LineWorkload(24), config)
    numbers = training._loaded.workload.train_dataset()

    def loss_of(model: nn.Module) -> Tensor:
        return F.mse_loss(model(numbers.features).squeeze(-1), numbers.targets)

    expected, loss = gradient_by_hand(training, loss_of), float(loss_of(training.model).detach())
    assert relative_error(gradient_of_a_step(training), expected) <= 1e-5
    assert float(build(LineWorkload(24), config).step().loss) == pytest.approx(loss, rel=1e-6)


def test_a_short_last_window_weighs_its_own_samples() -> None:
    training = build(LineWorkload(20), TrainConfig(micro_batch_size=4, gradient_accumulation_steps=3))
    assert training.step().samples == 12
    numbers = training._loaded.workload.train_dataset()
    expected = gradient_by_hand(
        training, lambda model: F.mse_loss(model(numbers.features[12:]).squeeze(-1), numbers.targets[12:])
    )
    assert relative_error(gradient_of_a_step(training), expected) <= 1e-5


class Ragged(LineWorkload):
    """Each sample i counts as many tokens as `counts[i]`; some count none."""

    def __init__(self, counts: list[int], give: Callable[[Tensor], Any]) -> None:
        super().__init__(len(counts))
        self.counts = torch.tensor(counts, dtype=torch.float32)
        self.give = give

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        tokens = self.counts[(100 * features[:, 0]).round().long()]
        errors = F.mse_loss(model(features).squeeze(-1), targets, reduction="none")
        return (errors * tokens).sum() / tokens.sum().clamp(min=1.0), self.give(tokens.sum())


RAGGED = [5, 1, 0, 7, 3, 2, 11, 1, 400, 2, 0, 9, 4, 1, 6, 2, 8, 3, 1, 5, 2, 9]
FORMS: dict[str, Callable[[Tensor], Any]] = {
    "float": float,
    "int": int,
    "numpy": lambda count: np.int64(int(count)),
    "tensor": lambda count: count,
    "integer tensor": lambda count: count.long(),
    "one-element tensor": lambda count: count.reshape(1),
}


def ragged_gradient(training: Training, workload: Ragged) -> Tensor:
    numbers = workload.train_dataset()
    tokens = workload.counts

    def loss_of(model: nn.Module) -> Tensor:
        errors = (model(numbers.features).squeeze(-1) - numbers.targets) ** 2
        return (errors * tokens).sum() / tokens.sum()

    return gradient_by_hand(training, loss_of)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("micro", "steps"), [(22, 1), (11, 2), (4, 6), (1, 22)])
def test_micro_batches_weigh_by_the_counts_a_workload_returns(form: str, micro: int, steps: int) -> None:
    workload = Ragged(RAGGED, FORMS[form])
    training = build(workload, TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=steps))
    expected = ragged_gradient(training, workload)
    by_samples = Ragged([1] * len(RAGGED), FORMS[form])
    assert relative_error(expected, ragged_gradient(training, by_samples)) > 0.05
    assert relative_error(gradient_of_a_step(training), expected) <= 1e-5


@pytest.mark.parametrize("form", ["float", "tensor"])
def test_a_first_micro_batch_that_counts_nothing_does_no_harm(form: str) -> None:
    workload = Ragged([0, 0, *RAGGED[:18], 0, 0], FORMS[form])
    training = build(workload, TrainConfig(micro_batch_size=2, gradient_accumulation_steps=11))
    expected = ragged_gradient(training, workload)
    assert relative_error(gradient_of_a_step(training), expected) <= 1e-5


@pytest.mark.parametrize("form", ["float", "tensor"])
def test_the_mean_of_nothing_is_no_part_of_the_loss(form: str) -> None:
    class Unlabelled(Ragged):
        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            loss, tokens = super().compute_loss(model, batch)
            return (loss if tokens else loss * torch.nan), tokens  # as a cross-entropy that ignores all of its targets

    config = TrainConfig(micro_batch_size=2, gradient_accumulation_steps=11)
    counts = [*RAGGED[:20], 0, 0]
    assert float(build(Unlabelled(counts, FORMS[form]), config).step().loss) == pytest.approx(
        float(build(Ragged(counts, FORMS[form]), config).step().loss)
    )


@pytest.mark.parametrize("form", ["float", "tensor"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_that_counts_nothing_at_all_leaves_the_weights_alone(form: str, steps: int) -> None:
    training = build(Ragged([0] * 6, FORMS[form]), TrainConfig(micro_batch_size=2, gradient_accumulation_steps=steps))
    before = [parameter.clone() for parameter in training.model.parameters()]
    assert float(training.step().loss) == 0.0
    assert all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))


def test_the_reported_loss_is_the_mean_over_what_was_counted() -> None:
    workload = Ragged(RAGGED, float)
    whole = build(workload, TrainConfig(micro_batch_size=22)).step()
    parts = build(workload, TrainConfig(micro_batch_size=4, gradient_accumulation_steps=6)).step()
    assert float(parts.loss) == pytest.approx(float(whole.loss), rel=1e-5)
    assert parts.samples == whole.samples == 22
    assert not parts.loss.requires_grad


class Clipped(LineWorkload):
    gradient_clip_norm = 0.05


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("config", [TrainConfig(micro_batch_size=24), MICRO], ids=["whole", "accumulated"])
def test_gradients_are_clipped_in_true_units(precision: Any, config: TrainConfig) -> None:
    free = gradient_of_a_step(build(LineWorkload(24), config.replace(precision=precision)))
    clipped = gradient_of_a_step(build(Clipped(24), config.replace(precision=precision)))
    assert float(free.norm()) > 0.1
    assert float(clipped.norm()) == pytest.approx(0.05, rel=1e-3)
    assert relative_error(clipped / 0.05, free / free.norm()) < 1e-3


def test_a_gradient_below_the_norm_is_not_stretched() -> None:
    workload = Clipped(24)
    workload.gradient_clip_norm = 1e6
    plain = gradient_of_a_step(build(LineWorkload(24), MICRO))
    assert torch.equal(gradient_of_a_step(build(workload, MICRO)), plain)


@pytest.mark.parametrize("config", [TrainConfig(micro_batch_size=24), MICRO], ids=["whole", "accumulated"])
def test_fp16_gradients_come_out_unscaled(config: TrainConfig) -> None:
    exact = gradient_of_a_step(build(LineWorkload(24), config))
    assert relative_error(gradient_of_a_step(build(LineWorkload(24), config.replace(precision="fp16"))), exact) < 5e-3


class Scheduled(LineWorkload):
    """The learning rate falls by half at each call of the schedule; `boost` can make the gradients overflow."""

    def __init__(self, *, fused: bool = False, boost: float = 1.0) -> None:
        super().__init__(24)
        self.fused = fused
        self.boost = boost

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=self.fused)

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(optimizer, lambda step: 0.5**step)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().compute_loss(model, batch) * self.boost


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("steps", [1, 2, 8])
def test_the_schedule_moves_once_per_optimizer_step(precision: Any, steps: int) -> None:
    config = TrainConfig(micro_batch_size=24 // steps, gradient_accumulation_steps=steps, precision=precision)
    training = build(Scheduled(), config)
    rates = []
    for _ in range(3):
        rates.append(training.optimizer.param_groups[0]["lr"])
        training.step()
    assert rates == [0.01, 0.005, 0.0025]


@pytest.mark.parametrize("fused", [False, True])
def test_the_schedule_waits_when_the_scaler_leaves_a_step_out(fused: bool) -> None:
    workload = Scheduled(fused=fused, boost=1e30)
    training = build(workload, MICRO.replace(precision="fp16"))
    before = [parameter.clone() for parameter in training.model.parameters()]
    scale = training.scaler.get_scale()
    training.step()
    assert training.optimizer.param_groups[0]["lr"] == 0.01
    assert training.scaler.get_scale() == scale / 2
    assert all(torch.equal(old, new) for old, new in zip(before, training.model.parameters(), strict=True))
    workload.boost = 1.0
    training.step()
    assert training.optimizer.param_groups[0]["lr"] == 0.005
    assert not torch.equal(before[0], next(training.model.parameters()))


def test_gradients_are_set_to_none_after_a_step() -> None:
    training = build(LineWorkload(24), MICRO)
    training.step()
    assert all(parameter.grad is None for parameter in training.model.parameters())


@pytest.mark.parametrize(
    ("samples", "micro", "steps", "expected"),
    [
        (22, 4, 2, [(8, False), (8, False), (6, True)]),
        (24, 4, 2, [(8, False), (8, False), (8, True)]),
        (22, 8, 1, [(8, False), (8, False), (6, True)]),
        (9, 4, 2, [(8, False), (1, True)]),
        (3, 4, 2, [(3, True)]),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_the_last_step_of_an_epoch_says_so(samples: int, micro: int, steps: int, expected: Any, workers: int) -> None:
    config = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=steps, num_workers=workers)
    training = build(LineWorkload(samples), config)
    outcomes = [training.step() for _ in range(2 * len(expected))]
    assert [(outcome.samples, outcome.ends_epoch) for outcome in outcomes] == 2 * expected
    assert (training.windows.epoch, training.windows.batches_done) == (2, 0)
    assert training.batches_per_epoch == -(-samples // micro)


@pytest.mark.parametrize("samples", [11, 12])
def test_an_iterable_dataset_is_counted_by_its_batches(samples: int) -> None:
    workload = LineWorkload()
    workload.train_dataset = lambda: NumberStream(samples)  # type: ignore[method-assign]
    training = build(workload, TrainConfig(micro_batch_size=2, gradient_accumulation_steps=2))
    outcomes = [training.step() for _ in range(4)]
    last = samples - 8
    flags = [(4, False), (4, False), (last, True), (4, False)]
    assert [(outcome.samples, outcome.ends_epoch) for outcome in outcomes] == flags
    assert training.batches_per_epoch is None


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "dataset", [lambda: torch.utils.data.TensorDataset(torch.zeros(0, 4)), lambda: NumberStream(0)]
)
@pytest.mark.fault("51", injected="empty datasets", outcome="the target's error, in one line")
def test_an_empty_dataset_is_the_targets_fault(dataset: Callable[[], Any], workers: int) -> None:
    workload = LineWorkload()
    workload.train_dataset = dataset  # type: ignore[method-assign]
    training = build(workload, TrainConfig(num_workers=workers))
    with pytest.raises(TargetError, match=r"^the training set is empty$") as caught:
        training.step()
    assert caught.value.hint == "train_dataset() must hold at least one sample"


@pytest.mark.parametrize(
    ("method", "returned", "message", "hint"),
    [
        ("build_model", None, "build_model() returned None", "it must return a torch.nn.modules.module.Module"),
        ("build_model", [1], "build_model() returned a list", "it must return a torch.nn.modules.module.Module"),
        (
            "build_optimizer",
            None,
            "build_optimizer() returned None",
            "it must return a torch.optim.optimizer.Optimizer",
        ),
        (
            "build_optimizer",
            {"optimizer": 1},
            "build_optimizer() returned a dict",
            "it must return a torch.optim.optimizer.Optimizer",
        ),
    ],
)
def test_a_part_of_the_wrong_type_is_named(method: str, returned: Any, message: str, hint: str) -> None:
    workload = LineWorkload()
    setattr(workload, method, lambda *_: returned)
    with pytest.raises(TargetError) as caught:
        build(workload, MICRO)
    assert (caught.value.message, caught.value.hint) == (f"toy.py:workload: {message}", hint)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("method", "build_part", "message"),
    [
        ("build_scheduler", plateau, "build_scheduler() returned ReduceLROnPlateau, which waits for a metric"),
        ("build_scheduler", lambda _optimizer: 3, "build_scheduler() returned a int"),
        ("build_optimizer", lambda m: torch.optim.LBFGS(m.parameters()), "LBFGS calls the model many times a step"),
    ],
)
def test_a_part_that_a_step_cannot_drive_is_named(method: str, build_part: Callable[[Any], Any], message: str) -> None:
    workload = LineWorkload()
    setattr(workload, method, build_part)
    with pytest.raises(TargetError, match=f"^toy.py:workload: {re.escape(message)}$"):
        build(workload, MICRO)


NOT_A_LOSS = "return the mean loss, a scalar tensor that depends on the model's parameters"
NOT_A_COUNT = "return (mean loss, count) with one number: how many tokens, pixels or boxes the loss is the mean of"


@pytest.mark.parametrize(
    ("make", "message", "hint"),
    [
        (lambda loss: None, "None", NOT_A_LOSS),
        (lambda loss: loss.item(), "a float", NOT_A_LOSS),
        (lambda loss: {"loss": loss}, "a dict", NOT_A_LOSS),
        (lambda loss: loss.detach(), "a tensor of shape [] without gradient", NOT_A_LOSS),
        (lambda loss: loss.expand(3), "a tensor of shape [3]", NOT_A_LOSS),
        (lambda loss: (loss.detach(), 4), "a tensor of shape [] without gradient", NOT_A_LOSS),
        (lambda loss: (loss, 4, 5), "a tuple of 3", "return the mean loss, or (mean loss, count)"),
        (lambda loss: (loss,), "a tuple of 1", "return the mean loss, or (mean loss, count)"),
        (lambda loss: (loss, "many"), "a str as the count", NOT_A_COUNT),
        (lambda loss: (loss, {"tokens": 4}), "a dict as the count", NOT_A_COUNT),
        (lambda loss: (loss, torch.ones(2)), "a tensor of shape [2] without gradient as the count", NOT_A_COUNT),
    ],
)
def test_a_loss_of_the_wrong_type_is_named(make: Callable[[Tensor], Any], message: str, hint: str) -> None:
    workload = LineWorkload()
    plain = workload.compute_loss
    workload.compute_loss = lambda model, batch: make(plain(model, batch))  # type: ignore[method-assign]
    training = build(workload, MICRO)
    with pytest.raises(TargetError) as caught:
        training.step()
    assert caught.value.message == f"toy.py:workload: compute_loss returned {message}"
    assert caught.value.hint == hint


def test_a_count_of_none_means_weigh_by_samples() -> None:
    workload = LineWorkload()
    plain = workload.compute_loss
    workload.compute_loss = lambda model, batch: (plain(model, batch), None)  # type: ignore[method-assign]
    assert torch.equal(gradient_of_a_step(build(workload, MICRO)), gradient_of_a_step(build(LineWorkload(), MICRO)))


@pytest.mark.parametrize("stop_after", [2, 3, 4], ids=["inside", "epoch end", "next epoch"])
@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param({"num_workers": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_training_goes_on_from_a_saved_position(stop_after: int, workers: dict[str, Any]) -> None:
    config = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2, **workers)
    first = build(PatchWorkload(dropout=0.2), config)
    for _ in range(stop_after):
        first.step()
    position = {"epoch": first.windows.epoch, "batches_done": first.windows.batches_done}
    model = {name: value.clone() for name, value in first.model.state_dict().items()}
    optimizer, generators = first.optimizer.state_dict(), read_generators()
    optimizer = {
        "state": {k: dict(v) for k, v in optimizer["state"].items()},
        "param_groups": optimizer["param_groups"],
    }
    optimizer["state"] = {k: {n: t.clone() for n, t in v.items()} for k, v in optimizer["state"].items()}
    expected = [float(first.step().loss) for _ in range(5)]
    second = build(PatchWorkload(dropout=0.2), config)
    second.step()  # the loader has been somewhere else before
    second.model.load_state_dict(model)
    second.optimizer.load_state_dict(optimizer)
    second.windows.move_to(**position)
    restore_generators(generators)
    outcomes = [second.step() for _ in range(5)]
    assert [float(outcome.loss) for outcome in outcomes] == expected
    assert [outcome.ends_epoch for outcome in outcomes] == [(stop_after + i) % 3 == 2 for i in range(5)]


def test_a_stream_goes_on_from_a_saved_position() -> None:
    workload = LineWorkload()
    workload.train_dataset = lambda: NumberStream(11)  # type: ignore[method-assign]
    training = build(workload, TrainConfig(micro_batch_size=2))
    training.windows.move_to(epoch=0, batches_done=3)
    assert training.windows.next_window().batches[0][0][:, 0].tolist() == pytest.approx([0.06, 0.07])


class Evaluated(PatchWorkload):
    """Its evaluation draws from every generator and looks around."""

    metric = ("score", "maximize")

    def __init__(self, returned: Any = 0.25) -> None:
        super().__init__(dropout=0.2)
        self.returned = returned
        self.seen: tuple[Any, ...] = ()

    def evaluate(self, model: nn.Module, device: torch.device) -> Any:
        images = torch.stack([AugmentedImages()[index][0] for index in range(4)])
        dtype = model(images).dtype
        self.seen = (model.training, torch.is_grad_enabled(), dtype, device, torch.rand(1), np.random.rand())
        random.random()
        if isinstance(self.returned, Exception):
            raise self.returned
        return self.returned


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_evaluation_leaves_no_trace(precision: Any) -> None:
    config = TrainConfig(micro_batch_size=8, precision=precision)

    def losses(*, evaluated: bool) -> list[float]:
        workload = Evaluated()
        training = build(workload, config)
        found = []
        for _ in range(6):
            found.append(float(training.step().loss))
            if evaluated:
                assert evaluate(load(workload), training, config) == {"score": 0.25}
                dtype = torch.bfloat16 if precision == "bf16" else torch.float32
                assert workload.seen[:4] == (False, False, dtype, CPU)
                assert all(module.training for module in training.model.modules())
        return found

    assert losses(evaluated=True) == losses(evaluated=False)


def test_evaluation_that_fails_leaves_no_trace_either() -> None:
    workload = Evaluated(KeyError("no such file"))
    training = build(workload, MICRO)
    before = read_generators()
    with pytest.raises(KeyError):
        evaluate(load(workload), training, MICRO)
    after = read_generators()
    assert torch.equal(before["torch"], after["torch"])
    assert before["random"] == after["random"]
    assert np.array_equal(before["numpy"][1], after["numpy"][1])
    assert before["numpy"][2] == after["numpy"][2]
    assert training.model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(("returned", "value"), [(torch.tensor(0.5), 0.5), (np.float32(0.5), 0.5), (3, 3.0)])
def test_a_metric_may_be_any_number(returned: Any, value: float) -> None:
    training = build(Evaluated(returned), MICRO)
    assert evaluate(training._loaded, training, MICRO) == {"score": value}


@pytest.mark.parametrize("returned", [None, {"accuracy": 1.0}, "good"])
def test_a_metric_that_is_no_number_is_named(returned: Any) -> None:
    training = build(Evaluated(returned), MICRO)
    with pytest.raises(TargetError, match=f"evaluate returned {type(returned).__name__}"):
        evaluate(training._loaded, training, MICRO)


def test_a_workload_without_evaluate_says_so() -> None:
    training = build(LineWorkload(), MICRO)
    with pytest.raises(TargetError, match=r"toy.py:workload has no evaluate\(model, device\)"):
        evaluate(training._loaded, training, MICRO)
    assert training.model.training


def test_the_phases_of_a_step_are_marked_in_order() -> None:
    marks: list[str] = []
    build(LineWorkload(), MICRO).step(marks.append)
    assert marks == ["data", *3 * ["copy", "forward", "backward"], "optimizer"]


class Drawn(LineWorkload):
    """Draws as many numbers as it is told before it builds its model."""

    def __init__(self, draws: int) -> None:
        super().__init__()
        self.draws = draws

    def build_model(self) -> nn.Module:
        model = super().build_model()
        torch.rand(self.draws)
        return model


def test_the_seed_alone_gives_weights_and_random_stream() -> None:
    few, many, other = (build(Drawn(draws), MICRO, seed=seed) for draws, seed in ((1, 4), (99, 4), (1, 5)))
    weights = [next(training.model.parameters()) for training in (few, many, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    streams = []
    for draws in (1, 99):
        build(Drawn(draws), MICRO, seed=4)
        streams.append((torch.rand(3).tolist(), np.random.rand(), random.random()))
    assert streams[0] == streams[1]


@pytest.mark.parametrize("seed", [0, 2**31, 2**40])
def test_every_generator_is_seeded(seed: int) -> None:
    drawn = []
    for _ in range(2):
        seed_everything(seed)
        drawn.append((torch.rand(2).tolist(), np.random.rand(), random.random()))
    assert drawn[0] == drawn[1]
    seed_everything(seed + 1)
    assert torch.rand(2).tolist() != drawn[0][0]


class WithKnob(LineWorkload):
    knobs = {"width": (8, 16)}
    width = 8

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, self.width), nn.Tanh(), nn.Linear(self.width, 1))


def test_the_users_own_knobs_are_set_before_the_model_is_built() -> None:
    training = build(WithKnob(), MICRO.replace(user_knobs={"width": 16}))
    assert training.model[0].out_features == 16
    assert math.isfinite(float(training.step().loss))


def test_a_batch_reaches_compute_loss_in_the_form_the_collate_function_gave_it() -> None:
    class Answer(dict[str, Any]):
        def __getattr__(self, name: str) -> Any:
            return self[name]

    class Collated(LineWorkload):
        def collate(self, samples: list[Any]) -> Answer:
            features, targets = zip(*samples, strict=True)
            return Answer(features=torch.stack(features), targets=torch.stack(targets))

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            return super().compute_loss(model, (batch.features, batch.targets))

    assert torch.equal(gradient_of_a_step(build(Collated(), MICRO)), gradient_of_a_step(build(LineWorkload(), MICRO)))
