"""The hooks on scripts, hung up in this process: what they see, what they change, and that they leave no trace."""

from __future__ import annotations

import copy
import dataclasses
import gc
import inspect
import io
import pickle
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from torch.optim import optimizer as optimizer_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _SingleProcessDataLoaderIter

from autotune.engine.activation_checkpointing import checkpoints_itself, exchange_activation_checkpointing
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.hooks import models
from autotune.engine.hooks.loaders import apply_loader_knobs, describe_loader
from autotune.engine.hooks.script import ScriptHooks, ScriptSettings, asynchronous_copies, shifted_seeds
from autotune.engine.hooks.steps import ScriptStep
from autotune.engine.kernels import list_attention_kernels
from autotune.machine.toolchain import has_cpp_compiler
from autotune.records import TrainConfig

BASELINE = TrainConfig(micro_batch_size=8, num_threads=1, optimizer_implementation="for-loop")
ROWS = 44
"""In batches of 8: an epoch of five full batches and a short one."""


class Hung:
    """Hooks that are hung up, and what they told.

    Attributes:
        hooks: under test.
        steps: found so far.
        turns: True for each turn to training, False for each to something else.
        errors: what training calls and backward passes raised.
    """

    def __init__(self, changes: dict[str, Any], **options: Any) -> None:
        self.steps: list[ScriptStep] = []
        self.turns: list[bool] = []
        self.errors: list[str] = []
        inspects = options.pop("inspects", False)
        settings = ScriptSettings(BASELINE.replace(**changes), frozenset(changes), **options)
        self.hooks = ScriptHooks(
            settings,
            on_step=self.steps.append,
            turn=self.turns.append,
            now=lambda: 0.0,
            go_on=self._go_on,
            on_error=lambda error: self.errors.append(str(error)),
            inspects=inspects,
        )

    def _go_on(self) -> None:
        if self.turns[-1:] == [False]:
            self.turns.append(True)

    @property
    def roots(self) -> list[nn.Module]:
        return self.hooks.models.roots

    @property
    def losses(self) -> list[float]:
        return [float(sum(step.losses)) for step in self.steps]


@contextmanager
def hang(changes: dict[str, Any] | None = None, **options: Any) -> Iterator[Hung]:
    """Hang up hooks that change some knobs of the baseline."""
    hung = Hung(changes or {}, **options)
    with hung.hooks.installed():
        yield hung


@pytest.fixture(autouse=True)
def one_thread_and_no_draw() -> Iterator[None]:
    threads, generators = torch.get_num_threads(), read_generators()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    restore_generators(generators)


def hooked_places() -> dict[str, Any]:
    """Everything that hooks are hung on."""
    places = {
        "loader": DataLoader.__iter__,
        "its iterators": DataLoader._get_iterator,
        "iterator": _BaseDataLoaderIter.__next__,
        "module": nn.Module._compiled_call_impl,
        "compile": nn.Module.compile,
        "optimizer": torch.optim.Optimizer.__init__,
        "backward": torch.autograd.backward,
        "grad": torch.autograd.grad,
        "scaler": torch.amp.GradScaler.scale,
        "autocast": torch.autocast.__enter__,
        "to": torch.Tensor.to,
        "cuda": torch.Tensor.cuda,
        "seeds": (torch.manual_seed, torch.random.manual_seed, torch.cuda.manual_seed, torch.cuda.manual_seed_all),
        "other seeds": (random.seed, np.random.seed),
        "before steps": len(optimizer_module._global_optimizer_pre_hooks),
        "after steps": len(optimizer_module._global_optimizer_post_hooks),
    }
    return places | {
        "threads": torch.get_num_threads(),
        "attention": torch.backends.cuda.flash_sdp_enabled(),
        "compile cache": torch.compiler.config.cache_key_tag,
    }


def make_model(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3))


def make_data() -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(x, x[:, :3].argmax(1))


def fit(model: nn.Module, loader: DataLoader[Any], *, epochs: int = 1, lr: float = 0.1) -> list[float]:
    """Train as scripts do and return the losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for _ in range(epochs):
        model.train()
        losses += run_epoch(model, optimizer, loader)
    return losses


def run_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loader: Iterable[Any]) -> list[float]:
    """Train for an epoch, in whatever mode the model is, and return the losses."""
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def take_step(model: nn.Module, *inputs: Tensor) -> None:
    """Train one step on whatever the model returns."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(*inputs).float().sum().backward()
    optimizer.step()


# What is left behind


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_as_it_was_afterwards(fails: bool) -> None:
    before = hooked_places()
    model = make_model()
    changes = {"num_threads": 2, "attention_backend": "math", "precision": "bf16", "non_blocking": True}
    try:
        with shifted_seeds(3, lambda: None), hang(changes, inspects=True):
            fit(model, DataLoader(make_data(), batch_size=8))
            inside = hooked_places()
            if fails:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert fails
    assert hooked_places() == before
    # The module hook is gone by then: no root is looked for after the first steps.
    assert [name for name in before if inside[name] == before[name]] == ["module"]
    assert not any("_compiled_call_impl" in module.__dict__ for module in model.modules())


def test_hooks_that_saw_nothing_leave_nothing() -> None:
    before = hooked_places()
    with hang():
        assert nn.Module._compiled_call_impl is not None
    assert hooked_places() == before


def test_roots_are_looked_for_during_the_first_steps_only() -> None:
    model, late = make_model(), make_model()
    with hang() as hung:
        fit(model, DataLoader(make_data(), batch_size=8))
        assert len(hung.steps) == 6
        take_step(late, torch.ones(1, 6))
    assert hung.roots == [model]


def pass_on(model: nn.Module) -> Any:
    """Return a model as another process would get it."""
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pass_on], ids=["copied", "pickled"])
def test_a_copy_of_a_hooked_model_is_its_own(duplicate: Callable[[nn.Module], nn.Module]) -> None:
    model, x = make_model(), torch.ones(2, 6)
    with hang({"precision": "bf16"}) as hung:
        fit(model, DataLoader(make_data(), batch_size=8))
        average = duplicate(model).eval()
        assert "_compiled_call_impl" not in average.__dict__
        calls = len(hung.turns)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
            assert torch.equal(average(x), torch.zeros(2, 3))
            assert not torch.equal(model(x), torch.zeros(2, 3))
        assert hung.roots == [model]
        assert len(hung.turns) == calls  # evaluation of a copy is none of ours once the roots are known


def test_a_copy_of_a_hooked_model_that_the_script_compiled_is_its_own() -> None:
    model, x = torch.compile(make_model(), backend="eager"), torch.ones(2, 6)
    with hang():
        take_step(model, x)  # type: ignore[arg-type]
        average = copy.deepcopy(model).eval()
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
            assert torch.equal(average(x), torch.zeros(2, 3))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
    torch._dynamo.reset()


class Averaged(nn.Module):
    """Says itself what a copy of it is made of, as some libraries' modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pass_on], ids=["copied", "pickled"])
def test_a_copy_of_a_hooked_model_with_a_state_of_its_own_is_its_own(duplicate: Callable[[Any], Any]) -> None:
    model, x = Averaged(), torch.ones(2, 6)
    with hang():
        take_step(model, x)
        average = duplicate(model)
        with torch.no_grad():
            for parameter in average.parameters():
                parameter.zero_()
            assert torch.equal(average(x), torch.zeros(2, 3))


def test_a_hooked_models_state_and_names_are_the_models() -> None:
    torch.manual_seed(1)
    model = make_model()
    names = [name for name, _ in model.named_modules()]
    keys, attributes = list(model.state_dict()), set(vars(model))
    with hang({"memory_format": "channels_last", "precision": "bf16"}):
        fit(model, DataLoader(make_data(), batch_size=8))
        assert list(model.state_dict()) == keys
        assert [name for name, _ in model.named_modules()] == names
        file = io.BytesIO()
        torch.save(model, file)
    assert set(vars(model)) == attributes
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert set(vars(loaded)) == attributes
    assert all(torch.equal(one, loaded.state_dict()[name]) for name, one in model.state_dict().items())


# What is found


class Wrapper(nn.Module):
    """As DistributedDataParallel and its like: the model is a part of what is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


