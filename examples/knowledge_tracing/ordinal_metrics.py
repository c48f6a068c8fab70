"""How well ordered categories are predicted: from a confusion matrix, whose rows are observed and columns predicted."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from answers import AnswerLog, pad_answers
from memory_network import PADDING


def evaluate_answers(model: nn.Module, log: AnswerLog, *, device: torch.device, batch_size: int) -> dict[str, float]:
    """Return the metrics of `ordinal_metrics` of the most likely categories, over the answers of held-out students.

    Args:
        model: a `MemoryNetwork` in evaluation mode.
        log: whose held-out part is used.
        device: where the model is.
        batch_size: sequences at once.
    """
    observed, predicted = [], []
    for first in range(0, len(log.held_out), batch_size):
        last = min(first + batch_size, len(log.held_out))
        questions, categories = pad_answers([log.held_out[index] for index in range(first, last)])
        chosen = model(questions.to(device), categories.to(device)).argmax(dim=-1).cpu()
        real = categories != PADDING
        observed.append(categories[real])
        predicted.append(chosen[real])
    return ordinal_metrics(torch.cat(observed), torch.cat(predicted), categories=log.categories)


def ordinal_metrics(observed: Tensor, predicted: Tensor, *, categories: int) -> dict[str, float]:
    """Return categorical and ordinal accuracy, quadratic weighted kappa and mean absolute error.

    Args:
        observed: int64 `[answers]` in 0..categories - 1.
        predicted: int64 `[answers]`, likewise.
        categories: how many there are.

    Returns:
        `categorical_accuracy` (share of hits), `ordinal_accuracy` (share at most one category off), `kappa` and
        `mae` (in categories).
    """
    confusion = torch.bincount(observed * categories + predicted, minlength=categories**2).double()
    shares = confusion.view(categories, categories) / confusion.sum()
    levels = torch.arange(categories)
    distances = (levels[:, None] - levels).abs()
    return {
        "categorical_accuracy": float(shares.diagonal().sum()),
        "ordinal_accuracy": float(shares[distances <= 1].sum()),
        "kappa": quadratic_weighted_kappa(shares),
        "mae": float((shares * distances).sum()),
    }


def quadratic_weighted_kappa(shares: Tensor) -> float:
    """Return Cohen's kappa with quadratic weights: 1 is perfect, 0 as good as chance at the same marginals.

    Args:
        shares: float `[categories, categories]`, sums to 1.

    Returns:
        The kappa; 0 where observed and predicted are one and the same category throughout, which shows nothing.
        Source: Cohen 1968, "Weighted kappa".
    """
    levels = torch.arange(len(shares), dtype=shares.dtype)
    weights = (levels[:, None] - levels) ** 2
    chance = float((weights * shares.sum(1)[:, None] * shares.sum(0)).sum())
    return 0.0 if chance == 0 else 1 - float((weights * shares).sum()) / chance
