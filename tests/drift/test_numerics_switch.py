"""Gradients of one micro batch under two numerics: what differs, and that the training never notices."""

from __future__ import annotations

import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_workloads import CPU, LineWorkload, PatchWorkload, build, load
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autotune.drift.record.numerics import IncomparableGradients, PairedGradients
from autotune.drift.record.side_computation import side_computation
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.loop import Training, backend_settings
from autotune.records import TrainConfig

BASELINE = TrainConfig(micro_batch_size=4)
BF16 = BASELINE.replace(precision="bf16")


def open_pair(workload: Any, config: TrainConfig, baseline: TrainConfig = BASELINE, *, steps: int = 2):
    """Return a training in its middle, and what computes its gradients aside."""
    training = build(workload, config)
    for _ in range(steps):
        training.step()
    return training, PairedGradients(training, load(workload), config, baseline)


def relative_error(pair: Any) -> float:
    return float((pair.own - pair.baseline).norm() / pair.baseline.norm())


def true_gradient(training: Training, workload: Any, batch: Any) -> Tensor:
    loss = workload.compute_loss(training.model, training.place(batch))
    found = torch.autograd.grad(loss, [p for group in training.optimizer.param_groups for p in group["params"]])
    return torch.cat([gradient.flatten() for gradient in found])


def test_the_gradients_are_those_of_either_numerics():
    workload = PatchWorkload()
    with backend_settings(BF16):
        training, paired = open_pair(workload, BF16)
        batch = training.windows.peek()
        pair = paired.compute(batch)
        assert torch.equal(pair.baseline, true_gradient(training, workload, batch))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(pair.own, true_gradient(training, workload, batch))
    assert 1e-5 < relative_error(pair) < 0.1
    assert paired.switched == ("precision",)
    assert [name for name, _, _ in paired.layers] == [name for name, _ in training.model.named_parameters()]
    assert sum(width for _, width, _ in paired.layers) == len(pair.own)


def test_the_same_numerics_give_the_same_gradients():
    workload = PatchWorkload()
    config = BASELINE.replace(attention_backend="math")
    with backend_settings(config):
        training, paired = open_pair(workload, config, config)
        paired.switched = ("precision",)
        pair = paired.compute(training.windows.peek())
    assert torch.equal(pair.own, pair.baseline)


@pytest.mark.parametrize("tried", ["math", "auto"])
def test_the_attention_kernel_is_the_baselines_and_is_put_back(tried, monkeypatch):
    """Neither `auto` within a restriction nor a restriction within `auto` may leave the other one's kernels."""
    other = "auto" if tried == "math" else "math"
    config, baseline = BASELINE.replace(attention_backend=tried), BASELINE.replace(attention_backend=other)
    allowed: list[bool] = []
    plain = F.scaled_dot_product_attention

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        allowed.append(torch.backends.cuda.flash_sdp_enabled())
        return plain(*args, **kwargs)

    with backend_settings(config):
        training, paired = open_pair(PatchWorkload(), config, baseline)
        monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
        paired.compute(training.windows.peek())
        assert torch.backends.cuda.flash_sdp_enabled() is (tried == "auto")
    of_baseline, of_own = (other == "auto"), (tried == "auto")
    assert allowed == [of_baseline] * 2 + [of_own] * 2  # two blocks, the baseline first


@pytest.mark.parametrize(
    ("precision", "dropout"),
    [
        ("bf16", 0.5),
        ("fp16", 0.0),
        pytest.param("bf16", 0.0, marks=pytest.mark.slow),
        pytest.param("fp16", 0.5, marks=pytest.mark.slow),
    ],
)
def test_a_training_ends_the_same_whether_anything_was_computed_aside(precision, dropout):
    config = BASELINE.replace(precision=precision, gradient_accumulation_steps=2)

    def run(*, looks: bool) -> dict[str, Any]:
        workload = WithState(dropout=dropout, samples=30)
        with backend_settings(config):
            training = build(workload, config)
            paired = PairedGradients(training, load(workload), config, BASELINE)
            for _ in range(9):  # three epochs: there is no batch to look at where one ends
                training.step()
                batch = training.windows.peek()
                if looks and batch is not None:
                    paired.compute(batch)
        drawn = {"torch": torch.rand(3).tolist(), "numpy": np.random.rand(3).tolist(), "random": random.random()}
        state = {name: value.clone() for name, value in training.model.state_dict().items()}
        scale = None if training.scaler is None else training.scaler.state_dict()
        gradients = [p.grad for p in training.model.parameters()]
        return {**state, **drawn, "scale": scale, "gradients": gradients, "own": workload.describe()}

    plain, looked = run(looks=False), run(looks=True)
    assert plain.keys() == looked.keys()
    for name, value in plain.items():
        same = torch.equal(value, looked[name]) if isinstance(value, Tensor) else value == looked[name]
        assert same, name
    assert plain["gradients"] == [None] * len(plain["gradients"])