class Tied(nn.Module):
    """A language model whose embedding owns the weight of its head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(tokens)))


def test_the_outermost_call_is_the_root() -> None:
    inner = make_model()
    outer = Wrapper(Wrapper(inner))
    with hang() as hung:
        take_step(outer, torch.ones(4, 6))
    assert hung.roots == [outer]


def test_the_model_within_a_data_parallel_one_of_one_device_is_the_root() -> None:
    model = make_model()
    with hang(inspects=True) as hung:
        for _ in range(2):
            take_step(nn.DataParallel(model), torch.ones(4, 6))
    assert hung.roots == [model]
    assert list(hung.hooks.models.calls) == [0]
    assert [step.samples for step in hung.steps] == [4, 4]


class PartByPart(nn.DataParallel[nn.Sequential]):
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.Sequential(*self.module[1:])(self.module[0](inputs))


def test_a_data_parallel_model_that_does_more_than_hand_a_call_on_is_the_root() -> None:
    compiled, parts = nn.DataParallel(make_model()), PartByPart(make_model())
    for model in (compiled, parts):
        with hang() as hung:
            if model is compiled:
                model.compile(backend="eager")
            take_step(model, torch.ones(4, 6))
        assert hung.roots == [model]
        assert hung.hooks.models.compiles_itself == (model is compiled)


def test_a_model_with_tied_weights_is_one_root() -> None:
    model = Tied()
    with hang() as hung:
        for _ in range(2):
            take_step(model, torch.zeros(4, 5, dtype=torch.long))
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [4, 4]


def test_a_loss_and_a_frozen_teacher_are_no_roots() -> None:
    model, teacher, x = make_model(), make_model().requires_grad_(False), torch.ones(4, 6)
    criterion = nn.KLDivLoss(reduction="batchmean")
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            target = teacher(x).softmax(1)  # in training mode, gradients on
            criterion(model(x).log_softmax(1), target).backward()
            optimizer.step()
    assert hung.roots == [model]
    assert len(hung.steps) == 2


class Criterion(nn.Module):
    def forward(self, model: nn.Module, *inputs: Tensor) -> Tensor:
        return model(*inputs).square().mean()


def test_a_model_that_a_loss_calls_is_the_root() -> None:
    model, criterion, x = make_model(), Criterion(), torch.ones(4, 6)
    with hang(inspects=True) as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(5):  # the last ones after all models are found
            criterion(model, x).backward()
            optimizer.step()
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [4] * 5


def test_a_loss_that_the_script_compiles_hides_what_it_calls_from_the_hooks() -> None:
    model, x = make_model(), torch.ones(4, 6)
    in_place = Criterion()
    in_place.compile(backend="eager")
    for criterion in (in_place, torch.compile(Criterion(), backend="eager")):
        with hang() as hung:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            criterion(model, x).backward()
            optimizer.step()
        assert (hung.roots, len(hung.steps)) == ([], 1)


def test_an_evaluation_makes_no_root_and_is_told_apart() -> None:
    model, x = make_model(), torch.ones(4, 6)
    with hang() as hung:
        model.eval()
        with torch.no_grad():
            model(x)  # a sanity check ahead of the training
        assert (hung.roots, hung.turns) == ([], [False])
        model.train()
        with torch.no_grad():
            model(x)  # statistics of the first batch
        assert (hung.roots, hung.turns) == ([], [False])
        take_step(model, x)
        assert (hung.roots, hung.turns) == ([model], [False, True])
        model.eval()
        model(x)
        assert hung.turns == [False, True, False]
        model.train()
        with torch.no_grad():
            model(x)  # samples for somebody else to learn from are a part of the training
        assert hung.turns == [False, True, False]


def test_a_step_goes_on_after_a_look_at_its_accuracy() -> None:
    model, x = make_model(), torch.ones(4, 6)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = model(x).sum()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
        assert hung.turns == [True, False]
        loss.backward()
        assert hung.turns == [True, False, True]
        model.eval()(x)
        optimizer.step()
        assert hung.turns == [True, False, True, False, True]


def test_an_attack_on_the_batch_is_a_part_of_its_step() -> None:
    model, samples = make_model(), TensorDataset(torch.randn(24, 6))
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x,) in DataLoader(samples, batch_size=4):
            model.eval()
            for _ in range(3):
                x = x.detach().requires_grad_()
                x = x + torch.autograd.grad(model(x).sum(), x)[0]
            model.train()
            model(x.detach()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [one.samples for one in hung.steps[1:]] == [4] * (len(hung.steps) - 1)
    assert {len(one.losses) for one in hung.steps[1:]} == {1}
    assert len(hung.hooks.watch.training_loaders) == 1
    assert hung.turns[-1] is True
    assert hung.turns.count(False) <= 3  # of the first step, when the loader was not known


def test_a_batch_that_is_fetched_ahead_hides_no_loss() -> None:
    model = make_model()
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = iter(DataLoader(TensorDataset(torch.randn(24, 6)), batch_size=4))
        (x,) = next(batches)
        for following in batches:
            loss = model(x).sum()
            (x,) = following
            for parameter, gradient in zip(
                model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
            ):
                parameter.grad = gradient
            optimizer.step()
    assert [len(one.losses) for one in hung.steps] == [1] * len(hung.steps)


def test_an_attacked_evaluation_is_no_training() -> None:
    model, held_out = make_model(), DataLoader(TensorDataset(torch.randn(8, 6)), batch_size=4)
    with hang() as hung:
        take_step(model, torch.ones(4, 6))
        before = len(hung.turns)
        model.eval()
        for (x,) in held_out:
            x.requires_grad_()
            model(x).sum().backward()
            model(x + x.grad)
        assert set(hung.turns[before:]) == {False}


def test_an_evaluation_on_the_training_data_adds_no_samples() -> None:
    model, loader = make_model(), DataLoader(TensorDataset(torch.randn(20, 6)), batch_size=4)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model.train()
            for (x,) in loader:
                model(x).sum().backward()
                optimizer.step()
            model.eval()
            for (x,) in loader:  # with gradients
                model(x)
    assert {one.samples for one in hung.steps} == {4}


@pytest.mark.parametrize("how", ["full", "selective"])
def test_a_model_with_recomputed_blocks_is_saved_as_it_is(how: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layers(x)

    model, x = nn.Sequential(Block(), Block()), torch.ones(4, 6)
    with hang({"activation_checkpointing": how}):
        take_step(model, x)
        assert "forward" in vars(model[0])
        assert torch.equal(copy.deepcopy(model)(x), model(x))
        reduced = model[0].forward.__reduce__()  # type: ignore[operator]
        assert reduced == (getattr, (model[0], "forward"))


def test_an_optimizer_may_keep_anything_in_its_state() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.state["steps"] = 0  # type: ignore[index, assignment]

    model = make_model()
    with hang({"optimizer_implementation": "foreach"}):
        optimizer = Counting(model.parameters())
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()


def test_a_model_can_be_scripted_while_it_is_hooked() -> None:
    model = nn.Sequential(nn.Linear(6, 2))
    with hang():
        take_step(model, torch.ones(4, 6))
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(torch.ones(2, 6)), model(torch.ones(2, 6)))
    assert "_compiled_call_impl" not in torch.jit._recursive.ignored_attributes


def test_what_a_model_returns_in_eval_mode_may_be_viewed() -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    with hang({"memory_format": "channels_last"}):
        take_step(model, x)
        assert not model(x).is_contiguous()
        assert model.eval()(x).view(2, -1).shape == (2, 144)


def test_weights_in_another_layout_are_saved_as_they_are_read(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)
    plain = safetensors.save_file
    with hang({"memory_format": "channels_last"}):
        take_step(model, x)
        safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert safetensors.save_file is plain
    read = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["0.weight"], model[0].weight)


def test_a_weight_that_is_trained_later_is_one_of_fused_sgd_too() -> None:
    def train(changes: dict[str, Any]) -> Tensor:
        torch.manual_seed(0)
        model, x = make_model(), torch.ones(4, 6)
        model[0].requires_grad_(False)
        with hang(changes):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
            for step in range(6):
                model[0].requires_grad_(step > 2)
                model(x).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    assert torch.allclose(train({"optimizer_implementation": "fused"}), train({}), atol=1e-6)


def test_a_fused_optimizer_that_unscales_its_gradients_stays_so() -> None:
    model, x = make_model(), torch.ones(4, 6)
    with hang({"optimizer_implementation": "foreach"}):
        optimizer, scaler = torch.optim.Adam(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.param_groups[0]["fused"]


def test_adagrad_is_switched_though_it_begins_with_a_state() -> None:
    model, x = make_model(), torch.ones(4, 6)
    with hang({"optimizer_implementation": "foreach"}):
        optimizer = torch.optim.Adagrad(model.parameters())
        model(x).sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["foreach"] is True


def test_parts_that_are_called_one_by_one_are_all_roots() -> None:
    encoder, head, other = nn.Linear(6, 8), nn.Linear(8, 2), nn.Linear(8, 3)
    parameters = [p for part in (encoder, head, other) for p in part.parameters()]
    with hang() as hung:
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            hidden = encoder(torch.ones(4, 6))
            head(hidden).sum().backward(retain_graph=True)
            other(hidden).sum().backward()
            optimizer.step()
    assert hung.roots == [encoder, head, other]
    assert [(step.samples, step.micro_batches, len(step.losses)) for step in hung.steps] == [(4, 1, 2)] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_computed_again_are_no_new_calls(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=reentrant))

    model, x = Checkpointed(), torch.ones(4, 6, requires_grad=True)
    with hang() as hung:
        for _ in range(2):
            take_step(model, x)
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [4, 4]
    assert [len(step.losses) for step in hung.steps] == [1, 1]


def test_a_part_that_the_script_checkpoints_is_found_once() -> None:
    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    with hang() as hung:
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(2):
            hidden = checkpoint(first, torch.ones(4, 6), use_reentrant=False)
            second(hidden).sum().backward()
            optimizer.step()
    assert hung.roots == [first, second]
    assert [step.samples for step in hung.steps] == [4, 4]


def test_a_model_of_the_scripts_own_compiling_is_one_root() -> None:
    model = torch.compile(make_model(), backend="eager")
    with hang() as hung:
        take_step(model, torch.ones(4, 6))  # type: ignore[arg-type]
    torch._dynamo.reset()
    assert hung.roots == [model]
    assert hung.hooks.models.compiles_itself


def test_what_the_script_does_itself_is_noted() -> None:
    model = make_model()
    with hang() as hung:
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(2):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert hung.hooks.autocast_dtypes == {torch.bfloat16}
    assert hung.hooks.optimizers.scales_loss
    assert hung.hooks.optimizers.optimizers == [optimizer]
    assert 0.0 < hung.losses[0] < 10.0  # as it was before it was scaled by 65,536


def test_a_cast_to_float32_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script does on a GPU whose flag for it says float32; on a CPU PyTorch leaves such a cast out."""
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _device: torch.float32)
    with hang() as hung, torch.autocast("cpu", dtype=torch.bfloat16):
        make_model()(torch.ones(4, 6))
    assert hung.hooks.autocast_dtypes == set()


