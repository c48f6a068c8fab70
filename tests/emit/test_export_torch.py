"""The plain PyTorch module that is exported: it runs, and trains as the settings say."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from exported_source import PLAIN, ask, run_source
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import Dataset, TensorDataset

from autotune.emit.export.snippet import export_snippet
from autotune.engine.loop import Training
from autotune.records import TrainConfig
from autotune.records import config as knobs
from autotune.targets.workload import check_workload


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = nn.functional.scaled_dot_product_attention(x[:, None, None], x[:, None, None], x[:, None, None])
        return torch.relu(self.linear(attended[:, 0, 0])) + x


class Tiny:
    """A workload small enough to run in milliseconds; it notes what it sees."""

    lr = 0.01

    def __init__(self, samples: int = 10) -> None:
        self.samples = samples
        self.seen: list[Any] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def train_dataset(self) -> Dataset[Any]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(self.samples, 8, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True))

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        self.seen.append((len(x), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return nn.functional.mse_loss(model(x).float(), y)


def run_snippet(config: TrainConfig, workload: Any, *, epochs: int = 1) -> tuple[nn.Module, list[float]]:
    names = run_source(export_snippet(ask(config)).text)
    model, losses = names["train"](workload, epochs=epochs, device="cpu")
    return model, losses


def reference_losses(config: TrainConfig, workload: Tiny) -> list[float]:
    """Train one epoch by the book: one forward pass of each effective batch, the snippet's own order."""
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=workload.lr)
    dataset: Any = workload.train_dataset()
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=config.effective_batch_size, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    losses = []
    for batch in loader:
        loss = workload.compute_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("mode", "tag"), [("off", ""), ("default", "attention=math")])
def test_compiled_attention_is_not_taken_from_another_kernels_cache(mode: Any, tag: str) -> None:
    names = run_source(export_snippet(ask(TrainConfig(attention_backend="math", compile_mode=mode))).text)
    with torch.compiler.config.patch(cache_key_tag=""):
        names["set_process_options"]()
        assert torch.compiler.config.cache_key_tag == tag


@pytest.mark.usefixtures("torch_settings")
@settings(max_examples=25, deadline=None)
@given(micro=st.integers(1, 5), accumulation=st.integers(1, 4), samples=st.integers(1, 17))
def test_accumulation_is_the_large_batch(micro: int, accumulation: int, samples: int) -> None:
    config = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    _, losses = run_snippet(config, Tiny(samples))
    expected = reference_losses(config, Tiny(samples))
    assert len(losses) == math.ceil(samples / (micro * accumulation))
    assert losses == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.usefixtures("torch_settings")
def test_returned_counts_weigh_the_micro_batches() -> None:
    class Weighted(Tiny):
        lr = 1.0

        def build_model(self) -> nn.Module:
            return nn.Linear(1, 1, bias=False)

        def train_dataset(self) -> Dataset[Any]:
            return TensorDataset(torch.tensor([[1.0], [2.0], [4.0]]))

        shuffle = False

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            (x,) = batch
            return model(torch.ones(1, 1)).sum() * x.item(), x.item()

    config = TrainConfig(micro_batch_size=1, gradient_accumulation_steps=3)
    torch.manual_seed(0)
    start = nn.Linear(1, 1, bias=False).weight.item()
    model, losses = run_snippet(config, Weighted())
    # d loss / d w is the mean of x weighted by x: (1 + 4 + 16) / 7 = 3.
    assert model.get_parameter("weight").item() == pytest.approx(start - 3.0)
    assert losses == [pytest.approx(3.0 * start)]


ROUNDING: dict[str, Any] = {
    "precision": "bf16",
    "activation_checkpointing": "selective",
    "optimizer_implementation": "fused",
    "attention_backend": "math",
    "memory_format": "channels_last",
    "cudnn_benchmark": True,
    "num_threads": 1,
    "num_workers": 1,
    "persistent_workers": True,
    "non_blocking": True,
    "pin_memory": True,
    "matmul_precision": "high",
    "compile_mode": "default",
}


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("field", [field for field in ROUNDING if field != "compile_mode"])
def test_each_knob_runs_and_learns_the_same(field: str) -> None:
    config = TrainConfig(micro_batch_size=4)
    _, expected = run_snippet(config, Tiny(), epochs=2)
    _, losses = run_snippet(config.replace(**{field: ROUNDING[field]}), Tiny(), epochs=2)
    assert losses == pytest.approx(expected, rel=0.05 if field == "precision" else 1e-4)


