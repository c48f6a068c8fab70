"""What a script's memory is said to be: its own objects, and its models on the shapes they were called with."""

from __future__ import annotations

from typing import Any

import memory_workloads as toys
import pytest
import torch
import torch.nn.functional as F
from record_factory import make_block, make_measurement
from torch import Tensor, nn

from autotune.engine.hooks.script import ScriptHooks, ScriptSettings
from autotune.measure.memory import measure_peak
from autotune.probe.memory.look import look_at_memory
from autotune.probe.memory.script import ScriptMemory
from autotune.records import TrainConfig
from autotune.records.facts import MemoryFacts
from autotune.records.measurement import PeakMemory

CPU = torch.device("cpu")
BATCH = 8
BASELINE = TrainConfig(micro_batch_size=BATCH, num_threads=1)


class Reading(nn.Module):
    """Decides by a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(toys.LENGTH, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.layer(tokens.float())
        return found if found.sum().item() > 0 else -found


def run_script(model: nn.Module, *, inspects: bool = True, **options: Any) -> MemoryFacts:
    """Train a model as scripts do, and look at its memory."""
    hooks = ScriptHooks(
        ScriptSettings(BASELINE),
        on_step=lambda _step: None,
        turn=lambda _is_training: None,
        now=lambda: 0.0,
        inspects=inspects,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(toys.WORDS, (BATCH, toys.LENGTH))

    def train() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            output = model(tokens)
            F.cross_entropy(output.flatten(0, -2), tokens.flatten()[: output[..., 0].numel()] % 4).backward()
            optimizer.step()

    with hooks.installed():
        peak = measure_peak(train, CPU)
    measurement = make_measurement([make_block(2 * BATCH, steps=2)], peak_memory=PeakMemory(host_bytes=peak or 0))
    settings: dict[str, Any] = {"base_bytes": 0, "limit_bytes": 2**33, "supported": ("fp32", "bf16")}
    settings |= {"checkpoints": False} | options
    return look_at_memory(ScriptMemory(hooks, measurement), BASELINE, CPU, **settings)


@pytest.mark.slow
def test_a_scripts_objects_are_counted() -> None:
    model = toys.Encoder()
    parameters = sum(p.numel() for p in model.parameters())
    found = run_script(model)
    assert found.weights_bytes == found.gradient_bytes == 4 * parameters
    assert 8 * parameters <= found.optimizer_bytes < 8 * parameters + 4096
    assert found.calibrated_micro_batch_size == BATCH


@pytest.mark.slow
def test_the_modes_of_a_scripts_model() -> None:
    found = run_script(toys.Encoder(), checkpoints=True, budget_seconds=30.0)
    assert found.missing == ""
    growth = {(mode.precision, mode.activation_checkpointing): mode.bytes_per_sample for mode in found.modes}
    assert len(growth) == 6
    assert growth["fp32", "full"] < growth["fp32", "off"]
    assert growth["bf16", "off"] < growth["fp32", "off"]
    assert found.modes[0].largest_micro_batch_size


def test_a_model_that_reads_values_is_told() -> None:
    found = run_script(Reading())
    assert found.modes == ()
    assert found.weights_bytes > 0
    assert "do not run on shapes alone" in found.missing


def test_a_model_whose_calls_were_not_seen_is_told() -> None:
    found = run_script(toys.Encoder(), inspects=False)
    assert found.modes == ()
    assert "no training call was seen" in found.missing


@pytest.mark.parametrize("seconds", [0.0, 0.01])
def test_the_budget_leaves_modes_out(seconds: float) -> None:
    assert len(run_script(toys.Encoder(), checkpoints=True, budget_seconds=seconds).modes) == 1


def test_calls_are_remembered_without_their_data() -> None:
    hooks = ScriptHooks(
        ScriptSettings(BASELINE), on_step=lambda _: None, turn=lambda _: None, now=lambda: 0.0, inspects=True
    )
    model, tokens = toys.Encoder(), torch.zeros(BATCH, toys.LENGTH, dtype=torch.int64)
    with hooks.installed():
        torch.optim.SGD(model.parameters())
        model(tokens=tokens)
        model(tokens=tokens)
    (args, kwargs) = hooks.models.calls[0]
    assert args == ()
    assert kwargs["tokens"].is_meta
    assert kwargs["tokens"].shape == tokens.shape
