"""Detections of a trained model, and their mean average precision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from csp_detector import BOX_OUTPUTS
from detection_boxes import decode_boxes, locate_cells, measure_overlaps

LEAST_SCORE = 0.01
MOST_CANDIDATES = 100  # of an image, before suppression; as many as COCO counts
SUPPRESSION_OVERLAP = 0.6


@dataclass(frozen=True)
class Boxes:
    """Boxes of one image: found, or there.

    Attributes:
        corners: left, top, right, bottom in pixels, `[boxes, 4]`.
        labels: classes, `[boxes]`.
        scores: confidence of each, `[boxes]`; None for true ones.
    """

    corners: Tensor
    labels: Tensor
    scores: Tensor | None = None


def select_detections(raw: Tensor, *, size: tuple[int, int]) -> list[Boxes]:
    """Return each image's detections, best first, on the CPU.

    A detection's score is the probability of an object times that of its likeliest class.

    Args:
        raw: the model's output, `[batch, cells, 5 + classes]`.
        size: height and width of the images in pixels.
    """
    raw = raw.detach().float()
    corners = decode_boxes(raw, locate_cells(*size, device=raw.device)).cpu()
    chances, labels = raw[..., BOX_OUTPUTS + 1 :].softmax(dim=-1).cpu().max(dim=-1)
    scores = chances * raw[..., BOX_OUTPUTS].sigmoid().cpu()
    return [suppress_overlaps(Boxes(*image)) for image in zip(corners, labels, scores, strict=True)]


def suppress_overlaps(candidates: Boxes) -> Boxes:
    """Drop faint candidates, and those that overlap a better one of their own class; best first."""
    assert candidates.scores is not None
    scores, order = candidates.scores.sort(descending=True, stable=True)
    order = order[scores >= LEAST_SCORE][:MOST_CANDIDATES]
    corners, labels = candidates.corners[order], candidates.labels[order]
    rivals = measure_overlaps(corners[:, None], corners) > SUPPRESSION_OVERLAP
    rivals &= labels[:, None] == labels
    kept = torch.ones(len(order), dtype=torch.bool)
    for index in range(len(order)):
        if kept[index]:
            kept[index + 1 :] &= ~rivals[index, index + 1 :]
    return Boxes(corners[kept], labels[kept], candidates.scores[order][kept])


def compute_mean_average_precision(
    found: Sequence[Boxes], truth: Sequence[Boxes], *, least_overlap: float = 0.5
) -> float:
    """Return the mean of the classes' average precisions, 0 to 1; NaN if there is no true box at all.

    Classes without a true box are left out, as in COCO and VOC.

    Args:
        found: each image's detections, best first.
        truth: each image's true boxes.
        least_overlap: intersection over union from which a detection is a hit.
    """
    classes = sorted({int(label) for image in truth for label in image.labels})
    if not classes:
        return math.nan
    return sum(_compute_class_precision(found, truth, label, least_overlap) for label in classes) / len(classes)


def compute_average_precision(scores: Tensor, hits: Tensor, *, truths: int) -> float:
    """Return the area under the precision-recall curve, each precision raised to the best one at a higher recall.

    This is the all-point interpolation of VOC since 2010 (Everingham et al. 2012, devkit, section 3.4.1).

    Args:
        scores: of a class's detections over all images, `[detections]`.
        hits: which of them are right, `[detections]`.
        truths: true boxes of the class.
    """
    right = hits[scores.argsort(descending=True, stable=True)].double()
    if not len(right):
        return 0.0
    precision = right.cumsum(0) / torch.arange(1, len(right) + 1)
    envelope = precision.flip(0).cummax(0).values.flip(0)
    # Recall rises by 1 / truths at each hit, and nowhere else.
    return float((envelope * right).sum() / truths)


def match_detections(found: Tensor, truth: Tensor, *, least_overlap: float) -> Tensor:
    """Return which detections of one image and class are hits, `[found]`.

    Each, best first, takes the true box that it overlaps most among those not yet taken, as in COCO.

    Args:
        found: corners, best first, `[found, 4]`.
        truth: corners, `[truth, 4]`.
        least_overlap: intersection over union from which a detection is a hit.
    """
    hits = torch.zeros(len(found), dtype=torch.bool)
    if not len(truth):
        return hits
    overlaps = measure_overlaps(found[:, None], truth)
    for index in range(len(found)):
        best, taken = overlaps[index].max(dim=0)
        if best >= least_overlap:
            hits[index] = True
            overlaps[:, taken] = -1.0
    return hits


def _compute_class_precision(found: Sequence[Boxes], truth: Sequence[Boxes], label: int, least_overlap: float) -> float:
    scores, hits, truths = [torch.empty(0)], [torch.empty(0, dtype=torch.bool)], 0
    for detections, wanted in zip(found, truth, strict=True):
        assert detections.scores is not None
        chosen = detections.labels == label
        corners = wanted.corners[wanted.labels == label]
        scores.append(detections.scores[chosen])
        hits.append(match_detections(detections.corners[chosen], corners, least_overlap=least_overlap))
        truths += len(corners)
    return compute_average_precision(torch.cat(scores), torch.cat(hits), truths=truths)
