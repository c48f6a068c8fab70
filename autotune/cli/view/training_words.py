"""A training's live figures as people read them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime

from autotune.format import (
    count,
    format_bytes,
    format_clock,
    format_duration,
    format_figure,
    format_of,
    format_progress,
    format_rate,
    format_share,
)
from autotune.records.run import Best
from autotune.sentences.training import describe_best, list_setbacks, list_speed, list_use
from autotune.train.report import Report


def describe_position(report: Report) -> str:
    """Return steps and percent, e.g. `12,340 of 30,000 steps, 41 %`."""
    if report.total_steps is None:
        return count(report.step, "step")
    return f"{report.step:,} of {count(report.total_steps, 'step')}, {format_progress(report.step, report.total_steps)}"


def describe_epoch(report: Report) -> str:
    """Return the epoch as people count it: from one."""
    if report.epochs is None:
        return f"epoch {report.epoch + 1:,}"
    return f"epoch {min(report.epoch + 1, report.epochs):,} of {report.epochs:,}"


def list_metrics(metrics: Mapping[str, float | None], best: Best | None) -> list[str]:
    """Return the last evaluation, the best one beside the metric that it is the best by."""
    shown = []
    for name, value in metrics.items():
        shown.append(f"{name} {format_figure(value)}")
        if best is not None and best.metric == name:
            shown.append(f"best {describe_best(best)}")
    if best is not None and best.metric not in metrics:
        shown.insert(0, f"best {best.metric} {describe_best(best)}")
    return shown


def list_machine(report: Report) -> list[str]:
    """Return how well the machine is used: the share waiting for data, MFU, memory."""
    facts = list_use(report.data_wait_fraction, report.mfu)
    if report.memory_bytes is not None:
        facts.append(f"memory {describe_memory(report.memory_bytes, report.memory_limit_bytes)}")
    return facts


def describe_memory(used_bytes: float, limit_bytes: float | None) -> str:
    """Return the memory in use and, where it is known, what there is of it."""
    used = format_bytes(used_bytes)
    if not limit_bytes:
        return used
    return f"{format_of(used, format_bytes(limit_bytes))} ({format_share(used_bytes / limit_bytes)})"


def list_time(report: Report, now: datetime, *, since_seconds: float = 0.0) -> list[str]:
    """Return the time this session took and what is left of the whole training.

    Args:
        report: the last one.
        now: by the user's clock.
        since_seconds: since that report.
    """
    so_far = f"{format_duration(report.elapsed_seconds + since_seconds)} so far"
    if report.remaining_seconds is None or not math.isfinite(report.remaining_seconds):
        return [so_far]
    left = max(0.0, report.remaining_seconds - since_seconds)
    without = "" if report.knows_evaluation else ", evaluations not counted yet"
    return [f"{format_duration(left)} left{without}", so_far, f"until about {format_clock(now, left)}"]


def list_issues(report: Report) -> list[str]:
    """Return what went wrong so far, the gravest first; empty when nothing did."""
    facts = []
    if report.step_downs:
        last = report.step_downs[-1]
        facts.append(f"{count(len(report.step_downs), 'step down')}, last {last.cause} at step {last.step:,}")
    return facts + list_setbacks(report.skipped_steps, report.allocator_retries)


def describe_line(report: Report, promised: float | None, now: datetime) -> str:
    """Return all of a report in one line, for a pipe or a log."""
    phase = f"{report.phase}, " if report.phase != "training" else ""
    facts = [
        describe_epoch(report),
        *list_speed(report.samples_per_second, promised),
        f"loss {format_figure(report.loss)}",
        f"learning rate {report.learning_rate:.3g}",
        *list_metrics(report.metrics, report.best),
        *list_machine(report),
        *list_time(report, now),
        *([f"guard: {report.guard}"] if report.guard else []),
        *list_issues(report),
    ]
    return f"{phase}{describe_position(report)}: {', '.join(facts)}".replace("\n", " ")


def describe_short_line(report: Report, promised: float | None) -> str:
    """Return what matters of a report in a line of at most 80 columns, as far as its figures are of usual length."""
    position = f"{report.step:,}"
    if report.total_steps is not None:
        position += f"/{report.total_steps:,}  {format_progress(report.step, report.total_steps)}"
    facts = [position, f"loss {format_figure(report.loss)}"]
    if report.samples_per_second > 0:
        share = f" ({format_share(report.samples_per_second / promised)} of expected)" if promised else ""
        facts.append(f"{format_rate(report.samples_per_second, unit='')}/s{share}")
    if report.remaining_seconds is not None and math.isfinite(report.remaining_seconds):
        facts.append(f"{format_duration(max(0.0, report.remaining_seconds))} left")
    phase = f"{report.phase}  " if report.phase != "training" else ""
    return f"{phase}{'  '.join(facts)}".replace("\n", " ")


def describe_evaluation(report: Report) -> str:
    """Return the last evaluation, for a line of its own; empty before there is one."""
    return ", ".join(list_metrics(report.metrics, report.best)).replace("\n", " ")
