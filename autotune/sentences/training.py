"""A training in words: how fast, how well it uses the machine, what it reached, what went wrong. Pure."""

from __future__ import annotations

import math

from autotune.format import count, format_factor, format_figure, format_rate, format_share
from autotune.records.run import Best

AS_PROMISED_FRACTION = 0.03
"""A throughput this close to what the search measured is as expected."""

_NOISE_SDS = 2.0
"""Standard deviations of single launches: further apart, two of them hardly are by chance."""


def list_speed(samples_per_second: float, promised: float | None) -> list[str]:
    """Return a throughput and how it compares with what the search measured; empty while there is none."""
    if samples_per_second <= 0:
        return []
    rate = format_rate(samples_per_second)
    if not promised:
        return [rate]
    return [rate, f"{format_factor(samples_per_second / promised)} of the expected {format_rate(promised, unit='')}"]


def judge_throughput(came: float, promised: float, noise: float | None = None) -> str:
    """Return in plain words how a throughput compares with the promised one.

    Args:
        came: samples per second.
        promised: what the search measured.
        noise: standard deviation of the log throughput of its launches; None when it is not known.
    """
    change = round(came / promised - 1.0, 6)
    if abs(change) <= AS_PROMISED_FRACTION:
        return "as expected"
    if noise is not None and came > 0 and abs(math.log(came / promised)) <= _NOISE_SDS * noise:
        return "as expected, within the noise"
    return "faster than expected" if change > 0 else "slower than expected"


def describe_best(best: Best) -> str:
    """Return the best evaluation and where it was, e.g. `1.1987 at step 11,250`."""
    return f"{format_figure(best.value)} at step {best.step:,}"


def list_use(data_wait_fraction: float | None, mfu: float | None) -> list[str]:
    """Return how well the machine is used, as far as it is known.

    Args:
        data_wait_fraction: share of the time spent waiting for the loader.
        mfu: model FLOPs utilisation.
    """
    shares = (("data wait", data_wait_fraction), ("MFU", mfu))
    return [f"{name} {format_share(share)}" for name, share in shares if share is not None]


def list_setbacks(skipped_steps: int, allocator_retries: int) -> list[str]:
    """Return what cost time without ending anything; empty when nothing did.

    Args:
        skipped_steps: left out by a loss scaler.
        allocator_retries: of the device's allocator, which has freed its cache and tried again.
    """
    retries = [count(allocator_retries, "allocator retry", "allocator retries")] if allocator_retries else []
    return retries + ([count(skipped_steps, "skipped step")] if skipped_steps else [])