def test_what_the_hooks_do_is_not_taken_for_the_scripts() -> None:
    model = make_model()
    with hang({"precision": "bf16"}) as hung:
        fit(model, DataLoader(make_data(), batch_size=8))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        assert scaler.scale(torch.ones(1)) == 1.0
    assert hung.hooks.autocast_dtypes == set()
    assert not hung.hooks.optimizers.scales_loss


def test_losses_samples_and_epochs_are_the_scripts() -> None:
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    torch.manual_seed(2)
    with hang(training_loaders=(describe_loader(loader),)) as hung:
        losses = fit(make_model(), loader, epochs=2)
    assert hung.losses == losses
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4] * 2


def test_a_gradient_penalty_is_a_part_of_the_loss_and_no_step() -> None:
    critic, x = make_model(), torch.ones(4, 6, requires_grad=True)
    with hang() as hung:
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(2):
            score = critic(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            (score.mean() + slope.square().sum()).backward()
            optimizer.step()
    assert [len(step.losses) for step in hung.steps] == [1, 1]


def test_gradients_taken_by_hand_are_steps_from_the_second_one_on() -> None:
    model = make_model()
    with hang() as hung:
        for _ in range(4):
            loss = model(torch.ones(4, 6)).sum()
            for p, slope in zip(model.parameters(), torch.autograd.grad(loss, tuple(model.parameters())), strict=True):
                p.data -= 0.1 * slope
    assert [(step.samples, len(step.losses)) for step in hung.steps] == [(4, 1)] * 3


def test_what_is_called_before_there_is_an_optimizer_trains_nothing() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 2)])
            self.strides = self.forward(torch.ones(1, 6)).shape  # as YOLO's, whose parts are called one by one

        def forward(self, x: Tensor) -> Tensor:
            for part in self.parts:
                x = part(x)
            return x

    with hang(inspects=True) as hung:
        model = Sized()
        model(torch.ones(1, 6))  # a summary
        average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
        average(torch.ones(4, 6))
    assert hung.roots == [model]
    assert not hung.hooks.models.compiles_itself
    assert [step.samples for step in hung.steps] == [4] * 3


def test_a_model_is_not_taken_for_compiled_where_a_part_of_it_was_called_before() -> None:
    model = make_model()
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        next(model.children())(torch.ones(4, 6)).sum().backward()
        model(torch.ones(4, 6)).sum().backward()
        optimizer.step()
    assert len(hung.roots) == 2
    assert not hung.hooks.models.compiles_itself


def test_a_loader_that_keeps_one_iterator_for_all_epochs_is_followed() -> None:
    class Endless(DataLoader[tuple[Tensor, ...]]):  # as YOLO's
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            object.__setattr__(self, "batch_sampler", Repeated(self.batch_sampler))
            self.kept: Any = None

        def __len__(self) -> int:
            return 3

        def __iter__(self) -> Any:
            if self.kept is None:
                self.kept = self._get_iterator()
            return (next(self.kept) for _ in range(len(self)))

    class Repeated:
        def __init__(self, once: Any) -> None:
            self.once = once

        def __iter__(self) -> Any:
            while True:
                yield from self.once

    with hang() as hung:
        loader = Endless(TensorDataset(torch.ones(12, 6)), batch_size=4, shuffle=True)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for (x,) in loader:
                model(torch.cat([x, x])).sum().backward()
                optimizer.step()
    assert hung.hooks.loaders.training_loader is loader
    assert [step.samples for step in hung.steps] == [4] * 6


def test_what_a_loader_of_a_librarys_own_takes_is_waited_for_too() -> None:
    with hang() as hung:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(torch.ones(12, 6)), batch_size=4)
        for (x,) in _SingleProcessDataLoaderIter(loader):  # as fastai's
            model(x).sum().backward()
            optimizer.step()
    assert [step.samples for step in hung.steps] == [4] * 3
    assert "data" in hung.hooks.timer.seconds


def test_a_batch_of_fewer_samples_than_asked_for_counts_those() -> None:
    model = make_model()
    with hang() as hung:
        fit(model, DataLoader(make_data(), batch_size=100, shuffle=True))
        fit(model, DataLoader(make_data(), batch_size=100, sampler=RandomSampler(make_data(), num_samples=200)))
    assert [step.samples for step in hung.steps] == [ROWS, 100, 100]


