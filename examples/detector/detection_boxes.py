"""Boxes as corners (left, top, right, bottom) in pixels: where cells are, what they predict, how boxes overlap."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from csp_detector import BOX_OUTPUTS, STRIDES

LARGEST_LOG_SIZE = 6.0  # e^6 strides: beyond any image; keeps an early, wild prediction finite
_EPSILON = 1e-7


@dataclass(frozen=True)
class Cells:
    """The positions that predict a box each, in the order of `CspDetector`.

    Attributes:
        centres: x and y in pixels, `[cells, 2]`.
        strides: pixels from one cell to the next, `[cells]`.
    """

    centres: Tensor
    strides: Tensor


def locate_cells(image_height: int, image_width: int, *, device: torch.device) -> Cells:
    """Return the cells of an image of that many pixels, multiples of the largest stride."""
    centres, strides = [], []
    for stride in STRIDES:
        rows = torch.arange(image_height // stride, device=device, dtype=torch.float32)
        columns = torch.arange(image_width // stride, device=device, dtype=torch.float32)
        y, x = torch.meshgrid(rows, columns, indexing="ij")
        centres.append((torch.stack([x, y], dim=-1).flatten(0, 1) + 0.5) * stride)
        strides.append(torch.full((len(rows) * len(columns),), float(stride), device=device))
    return Cells(torch.cat(centres), torch.cat(strides))


def decode_boxes(raw: Tensor, cells: Cells) -> Tensor:
    """Return the boxes `[batch, cells, 4]` that raw predictions `[batch, cells, 4 or more]` stand for.

    The centre is an offset from the cell's and the size an exponential, both in strides (Ge et al. 2021, YOLOX,
    arXiv:2107.08430, section 2.1).
    """
    offsets, log_sizes = raw[..., :BOX_OUTPUTS].float().chunk(2, dim=-1)
    strides = cells.strides[:, None]
    middle = cells.centres + offsets * strides
    half = log_sizes.clamp(max=LARGEST_LOG_SIZE).exp() * strides / 2
    return torch.cat([middle - half, middle + half], dim=-1)


def to_corners(boxes: Tensor, *, image_height: int, image_width: int) -> Tensor:
    """Return YOLO boxes (centre x, centre y, width, height as shares of the image) `[..., 4]` as corners in pixels."""
    x, y, width, height = boxes.unbind(dim=-1)
    left, right = (x - width / 2) * image_width, (x + width / 2) * image_width
    top, bottom = (y - height / 2) * image_height, (y + height / 2) * image_height
    return torch.stack([left, top, right, bottom], dim=-1)


def measure_overlaps(first: Tensor, second: Tensor) -> Tensor:
    """Return the intersection over union of boxes `[..., 4]` and `[..., 4]`, broadcast against each other."""
    low = torch.maximum(first[..., :2], second[..., :2])
    high = torch.minimum(first[..., 2:], second[..., 2:])
    intersection = (high - low).clamp(min=0).prod(dim=-1)
    return intersection / (measure_areas(first) + measure_areas(second) - intersection + _EPSILON)


def measure_areas(boxes: Tensor) -> Tensor:
    """Return the areas `[...]` of boxes `[..., 4]` in square pixels."""
    return (boxes[..., 2:] - boxes[..., :2]).clamp(min=0).prod(dim=-1)


def measure_complete_overlaps(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return the complete IoU `[...]` of pairs of boxes `[..., 4]`, from -1.5 or so to 1.

    IoU - d^2 / c^2 - alpha v: d is between the centres, c the diagonal of the box around both, v the difference of the
    aspect ratios (Zheng et al. 2020, Distance-IoU Loss, arXiv:1911.08287, equations 8 to 11).
    """
    overlap = measure_overlaps(predicted, wanted)
    distance = (predicted[..., :2] + predicted[..., 2:] - wanted[..., :2] - wanted[..., 2:]).square().sum(dim=-1) / 4
    around = torch.maximum(predicted[..., 2:], wanted[..., 2:]) - torch.minimum(predicted[..., :2], wanted[..., :2])
    slant = 4 / math.pi**2 * (_measure_angle(wanted) - _measure_angle(predicted)).square()
    with torch.no_grad():
        weight = slant / (1 - overlap + slant + _EPSILON)
    return overlap - distance / (around.square().sum(dim=-1) + _EPSILON) - weight * slant


def _measure_angle(boxes: Tensor) -> Tensor:
    width, height = (boxes[..., 2:] - boxes[..., :2]).unbind(dim=-1)
    return torch.atan(width / (height + _EPSILON))