class WithState(PatchWorkload):
    """Keeps state wherever one can: BatchNorm's means, a buffer that is exchanged, counters, lists, its own tensor."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.calls, self.history, self.recent = 0, [], deque(maxlen=3)
        self.seen, self.mean = {"largest": 0.0}, torch.zeros(3)
        self.helpers = {"curriculum": [Curriculum()]}

    def build_model(self) -> nn.Module:
        return Normalised(super().build_model())

    def compute_loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        images.mul_(0.99)  # on a CPU this is the loader's own batch
        self.calls += 1
        self.history.append(self.calls)
        self.recent.append(float(images.mean()))
        self.seen["largest"] = max(self.seen["largest"], float(images.max()))
        self.mean.add_(images.mean((0, 2, 3)))
        if self.calls == 2:
            self.late = "an attribute that comes later"
        random.random(), np.random.rand()
        weight = self.helpers["curriculum"][0].advance()
        return weight * super().compute_loss(model, (images, labels))

    def describe(self) -> Any:
        held = self.helpers["curriculum"][0].describe()
        return self.calls, self.history, list(self.recent), self.seen, self.mean.tolist(), hasattr(self, "late"), held


class Curriculum:
    """Counts, and draws from generators of its own; it knows the counter that knows it."""

    def __init__(self) -> None:
        self.counter = SimpleNamespace(steps=0, owner=self)
        self.means = np.zeros(2)
        self.torch_source = torch.Generator().manual_seed(1)
        self.sources = (np.random.default_rng(1), np.random.RandomState(1), random.Random(1))

    def advance(self) -> float:
        self.counter.steps += 1
        modern, old, plain = self.sources
        drawn = [float(torch.rand((), generator=self.torch_source)), modern.random(), old.rand(), plain.random()]
        self.means += drawn[:2]
        return 1.0 + 0.01 * self.counter.steps + sum(drawn)

    def describe(self) -> Any:
        modern, old, plain = self.sources
        drawn = float(torch.rand((), generator=self.torch_source)), modern.random(), old.rand(), plain.random()
        return self.counter.steps, self.means.tolist(), drawn


class Normalised(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = nn.BatchNorm2d(3), inner
        self.register_buffer("average", torch.zeros(3))
        self.register_buffer("latest", torch.zeros(3))
        self.forwards = 0

    def forward(self, images: Tensor) -> Tensor:
        self.forwards += 1
        self.latest = images.detach().float().mean((0, 2, 3))
        self.average.data.mul_(0.9).add_(0.1 * self.latest)  # behind the back of the version counter
        return self.inner(self.norm(images))


def test_dropout_is_no_difference():
    with backend_settings(BF16):
        training, paired = open_pair(PatchWorkload(dropout=0.5), BF16)
        assert relative_error(paired.compute(training.windows.peek())) < 0.1


class OwnNoise(LineWorkload):
    """Draws numbers of its own, in the type of what it computed: other numbers under another precision."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        predicted = model(features).squeeze(-1)
        return F.mse_loss((predicted + torch.randn(100, dtype=predicted.dtype)[-len(predicted) :]).float(), targets)