def test_a_batch_of_batches_counts_what_is_in_it() -> None:
    class Whole(Dataset[Tensor]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Tensor:
            return torch.ones(16, 6)

    for size, samples in ((None, 16), (1, 1)):
        loader = DataLoader(Whole(), batch_size=size)
        with hang() as hung:
            model = make_model()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for x in loader:
                model(x.reshape(-1, 6)).sum().backward()
                optimizer.step()
        assert [step.samples for step in hung.steps] == [samples] * 3


def test_an_error_that_the_script_catches_is_noted() -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            if torch.is_autocast_enabled("cpu"):
                raise RuntimeError("full precision only")
            return self.linear(x)

    model = Picky()
    for changes, found in ({}, []), ({"precision": "bf16"}, ["full precision only"] * 2):
        with hang(changes) as hung:
            for _ in range(2):
                try:
                    take_step(model, torch.ones(4, 6))
                except RuntimeError:
                    continue
        assert hung.errors == found


# No random number, no other order


class Noisy(Dataset[Any]):
    """Samples that every global generator has a hand in."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return torch.randn(6) + float(np.random.rand()) + random.random(), index % 3


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def test_batches_of_a_batch_sampler_are_counted_by_its_size() -> None:
    def collate(samples: list[Any]) -> Any:
        return tuple(zip(*samples, strict=True))  # as detectors do: a tuple of single samples

    model, data = make_model(), make_data()
    loader = DataLoader(
        data, batch_sampler=BatchSampler(SequentialSampler(data), 8, drop_last=True), collate_fn=collate
    )
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for inputs, _ in loader:
            model(torch.stack(inputs)).sum().backward()
            optimizer.step()
    assert {step.samples for step in hung.steps} == {8}


@pytest.mark.parametrize("inspects", [False, True])
def test_hooks_draw_no_random_number(inspects: bool) -> None:
    def train() -> tuple[list[float], Any]:
        seed_all(3)
        losses = fit(make_model(0.3), DataLoader(Noisy(), batch_size=8, shuffle=True), epochs=3)
        states = read_generators()
        return losses, (states["torch"].tolist(), states["numpy"][1].tolist(), states["numpy"][2], states["random"])

    expected = train()
    key = describe_loader(DataLoader(Noisy(), batch_size=8, shuffle=True))
    with hang(inspects=inspects) as hung:
        assert train() == expected
    assert hung.losses == expected[0]
    assert hung.hooks.loaders.random_sources == {"torch", "numpy", "random"}
    with hang(training_loaders=(key,), inspects=inspects):
        assert train() == expected


def test_a_thread_that_fetches_ahead_gives_each_step_its_batch() -> None:
    model, loader = make_model(), DataLoader(make_data(), batch_size=8)
    with hang() as hung, ThreadPoolExecutor(1) as thread:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = thread.submit(iter, loader).result()
        for fetched in (1, 2, 1):
            for x, y in [thread.submit(next, batches).result() for _ in range(fetched)]:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    assert hung.hooks.watch.training_loaders == {describe_loader(loader)}
    assert [(step.samples, step.micro_batches) for step in hung.steps] == [(8, 1)] * 4


def test_samples_that_draw_nothing_have_no_random_source() -> None:
    with hang() as hung:
        fit(make_model(0.3), DataLoader(make_data(), batch_size=8, shuffle=True), epochs=2)
    assert hung.hooks.loaders.random_sources == set()


def learn(
    changes: dict[str, Any] | None, *, keeps: bool = False, epochs: int = 3, **loader_options: Any
) -> tuple[list[float], list[float], list[Any]]:
    """Train a model with dropout, validating between the epochs.

    Args:
        changes: knobs; None to train without hooks.
        keeps: the script keeps its workers by itself.
        epochs: of the training.
        loader_options: of its loader.

    Returns:
        The losses, the next random numbers of the process, and how the two loaders are set.
    """
    seed_all(4)
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, **loader_options}
    loader, validation = DataLoader(make_data(), **options), DataLoader(make_data(), batch_size=22)
    model = make_model(0.3)
    losses: list[float] = []

    def train() -> None:
        for _ in range(epochs):
            losses.extend(fit(model, loader))
            model.eval()
            with torch.no_grad():
                for x, _ in validation:
                    model(x)

    if changes is None:
        train()
    else:
        keys = (describe_loader(loader),)
        with hang(changes, training_loaders=keys):
            train()
    drawn = [torch.rand(1).item(), float(np.random.rand()), random.random()]
    found = [(one.num_workers, one.prefetch_factor, one.persistent_workers) for one in (loader, validation)]
    loader._iterator = None  # ends workers that were kept
    return losses, drawn, found


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], list[float], list[Any]]:
    return learn(None)


LOADER_CHANGES = {
    "workers": ({"num_workers": 2}, (2, 2, False)),
    "kept workers": ({"num_workers": 2, "persistent_workers": True}, (2, 2, True)),
    "one kept worker that runs ahead": (
        {"num_workers": 1, "prefetch_factor": 8, "persistent_workers": True},
        (1, 8, True),
    ),
    "kept without workers": ({"persistent_workers": True}, (0, None, False)),
    "prefetching without workers": ({"prefetch_factor": 4}, (0, None, False)),
    "nothing": ({}, (0, None, False)),
}


@pytest.mark.parametrize("name", LOADER_CHANGES)
def test_loader_knobs_change_no_bit_of_what_is_learned(name: str, plain: Any) -> None:
    changes, found = LOADER_CHANGES[name]
    losses, drawn, (training, validation) = learn(changes)
    assert losses == plain[0]
    assert drawn == plain[1]
    assert training == found
    assert validation == (0, None, False)


def test_the_dropout_and_the_order_of_later_epochs_depend_on_the_seed_of_the_workers(plain: Any) -> None:
    # What the hooks make up for: a kept iterator draws one number less an epoch, and all that follows is another.
    kept, _, _ = learn(None, num_workers=1, persistent_workers=True)
    assert kept[:6] == plain[0][:6]
    assert kept[6:] != plain[0][6:]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_workers": 0},
        {"persistent_workers": False},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": False},
        {"prefetch_factor": 4},
        {},
    ],
    ids=str,
)
def test_a_script_that_keeps_its_workers_learns_the_same_without(changes: dict[str, Any]) -> None:
    own = {"num_workers": 1, "persistent_workers": True}
    expected, drawn, _ = learn(None, **own)
    assert learn(changes, keeps=True, **own)[:2] == (expected, drawn)


def test_a_loader_built_anew_for_each_epoch_learns_the_same_with_kept_workers() -> None:
    def train() -> list[float]:
        seed_all(6)
        model = make_model(0.3)
        losses: list[float] = []
        for _ in range(3):
            losses += fit(model, DataLoader(make_data(), batch_size=8, shuffle=True))
        return losses

    expected = train()
    key = describe_loader(DataLoader(make_data(), batch_size=8, shuffle=True))
    changes = {"num_workers": 1, "persistent_workers": True}
    with hang(changes, training_loaders=(key,)):
        assert train() == expected


def test_an_epoch_cut_short_learns_the_same_with_kept_workers() -> None:
    def train() -> list[float]:
        seed_all(7)
        model, loader = make_model(0.3), DataLoader(make_data(), batch_size=8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[float] = []
        for _ in range(3):
            for number, (x, y) in enumerate(loader):
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if number == 2:
                    break
        loader._iterator = None
        return losses

    expected = train()
    key = describe_loader(DataLoader(make_data(), batch_size=8, shuffle=True))
    changes = {"num_workers": 2, "persistent_workers": True}
    with hang(changes, training_loaders=(key,)):
        assert train() == expected


class Resampled(TensorDataset):
    """Draws other targets before each epoch, as recommenders draw negatives."""

    def redraw(self, epoch: int) -> None:
        x, y = self.tensors
        self.tensors = (x, (y + epoch) % 3)


class Behind:
    """What a data set of another library is: no `Dataset` of PyTorch's, and with slots."""

    __slots__ = ("parts",)

    def __init__(self, one: Resampled) -> None:
        self.parts = {"only": (one,)}

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        return self.parts["only"][0][index]


@pytest.mark.parametrize(
    "wrap",
    [lambda one: one, lambda one: Subset(one, range(ROWS)), Behind, lambda one: Subset(Behind(one), range(ROWS))],
    ids=["itself", "within", "of another library", "within one of another library"],
)
def test_data_that_a_script_exchanges_between_epochs_reach_workers_that_are_kept(wrap: Any) -> None:
    def train() -> list[float]:
        seed_all(8)
        model, data = make_model(), Resampled(*make_data().tensors)
        loader = DataLoader(wrap(data), batch_size=8, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses: list[float] = []
        for epoch in range(3):
            data.redraw(epoch)
            losses += run_epoch(model, optimizer, loader)
        loader._iterator = None
        return losses

    expected = train()
    key = describe_loader(DataLoader(wrap(Resampled(*make_data().tensors)), batch_size=8, shuffle=True))
    with hang({"num_workers": 1, "persistent_workers": True}, training_loaders=(key,)):
        assert train() == expected


def test_a_model_that_the_script_compiles_in_place_is_found() -> None:
    def train() -> list[float]:
        seed_all(9)
        model = make_model()
        model.compile(backend="eager")
        return fit(model, DataLoader(make_data(), batch_size=8))

    expected = train()
    with hang() as hung:
        assert train() == expected
    assert len(hung.roots) == 1
    assert hung.hooks.models.compiles_itself
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4]
    assert hung.losses == expected


def test_a_model_that_is_compiled_after_its_first_call_is_one_root() -> None:
    with hang({"activation_checkpointing": "full"}) as hung:
        model = make_model()
        model(torch.ones(1, 6))
        model.compile(backend="eager")
        fit(model, DataLoader(make_data(), batch_size=8))
    assert hung.roots == [model]


def test_no_copy_of_a_model_that_was_compiled_in_place_takes_hooks_along() -> None:
    class Keeper(nn.Linear):
        def __getstate__(self) -> dict[str, Any]:
            return dict(self.__dict__)  # as DistributedDataParallel: all of it

    with hang():
        model = Keeper(6, 3)
        model.compile(backend="eager")
        copied, pickled = copy.deepcopy(model), pickle.loads(pickle.dumps(model.state_dict()))
        assert copied.__dict__["_compiled_call_impl"] is None
        assert copied(torch.ones(2, 6)).shape == (2, 3)
        assert pickled.keys() == model.state_dict().keys()


def test_blocks_that_the_script_compiles_in_place_are_parts_of_the_model() -> None:
    with hang({"precision": "bf16"}) as hung:
        model = make_model()
        for block in model:
            block.compile(backend="eager")
        fit(model, DataLoader(make_data(), batch_size=8))
        copied = copy.deepcopy(model)
    assert [root is model for root in hung.roots] == [True]
    assert copied(torch.ones(2, 6)).shape == (2, 3)


def test_a_model_that_trains_in_eval_mode_is_found_from_its_second_step_on() -> None:
    """As one of `from_pretrained`, which nobody told to train."""
    model = make_model().eval()
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = run_epoch(model, optimizer, DataLoader(make_data(), batch_size=8))
        with torch.no_grad():
            model(torch.ones(4, 6))
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 4]
    assert hung.losses == losses[1:]
    assert hung.turns[-1] is False


def test_a_model_that_a_validation_left_in_eval_mode_is_trained_so() -> None:
    """As one whose script calls `train()` once in an epoch, and validates within it."""
    model, seen = make_model(), list[torch.dtype]()
    model[-1].register_forward_hook(lambda _module, _args, output: seen.append(output.dtype))
    with hang({"precision": "bf16"}) as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = run_epoch(model, optimizer, DataLoader(make_data(), batch_size=8))
        model.eval()
        with torch.no_grad():
            model(torch.ones(4, 6))
        losses += run_epoch(model, optimizer, DataLoader(make_data(), batch_size=8))
        with torch.no_grad():
            model(torch.ones(4, 6))
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4, 8, 8, 8, 8, 4]
    assert hung.losses == [*losses[:6], *losses[7:]]
    own, ours = torch.float32, torch.bfloat16
    assert seen == [ours] * 6 + [own] * 2 + [ours] * 5 + [own]
    assert hung.turns[-1] is False


