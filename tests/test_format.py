"""Numbers as people read them."""

from __future__ import annotations

import math
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.format import (
    EN_DASH,
    TIMES,
    count,
    format_age,
    format_bandwidth,
    format_bounds,
    format_budget,
    format_bytes,
    format_clock,
    format_duration,
    format_factor,
    format_factor_down,
    format_figure,
    format_gain,
    format_of,
    format_part,
    format_percent,
    format_progress,
    format_rate,
    format_rough_factor,
    format_share,
    format_time,
)
from autotune.units import parse_bytes, parse_duration

NOON = datetime(2026, 3, 1, 12, 0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.035, "0.035s"),
        (0.35, "0.35s"),
        (1.0, "1.0s"),
        (9.94, "9.9s"),
        (42.4, "42s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3599.6, "1h00m"),
        (3900, "1h05m"),
        (360000, "100h00m"),
    ],
)
def test_durations_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@given(st.floats(0.001, 1e7))
def test_a_formatted_duration_reads_back_to_its_precision(seconds: float) -> None:
    precisions = ((1, 0.05 * seconds), (10, 0.05), (3599.5, 0.5), (math.inf, 60.0))
    precision = next(fitting for below, fitting in precisions if seconds < below)
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0, abs=1.001 * precision)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1 KiB"),
        (40.6 * 2**20, "40.6 MiB"),
        (1.25 * 2**30, "1.25 GiB"),
        (5 * 2**40, "5120 GiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1024, 2**50))
def test_a_formatted_size_reads_back_to_its_precision(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)


@pytest.mark.parametrize(("fraction", "text"), [(0.0031, "+0.31%"), (-0.02, "-2.00%"), (0.0, "+0.00%")])
def test_percentages_for_people(fraction: float, text: str) -> None:
    assert format_percent(fraction) == text
    assert format_percent(fraction, digits=0) == f"{100 * fraction:+.0f}%"


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1240.4, "1,240 samples/s"), (100, "100 samples/s"), (99.46, "99.5 samples/s"), (0.5, "0.5 samples/s")],
)
def test_rates_for_people(rate: float, text: str) -> None:
    assert format_rate(rate) == text
    assert format_rate(rate, unit="steps/s") == text.replace("samples", "steps")


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0.94e9, 122e9, "1/130"), (3.46, 177.0, "1/51"), (40.0, 100.0, "1/2.5"), (1.0, 12345.0, "1/12,000"),
     (0.0, 1.0, "0"), (1.0, 1.0, "1/1.0"), (1.0, 9.96, "1/10")],
)  # fmt: skip
def test_small_parts_for_people(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0.0000"),
        (1.5, "1.5000"),
        (-0.25, "-0.2500"),
        (1.2e-5, "1.200e-05"),
        (3e7, "3.000e+07"),
        (None, "not finite"),
    ],
)
def test_losses_of_any_size_are_told_apart(value: float | None, words: str) -> None:
    assert format_figure(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(60.0, "12:01"), (86400.0, "02 Mar 12:00"), (1e30, "never"), (float("inf"), "never")]
)
def test_the_time_of_its_end_has_a_date_where_it_needs_one(seconds: float, words: str) -> None:
    assert format_clock(NOON, seconds) == words


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (format_time(0.0), "0 ms"),
        (format_time(4.2e-6), "4.2 us"),
        (format_time(0.0387), "38.7 ms"),
        (format_time(0.9999), "1s"),
        (format_time(75.0), "1m15s"),
        (format_bytes(0), "0 B"),
        (format_bytes(64 * 2**20), "64 MiB"),
        (format_bytes(1023.9 * 2**20), "1 GiB"),
        (format_bytes(1007 * 2**30), "1007 GiB"),
        (format_bandwidth(0.0), "0 B/s"),
        (format_bandwidth(9.999e9), "10 GB/s"),
        (format_bandwidth(3.35e12), "3.35 TB/s"),
        (format_share(0.0), "0 %"),
        (format_share(0.001), "<1 %"),
        (format_share(0.62), "62 %"),
        (format_share(1.31), "131 %"),
        (format_factor(1.375), "1.38x"),
        (format_factor(24.12), "24.1x"),
        (format_factor(1200), "1,200x"),
        (format_of("15.8 TFLOP/s", "50 TFLOP/s"), "15.8 of 50 TFLOP/s"),
        (format_of("900 GB/s", "2.9 TB/s"), "900 GB/s of 2.9 TB/s"),
        (format_of("1.2s", "1.4s"), "1.2s of 1.4s"),
        (format_factor(1e300), "1e+300x"),
        (format_factor(math.inf), "infx"),
        (format_factor(1.38, sign=TIMES), "1.38\N{MULTIPLICATION SIGN}"),
        (format_rough_factor(3.0), "3x"),
        (format_rough_factor(2.64), "2.6x"),
        (format_rough_factor(139.0), "140x"),
        (format_rough_factor(12_400.0), "12,000x"),
        (format_factor_down(1.139), "1.13x"),
        (format_factor_down(1.13), "1.13x"),
        (format_factor_down(24.19), "24.1x"),
        (format_bounds(1.319, 1.461), "1.31-1.47"),
        (format_bounds(1.13, 1.46, dash=EN_DASH), "1.13\N{EN DASH}1.46"),
        (format_progress(29_999, 30_000), "99 %"),
        (format_progress(30_001, 30_000), "100 %"),
        (format_progress(5, None), ""),
        (format_gain(1.1, 1.8), "1.1-1.8x"),
        (format_gain(1.02, 1.06), "1.02-1.06x"),
        (format_gain(2.0, 2.04), "2.0x"),
        (format_gain(100, 2400), "100-2,400x"),
        (format_budget(61.0), "2m"),
        (format_budget(5000.0), "84m"),
        (format_budget(3.2 * 3600), "4h"),
        (format_budget(80 * 3600), "4d"),
        (count(1, "pair"), "1 pair"),
        (count(1240, "batch", "batches"), "1,240 batches"),
        (format_age(3599.0), ""),
        (format_age(3600.0), "measured 1 hour ago"),
        (format_age(47.5 * 3600), "measured 47 hours ago"),
        (format_age(3 * 86400), "measured 3 days ago"),
    ],
)
def test_figures_as_people_read_them(shown: str, expected: str) -> None:
    assert shown == expected
