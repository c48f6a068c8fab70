"""The pictures that the built-in demo learns from, drawn with numpy: a dark figure on a lighter ground.

    figure and ground, shaded -> warped -> blurred -> halved -> sensor noise -> normalised

It is what an image pipeline does to a photograph: passes over arrays of some hundred kB that come and go. Everything is
float32 and nothing calls BLAS, so that a picture is the same to the bit whatever the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Floats = NDArray[np.float32]

FIGURES = ("disc", "ring", "half disc", "crescent", "triangle", "square", "cross", "flower")
PICTURE_SIZE = 48
"""Pixels along a side."""

# Drawn twice as large and halved: edges come out smooth.
_CANVAS = 2 * PICTURE_SIZE
_LARGEST_TURN = 0.5
_TEXTURE_CELLS, _TEXTURE_CONTRAST = 10, np.float32(0.05)
_SHADE_CONTRAST = np.float32(0.3)
_WARP_CELLS, _WARP_PIXELS = 5, np.float32(4)
_BLUR_RADIUS = 3

_AXIS = np.linspace(-1, 1, _CANVAS, dtype=np.float32)
_PIXELS = np.arange(_CANVAS, dtype=np.float32)


def draw_picture(figure: str, random: Generator) -> Floats:
    """Return a picture, `[3, PICTURE_SIZE, PICTURE_SIZE]`, of mean 0 and standard deviation 1.

    Args:
        figure: one of `FIGURES`.
        random: everything else about it is drawn from here.
    """
    canvas = _blur(_warp(_paint(figure, random), random), random)
    picture = (canvas[:, ::2, ::2] + canvas[:, 1::2, ::2] + canvas[:, ::2, 1::2] + canvas[:, 1::2, 1::2]) / np.float32(
        4
    )
    picture += np.float32(random.uniform(0.01, 0.06)) * random.standard_normal(picture.shape, dtype=np.float32)
    np.clip(picture, 0, 1, out=picture)
    picture -= picture.mean()
    picture /= picture.std() + np.float32(1e-3)
    return picture


def _paint(figure: str, random: Generator) -> Floats:
    """Return the canvas, `[3, _CANVAS, _CANVAS]`: place, size, turn, colours and light are drawn."""
    radius = np.float32(random.uniform(0.45, 0.7))
    right, down = random.uniform(-0.25, 0.25, 2).astype(np.float32)
    x, y = (_AXIS[None, :] - right) / radius, (_AXIS[:, None] - down) / radius
    cosine, sine = _direction(random.uniform(-_LARGEST_TURN, _LARGEST_TURN))
    outside = measure_distance(figure, cosine * x - sine * y, sine * x + cosine * y)
    cover = np.clip(np.float32(0.5) - outside * radius * np.float32(_CANVAS / 2), 0, 1)
    ground = random.uniform(0.5, 0.9, 3).astype(np.float32)
    ink = np.clip(ground - random.uniform(0.3, 0.6, 3).astype(np.float32), 0, 1)
    back = ground[:, None, None] + _TEXTURE_CONTRAST * _draw_texture(_TEXTURE_CELLS, random)
    front = ink[:, None, None] + _TEXTURE_CONTRAST * _draw_texture(_TEXTURE_CELLS, random)
    along, across = _direction(random.uniform(-math.pi, math.pi))
    shade = np.float32(1) + _SHADE_CONTRAST * (along * _AXIS[None, :] + across * _AXIS[:, None])
    painted: Floats = (back + (front - back) * cover) * shade
    return painted


def measure_distance(figure: str, x: Floats, y: Floats) -> Floats:
    """Return about how far points lie outside a figure of radius 1 around the origin; negative inside.

    Args:
        figure: one of `FIGURES`.
        x: of the points, to the right.
        y: of the points, downwards.
    """
    if figure in ("triangle", "square", "cross"):
        return _measure_angular(figure, x, y)
    return _measure_round(figure, x, y)


def _measure_round(figure: str, x: Floats, y: Floats) -> Floats:
    radius: Floats = np.hypot(x, y)
    if figure == "disc":
        distance: Floats = radius - np.float32(0.9)
    elif figure == "ring":
        distance = abs(radius - np.float32(0.75)) - np.float32(0.22)
    elif figure == "half disc":
        distance = np.maximum(radius - np.float32(1), y)
    elif figure == "crescent":
        distance = np.maximum(radius - np.float32(1), np.float32(0.8) - np.hypot(x - np.float32(0.5), y))
    else:
        petals = np.float32(0.7) + np.float32(0.3) * np.cos(np.float32(5) * np.arctan2(y, x))
        distance = radius - petals
    return distance


def _measure_angular(figure: str, x: Floats, y: Floats) -> Floats:
    if figure == "triangle":
        half, slope = np.float32(0.5), np.float32(math.sqrt(0.75))
        distance: Floats = np.maximum(np.maximum(y, slope * x - half * y), -slope * x - half * y) - np.float32(0.55)
        return distance
    x, y = abs(x), abs(y)
    if figure == "square":
        distance = np.maximum(x, y) - np.float32(0.8)
    else:
        arm, width = np.float32(1), np.float32(0.3)
        distance = np.minimum(np.maximum(x - width, y - arm), np.maximum(x - arm, y - width))
    return distance


def _draw_texture(cells: int, random: Generator) -> Floats:
    """Return smooth noise of standard deviation 1 or less, `[_CANVAS, _CANVAS]`: a coarse grid enlarged linearly."""
    coarse = random.standard_normal((cells, cells), dtype=np.float32)
    place = np.linspace(0, cells - 1.001, _CANVAS, dtype=np.float32)
    cell = place.astype(np.intp)
    weight = place - cell.astype(np.float32)
    rows = coarse[cell] + (coarse[cell + 1] - coarse[cell]) * weight[:, None]
    texture: Floats = rows[:, cell] + (rows[:, cell + 1] - rows[:, cell]) * weight
    return texture


def _warp(canvas: Floats, random: Generator) -> Floats:
    """Return the canvas with every pixel fetched from a place a few pixels away, neighbours from alike places."""
    last = np.float32(_CANVAS - 1.01)
    x = np.clip(_PIXELS[None, :] + _WARP_PIXELS * _draw_texture(_WARP_CELLS, random), 0, last)
    y = np.clip(_PIXELS[:, None] + _WARP_PIXELS * _draw_texture(_WARP_CELLS, random), 0, last)
    left, top = x.astype(np.intp), y.astype(np.intp)
    to_right, to_bottom = x - left.astype(np.float32), y - top.astype(np.float32)
    corner = top * _CANVAS + left
    pixels = canvas.reshape(3, -1)
    upper = pixels[:, corner] * (1 - to_right) + pixels[:, corner + 1] * to_right
    lower = pixels[:, corner + _CANVAS] * (1 - to_right) + pixels[:, corner + _CANVAS + 1] * to_right
    warped: Floats = upper + (lower - upper) * to_bottom
    return warped


def _blur(canvas: Floats, random: Generator) -> Floats:
    """Return the canvas blurred by a Gaussian of a drawn width, rows first, then columns."""
    offsets = np.arange(-_BLUR_RADIUS, _BLUR_RADIUS + 1)
    weights = np.exp(-(offsets**2) / (2 * random.uniform(0.6, 1.8) ** 2))
    kernel = (weights / weights.sum()).astype(np.float32)
    border = (_BLUR_RADIUS, _BLUR_RADIUS)
    padded = np.pad(canvas, ((0, 0), border, border), mode="edge")
    rows = sum(weight * padded[:, first : first + _CANVAS] for first, weight in enumerate(kernel))
    blurred: Floats = sum(weight * rows[:, :, first : first + _CANVAS] for first, weight in enumerate(kernel))
    return blurred


def _direction(angle: float) -> tuple[np.float32, np.float32]:
    return np.float32(math.cos(angle)), np.float32(math.sin(angle))
