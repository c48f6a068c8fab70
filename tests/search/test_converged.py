"""A real model trained until nothing is learned any more: rounding is not refused there, and a mistake is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autotune.drift.compare.gradient_rows import GradientRows, RowLayout
from autotune.drift.compare.gradients import judge
from autotune.drift.gate.comparisons import accept_lost, are_lost_in_noise, compare_points
from autotune.drift.record.trace_file import GradientTrace, Point
from autotune.records.quality import QualityCheck

WINDOWS, BATCH, SAMPLES = 24, 32, 1024


@pytest.fixture(scope="module")
def trained() -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """Return a classifier at the bottom of its loss, and its data: labels drawn at random from a linear model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    samples = torch.randn(SAMPLES, 16)
    labels = torch.distributions.Categorical(logits=samples @ torch.randn(16, 4)).sample()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=120, history_size=20, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(samples), labels)
        loss = loss + 0.01 * sum((one**2).sum() for one in model.parameters())
        loss.backward()
        return loss

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them wait for each other in layers as small as these
    optimizer.step(closure)
    torch.set_num_threads(threads)
    return model, samples, labels


def capture(
    trained: tuple[torch.nn.Module, torch.Tensor, torch.Tensor], *, casts: bool = False, decay: float = 0.02
) -> GradientTrace:
    """Return the gradients of some batches at the bottom, the decay of the weights among them."""
    model, samples, labels = trained
    order = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(WINDOWS):
        chosen = torch.randperm(SAMPLES, generator=order)[:BATCH]
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss = torch.nn.functional.cross_entropy(model(samples[chosen]), labels[chosen])
        loss.backward()
        grads = [one.grad + decay * one.detach() for one in model.parameters() if one.grad is not None]
        rows.append(torch.cat([one.flatten() for one in grads]).numpy())
    names, sizes = zip(*((name, one.numel()) for name, one in model.named_parameters()), strict=True)
    arm = GradientRows(BATCH * np.arange(1, 1 + WINDOWS), np.stack(rows))
    point = Point(arm, arm, np.full((WINDOWS, 1), 0.1))
    return GradientTrace(RowLayout(tuple(names), np.array(sizes), np.array(sizes)), (point,))


def check_against_itself(
    trained: tuple[torch.nn.Module, torch.Tensor, torch.Tensor], *, casts: bool = False, decay: float = 0.02
) -> QualityCheck:
    ours, theirs = capture(trained, casts=casts, decay=decay), capture(trained)
    return judge(compare_points(ours, theirs, None, steps=0), samples=0)


def test_rounding_at_the_bottom_is_not_refused(trained: tuple[torch.nn.Module, torch.Tensor, torch.Tensor]) -> None:
    check = check_against_itself(trained, casts=True)
    (found,) = check.fidelity
    assert found.bias is not None
    assert found.bias.estimate > 0.02  # of a mean that has vanished it is a lot
    assert check.verdict == "inconclusive", check.reason
    assert are_lost_in_noise([check]), check.reason
    (accepted,) = accept_lost([check])
    assert accepted.verdict == "non-inferior"
    assert accepted.reason.startswith("lost in the noise of a training that learns nothing any more: ")


@pytest.mark.parametrize("decay", [-0.02, 0.06])
def test_a_mistake_at_the_bottom_is_no_pass(
    trained: tuple[torch.nn.Module, torch.Tensor, torch.Tensor], decay: float
) -> None:
    check = check_against_itself(trained, decay=decay)
    assert check.verdict == "inferior", check.reason
    assert not are_lost_in_noise([check])
    assert accept_lost([check]) == (check,)