def test_a_teacher_in_eval_mode_is_no_model_to_train() -> None:
    teacher, student = make_model().eval(), make_model()
    with hang() as hung:
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for x, _ in DataLoader(make_data(), batch_size=8):
            optimizer.zero_grad()
            nn.functional.mse_loss(student(x), teacher(x).detach()).backward()
            optimizer.step()
    assert hung.roots == [student]
    assert len(hung.steps) == 6


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(6, 16), nn.ReLU()), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Named()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class Past(nn.Module):
    """A script's model that is called past its call; it is no part of the script's own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "model", model)

    def __call__(self, x: Tensor) -> Any:
        return self.model.forward(x)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.model.parameters(recurse)


@pytest.mark.parametrize("make", [Named, Outer, make_model], ids=["model", "nested", "sequential"])
def test_a_model_whose_forward_is_called_is_found_from_its_second_step_on(make: Callable[[], nn.Module]) -> None:
    seed_all(3)
    model = make()
    own = {kind: vars(kind).get("forward") for kind in map(type, model.modules())}
    expected = fit(copy.deepcopy(model), DataLoader(make_data(), batch_size=8))
    with hang() as hung:
        losses = fit(Past(model), DataLoader(make_data(), batch_size=8))
        with torch.no_grad():
            assert torch.equal(copy.deepcopy(model).forward(torch.ones(4, 6)), model(torch.ones(4, 6)))
        pickle.loads(pickle.dumps(model)).forward(torch.ones(4, 6)).sum().backward()
    assert losses == expected
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 4]
    assert hung.losses == losses[1:]
    assert {kind: vars(kind).get("forward") for kind in map(type, model.modules())} == own


def test_settings_reach_a_model_whose_forward_is_called() -> None:
    seen = []
    model = Named()
    model.head.register_forward_pre_hook(lambda _module, given: seen.append(given[0].dtype))
    with hang({"precision": "bf16"}):
        fit(Past(model), DataLoader(make_data(), batch_size=8))
    assert seen == [torch.float32, *[torch.bfloat16] * 5]


def test_a_hook_that_a_call_of_forward_passes_by_stays_passed_by() -> None:
    model, calls = Named(), []
    model.register_forward_hook(lambda *_given: calls.append(1))
    with hang() as hung:
        fit(Past(model), DataLoader(make_data(), batch_size=8))
    assert calls == []
    assert hung.roots == [model.body, model.head]


def test_a_wrapper_of_one_device_is_no_model_whose_forward_is_called() -> None:
    model = Named()
    with hang() as hung:
        fit(nn.DataParallel(model), DataLoader(make_data(), batch_size=8))
    assert hung.roots == [model]
    assert len(hung.steps) == 6


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.reshape(-1, 1, 2, 3).repeat(1, 1, 4, 2))).mean((2, 3))


def test_an_optimizer_has_the_layout_that_its_weights_are_given_later() -> None:
    """A fused one pairs the elements of weights and state as they lie in memory."""

    def train(wrap: Callable[[nn.Module], nn.Module]) -> list[list[Tensor]]:
        found = []
        for fold in range(2):
            seed_all(fold)
            model = Convolved()
            called, optimizer = wrap(model), torch.optim.Adam(model.parameters(), lr=0.01)
            run_epoch(called, optimizer, DataLoader(make_data(), batch_size=8))
            found.append([parameter.detach().contiguous() for parameter in model.parameters()])
        return found

    expected = train(Past)
    for wrap in (Past, lambda model: model):
        with hang({"memory_format": "channels_last", "optimizer_implementation": "fused"}):
            found = train(wrap)
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True))


class Calling(Named):
    """Calls its `forward` by itself, as GPyTorch's modules do."""

    def __call__(self, x: Tensor) -> Any:
        return self.forward(x)


