"""Two runs side by side on stdout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.cli.pages.layout import LinePage, open_page
from autotune.format import (
    format_bytes,
    format_duration,
    format_factor,
    format_figure,
    format_percent,
    format_rate,
    format_share,
)
from autotune.records.comparison import RunComparison, RunSide
from autotune.sentences.settings import name_setting
from autotune.sentences.training import AS_PROMISED_FRACTION as AS_FAST_FRACTION
from autotune.sentences.training import describe_best

Row = tuple[str, str, str, str]

_SAME_LOSS_FRACTION = 0.005
"""The usual limit of a search's loss check; one pair of runs has no interval to say more."""


def print_comparison(comparison: RunComparison) -> None:
    """Print two runs side by side on stdout."""
    page = open_page()
    page.heading("runs")
    for name, side in (("a", comparison.first), ("b", comparison.second)):
        page.facts(name, [f"{side.folder} ({side.state})"])
    pair = comparison.loss
    _show_rows(page, "settings", list_settings(comparison))
    _show_rows(page, "training", list_lengths(comparison))
    _show_rows(page, "speed", list_speeds(comparison))
    note = "" if pair is None else f"loss: mean from {pair.from_samples:,} to {pair.to_samples:,} samples"
    _show_rows(page, "learning", list_losses(comparison), note)
    _show_rows(page, "trouble", list_issues(comparison))
    page.heading("notes")
    for note in comparison.notes:
        page.sentence(note, bullet=True)
    page.heading("in short")
    page.sentence(describe_difference(comparison), style="bold")


def describe_difference(comparison: RunComparison) -> str:
    """Return in a sentence how the second run differs from the first, e.g. `b is 1.12x faster than a, same loss`."""
    ratio, pair = comparison.throughput_ratio, comparison.loss
    if not ratio:
        speed = "their speeds cannot be compared"
    elif abs(ratio - 1.0) <= AS_FAST_FRACTION:
        speed = "b is as fast as a"
    else:
        faster, slower, factor = ("b", "a", ratio) if ratio > 1.0 else ("a", "b", 1.0 / ratio)
        speed = f"{faster} is {format_factor(factor)} faster than {slower}"
    if pair is None:
        return f"{speed}; no loss of theirs can be compared"
    change = 0.0 if pair.first == pair.second else (pair.second - pair.first) / abs(pair.first or math.inf)
    if abs(change) <= _SAME_LOSS_FRACTION:
        return f"{speed}, same loss"
    return f"{speed}; the loss of b is {format_percent(change)}"


def list_settings(comparison: RunComparison) -> list[Row]:
    """Return what the runs were started with, and each setting in which they differ."""
    a, b = comparison.first, comparison.second
    rows = [("settings from", a.origin, b.origin, "")]
    if a.target.label != b.target.label:
        rows.insert(0, ("target", a.target.label, b.target.label, "another"))
    else:
        rows.insert(0, ("target", a.target.label, "the same" if a.target == b.target else "changed", ""))
    for pair in comparison.settings:
        rows.append((name_setting(pair.name), _show(pair.first), _show(pair.second), ""))
    return rows if comparison.settings else [*rows, ("every setting", "the same", "the same", "")]


def list_lengths(comparison: RunComparison) -> list[Row]:
    """Return how far the runs came."""

    def planned(side: RunSide) -> str:
        if side.planned_steps is not None:
            return f"{side.planned_steps:,} steps"
        return f"{side.planned_epochs:,} epochs" if side.planned_epochs is not None else "-"

    rows = [
        _row(comparison, "planned", planned),
        _row(comparison, "state", lambda side: side.state),
        _row(comparison, "steps", lambda side: f"{side.steps:,}"),
        _row(comparison, "epochs", lambda side: f"{side.epochs:,}"),
        _row(comparison, "samples", lambda side: f"{side.samples:,}"),
    ]
    return [row for row in rows if row[1:3] != ("-", "-")]  # nobody knows how long a script is to train


