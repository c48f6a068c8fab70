"""Pictures of imagined banknotes lying about, drawn with torch: guilloche, portrait and number in perspective."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from torch.utils.data import Dataset

DENOMINATIONS = (5, 10, 20, 50, 100)
INKS = ((0.35, 0.38, 0.42), (0.75, 0.2, 0.15), (0.1, 0.35, 0.75), (0.85, 0.55, 0.05), (0.05, 0.55, 0.25))
FACE_HEIGHT, FACE_WIDTH = 64, 128
# Half of a note's width, as a share of half the picture's.
LEAST_REACH, LARGEST_REACH = 0.28, 0.5
MOST_NOTES, MOST_DISTRACTORS = 3, 2
LEAST_VISIBLE_SHARE = 0.3
NOISE_STD = 0.02
# Three by five dots, row by row.
DIGITS = {"0": "111101101101111", "1": "010110010010111", "2": "111001111100111", "5": "111100111001111"}

Sample = tuple[Tensor, Tensor, Tensor]
"""An image `[3, height, width]` in 0..1, boxes `[boxes, 4]` as in YOLO's files, and labels `[boxes]`."""


class BanknoteScenes(Dataset[Sample]):
    """Pictures drawn on the fly: anew from torch's global generator each time, or fixed by the index and kept."""

    def __init__(self, length: int, *, image_size: int, fixed: bool) -> None:
        """Draw nothing yet.

        Args:
            length: number of pictures.
            image_size: height and width in pixels.
            fixed: the index seeds the picture; else the global generator decides.
        """
        self._length, self._image_size, self._fixed = length, image_size, fixed
        self._drawn: dict[int, Sample] = {}

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < self._length:
            raise IndexError(f"there is no picture {index} of {self._length}")
        if not self._fixed:
            return draw_scene(self._image_size, None)
        if index not in self._drawn:
            self._drawn[index] = draw_scene(self._image_size, torch.Generator().manual_seed(index))
        return self._drawn[index]


@dataclass
class Picture:
    """A picture in the making.

    Attributes:
        pixels: `[3, size, size]`.
        owner: what is seen in a pixel: 0 the ground or a distractor, else the number of a note, `[size, size]`.
    """

    pixels: Tensor
    owner: Tensor

    def paint(self, texture: Tensor, placement: Tensor, *, number: int) -> int:
        """Lay a texture `[3, height, width]` over what is there; return the pixels that it covers.

        Args:
            texture: the thing's surface.
            placement: homography from the picture's coordinates (-1 to 1) to the texture's, `[3, 3]`.
            number: the note's, or 0.
        """
        projected = locate_pixels(self.pixels.shape[-1]) @ placement.T
        depth = projected[..., 2:].clamp(min=0.1)
        position = projected[..., :2] / depth
        inside = (position.abs() <= 1).all(dim=-1)
        colours = F.grid_sample(texture[None], position[None], padding_mode="border", align_corners=False)[0]
        self.pixels = torch.where(inside, colours, self.pixels)
        self.owner = torch.where(inside, number, self.owner)
        return int(inside.sum())


def draw_scene(image_size: int, generator: Generator | None) -> Sample:
    """Draw one to three notes over a textured ground, with things that hide a part of them.

    Args:
        image_size: height and width in pixels.
        generator: decides everything; None for torch's global one.
    """
    picture = Picture(_draw_ground(image_size, generator), torch.zeros(image_size, image_size, dtype=torch.long))
    labels = torch.randint(len(DENOMINATIONS), (_draw_count(1, MOST_NOTES, generator),), generator=generator)
    covered = []
    for number, label in enumerate(labels.tolist(), start=1):
        reach, brightness, stain = torch.rand(3, generator=generator).tolist()
        wide = LEAST_REACH + (LARGEST_REACH - LEAST_REACH) * reach
        placement = _place(wide, wide * FACE_HEIGHT / FACE_WIDTH, generator)
        face = draw_faces()[label] * (0.75 + 0.45 * brightness) - 0.1 * stain
        covered.append(picture.paint(face, placement, number=number))
    for _ in range(_draw_count(0, MOST_DISTRACTORS, generator)):
        wide, high = (0.05 + 0.12 * torch.rand(2, generator=generator)).tolist()
        picture.paint(torch.rand(3, 3, 5, generator=generator), _place(wide, high, generator), number=0)
    light = 0.75 + 0.4 * torch.rand(1, 2, 2, generator=generator)
    light = F.interpolate(light[None], size=image_size, mode="bilinear", align_corners=True)[0]
    noise = NOISE_STD * torch.randn(3, image_size, image_size, generator=generator)
    boxes, kept = _find_boxes(picture.owner, covered)
    return (picture.pixels * light + noise).clamp(0, 1), boxes, labels[kept]