class Whole(nn.Module):
    """Trains within its `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Named()

    def forward(self, loader: DataLoader[Any]) -> list[float]:
        return fit(self.model, loader)


def test_a_forward_that_is_not_called_by_its_name_leaves_the_parts_models() -> None:
    calling, kept, whole = Calling(), Named(), Whole()
    with hang() as hung:
        fit(calling, DataLoader(make_data(), batch_size=8))
    assert hung.roots == [calling.body, calling.head]
    assert len(hung.steps) == 6
    past = Past(kept)
    object.__setattr__(past, "model", type("Kept", (), {"forward": kept.forward, "parameters": kept.parameters})())
    with hang() as hung:
        fit(past, DataLoader(make_data(), batch_size=8))
    assert hung.roots == [kept.body, kept.head]
    assert len(hung.steps) == 5
    with hang() as hung:
        whole.forward(DataLoader(make_data(), batch_size=8))
    assert hung.roots == [whole.model]
    assert len(hung.steps) == 5


def test_a_model_whose_forward_is_called_twice_a_step_has_its_settings_from_a_whole_step_on() -> None:
    model, seen = Named(), list[torch.dtype]()
    model.head.register_forward_hook(lambda _module, _given, returned: seen.append(returned.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hang({"precision": "bf16"}) as hung:
        torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for _ in range(3):
            (model.forward(torch.ones(4, 6)).sum() + model.forward(torch.zeros(4, 6)).sum()).backward()
            optimizer.step()
    assert seen == [*[torch.float32] * 2, *[torch.bfloat16] * 4]
    assert [step.samples for step in hung.steps] == [8, 8]


def test_a_reference_of_a_model_whose_forward_is_called_beside_another() -> None:
    called, past = Named(), Named()
    optimizers = [torch.optim.Adam(model.parameters()) for model in (called, past)]
    with hang(in_float64=True) as hung:
        torch.optim.SGD([nn.Parameter(torch.ones(1))])
        for _ in range(3):
            (called(torch.ones(4, 6)).sum() + past.forward(torch.ones(4, 6)).sum()).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert hung.roots == [called, past]


def test_an_evaluation_by_forward_is_none_of_the_training() -> None:
    model, tested = Named(), DataLoader(make_data(), batch_size=ROWS)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model.eval()
        with torch.no_grad():
            for x, _ in tested:
                model.forward(x)
        model.train()
        run_epoch(Past(model), optimizer, DataLoader(make_data(), batch_size=8))
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 4]
    assert len(hung.hooks.watch.training_loaders) == 1


def test_what_hangs_on_a_class_takes_no_hooks_along() -> None:
    """A class of `__main__` is pickled by its code, with all that it holds."""
    plain, model = Named.forward, Named()
    with hang():
        fit(Past(model), DataLoader(make_data(), batch_size=8))
        assert [cell.cell_contents for cell in Named.forward.__closure__ or ()] == [plain]
        assert inspect.signature(model.forward) == inspect.signature(plain.__get__(model))
    assert Named.forward is plain


def test_settings_reach_the_models_of_later_folds_and_of_no_other_kind() -> None:
    seen: list[list[torch.dtype]] = []

    def watch(model: nn.Module) -> nn.Module:
        dtypes = list[torch.dtype]()
        seen.append(dtypes)
        model.register_forward_hook(lambda _module, _given, returned: dtypes.append(returned.dtype))
        return model

    class Other(Named):
        pass

    loader = DataLoader(make_data(), batch_size=8)
    with hang({"precision": "bf16"}) as hung:
        first = make_model()
        watch(first[-1])
        fit(first, loader, epochs=2)
        for kind in (make_model, make_model, Other):
            fold = kind()
            watch(fold[-1] if isinstance(fold, nn.Sequential) else fold.head)  # type: ignore[attr-defined]
            fit(fold, loader)
            gone = weakref.ref(fold)
            gc.disable()  # a fold's memory is free before the next one's is taken
            del fold
            gc.enable()
            assert gone() is None
    half, full = torch.bfloat16, torch.float32
    assert seen == [[half] * 12, [full, *[half] * 5], [full, *[half] * 5], [full] * 6]
    assert hung.roots == [first]
    assert len(hung.steps) == 12 + 3 * 6


class Endless(RandomSampler):
    def __len__(self) -> int:
        raise ValueError("not known before the epoch is over")


def test_a_sampler_need_not_have_a_length() -> None:
    loader = DataLoader(make_data(), batch_size=8, sampler=Endless(make_data()))
    assert describe_loader(loader) == f"TensorDataset[{ROWS}] by Endless"


@pytest.mark.parametrize("batch_size", [4, ROWS])
def test_an_evaluation_without_eval_mode_is_no_training(batch_size: int) -> None:
    model, optimizer = make_model(), torch.optim.SGD
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    validation = DataLoader(make_data(), batch_size=batch_size)
    with hang() as hung:
        stepping = optimizer(model.parameters(), lr=0.1)
        for _ in range(3):
            for x, y in loader:
                stepping.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                stepping.step()
            with torch.no_grad():
                for x, _ in validation:
                    model(x)
        trained = hung.hooks.watch.training_loaders
    assert trained == {describe_loader(loader)}
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4] * 3


def test_an_evaluation_on_the_training_loader_without_eval_mode_is_no_training() -> None:
    model, loader = make_model(), DataLoader(make_data(), batch_size=8, shuffle=True)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run_epoch(model, optimizer, loader)
        batches = iter(loader)
        run_epoch(model, optimizer, islice(batches, 2))
        began = hung.hooks.loaders.restarted_at
        with torch.no_grad():
            for x, _ in loader:
                model(x)
        run_epoch(model, optimizer, batches)
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4] * 2
    assert hung.turns.count(False) == 5  # a look at one batch may be a teacher's
    assert began is not None
    assert hung.hooks.loaders.restarted_at == began


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_whose_activations_are_all_computed_again_evaluates_nothing(reentrant: bool) -> None:
    model, loader = make_model(), DataLoader(make_data(), batch_size=8)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, _ in loader:
            checkpoint(model, x.requires_grad_(), use_reentrant=reentrant).sum().backward()
            optimizer.step()
    assert False not in hung.turns
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4]


def test_a_teacher_that_looks_at_the_batches_of_its_student_evaluates_nothing() -> None:
    model, teacher = make_model(), make_model()
    labelled = DataLoader(make_data(), batch_size=8, shuffle=True)
    unlabelled = DataLoader(make_data(), batch_size=4)
    with hang() as hung:
        stepping = torch.optim.SGD(model.parameters(), lr=0.1)
        for (x, y), (more, _) in zip(labelled, unlabelled, strict=False):
            with torch.no_grad():
                wanted = teacher(more)
            stepping.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y) + nn.functional.mse_loss(model(more), wanted)
            loss.backward()
            stepping.step()
        trained = hung.hooks.watch.training_loaders
    assert trained == {describe_loader(labelled), describe_loader(unlabelled)}
    assert [step.samples for step in hung.steps] == [12, 12, 12, 12, 12, 8]


def test_an_attention_kernel_is_for_training_calls_alone() -> None:
    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.allowed: list[list[SDPBackend]] = []

        def forward(self, x: Tensor) -> Tensor:
            self.allowed.append(list_attention_kernels())
            return x * self.scale

    model, x = Attends(), torch.ones(4, 6)
    own = list_attention_kernels()
    with hang({"attention_backend": "math"}):
        take_step(model, x)
        with torch.no_grad():
            model(x)
        model.eval()(x)
        take_step(model.train(), x)
    assert model.allowed == [[SDPBackend.MATH], own, own, [SDPBackend.MATH]]
    assert list_attention_kernels() == own


@pytest.mark.parametrize("replacement", [True, False])
def test_a_sampler_that_draws_as_it_goes_learns_the_same_with_workers(replacement: bool) -> None:
    weights = torch.arange(1.0, ROWS + 1)

    def options() -> dict[str, Any]:
        return {"shuffle": False, "sampler": WeightedRandomSampler(weights, 24, replacement=replacement)}

    expected, drawn, _ = learn(None, **options())
    assert learn({"num_workers": 2, "persistent_workers": True}, **options())[:2] == (expected, drawn)


def test_a_loader_with_a_generator_of_its_own_learns_the_same_with_workers() -> None:
    def options() -> dict[str, Any]:
        return {"generator": torch.Generator().manual_seed(9)}

    expected, drawn, _ = learn(None, **options())
    assert learn({"num_workers": 2, "persistent_workers": True}, **options())[:2] == (expected, drawn)


@pytest.mark.parametrize("changes", [{"num_workers": 2}, {"num_workers": 2, "persistent_workers": True}], ids=str)
def test_two_loaders_side_by_side_learn_the_same_with_workers(changes: dict[str, Any]) -> None:
    def make_loaders() -> list[DataLoader[Any]]:
        x = make_data().tensors[0]
        return [DataLoader(TensorDataset(part), batch_size=8, shuffle=True) for part in (x, x[:40].flip(0))]

    def train() -> list[float]:
        seed_all(8)
        loaders, model, losses = make_loaders(), make_model(0.3), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for (x,), (other,) in zip(*loaders, strict=False):
                loss = (model(x).mean() - model(other).square().mean()).square()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        for loader in loaders:
            loader._iterator = None
        return losses

    expected = train()
    keys = tuple(map(describe_loader, make_loaders()))
    with hang(changes, training_loaders=keys):
        assert train() == expected


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for row in range(ROWS):
            yield torch.full((6,), float(row)), row % 3


def test_a_stream_is_left_alone() -> None:
    loader = DataLoader(Stream(), batch_size=8)
    changes = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True}
    with hang(changes, training_loaders=(describe_loader(loader),)) as hung:
        fit(make_model(), loader, lr=0.001)
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (0, None, False)
    assert sum(step.samples for step in hung.steps) == ROWS


def test_the_batches_of_a_stream_can_be_pinned() -> None:
    loader = DataLoader(Stream(), batch_size=8)
    apply_loader_knobs(
        loader, BASELINE.replace(num_workers=2, pin_memory=True), frozenset({"num_workers", "pin_memory"})
    )
    assert loader.pin_memory
    assert loader.num_workers == 0


def test_a_loader_that_waits_for_its_workers_for_some_time_can_do_without_them() -> None:
    expected = learn(None)[:2]
    assert learn({"num_workers": 0}, num_workers=2, timeout=60)[0] == expected[0]


class Buckets:
    """A batch sampler that draws its order when it begins."""

    def __init__(self) -> None:
        self._batches = [list(range(start, start + 8)) for start in range(0, 40, 8)]

    def __iter__(self) -> Iterator[list[int]]:
        random.shuffle(self._batches)
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)


@pytest.mark.parametrize("own_workers", [0, 1])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_batch_sampler_that_draws_when_it_begins_has_its_order(own_workers: int, workers: int, keeps: bool) -> None:
    def train(changes: dict[str, Any] | None) -> tuple[list[float], float]:
        random.seed(5)
        torch.manual_seed(5)
        persistent = keeps and own_workers > 0
        loader = DataLoader(
            make_data(), batch_sampler=Buckets(), num_workers=own_workers, persistent_workers=persistent
        )
        model = make_model()
        with hang(changes, training_loaders=(describe_loader(loader),)) if changes else nullcontext():
            losses = [loss for _ in range(3) for loss in fit(model, loader, lr=0.01)]
        loader._iterator = None
        return losses, random.random()

    assert train({"num_workers": workers}) == train(None)


def test_a_loader_is_touched_only_once_something_was_trained_on_it() -> None:
    loader, validation = DataLoader(make_data(), batch_size=8), DataLoader(Noisy(), batch_size=8)
    model = make_model()
    with hang({"num_workers": 2}):
        for epoch in range(2):
            fit(model, loader)
            assert loader.num_workers == (2 if epoch else 0)
            model.eval()
            for x, _ in validation:
                model(x)
            assert validation.num_workers == 0


def test_a_loader_that_evaluates_on_the_training_data_is_not_taken_for_the_one_that_trains() -> None:
    model, data = make_model(), make_data()
    loader, evaluation = (DataLoader(data, batch_size=size, shuffle=True) for size in (8, 44))
    with hang({"num_threads": 2}, training_loaders=(describe_loader(loader),)) as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with torch.no_grad():
                for x, _ in evaluation:
                    model.eval()(x)
            run_epoch(model.train(), optimizer, loader)
            assert hung.hooks.loaders.training_loader is loader
            assert hung.hooks.loaders.training_loaders == [loader]
        with torch.no_grad():
            for x, _ in evaluation:
                model.eval()(x)
        assert hung.hooks.loaders.training_loader is loader
        first = weakref.ref(loader)
        del loader
        gc.collect()
        assert first() is None
        later = DataLoader(data, batch_size=4, shuffle=True)
        run_epoch(model.train(), optimizer, later)
        assert hung.hooks.loaders.training_loader is later


def test_loaders_are_told_apart_by_what_does_not_change_from_run_to_run() -> None:
    data = make_data()
    shuffled = DataLoader(data, batch_size=8, shuffle=True)
    assert describe_loader(shuffled) == describe_loader(DataLoader(data, batch_size=4, shuffle=True, num_workers=2))
    others = [DataLoader(data, batch_size=8), DataLoader(Noisy(), shuffle=True), DataLoader(Stream(), batch_size=8)]
    keys = {describe_loader(loader) for loader in (shuffled, *others)}
    assert keys == {
        "TensorDataset[44] by RandomSampler",
        "TensorDataset[44] by SequentialSampler",
        "Noisy[44] by RandomSampler",
        "Stream[?] by _InfiniteConstantSampler",
    }


# Knobs of the model and the optimizer


@dataclasses.dataclass
class Answer:
    logits: Tensor
    states: list[Tensor]
    number: int = 3


class Speaker(nn.Module):
    """Says what precision it was called in, and answers in various forms."""

    def __init__(self, answer: Callable[[Tensor], Any] = lambda hidden: hidden) -> None:
        super().__init__()
        self.linear, self.answer = nn.Linear(6, 3), answer
        self.casts: list[bool] = []

    def forward(self, x: Tensor) -> Any:
        self.casts.append(torch.is_autocast_enabled("cpu"))
        hidden = self.linear(x)
        assert hidden.dtype == (torch.bfloat16 if self.casts[-1] else torch.float32)
        return self.answer(hidden)


def test_only_training_calls_are_cast() -> None:
    model, x = Speaker(), torch.ones(4, 6)
    with hang({"precision": "bf16"}):
        model.eval()
        model(x)
        model.train()
        take_step(model, x)
        with torch.no_grad():
            model(x)
        model.eval()
        returned = model(x)
        assert not torch.is_autocast_enabled("cpu")
    assert model.casts == [False, True, False, False]
    assert torch.equal(returned, model.linear(x))


def test_a_frozen_network_of_the_loss_is_cast_where_a_step_calls_it() -> None:
    model, judge, x = Speaker(), Speaker(), torch.ones(4, 6)
    judge.requires_grad_(False)
    own = judge.linear(x)
    with hang({"precision": "bf16"}) as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        judge(x)  # before there is a step: what it is to be held against
        for _ in range(2):
            teacher = judge(x)
            (teacher - model(x) + judge(x)).square().sum().backward()
            optimizer.step()
        timer = hung.hooks.timer
        timer.is_aside = True
        assert torch.equal(judge(x), own)
        timer.is_aside = False
        timer.enter("data")  # a dataset's own
        judge(x)
        timer.leave()
        assert hung.roots == [model]
    # The first teacher comes before any model is known.
    assert judge.casts == [False, False, True, True, True, False, False]
    assert "_compiled_call_impl" not in judge.__dict__
    judge(x)
    assert not judge.casts[-1]


def test_a_frozen_network_of_the_loss_has_the_layout_of_the_model() -> None:
    model, judge = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3).requires_grad_(False)
    with hang({"memory_format": "channels_last"}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        judge(model(torch.ones(2, 2, 4, 4))).sum().backward()
        optimizer.step()
    assert judge.weight.is_contiguous(memory_format=torch.channels_last)
    assert not judge.weight.is_contiguous()


def test_a_frozen_network_of_another_type_answers_in_that() -> None:
    model, judge, x = Speaker(), nn.Linear(6, 3).to(torch.bfloat16).requires_grad_(False), torch.ones(4, 6)
    with hang({"precision": "bf16"}):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model(x).sum().backward()
        assert judge(x.bfloat16()).dtype == torch.bfloat16
        optimizer.step()


def test_a_frozen_network_that_is_trained_later_is_a_model_of_the_script() -> None:
    model, critic, x = Speaker(), Speaker(), torch.ones(4, 6)
    with hang({"precision": "bf16"}) as hung:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (model, critic)]
        for _ in range(2):
            critic.requires_grad_(False)
            (model(x).sum() + critic(x).sum()).backward()
            optimizers[0].step()
            critic.requires_grad_(True)
            critic(x).sum().backward()
            optimizers[1].step()
        assert hung.roots == [model, critic]
    assert critic.casts == [True] * 4
    assert critic.linear.weight.grad is not None


ANSWERS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "tensor": (lambda h: h, lambda r: [r]),
    "tuple": (lambda h: (h, h * 2, "text", None), lambda r: list(r[:2])),
    "dictionary": (lambda h: {"logits": h, "more": [h]}, lambda r: [r["logits"], *r["more"]]),
    "dataclass": (lambda h: Answer(h, [h, h]), lambda r: [r.logits, *r.states]),
}


@pytest.mark.parametrize("form", ANSWERS)
def test_what_a_cast_call_returns_is_float32_again(form: str) -> None:
    answer, find_tensors = ANSWERS[form]
    model, x = Speaker(answer), torch.ones(4, 6)
    expected = type(model(x))
    with hang({"precision": "bf16"}):
        torch.optim.SGD(model.parameters())
        returned = model(x)
    assert type(returned) is expected
    tensors = find_tensors(returned)
    assert all(tensor.dtype == torch.float32 and tensor.grad_fn is not None for tensor in tensors)
    assert not torch.equal(tensors[0], model.linear(x))  # it was cast
    tensors[0].sum().backward()
    assert model.linear.weight.grad is not None
    assert model.linear.weight.grad.dtype == torch.float32


def test_a_dataclass_with_a_field_of_its_own_making_comes_back() -> None:
    @dataclasses.dataclass
    class Counted:
        logits: Tensor
        count: int = dataclasses.field(init=False, default=0)

        def __post_init__(self) -> None:
            self.count = len(self.logits)

    model = Speaker(Counted)
    with hang({"precision": "bf16"}):
        returned = model(torch.ones(4, 6))
    assert (returned.count, returned.logits.dtype) == (4, torch.float32)


def test_whole_numbers_and_half_precision_of_the_scripts_own_are_left_in_peace() -> None:
    model = Speaker(lambda hidden: (hidden.argmax(1), hidden.double()))
    with hang({"precision": "bf16"}):
        labels, wide = model(torch.ones(4, 6))
    assert (labels.dtype, wide.dtype) == (torch.int64, torch.float64)


class Pictures(nn.Module):
    """Has weights and buffers of every rank, and notes how its inputs lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3), nn.Linear(4, 2)
        self.register_buffer("relative", torch.zeros(2, 3, 4, 5, 6))
        self.register_buffer("mean", torch.zeros(2, 3, 4, 5))
        self.inputs: list[bool] = []

    def forward(self, images: Tensor, *, scale: Tensor) -> Tensor:
        self.inputs.append(images.is_contiguous(memory_format=torch.channels_last))
        return self.linear(self.convolution(images).mean((2, 3))) * scale