@pytest.mark.usefixtures("torch_settings")
def test_all_knobs_run_together() -> None:
    config = TrainConfig(micro_batch_size=2, gradient_accumulation_steps=2, **(ROUNDING | {"compile_mode": "off"}))
    _, losses = run_snippet(config, Tiny(), epochs=2)
    assert len(losses) == 6
    assert all(math.isfinite(loss) for loss in losses)
    assert torch.get_num_threads() == 1
    assert torch.backends.cudnn.benchmark is True


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(
    ("precision", "enabled", "dtype"),
    [("fp32", False, None), ("bf16", True, torch.bfloat16), ("fp16", True, torch.float16)],
)
def test_precision_reaches_the_forward_pass(precision: Any, enabled: bool, dtype: Any) -> None:
    workload = Tiny()
    run_snippet(TrainConfig(micro_batch_size=5, precision=precision), workload)
    assert [entry[1] for entry in workload.seen] == [enabled, enabled]
    assert dtype is None or workload.seen[0][2] is dtype


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize(("precision", "enabled"), [("fp32", False), ("bf16", False), ("fp16", True)])
def test_only_fp16_scales_its_loss(precision: Any, enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[dict[str, Any]] = []
    real = torch.amp.GradScaler

    def build(*args: Any, **kwargs: Any) -> Any:
        built.append(kwargs)
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.amp, "GradScaler", build)
    run_snippet(TrainConfig(precision=precision), Tiny())
    assert built == [{"enabled": enabled}]


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_compilation_is_asked_of_the_model(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **given: asked.append(given))
    run_snippet(TrainConfig(compile_mode=mode), Tiny())
    assert asked == [{} if mode == "default" else {"mode": mode}]


@pytest.mark.usefixtures("torch_settings")
def test_attention_is_restricted_to_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(Tiny):
        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            self.seen.append((torch.backends.cuda.math_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled()))
            return super().compute_loss(model, batch)

    workload = Watching(4)
    run_snippet(TrainConfig(attention_backend="math"), workload)
    assert workload.seen[0] == (True, False)
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("implementation", get_args(knobs.OptimizerImplementation))
def test_optimizer_implementation_is_set(implementation: Any) -> None:
    class Keeping(Tiny):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            self.optimizer = super().build_optimizer(model)
            return self.optimizer

    workload = Keeping()
    run_snippet(TrainConfig(optimizer_implementation=implementation), workload)
    (group,) = workload.optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (implementation == "fused", implementation == "foreach")


@pytest.mark.usefixtures("torch_settings")
def test_channels_last_reaches_weights_and_inputs() -> None:
    class Convolution(Tiny):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))

        def train_dataset(self) -> Dataset[Any]:
            return TensorDataset(torch.randn(6, 3, 4, 4), torch.randn(6, 1))

        def compute_loss(self, model: Any, batch: Any) -> Any:
            x, y = batch
            laid_out = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, model[0].weight)]
            self.seen.append(laid_out)
            return nn.functional.mse_loss(model(x), y)

    workload = Convolution()
    run_snippet(TrainConfig(memory_format="channels_last"), workload)
    assert workload.seen == [[True, True]]


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_checkpointing_recomputes_the_blocks(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"block": 0}
    plain = Block.forward

    def count(self: Block, x: torch.Tensor) -> torch.Tensor:
        calls["block"] += 1
        return plain(self, x)

    monkeypatch.setattr(Block, "forward", count)
    run_snippet(TrainConfig(activation_checkpointing=kind), Tiny(4))
    assert calls["block"] == 4  # two blocks, forward and again in the backward pass


def test_selective_checkpointing_keeps_matrix_products_only() -> None:
    keep = run_source(export_snippet(ask(TrainConfig(activation_checkpointing="selective"))).text)["keep_dear"]
    policy = torch.utils.checkpoint.CheckpointPolicy
    assert keep(None, torch.ops.aten.mm.default) is policy.MUST_SAVE
    assert keep(None, torch.ops.aten.relu.default) is policy.PREFER_RECOMPUTE


@pytest.mark.usefixtures("torch_settings")
def test_checkpointing_without_blocks_is_refused() -> None:
    workload = SimpleNamespace(build_model=lambda: nn.Linear(2, 1))
    with pytest.raises(ValueError, match="no repeated blocks"):
        run_snippet(TrainConfig(activation_checkpointing="full"), workload)


@pytest.mark.usefixtures("torch_settings")
def test_gradients_are_clipped_after_unscaling() -> None:
    class Clipped(Tiny):
        gradient_clip_norm = 0.001

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            return super().compute_loss(model, batch) * 0.01  # small enough for the scaler's first scale

    moved = []
    for precision in ("fp32", "fp16"):
        config = TrainConfig(micro_batch_size=10, precision=precision)
        model, _ = run_snippet(config, Clipped())
        before = _fresh(Tiny())
        moved.append(sum((value - before[name]).square().sum().item() for name, value in model.state_dict().items()))
    # Far above the limit, so the step is lr x limit long in either precision.
    assert moved == pytest.approx([(0.01 * 0.001) ** 2] * 2, rel=0.02)


