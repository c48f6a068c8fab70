"""The lines of the block that shows a running training. Pure: figures and a width in, styled lines out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from rich.text import Text

from autotune.cli.view.terminal import one_line
from autotune.cli.view.training_words import (
    describe_epoch,
    describe_position,
    list_issues,
    list_machine,
    list_metrics,
    list_time,
)
from autotune.format import format_figure, format_progress
from autotune.sentences.training import list_speed
from autotune.train.report import Report

_LABEL_WIDTH = 12
_NARROWEST_BAR, _WIDEST_BAR = 8, 60
_WIDEST_TREND = 24
_GAP = "   "
_LEVELS = (
    "\N{LOWER ONE EIGHTH BLOCK}\N{LOWER ONE QUARTER BLOCK}\N{LOWER THREE EIGHTHS BLOCK}\N{LOWER HALF BLOCK}"
    "\N{LOWER FIVE EIGHTHS BLOCK}\N{LOWER THREE QUARTERS BLOCK}\N{LOWER SEVEN EIGHTHS BLOCK}\N{FULL BLOCK}"
)
_BAR = ("\N{BOX DRAWINGS HEAVY HORIZONTAL}", "\N{BOX DRAWINGS LIGHT HORIZONTAL}")
_PLAIN_BAR = ("#", "-")
_HEADS = ("epoch", "speed", "loss", "metrics", "time")
"""Lines whose first fact is what people look for."""


class Trend:
    """Losses of a whole session in a few figures: when they are too many, neighbours become their mean."""

    def __init__(self, points: int = 64) -> None:
        self._points = points
        self._means: list[float] = []
        self._pending: list[float] = []
        self._stride = 1

    def add(self, loss: float) -> None:
        """Take in a loss; one that is not finite is left out."""
        if not math.isfinite(loss):
            return
        self._pending.append(loss)
        if len(self._pending) < self._stride:
            return
        self._means.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self._means) >= self._points:
            pairs = zip(self._means[::2], self._means[1::2], strict=False)
            self._means = [(first + second) / 2 for first, second in pairs]
            self._stride *= 2

    def draw(self, width: int, levels: Sequence[str]) -> str:
        """Return the curve as signs of different height, the newest to the right; empty before there are two."""
        points = self._means
        if width < 2 or len(points) < 2:
            return ""
        columns = min(width, len(points))
        ends = [round(i * len(points) / columns) for i in range(columns + 1)]
        means = [sum(points[a:b]) / (b - a) for a, b in pairwise(ends)]
        low, high = min(means), max(means)
        scale = (len(levels) - 1) / (high - low) if 0 < high - low < math.inf else 0.0
        return "".join(levels[round((mean - low) * scale)] for mean in means)


@dataclass(frozen=True)
class Figures:
    """What the block is made of.

    Attributes:
        report: the last one.
        promised: samples per second that the search measured; None when it did not.
        trend: of the loss in this session.
        since_seconds: since the last report.
    """

    report: Report
    promised: float | None
    trend: Trend
    since_seconds: float = 0.0


def list_block_lines(figures: Figures, width: int, *, is_plain: bool = False) -> list[Text]:
    """Return the lines of the block, an empty one before them.

    Args:
        figures: where the training stands.
        width: of the terminal, in cells; what has no room is left out, the least important first.
        is_plain: the terminal's encoding has no signs but ASCII's.
    """
    report, room = figures.report, max(1, width - _LABEL_WIDTH)
    rows = (
        ("epoch", [describe_epoch(report).removeprefix("epoch "), f"{report.samples:,} samples"]),
        ("speed", list_speed(report.samples_per_second, figures.promised)),
        ("loss", [format_figure(report.loss), f"learning rate {report.learning_rate:.3g}"]),
        ("metrics", list_metrics(report.metrics, report.best)),
        ("machine", list_machine(report)),
        ("time", list_time(report, datetime.now(), since_seconds=figures.since_seconds)),
        ("guard", [report.guard] if report.guard else []),
        ("trouble", list_issues(report)),
    )
    lines = [Text(), _bar_line(report, room, _PLAIN_BAR if is_plain else _BAR)]
    for name, facts in rows:
        if facts:
            lines.append(_line(name, _fit(facts, room)))
        if name == "loss" and not is_plain:
            left = room + _LABEL_WIDTH - lines[-1].cell_len - len(_GAP)
            curve = figures.trend.draw(min(_WIDEST_TREND, left), _LEVELS)
            lines[-1].append(f"{_GAP}{curve}" if curve else "", "cyan")
    return lines


def label(name: str, *, style: str = "dim") -> Text:
    """Return the begin of a line."""
    return Text.assemble((f"{one_line(name):<{_LABEL_WIDTH}}", style), no_wrap=True, overflow="ellipsis")


def _bar_line(report: Report, room: int, signs: tuple[str, str]) -> Text:
    line, position = label(report.phase, style="bold"), describe_position(report)
    if not report.total_steps:
        return line.append(position, "bold")
    width = min(_WIDEST_BAR, room - len(position) - len(_GAP))
    if width < _NARROWEST_BAR:
        position = f"{report.step:,}/{report.total_steps:,} {format_progress(report.step, report.total_steps)}"
        width = min(_WIDEST_BAR, room - len(position) - len(_GAP))
    if width >= _NARROWEST_BAR:
        filled = min(width, int(width * report.step / report.total_steps))
        line.append(signs[0] * filled, "cyan" if report.phase == "training" else "magenta")
        line.append(signs[1] * (width - filled), "dim").append(_GAP)
    return line.append(position, "bold")


def _line(name: str, facts: Sequence[str]) -> Text:
    style = "yellow" if name == "trouble" else ""
    line = label(name).append(facts[0], "bold" if name in _HEADS else style)
    for fact in facts[1:]:
        line.append(_GAP).append(fact, style)
    return line


def _fit(facts: Sequence[str], room: int) -> list[str]:
    """Return as many facts as there is room for, at least the first of them."""
    shown: list[str] = []
    for fact in map(one_line, facts):
        if not shown or Text(_GAP.join((*shown, fact))).cell_len <= room:
            shown.append(fact)
    return shown