def test_channels_last_reaches_weights_and_training_inputs() -> None:
    torch.manual_seed(0)
    model = Pictures()
    plain = copy.deepcopy(model)
    x, scale = torch.randn(2, 3, 8, 8), torch.ones(1)
    with hang({"memory_format": "channels_last"}):
        torch.optim.SGD(model.parameters())
        loss = model(x, scale=scale).sum()
        loss.backward()
        model.eval()
        model(x, scale=scale)
    assert model.inputs == [True, False]
    assert model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.mean.is_contiguous(memory_format=torch.channels_last)
    assert model.relative.is_contiguous()
    expected = plain(x, scale=scale).sum()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(model.convolution.weight.grad, plain.convolution.weight.grad, rtol=1e-4)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.ReLU())
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.body(x)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize(("kind", "calls"), [("off", 6), ("full", 12), ("selective", 12)])
def test_activation_checkpointing_computes_again_and_learns_the_same(kind: str, calls: int) -> None:
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    seed_all(1)
    expected = fit(Stack(), loader)
    seed_all(1)
    model = Stack()
    with hang({} if kind == "off" else {"activation_checkpointing": kind}) as hung:
        losses = fit(model, loader)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert [block.calls for block in model.blocks] == [calls, calls]
    assert hung.roots == [model]
    assert [step.samples for step in hung.steps] == [8, 8, 8, 8, 8, 4]


