"""A model is compiled whatever its class, and stays the object it was."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from autotune.engine.compilation import apply_compilation, compile_seconds, compiled_graph_count
from autotune.engine.loop import backend_settings
from autotune.records.config import TrainConfig


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).relu()
        return output


class Fitted(Own):
    """As models of Keras' kind are: `compile` names an optimizer and a loss."""

    def compile(self, optimizer: str, loss: str) -> None:
        raise AssertionError(f"{optimizer} and {loss} are the user's to name")


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Own(), id="own"),
        pytest.param(Fitted(), id="with a compile of its own"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), id="torch's", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_a_model_is_compiled_whatever_its_class(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    eager, names = model(x), list(model.state_dict())
    before, spent, began = compiled_graph_count(), compile_seconds(), time.perf_counter()
    apply_compilation(model, TrainConfig(compile_mode="default"))
    output = model(x)
    output.sum().backward()
    assert compiled_graph_count() == before + 1
    assert 0.0 < compile_seconds() - spent < time.perf_counter() - began
    spent = compile_seconds()
    model(x).sum().backward()
    assert compile_seconds() == spent
    torch.testing.assert_close(output, eager)
    assert list(model.state_dict()) == names


def test_a_tag_of_the_users_is_kept() -> None:
    tags = set()
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for changes in ({}, {"attention_backend": "math"}, {"matmul_precision": "medium"}):
            with backend_settings(TrainConfig(**changes)):
                tags.add(torch.compiler.config.cache_key_tag)
        assert torch.compiler.config.cache_key_tag == "mine"
    assert len(tags) == 3
    assert all(tag.startswith("mine ") for tag in tags)


COMPILED = """
import sys, torch
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from autotune.engine.compilation import apply_compilation
from autotune.engine.loop import backend_settings
from autotune.records.config import TrainConfig

class Model(torch.nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)

config = TrainConfig(attention_backend=sys.argv[1], compile_mode="default", num_threads=1)
with backend_settings(config):
    model = Model()
    apply_compilation(model, config)
    model(torch.ones(1, 2, 4, 8, requires_grad=True)).sum().backward()
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


@pytest.mark.slow
def test_code_compiled_for_one_attention_kernel_is_not_taken_for_another(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}

    def count_hits(kernel: str) -> int:
        command = [sys.executable, "-W", "ignore", "-c", COMPILED, kernel]
        return int(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout)

    assert [count_hits(kernel) for kernel in ("auto", "auto", "math", "math")] == [0, 1, 0, 1]