@functools.cache
def draw_faces() -> Tensor:
    """Return the surface of each denomination, `[denominations, 3, 64, 128]`; nothing random is in it."""
    return torch.stack([_draw_face(kind) for kind in range(len(DENOMINATIONS))])


@functools.cache
def locate_pixels(size: int) -> Tensor:
    """Return the homogeneous coordinates (x, y, 1) of a picture's pixels, -1 to 1, `[size, size, 3]`."""
    steps = (torch.arange(size) + 0.5) * 2 / size - 1
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    return torch.stack([x, y, torch.ones_like(x)], dim=-1)


def _draw_face(kind: int) -> Tensor:
    rows, columns = (torch.arange(FACE_HEIGHT) + 0.5) / FACE_HEIGHT, (torch.arange(FACE_WIDTH) + 0.5) / FACE_WIDTH
    y, x = torch.meshgrid(rows * 2 - 1, columns * 4 - 2, indexing="ij")
    swing = torch.sin((2 + kind) * x) * 0.6
    guilloche = torch.sin(14 * (y + swing)) * torch.sin(14 * (y - swing) + kind)
    ink = 0.55 + 0.25 * guilloche
    portrait = ((x - 1.0) / 0.45).square() + (y / 0.7).square()
    ink = torch.where(portrait < 1, 0.55 + 0.35 * torch.cos(5 * portrait + kind), ink)
    ink = torch.where((y.abs() > 0.92) | (x.abs() > 1.94), 0.9, ink)
    number = _draw_number(DENOMINATIONS[kind])
    height, width = number.shape
    for top, left in ((8, 8), (FACE_HEIGHT - height - 8, 28)):
        ink[top : top + height, left : left + width] = number
    paper, colour = torch.tensor([0.95, 0.93, 0.85])[:, None, None], torch.tensor(INKS[kind])[:, None, None]
    return paper * (1 - ink) + colour * ink


def _draw_number(value: int) -> Tensor:
    digits = [torch.tensor([float(dot) for dot in DIGITS[digit]]).view(5, 3) for digit in str(value)]
    dots = torch.cat([F.pad(digit, (1, 1, 1, 1)) for digit in digits], dim=1)
    return dots.repeat_interleave(3, dim=0).repeat_interleave(3, dim=1)


def _draw_ground(size: int, generator: Generator | None) -> Tensor:
    grey = 0.2 + 0.5 * torch.rand(1, 1, 5, 5, generator=generator)
    coarse = grey + 0.3 * torch.rand(1, 3, 5, 5, generator=generator) - 0.15
    smooth = F.interpolate(coarse, size=size, mode="bicubic", align_corners=False)[0]
    frequency = 25 * torch.rand(3, generator=generator) - 12.5
    grain = torch.sin(locate_pixels(size) @ frequency)
    return smooth + 0.08 * grain


def _place(wide: float, high: float, generator: Generator | None) -> Tensor:
    """Return a random homography for a thing of that half width and half height, `[3, 3]`."""
    x, y, angle, shear, tilt_x, tilt_y = (2 * torch.rand(6, generator=generator) - 1).tolist()
    cosine, sine = math.cos(angle * math.pi), math.sin(angle * math.pi)
    move = torch.tensor([[1, 0, -0.65 * x], [0, 1, -0.65 * y], [0, 0, 1]])
    turn = torch.tensor([[cosine, sine, 0], [-sine, cosine, 0], [0, 0, 1]])
    scale = torch.tensor([[1 / wide, 0.1 * shear / wide, 0], [0, 1 / high, 0], [0, 0, 1]])
    tilt = torch.tensor([[1, 0, 0], [0, 1, 0], [0.12 * tilt_x, 0.12 * tilt_y, 1]])
    return tilt @ scale @ turn @ move


def _find_boxes(owner: Tensor, covered: list[int]) -> tuple[Tensor, list[int]]:
    """Return the boxes around what is seen of each note, and which notes are seen well enough to have one."""
    size, boxes, kept = owner.shape[0], [], []
    for index, pixels in enumerate(covered):
        visible = owner == index + 1
        if int(visible.sum()) <= LEAST_VISIBLE_SHARE * pixels:
            continue
        rows, columns = visible.any(dim=1).nonzero().flatten(), visible.any(dim=0).nonzero().flatten()
        top, bottom, left, right = int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1
        boxes.append([(left + right) / 2, (top + bottom) / 2, right - left, bottom - top])
        kept.append(index)
    return torch.tensor(boxes, dtype=torch.float32).view(-1, 4) / size, kept


def _draw_count(least: int, most: int, generator: Generator | None) -> int:
    return int(torch.randint(least, most + 1, (1,), generator=generator))