class Switched(Stack):
    """Checkpoints by a flag of its own, as Hugging Face's layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.gradient_checkpointing else block(x)
        return self.head(x)


def test_what_a_model_without_blocks_checkpoints_by_itself_stays_where_it_is_full() -> None:
    model = make_model()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    exchange_activation_checkpointing(model, TrainConfig(activation_checkpointing="full"))
    assert checkpoints_itself(model)


def test_a_model_without_blocks_stops_what_it_checkpoints_by_itself() -> None:
    model = make_model()
    model.gradient_checkpointing = True  # type: ignore[assignment]
    with hang({"activation_checkpointing": "off"}):
        fit(model, DataLoader(make_data(), batch_size=8))
    assert not checkpoints_itself(model)


@pytest.mark.parametrize(("kind", "calls"), [("full", 12), ("off", 6), ("selective", 12)])
def test_what_a_model_checkpoints_by_itself_is_exchanged(kind: str, calls: int) -> None:
    loader = DataLoader(make_data(), batch_size=8, shuffle=True)
    seed_all(1)
    expected = fit(Stack(), loader)
    seed_all(1)
    model = Switched()
    with hang({} if kind == "full" else {"activation_checkpointing": kind}):
        losses = fit(model, loader)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert [block.calls for block in model.blocks] == [calls, calls]
    assert checkpoints_itself(model) == (kind == "full")


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_part_without_blocks_does_not_keep_another_from_checkpointing(kind: str) -> None:
    encoder, head = Stack(), nn.Linear(3, 2)
    with hang({"activation_checkpointing": kind}) as hung:
        torch.optim.SGD(encoder.parameters())
        head(encoder(torch.ones(4, 6))).sum().backward()
    assert hung.roots == [encoder, head]
    assert [block.calls for block in encoder.blocks] == [2, 2]


def test_what_is_asked_of_a_compiled_model_in_eval_mode_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []

    def compile_in_place(model: nn.Module, config: TrainConfig) -> None:
        assert config.compile_mode == "default"

        def call(x: Tensor) -> Any:
            calls.append(model.training)
            return model._call_impl(x)  # type: ignore[no-untyped-call]

        model._compiled_call_impl = call

    monkeypatch.setattr("autotune.engine.hooks.script.apply_compilation", compile_in_place)
    model = make_model()
    with hang({"compile_mode": "default"}):
        for _ in range(2):
            fit(model, DataLoader(make_data(), batch_size=8))
            model.eval()
            with torch.no_grad():
                assert torch.isfinite(model(torch.ones(3, 6))).all()
            model.train()
        trained = len(calls)
        with torch.no_grad():
            model(torch.ones(3, 6))  # in training mode it is part of a step: what a policy samples, or a generator
    assert len(calls) == trained + 1
    assert all(calls)


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="torch.compile on a CPU needs a C++ compiler on PATH")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("more", [{}, {"precision": "bf16"}, {"activation_checkpointing": "full"}], ids=str)
def test_a_compiled_model_learns_the_same_and_is_evaluated_as_before(more: dict[str, Any]) -> None:
    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.body[0](x)

    def build() -> Stack:
        seed_all(1)
        model = Stack()
        model.blocks = nn.ModuleList(Plain() for _ in range(2))
        return model

    loader = DataLoader(make_data(), batch_size=8, shuffle=True, drop_last=True)
    expected = fit(build(), loader)
    before = compiled_graph_count()
    try:
        model = build()
        with hang({"compile_mode": "default", **more}) as hung:
            losses = fit(model, loader)
            graphs = compiled_graph_count()
            model.eval()
            with torch.no_grad():
                assert model(torch.ones(4, 6)).dtype == torch.float32
            assert compiled_graph_count() == graphs
    finally:
        torch._dynamo.reset()
    assert graphs > before
    assert hung.roots == [model]
    assert losses == pytest.approx(expected, rel=2e-2 if "precision" in more else 1e-5)


@pytest.mark.parametrize("wanted", ["fused", "foreach", "for-loop"])
def test_a_fresh_optimizer_is_switched(wanted: str) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    with hang({"optimizer_implementation": wanted}):
        for _ in range(2):
            model(torch.ones(4, 6)).sum().backward()
            optimizer.step()
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (wanted == "fused", wanted == "foreach")


def test_an_optimizer_with_a_state_is_left_as_it_is() -> None:
    model = make_model()
    first = torch.optim.AdamW(model.parameters())
    model(torch.ones(4, 6)).sum().backward()
    first.step()
    resumed = torch.optim.AdamW(model.parameters())
    resumed.load_state_dict(first.state_dict())
    before = (resumed.param_groups[0]["fused"], resumed.param_groups[0]["foreach"])
    with hang({"optimizer_implementation": "fused"}) as hung:
        model(torch.ones(4, 6)).sum().backward()
        resumed.step()
    assert (resumed.param_groups[0]["fused"], resumed.param_groups[0]["foreach"]) == before
    assert hung.hooks.optimizers.optimizers == [resumed]


@pytest.mark.parametrize("optimizer_implementation", ["fused", "foreach"])
def test_switched_optimizers_learn_the_same(optimizer_implementation: str) -> None:
    def train() -> list[float]:
        seed_all(2)
        return fit(make_model(0.2), DataLoader(make_data(), batch_size=8, shuffle=True), epochs=2)

    expected = train()
    with hang({"optimizer_implementation": optimizer_implementation}):
        assert train() == pytest.approx(expected, rel=1e-5)


def test_an_optimizer_is_not_kept_alive() -> None:
    model, x = make_model(), torch.ones(4, 6)
    with hang() as hung:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(x).sum().backward()
            optimizer.step()
        assert hung.hooks.optimizers.optimizers == [optimizer]
        gone = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert gone() is None
        assert hung.hooks.optimizers.optimizers == []


@pytest.mark.parametrize("inspects", [False, True])
def test_optimizers_that_are_made_anew_are_not_waited_for(inspects: bool) -> None:
    with hang(inspects=inspects) as hung:
        for _ in range(3):
            fit(make_model(), DataLoader(make_data(), batch_size=8))
    assert [step.micro_batches for step in hung.steps] == [1] * 18
    assert len(hung.hooks.optimizers.optimizers) == inspects  # the last one, to look at


def test_steps_are_seen_after_one_that_raised() -> None:
    """As of a script that finds the batch size that fits its memory."""

    class Full(torch.optim.SGD):
        is_full = True

        def step(self, closure: Any = None) -> Any:
            if self.is_full:
                raise torch.OutOfMemoryError("planted")
            return super().step(closure)

    model, x = make_model(), torch.ones(4, 6)
    with hang() as hung:
        optimizer = Full(model.parameters(), lr=0.1)
        for number in range(4):
            optimizer.is_full = number == 0
            model(x).sum().backward()
            with suppress(torch.OutOfMemoryError):
                optimizer.step()
    assert [len(step.losses) for step in hung.steps] == [1, 1, 1]
    assert not hung.hooks.timer._open


def test_settings_of_the_process_wait_for_the_first_training_call() -> None:
    model = make_model()
    with hang({"num_threads": 2, "attention_backend": "math"}):
        torch.set_num_threads(1)  # the script's own, at its start
        model.eval()
        model(torch.ones(4, 6))
        assert torch.get_num_threads() == 1
        take_step(model.train(), torch.ones(4, 6))
        assert torch.get_num_threads() == 2
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.get_num_threads() == 1
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("by_hand", [False, True], ids=["optimizer", "by hand"])
def test_settings_of_the_process_reach_a_training_without_a_model(by_hand: bool) -> None:
    frozen, picture = make_model().requires_grad_(False), torch.ones(4, 6, requires_grad=True)
    with hang({"num_threads": 2, "attention_backend": "math"}) as hung:
        optimizer = None if by_hand else torch.optim.SGD([picture], lr=0.1)
        frozen(picture).sum().backward()
        assert torch.get_num_threads() == 1 + by_hand  # there a step ends with the backward pass
        if optimizer is not None:
            optimizer.step()
        assert torch.get_num_threads() == 2
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert (hung.roots, len(hung.steps)) == ([], 1)
    assert torch.get_num_threads() == 1


def test_a_training_without_a_model_is_where_its_parameters_are() -> None:
    picture = torch.ones(4, requires_grad=True, device="meta")
    with hang() as hung:
        optimizer = torch.optim.SGD([picture], lr=0.1, foreach=False)
        picture.sum().backward()
        optimizer.step()
        assert hung.hooks.device.type == "meta"
        take_step(make_model(), torch.ones(4, 6))  # what it was is known only now
    assert hung.hooks.device.type == "cpu"


def test_copies_that_are_not_from_pinned_memory_are_as_before() -> None:
    x = torch.ones(3)
    with asynchronous_copies():
        assert torch.Tensor.to is not None
        assert x.to(torch.float64).dtype == torch.float64
        assert x.to("cpu") is x
        assert torch.equal(x.to(device="cpu", dtype=torch.int64), torch.ones(3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("args", "kwargs", "adds"),
    [
        (("meta", torch.float64), {}, True),
        ((torch.ones(1, device="meta"),), {}, True),
        ((), {"tensor": torch.ones(1, device="meta")}, True),
        ((), {"device": "meta"}, True),
        (("meta", torch.float64, False), {}, False),
        (("meta", torch.float64, True, True), {}, False),
        ((torch.ones(1, device="meta"), False), {}, False),
        (("meta",), {"non_blocking": False}, False),
    ],
)
def test_a_copy_that_says_itself_whether_it_waits_is_left_alone(
    args: tuple[Any, ...], kwargs: dict[str, Any], adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    plain = torch.Tensor.to

    def note(tensor: torch.Tensor, /, *args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(kwargs)
        return plain(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", note)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    x = torch.ones(3)
    with asynchronous_copies():
        assert x.to(*args, **kwargs).is_meta
    assert asked == [kwargs | {"non_blocking": True} if adds else kwargs]


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((torch.float64,), {}),
        (("cpu",), {}),
        ((torch.ones(1),), {}),
        ((), {"dtype": torch.int64}),
        ((), {"device": "cpu"}),
    ],
)
def test_nothing_is_asked_of_a_tensor_that_stays_on_the_host(
    args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_tensor: torch.Tensor) -> bool:
        raise RuntimeError("CUDA error: initialization error")  # as in a forked loader worker

    monkeypatch.setattr(torch.Tensor, "is_pinned", ask)
    with asynchronous_copies():
        assert not torch.ones(3).to(*args, **kwargs).is_meta


# Seeds


def test_seeds_are_shifted_and_heard_of() -> None:
    heard: list[bool] = []

    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    seed_all(11 + 5)
    expected = draw()
    with shifted_seeds(5, lambda: heard.append(True)):
        seed_all(11)
        assert draw() == expected
        torch.random.manual_seed(seed=11)
        assert torch.rand(1).item() == expected[0]
        random.seed("a word")
        assert {*heard} == {True}
    assert len(heard) >= 5
    random.seed("a word")
    word = random.random()
    with shifted_seeds(5, lambda: None):
        random.seed("a word")
        assert random.random() == word
    seed_all(11)
    assert draw() != expected


def test_a_shift_by_nothing_changes_nothing() -> None:
    seed_all(11)
    expected = torch.rand(1).item(), float(np.random.rand()), random.random()
    with shifted_seeds(0, lambda: None):
        seed_all(11)
    assert (torch.rand(1).item(), float(np.random.rand()), random.random()) == expected


def test_a_seeded_generator_is_returned_as_before() -> None:
    with shifted_seeds(1, lambda: None):
        assert isinstance(torch.manual_seed(3), torch.Generator)
        assert torch.initial_seed() == 4


def test_a_seed_that_is_a_number_of_numpys_is_shifted_too() -> None:
    with shifted_seeds(5, lambda: None):
        torch.manual_seed(np.int64(3))  # type: ignore[arg-type]
        assert torch.initial_seed() == 8


def test_the_largest_seed_of_numpy_can_be_shifted() -> None:
    with shifted_seeds(5, lambda: None):
        np.random.seed(2**32 - 1)


def test_a_seed_reaches_a_gpu_shifted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with shifted_seeds(5, lambda: None):
        torch.manual_seed(11)
    assert seeds == [16]


class ByModule(Dataset[tuple[Tensor, Tensor]]):
    """Makes its samples by a module, as transforms do; their targets say whether anything looks at its calls."""

    def __init__(self) -> None:
        self.transform = nn.Identity()

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        is_watched = nn.Module._compiled_call_impl is not None
        return self.transform(torch.randn(6)), torch.tensor(float(is_watched))


@pytest.mark.parametrize("own_workers", [0, 1])
def test_modules_that_make_samples_in_a_worker_are_not_watched(own_workers: int) -> None:
    loader = DataLoader(ByModule(), batch_size=8, num_workers=own_workers)
    with hang({"num_workers": 1}, training_loaders=(describe_loader(loader),)):
        watched = torch.cat([target for _, target in loader])
        assert nn.Module._compiled_call_impl is not None  # in this process models are still looked for
    assert watched.tolist() == [0.0] * 16


def test_once_all_models_are_found_no_call_writes_to_the_class_of_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model, written = make_model(), list[str]()
    with hang() as hung:
        fit(model, DataLoader(make_data(), batch_size=8))
        hung.hooks.models.stop_finding()
        monkeypatch.setattr(models, "look_for_no_models", lambda: written.append("written"))
        fit(model, DataLoader(make_data(), batch_size=8))
        assert len(hung.roots) == 1
        assert written == []


class Unwatchable(nn.Module):
    """Compiles something within its call, which PyTorch refuses where operations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        noisy = nn.functional.dropout(self.layer(x))
        if torch._C._len_torch_dispatch_stack():
            raise RuntimeError("non-infra torch dispatch mode present, this is not supported today in torch.compile")
        return noisy


def test_what_refuses_to_be_watched_trains_as_it_does_by_itself() -> None:
    def train(**options: Any) -> Tensor:
        torch.manual_seed(0)
        model, x = Unwatchable(), torch.randn(8, 6)
        with hang(**options) as hung:
            take_step(model, x)
            take_step(model, x)
        assert not options or hung.hooks.models.seen.flops == 0
        return model.layer.weight.detach()

    assert torch.equal(train(inspects=True), train())
