"""Pictures of banknotes with their boxes: drawn ones, or a folder of photographs in YOLO's format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from autotune.errors import TargetError
from banknote_scenes import DENOMINATIONS, BanknoteScenes, Sample
from detection_loss import NO_LABEL

IMAGE_SUFFIXES = (".jpeg", ".jpg", ".png")
GREY = 114 / 255  # what YOLO trainings fill a letterbox's borders with
LARGEST_BRIGHTENING = 0.2
MOST_CLASSES = 1_000
"""A slip of the keyboard in a label is not to become a model of that many classes."""

Batch = tuple[Tensor, Tensor, Tensor]
"""Images `[batch, 3, height, width]`, boxes `[batch, most boxes, 4]`, labels `[batch, most boxes]`."""


@dataclass(frozen=True)
class Banknotes:
    """A detector's data.

    Attributes:
        train: samples to train on, new ones or differently lit ones in each epoch.
        held_out: samples to evaluate on, the same each time.
        class_names: by label.
    """

    train: Dataset[Sample]
    held_out: Dataset[Sample]
    class_names: tuple[str, ...]


def draw_banknotes(*, image_size: int, train_images: int, held_out_images: int) -> Banknotes:
    """Return drawn pictures of that many pixels a side."""
    return Banknotes(
        train=BanknoteScenes(train_images, image_size=image_size, fixed=False),
        held_out=BanknoteScenes(held_out_images, image_size=image_size, fixed=True),
        class_names=tuple(str(value) for value in DENOMINATIONS),
    )


def open_banknotes(folder: Path, *, image_size: int) -> Banknotes:
    """Return the photographs below `images/train` and `images/val`, with the boxes below `labels/`.

    Raises:
        TargetError: Pillow, a folder or a file is missing or cannot be read, or a line is not
            `class cx cy width height`.
    """
    _require_pillow()
    try:
        splits = [_find_images(folder, split) for split in ("train", "val")]
        names = _read_class_names(folder / "classes.txt")
        labels = [
            [read_labels(_label_path(folder, path), num_classes=len(names) or None) for path in paths]
            for paths in splits
        ]
    except OSError as reason:
        raise TargetError(
            f"{reason.filename or folder} cannot be read: {reason.strerror}", hint="see the README for what lies where"
        ) from None
    train = LabelledImages(splits[0], labels[0], image_size=image_size, vary=True)
    held_out = LabelledImages(splits[1], labels[1], image_size=image_size, vary=False)
    for split, data in (("train", train), ("val", held_out)):
        if data.largest_label < 0:
            raise TargetError(f"{folder / 'labels' / split}: no file has a box", hint="label at least one image of it")
    largest = max(train.largest_label, held_out.largest_label)
    return Banknotes(train, held_out, names or tuple(str(label) for label in range(largest + 1)))


class LabelledImages(Dataset[Sample]):
    """Image files and their boxes, fitted into squares of one size."""

    def __init__(
        self, paths: Sequence[Path], labels: Sequence[tuple[Tensor, Tensor]], *, image_size: int, vary: bool
    ) -> None:
        """Read no image yet.

        Args:
            paths: of the images.
            labels: boxes `[boxes, 4]` and classes `[boxes]` of each.
            image_size: height and width of a sample in pixels.
            vary: mirror and brighten at random; all randomness comes from torch's global generator.
        """
        self._paths, self._labels = list(paths), list(labels)
        self._image_size, self._vary = image_size, vary

    @property
    def largest_label(self) -> int:
        """The largest class there is; -1 if there is no box."""
        return max((int(labels.max()) for _, labels in self._labels if len(labels)), default=-1)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Sample:
        boxes, labels = self._labels[index]
        image, boxes = fit_into_square(read_image(self._paths[index]), boxes, image_size=self._image_size)
        if not self._vary:
            return image, boxes, labels
        mirrored, brightening = torch.rand(2).tolist()
        if mirrored < 0.5:
            image, boxes = image.flip(-1), torch.cat([1 - boxes[:, :1], boxes[:, 1:]], dim=1)
        return (image * (1 + LARGEST_BRIGHTENING * (2 * brightening - 1))).clamp(0, 1), boxes, labels


def collate_banknotes(samples: Sequence[Sample]) -> Batch:
    """Stack samples; boxes are filled up to the sample with the most (at least one row), labels with `NO_LABEL`."""
    images, boxes, labels = zip(*samples, strict=True)
    most = max(1, *(len(some) for some in labels))
    return (
        torch.stack(images),
        torch.stack([F.pad(some, (0, 0, 0, most - len(some))) for some in boxes]),
        torch.stack([F.pad(some, (0, most - len(some)), value=NO_LABEL) for some in labels]),
    )


def fit_into_square(image: Tensor, boxes: Tensor, *, image_size: int) -> tuple[Tensor, Tensor]:
    """Return an image `[3, height, width]` enlarged or shrunk into the middle of a grey square, and its boxes there."""
    height, width = image.shape[1:]
    scale = image_size / max(height, width)
    high, wide = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (image_size - high) // 2, (image_size - wide) // 2
    fitted = F.interpolate(image[None], size=(high, wide), mode="bilinear", antialias=True, align_corners=False)[0]
    square = image.new_full((3, image_size, image_size), GREY)
    square[:, top : top + high, left : left + wide] = fitted
    stretch = boxes.new_tensor([wide, high, wide, high])
    return square, (boxes * stretch + boxes.new_tensor([left, top, 0, 0])) / image_size


def read_image(path: Path) -> Tensor:
    """Return an image file as float32 `[3, height, width]` in 0..1, upright as every viewer shows it.

    Raises:
        TargetError: it is no image that Pillow can read, or a huge one.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as file:
            # Phones store what the sensor saw and how to turn it; labels are drawn on the turned image.
            rgb = ImageOps.exif_transpose(file).convert("RGB")
    except Exception as reason:  # a decoder fails in many ways
        raise TargetError(f"{path} cannot be read as an image: {reason}", hint="replace it by a JPEG or PNG") from None
    pixels = torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8)
    return pixels.view(rgb.height, rgb.width, 3).permute(2, 0, 1).float() / 255


