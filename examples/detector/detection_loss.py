"""Which cells are to find which box, and the loss: complete IoU, objectness and class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from csp_detector import BOX_OUTPUTS, STRIDES
from detection_boxes import Cells, decode_boxes, locate_cells, measure_areas, measure_complete_overlaps, to_corners

NO_LABEL = -1
"""Label of the rows that fill a batch's boxes up to the image with the most of them."""

# In strides: 1.5 makes the 3 x 3 cells around a box's centre responsible for it (YOLOX, "multi positives").
CENTRE_RADIUS = 1.5
# A box whose longer side is below this many strides belongs to that stride, if the finer one cannot have it.
LARGEST_SPAN = 6.0
BOX_WEIGHT, CLASS_WEIGHT = 2.0, 3.0


@dataclass(frozen=True)
class Assignment:
    """What each cell is to predict.

    Attributes:
        positive: the cell is to find a box, `[batch, cells]`.
        matched: index of that box among the image's; 0 where the cell is not positive, `[batch, cells]`.
    """

    positive: Tensor
    matched: Tensor


def compute_detection_loss(
    raw: Tensor, boxes: Tensor, labels: Tensor, *, size: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch divided by its positive cells, and how many these are (1 if there are none).

    Box and class are learned in positive cells only, objectness in all. Micro batches weighed by the count add up to
    the whole batch, but for one that has no box at all, which counts as one cell. Nothing here waits for the device.

    Args:
        raw: the model's output, `[batch, cells, 5 + classes]`.
        boxes: centre x, centre y, width and height as shares of the image, `[batch, most boxes, 4]`.
        labels: their classes, `NO_LABEL` in rows without a box, `[batch, most boxes]`.
        size: height and width of the images in pixels.
    """
    height, width = size
    # Exponentials and areas in pixels leave the range of float16, which autocast may have chosen.
    raw = raw.float()
    cells = locate_cells(height, width, device=raw.device)
    corners = to_corners(boxes, image_height=height, image_width=width)
    assigned = assign_cells(corners, labels != NO_LABEL, cells)
    positive = assigned.positive.float()
    wanted = corners.gather(1, assigned.matched[..., None].expand(-1, -1, 4))
    classes = labels.gather(1, assigned.matched).clamp(min=0)
    box_loss = (1 - measure_complete_overlaps(decode_boxes(raw, cells), wanted)) * positive
    object_loss = F.binary_cross_entropy_with_logits(raw[..., BOX_OUTPUTS], positive, reduction="none")
    logits = raw[..., BOX_OUTPUTS + 1 :].transpose(1, 2)
    class_loss = F.cross_entropy(logits, classes, reduction="none") * positive
    count = positive.sum().clamp(min=1)
    return (BOX_WEIGHT * box_loss + object_loss + CLASS_WEIGHT * class_loss).sum() / count, count


@torch.no_grad()
def assign_cells(corners: Tensor, present: Tensor, cells: Cells) -> Assignment:
    """Decide which cells are to find which box: those around its centre, on the stride that suits its size.

    Where several boxes claim a cell, the smallest one gets it (Tian et al. 2019, FCOS, arXiv:1904.01355, section 3.1).

    Args:
        corners: boxes in pixels, `[batch, most boxes, 4]`.
        present: which rows hold a box, `[batch, most boxes]`.
        cells: of the images.
    """
    middle = (corners[..., :2] + corners[..., 2:]) / 2
    longer_side = (corners[..., 2:] - corners[..., :2]).amax(dim=-1)
    strides = cells.strides[:, None]
    distance = (cells.centres[:, None] - middle[:, None]).abs().amax(dim=-1) / strides
    span = longer_side[:, None] / strides
    # The next finer stride ends where this one begins; the finest and the coarsest take what is beyond.
    long_enough = (span >= LARGEST_SPAN / 2) | (strides == STRIDES[0])
    short_enough = (span < LARGEST_SPAN) | (strides == STRIDES[-1])
    claimed = (distance < CENTRE_RADIUS) & long_enough & short_enough & present[:, None]
    areas = measure_areas(corners)[:, None].masked_fill(~claimed, float("inf"))
    return Assignment(positive=claimed.any(dim=-1), matched=areas.argmin(dim=-1))
