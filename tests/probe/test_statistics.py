"""Whether a layer of a model keeps statistics of what it is trained on."""

from __future__ import annotations

import pytest
from torch import nn

from autotune.probe.model import keeps_statistics


class Frozen(nn.Module):
    """Holds its normalisation in eval mode, as a detector does that was trained before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.layers[1].eval()
        return self


@pytest.mark.parametrize(
    ("layer", "keeps"),
    [
        (nn.BatchNorm1d(2), True),
        (nn.InstanceNorm1d(2), False),
        (nn.InstanceNorm1d(2, track_running_stats=True), True),
        (nn.LayerNorm(2), False),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)), True),
    ],
)
def test_a_layer_keeps_statistics_of_what_it_is_trained_on(layer: nn.Module, keeps: bool) -> None:
    assert keeps_statistics(nn.Sequential(nn.Linear(2, 2), layer)) == keeps


def test_a_layer_that_its_model_holds_in_eval_mode_keeps_none() -> None:
    model = Frozen()
    assert not keeps_statistics(model.train())
    assert keeps_statistics(model.eval())  # nothing is known of how it is trained