def read_labels(path: Path, *, num_classes: int | None) -> tuple[Tensor, Tensor]:
    """Return the boxes `[boxes, 4]` and classes `[boxes]` of a YOLO label file; an image without one is background.

    Raises:
        OSError: the file cannot be read.
        TargetError: there is no such folder, or a line is not `class cx cy width height`.
    """
    if not path.parent.is_dir():
        raise TargetError(
            f"{path.parent} is not a folder", hint="labels lie in labels/train and labels/val, as for YOLO"
        )
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    rows = [
        _parse_line(line, place=f"{path}, line {number}", num_classes=num_classes)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    table = torch.tensor(rows, dtype=torch.float64).view(-1, 5)
    return table[:, 1:].float(), table[:, 0].long()


def _parse_line(line: str, *, place: str, num_classes: int | None) -> list[float]:
    hint = "a line is: class cx cy width height, the last four as shares of the image, 0 to 1"
    words = line.split()
    if len(words) != 5:
        raise TargetError(f"{place}: {line.strip()[:60]!r} has {len(words)} columns, not 5", hint=hint)
    try:
        label, *box = int(words[0]), *(float(word) for word in words[1:])
    except ValueError:
        raise TargetError(f"{place}: {line.strip()[:60]!r} is not a class and four numbers", hint=hint) from None
    if not 0 <= label < (num_classes or MOST_CLASSES):
        allowed = str(MOST_CLASSES - 1) if num_classes is None else f"{num_classes - 1}, as in classes.txt"
        raise TargetError(f"{place}: class {words[0][:20]}", hint=f"it must be 0 to {allowed}")
    for name, value in zip(("cx", "cy", "width", "height"), box, strict=True):
        least_is_allowed = name in ("cx", "cy")
        if not (math.isfinite(value) and 0 <= value <= 1 and (value > 0 or least_is_allowed)):
            allowed = "0 to 1" if least_is_allowed else "more than 0 and at most 1"
            raise TargetError(f"{place}: {name} is {value:g}", hint=f"it must be {allowed}, a share of the image")
    return [label, *box]


def _find_images(folder: Path, split: str) -> list[Path]:
    images = folder / "images" / split
    if not images.is_dir():
        raise TargetError(f"{images} is not a folder", hint="images lie in images/train and images/val, as for YOLO")
    found = sorted(path for path in images.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
    if not found:
        raise TargetError(f"{images} has no image", hint=f"images end in {', '.join(IMAGE_SUFFIXES)}")
    return found


def _label_path(folder: Path, image: Path) -> Path:
    return folder / "labels" / image.parent.name / f"{image.stem}.txt"


def _read_class_names(path: Path) -> tuple[str, ...]:
    """Return the names in a file, one a line; none if there is no file.

    Raises:
        OSError: the file cannot be read.
        TargetError: the file holds no name, or too many.
    """
    if not path.is_file():
        return ()
    names = tuple(line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip())
    if not names:
        raise TargetError(f"{path} is empty", hint="write one class name a line, or remove it")
    if len(names) > MOST_CLASSES:
        raise TargetError(f"{path} has {len(names):,} names", hint=f"at most {MOST_CLASSES:,} classes are allowed")
    return names


def _require_pillow() -> Any:
    try:
        import PIL.Image
    except ImportError:
        raise TargetError(
            "photographs are read with Pillow, which is not installed", hint="pip install pillow"
        ) from None
    return PIL.Image