def list_speeds(comparison: RunComparison) -> list[Row]:
    """Return how fast the runs were, and how well they used the machine."""
    ratio, time_ratio = comparison.throughput_ratio, comparison.training_time_ratio
    rows = [
        _row(comparison, "throughput", _maybe(format_rate, "samples_per_second"), _maybe_text(format_factor, ratio)),
        _row(comparison, "promised", _maybe(format_rate, "promised_samples_per_second")),
        _row(
            comparison,
            "time in steps",
            _maybe(format_duration, "training_seconds"),
            _maybe_text(format_factor, time_ratio),
        ),
        _row(comparison, "evaluations", _maybe(format_duration, "evaluation_seconds")),
        _row(comparison, "checkpoints", _maybe(format_duration, "checkpoint_seconds")),
        _row(comparison, "data wait", _maybe(format_share, "data_wait_fraction")),
        _row(comparison, "MFU", _maybe(format_share, "mfu")),
        _row(comparison, "peak memory", _maybe(format_bytes, "peak_memory_bytes")),
    ]
    return [row for row in rows if row[1:3] != ("-", "-")]


def list_losses(comparison: RunComparison) -> list[Row]:
    """Return the losses after the same number of samples, and the metrics."""

    def best(side: RunSide) -> str:
        return "-" if side.best is None else describe_best(side.best)

    a, b, rows = comparison.first, comparison.second, []
    pair = comparison.loss
    if pair is not None:
        rows.append(("loss", format_figure(pair.first), format_figure(pair.second), _change(pair.first, pair.second)))
    rows.append(_row(comparison, "last loss", _maybe(format_figure, "loss")))
    for name in dict.fromkeys((*a.metrics, *b.metrics)):
        values = a.metrics.get(name), b.metrics.get(name)
        shown = [format_figure(side.metrics[name]) if name in side.metrics else "-" for side in (a, b)]
        rows.append((name, shown[0], shown[1], _change(*values)))
    names = dict.fromkeys(side.best.metric for side in (a, b) if side.best is not None)
    if names:
        rows.append(_row(comparison, f"best {'/'.join(names)}", best))
    return rows


def list_issues(comparison: RunComparison) -> list[Row]:
    """Return what went wrong; empty when nothing did and nothing was guarded."""

    def downs(side: RunSide) -> str:
        return ", ".join(f"{one.cause} at step {one.step:,}" for one in side.step_downs) or "none"

    def guard(side: RunSide) -> str:
        if side.guard is None or not side.guard.is_on:
            return "-"
        return f"{side.guard.gradient_checks:,} checks, {side.guard.alarms:,} alarms"

    rows = [_row(comparison, "steps down", downs), _row(comparison, "drift guard", guard)]
    for label, name in (("skipped steps", "skipped_steps"), ("allocator retries", "allocator_retries")):
        rows.append(_row(comparison, label, _maybe(lambda value: f"{value or 0:,}", name)))
    return [row for row in rows if not {*row[1:3]} <= {"-", "0", "none"}]


def _show_rows(page: LinePage, heading: str, rows: Sequence[Row], note: str = "") -> None:
    if not rows:
        return
    page.heading(heading, note)
    if any(relation for *_, relation in rows):
        page.table(("", "a", "b", "b to a"), [(*cells, relation or "-") for *cells, relation in rows])
    else:
        page.table(("", "a", "b"), [cells for *cells, _ in rows])


def _row(comparison: RunComparison, name: str, describe: Callable[[RunSide], str], relation: str = "") -> Row:
    return (name, describe(comparison.first), describe(comparison.second), relation)


def _maybe(describe: Callable[[float], str], name: str) -> Callable[[RunSide], str]:
    """Return what describes one field of a run; a dash where it is not known."""
    return lambda side: _maybe_text(describe, getattr(side, name)) or "-"


def _maybe_text(describe: Callable[[float], str], value: float | None) -> str:
    return "" if value is None else describe(value)


def _change(before: float | None, after: float | None) -> str:
    if before is None or after is None or before == 0:
        return ""
    return format_percent((after - before) / abs(before))


def _show(value: object) -> str:
    return "not set" if value is None else str(value)
