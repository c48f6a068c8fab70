"""A training's live figures as people read them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import datetime, timedelta

from autotune.cli.probe_words import format_factor, format_of, format_share, format_size
from autotune.records.run import Best
from autotune.sentences import count
from autotune.train.report import Report
from autotune.units import format_duration, format_rate

AS_PROMISED_FRACTION = 0.03
"""A throughput this close to what the search measured is as promised."""

_SMALLEST_PLAIN, _LARGEST_PLAIN = 1e-3, 1e5
_TELLING_HOURS = 12 * 3600.0


def format_figure(value: float | None) -> str:
    """Return a loss or a metric for people: four decimals, or the power of ten of one that is tiny or huge."""
    if value is None:
        return "not finite"
    is_plain = value == 0 or _SMALLEST_PLAIN <= abs(value) < _LARGEST_PLAIN
    return f"{value:.4f}" if is_plain else f"{value:.3e}"


def describe_position(report: Report) -> str:
    """Return steps and percent, e.g. `12,340 of 30,000 steps, 41 %`."""
    if report.total_steps is None:
        return count(report.step, "step")
    return f"{report.step:,} of {count(report.total_steps, 'step')}, {format_done(report)}"


def format_done(report: Report) -> str:
    """Return the share of the steps that is done, never 100 % before it is; empty without a total."""
    if not report.total_steps:
        return ""
    return f"{min(100, math.floor(100 * report.step / report.total_steps))} %"


def describe_epoch(report: Report) -> str:
    """Return the epoch as people count it: from one."""
    if report.epochs is None:
        return f"epoch {report.epoch + 1:,}"
    return f"epoch {min(report.epoch + 1, report.epochs):,} of {report.epochs:,}"


def list_speed(report: Report, promised: float | None) -> list[str]:
    """Return the throughput and how it compares with what the search measured."""
    if report.samples_per_second <= 0:
        return []
    rate = format_rate(report.samples_per_second)
    if not promised:
        return [rate]
    ratio = report.samples_per_second / promised
    return [rate, f"{format_factor(ratio)} of the promised {format_rate(promised, unit='').strip()}"]


def list_metrics(metrics: Mapping[str, float | None], best: Best | None) -> list[str]:
    """Return the last evaluation, the best one beside the metric that it is the best by."""
    shown = []
    for name, value in metrics.items():
        shown.append(f"{name} {format_figure(value)}")
        if best is not None and best.metric == name:
            shown.append(f"best {format_figure(best.value)} at step {best.step:,}")
    if best is not None and best.metric not in metrics:
        shown.insert(0, f"best {best.metric} {format_figure(best.value)} at step {best.step:,}")
    return shown


def list_machine(report: Report) -> list[str]:
    """Return how well the machine is used: the share waiting for data, MFU, memory."""
    facts = []
    if report.data_wait_fraction is not None:
        facts.append(f"data wait {format_share(report.data_wait_fraction)}")
    if report.mfu is not None:
        facts.append(f"MFU {format_share(report.mfu)}")
    if report.memory_bytes is not None:
        facts.append(f"memory {describe_memory(report.memory_bytes, report.memory_limit_bytes)}")
    return facts


def describe_memory(used_bytes: float, limit_bytes: float | None) -> str:
    """Return the memory in use and, where it is known, what there is of it."""
    used = format_size(used_bytes)
    if not limit_bytes:
        return used
    return f"{format_of(used, format_size(limit_bytes))} ({format_share(used_bytes / limit_bytes)})"


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


def format_clock(now: datetime, seconds: float) -> str:
    """Return the time of day it will be, with the date where that is not plain."""
    try:
        then = now + timedelta(seconds=seconds)
    except OverflowError:
        return "never"
    return f"{then:%H:%M}" if seconds < _TELLING_HOURS else f"{then:%d %b %H:%M}"


def list_issues(report: Report) -> list[str]:
    """Return what went wrong so far, the gravest first; empty when nothing did."""
    facts = []
    if report.step_downs:
        last = report.step_downs[-1]
        facts.append(f"{count(len(report.step_downs), 'step down')}, last {last.cause} at step {last.step:,}")
    if report.allocator_retries:
        facts.append(count(report.allocator_retries, "allocator retry", "allocator retries"))
    if report.skipped_steps:
        facts.append(count(report.skipped_steps, "skipped step"))
    return facts


def describe_line(report: Report, promised: float | None, now: datetime) -> str:
    """Return all of a report in one line, for a pipe or a log."""
    phase = f"{report.phase}, " if report.phase != "training" else ""
    facts = [
        describe_epoch(report),
        *list_speed(report, promised),
        f"loss {format_figure(report.loss)}",
        f"learning rate {report.learning_rate:.3g}",
        *list_metrics(report.metrics, report.best),
        *list_machine(report),
        *list_time(report, now),
        *([f"guard: {report.guard}"] if report.guard else []),
        *list_issues(report),
    ]
    return f"{phase}{describe_position(report)}: {', '.join(facts)}".replace("\n", " ")


def judge_throughput(came: float, promised: float) -> str:
    """Return in plain words how a throughput compares with the promised one."""
    change = round(came / promised - 1.0, 6)
    if abs(change) <= AS_PROMISED_FRACTION:
        return "as promised"
    return "faster than promised" if change > 0 else "slower than promised"
