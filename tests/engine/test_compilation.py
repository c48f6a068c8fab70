"""A model is compiled whatever its class, and stays the object it was."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autotune.engine.compilation import apply_compilation, compiled_graph_count
from autotune.records.config import TrainConfig


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x).relu()
        return output


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(Own(), id="own"),
        pytest.param(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), id="torch's", marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
def test_a_model_is_compiled_whatever_its_class(model: nn.Module) -> None:
    x = torch.randn(3, 4)
    eager, names = model(x), list(model.state_dict())
    before = compiled_graph_count()
    apply_compilation(model, TrainConfig(compile_mode="default"))
    output = model(x)
    output.sum().backward()
    assert compiled_graph_count() == before + 1
    torch.testing.assert_close(output, eager)
    assert list(model.state_dict()) == names