class OwnMask(OwnNoise):
    """Draws the same numbers in any precision."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        weight = torch.rand(len(targets))
        return (weight * (model(features).squeeze(-1).float() - targets).square()).mean()


def test_random_numbers_that_cannot_be_held_the_same_are_told_from_those_that_can():
    with backend_settings(BF16):
        training, paired = open_pair(OwnNoise(), BF16)
        with pytest.raises(IncomparableGradients, match="random numbers"):
            paired.compute(training.windows.peek())
        training, paired = open_pair(OwnMask(), BF16)
        assert relative_error(paired.compute(training.windows.peek())) < 0.1


class Noisy(LineWorkload):
    """Adds noise from a generator of its own to the features, as diffusion models do."""

    def __init__(self, source: torch.Generator | None) -> None:
        super().__init__()
        if source is not None:
            self.source = source

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        noise = torch.randn(features.shape, generator=getattr(self, "source", _HIDDEN))
        return super().compute_loss(model, (features + noise, targets + 3.0 * noise[:, 0]))


_HIDDEN = torch.Generator().manual_seed(4)


def test_noise_of_the_workloads_own_is_the_same_in_both_arms_and_where_it_cannot_be_nothing_is_compared():
    with backend_settings(BF16):
        training, paired = open_pair(Noisy(torch.Generator().manual_seed(3)), BF16)
        assert relative_error(paired.compute(training.windows.peek(), repeats=True)) < 0.1
        training, paired = open_pair(Noisy(None), BF16)
        assert relative_error(paired.compute(training.windows.peek())) > 0.3
        with pytest.raises(IncomparableGradients, match="another one each time"):
            paired.compute(training.windows.peek(), repeats=True)


class Renormalising(LineWorkload):
    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        with torch.no_grad():
            model[0].weight.clamp_(-0.1, 0.1)
        return super().compute_loss(model, batch)


def test_a_model_that_changes_its_weights_as_it_computes_is_left_alone():
    with backend_settings(BF16):
        training, paired = open_pair(Renormalising(), BF16)
        with pytest.raises(IncomparableGradients, match="changes its weights"):
            paired.compute(training.windows.peek())


def test_an_optimizer_that_steps_inside_the_backward_pass_does_not_step():
    workload = LineWorkload()
    with backend_settings(BF16):
        training, paired = open_pair(workload, BF16)
        weight = next(training.model.parameters())
        before = weight.detach().clone()
        weight.register_post_accumulate_grad_hook(lambda leaf: leaf.data.sub_(leaf.grad))
        pair = paired.compute(training.windows.peek())
        assert torch.equal(weight, before)
        assert pair.own.norm() > 0


class Reentrant(LineWorkload):
    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        features, targets = batch
        predicted = checkpoint(model, features.requires_grad_(), use_reentrant=True)
        return F.mse_loss(predicted.squeeze(-1).float(), targets)


def test_reentrant_checkpointing_is_no_hindrance():
    with backend_settings(BF16):
        training, paired = open_pair(Reentrant(), BF16)
        assert relative_error(paired.compute(training.windows.peek())) < 0.1


def test_fp16_gradients_are_scaled_as_in_the_training_and_unscaled():
    config = BASELINE.replace(precision="fp16")
    workload = LineWorkload()
    plain = workload.compute_loss
    workload.compute_loss = lambda model, batch: 1e-6 * plain(model, batch)
    with backend_settings(config):
        training, paired = open_pair(workload, config)
        assert relative_error(paired.compute(training.windows.peek())) < 0.01
        training.scaler = None
        assert relative_error(paired.compute(training.windows.peek())) > 0.2


def test_the_gradients_of_settings_in_fp16_do_not_vanish_beside_others():
    workload = LineWorkload()
    plain = workload.compute_loss
    workload.compute_loss = lambda model, batch: 1e-6 * plain(model, batch)
    training, paired = open_pair(workload, BASELINE, BASELINE.replace(precision="fp16"))
    assert relative_error(paired.compute(training.windows.peek())) < 0.01


class Compilable(LineWorkload):
    def build_model(self) -> nn.Module:
        return Doubling(super().build_model())


class Doubling(nn.Module):
    """Compiled it is another model."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: Tensor) -> Tensor:
        return self.inner(features) * (2.0 if torch.compiler.is_compiling() else 1.0)


@pytest.mark.slow
def test_the_compiled_model_is_compared_with_the_eager_one_and_compiled_once():
    config = BASELINE.replace(compile_mode="default")
    with backend_settings(config):
        training, paired = open_pair(Compilable(), config)
        compiled = compiled_graph_count()
        pair = paired.compute(training.windows.peek())
        training.step()
        assert compiled_graph_count() == compiled
    assert relative_error(pair) > 0.5


def test_what_fails_aside_leaves_no_trace_either():
    model, owner = nn.BatchNorm1d(2), LineWorkload()
    gradient = torch.ones(2)
    model.weight.grad = gradient
    state = torch.get_rng_state()

    def fail() -> None:
        assert model.weight.grad is None
        model(torch.rand(4, 2)).sum().backward()
        owner.new = model.eval()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), side_computation(model, [], owner, CPU):
        fail()
    assert model.weight.grad is gradient
    assert model.training
    assert torch.equal(model.running_mean, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert not hasattr(owner, "new")
