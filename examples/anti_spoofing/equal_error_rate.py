"""How well a countermeasure tells spoofed from bona fide speech: the equal error rate.

It is where the misses of bona fide speech and the false acceptances of spoofed speech are equally many. On a finite set
no threshold need give that; it is taken on the convex hull of the ROC, the best that mixing two thresholds can do
(Brümmer and de Villiers, "The BOSARIS Toolkit", 2013). A score that changes moves it by about 1/trials.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

Point = tuple[float, float]
"""False acceptance rate and miss rate at one threshold."""


def equal_error_rate(scores: Tensor, labels: Tensor) -> float:
    """Return the equal error rate, a fraction: 0.05 is 5 %; NaN if a score is not finite.

    Args:
        scores: larger for what looks bona fide, `[trials]`; equal ones are on one side of every threshold.
        labels: 1 for bona fide, 0 for spoofed, `[trials]`.

    Raises:
        ValueError: there is no bona fide or no spoofed trial.
    """
    score, truth = scores.double().numpy(), labels.bool().numpy()
    if truth.all() or not truth.any():
        raise ValueError("an equal error rate needs both bona fide and spoofed trials")
    if not np.isfinite(score).all():
        return float("nan")
    hull = _find_hull(_trace_errors(score, truth))
    for (accepted, missed), (accepted_next, missed_next) in itertools.pairwise(hull):
        if missed_next >= accepted_next:  # the first corner beyond the diagonal, on which both rates are equal
            before, after = accepted - missed, missed_next - accepted_next
            share = before / (before + after)
            return float(accepted + share * (accepted_next - accepted))
    raise AssertionError("a hull from (1, 0) to (0, 1) crosses the diagonal")


def _trace_errors(score: NDArray[np.float64], truth: NDArray[np.bool_]) -> list[Point]:
    """Return both rates at every threshold, from accepting everything, (1, 0), to nothing, (0, 1)."""
    order = np.argsort(score, kind="stable")
    last_of_equals = np.append(np.diff(score[order]) > 0, True)
    bona_fide = truth[order]
    missed = np.cumsum(bona_fide)[last_of_equals] / bona_fide.sum()
    accepted = 1 - np.cumsum(~bona_fide)[last_of_equals] / (~bona_fide).sum()
    return [(1.0, 0.0), *zip(accepted.tolist(), missed.tolist(), strict=True)]


def _find_hull(points: list[Point]) -> list[Point]:
    """Return the corners of the lower convex hull of points that go left and up."""
    hull: list[Point] = []
    for point in points:
        while len(hull) >= 2 and _turns_outward(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return hull


def _turns_outward(first: Point, middle: Point, last: Point) -> bool:
    """Return whether the middle one is not below the line from the first to the last."""
    cross = (middle[0] - first[0]) * (last[1] - first[1]) - (middle[1] - first[1]) * (last[0] - first[0])
    return cross >= 0


def score_clips(
    model: nn.Module, clips: Dataset[tuple[Tensor, int]], *, device: torch.device, batch_size: int
) -> tuple[Tensor, Tensor]:
    """Return the log odds of bona fide and the label of each clip, `[clips]` each; no random number is drawn."""
    count = len(clips)  # type: ignore[arg-type]  # map-style
    scores: list[Tensor] = []
    labels: list[int] = []
    for start in range(0, count, batch_size):
        batch = [clips[index] for index in range(start, min(count, start + batch_size))]
        logits = model(torch.stack([spectrogram for spectrogram, _ in batch]).to(device)).float().cpu()
        scores.append(logits[:, 1] - logits[:, 0])
        labels.extend(label for _, label in batch)
    return torch.cat(scores), torch.tensor(labels)