@pytest.mark.usefixtures("torch_settings")
def test_own_knobs_scheduler_clipping_and_drop_last() -> None:
    class Full(Tiny):
        gradient_clip_norm = 1e-9
        drop_last = True

        def build_scheduler(self, optimizer: Any) -> Any:
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
            return self.scheduler

    workload = Full(10)
    before = {k: v.clone() for k, v in _fresh(workload).items()}
    config = TrainConfig(micro_batch_size=4, user_knobs={"lr": 0.25})
    model, losses = run_snippet(config, workload)
    assert workload.lr == 0.25
    assert len(losses) == 2  # 4 + 4; the last two samples are left out
    assert workload.scheduler.last_epoch == 2
    for name, value in model.state_dict().items():
        assert torch.allclose(value, before[name], atol=1e-8)


def _fresh(workload: Tiny) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return workload.build_model().state_dict()


@pytest.mark.usefixtures("torch_settings")
def test_a_set_smaller_than_a_step_is_still_trained_on() -> None:
    workload = Tiny(3)
    workload.drop_last = True  # type: ignore[attr-defined]
    _, losses = run_snippet(TrainConfig(micro_batch_size=8), workload)
    assert len(losses) == 1


@pytest.mark.usefixtures("torch_settings")
def test_nested_batches_are_moved() -> None:
    names = run_source(export_snippet(ask(PLAIN)).text)
    batch = {"x": [torch.ones(2), "text"], "y": (torch.zeros(3),)}
    moved = names["move"](batch, torch.device("meta"))
    assert moved["x"][0].device.type == "meta"
    assert moved["x"][1] == "text"
    assert moved["y"][0].device.type == "meta"
    assert names["count_samples"]({"name": "n", "scalar": torch.tensor(1), "x": [torch.ones(5, 2)]}) == 5
    kept = names["move"](Sheet(torch.ones(2), "text"), torch.device("meta"))
    assert (kept.x.device.type, kept.name) == ("meta", "text")
    assert names["move"](Graphs(torch.ones(2)), torch.device("meta")).x.device.type == "meta"


@dataclass(frozen=True)
class Sheet:
    x: Any
    name: str


class Graphs:
    """A batch that moves itself, and no tensor tells how many samples it has."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def to(self, device: Any) -> Graphs:
        return Graphs(self.x.to(device))


class Ordered(Tiny):
    """The engine visits the samples as the exported loop does."""

    shuffle = False


def engine_run(config: TrainConfig, workload: Any, steps: int) -> tuple[nn.Module, list[float]]:
    """Return what the engine trains, and its losses."""
    loaded = check_workload(workload, label="x", fingerprint="y")
    training = Training(loaded, config, device=torch.device("cpu"), seed=0)
    losses = [float(training.step().loss) for _ in range(steps)]
    return training.call_model(lambda model: model), losses


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("checkpointing", ["off", "full"])
def test_the_average_of_the_weights_is_that_of_the_engine(checkpointing: Any) -> None:
    class Averaging(Ordered):
        lr = 0.1

        def build_averaged_model(self, model: nn.Module) -> AveragedModel:
            return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))

    config = TrainConfig(micro_batch_size=4, activation_checkpointing=checkpointing)
    expected, expected_losses = engine_run(config, Averaging(), 6)
    model, losses = run_snippet(config, Averaging(), epochs=2)
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected.state_dict()[name], atol=1e-6)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("kind", ["graphs", "time first"])
def test_samples_are_counted_by_what_the_loader_takes(kind: str, drop_last: bool) -> None:
    class Shaped(Ordered):
        def collate(self, samples: list[Any]) -> Any:
            x, y = (torch.stack(part) for part in zip(*samples, strict=True))
            return Graphs(torch.cat((x, y), 1)) if kind == "graphs" else {"x": x.T.contiguous(), "y": y}

        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            x, y = (batch.x[:, :8], batch.x[:, 8:]) if kind == "graphs" else (batch["x"].T, batch["y"])
            return nn.functional.mse_loss(model(x), y)

    Shaped.drop_last = drop_last  # type: ignore[attr-defined]
    config = TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2)
    _, expected = engine_run(config, Shaped(11), 1 if drop_last else 2)
    _, losses = run_snippet(config, Shaped(11))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("torch_settings")
@pytest.mark.parametrize("counts", [(0, 3), (3, 0), (0, 0), (0.25, 0.5), (0,)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_micro_batches_that_count_nothing_weigh_nothing(counts: tuple[float, ...], as_tensor: bool) -> None:
    class Counted(Ordered):
        def compute_loss(self, model: nn.Module, batch: Any) -> Any:
            count = counts[int(batch[1][0] > 0)]
            loss = super().compute_loss(model, batch)
            return loss, torch.tensor(count) if as_tensor else count

        def train_dataset(self) -> Dataset[Any]:
            x = torch.randn(2 * len(counts), 8, generator=torch.Generator().manual_seed(3))
            return TensorDataset(x, torch.arange(len(counts)).repeat_interleave(2)[:, None].float())

    config = TrainConfig(micro_batch_size=2, gradient_accumulation_steps=2)
    expected_model, expected = engine_run(config, Counted(), 1)
    model, losses = run_snippet(config, Counted())
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, expected_model.state_dict()[name], atol=1e-6)
