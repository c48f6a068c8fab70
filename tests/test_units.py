from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.units import (
    format_bytes,
    format_duration,
    format_part,
    format_percent,
    format_rate,
    parse_amount,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("20m", 1200),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("2d", 172800),
        ("1d2h3m4.5s", 93784.5),
        (" 20M ", 1200),
        ("00:20:00", 1200),
        ("100:00:01", 360001),
        ("1:2:3", 3723),
        ("0.333333333333333333s", 1 / 3),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("20", "20m or 20s?"),
        ("", "write 90s"),
        ("-5m", "write 90s"),
        ("1e3s", "write 90s"),
        ("20 m", "write 90s"),
        ("20min", "write 90s"),
        (".5h", "write 90s"),
        ("1:60:00", "write 90s"),
        ("20:00", "write 90s"),
        ("\uff11m", "write 90s"),
        ("nan", "write 90s"),
        ("inf", "write 90s"),
        ("0s", "longer than 0s"),
        ("0h0m", "longer than 0s"),
        ("00:00:00", "longer than 0s"),
        ("9" * 400 + "h", "write 90s"),
        ("9" * 400 + ":00:00", "write 90s"),
        ("9" * 5000 + ":00:00", "write 90s"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_duration_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_duration(text, name="--budget")
    assert caught.value.message.startswith(f"--budget {text!r}")
    assert hint in caught.value.hint


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


@given(st.integers(0, 400), st.integers(0, 23), st.integers(0, 59), st.integers(1, 59))
def test_a_duration_in_parts_is_their_sum(days: int, hours: int, minutes: int, seconds: int) -> None:
    total = days * 86400 + hours * 3600 + minutes * 60 + seconds
    assert parse_duration(f"{days}d{hours}h{minutes}m{seconds}s") == total
    assert parse_duration(f"{days * 24 + hours}:{minutes:02d}:{seconds:02d}") == total


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("800MiB", 800 * 2**20),
        ("16Gi", 16 * 2**30),
        ("8g", 8 * 2**30),
        ("8G", 8 * 2**30),
        ("8GB", 8 * 10**9),
        ("8gb", 8 * 10**9),
        ("8 GiB", 8 * 2**30),
        ("1.5k", 1536),
        ("2T", 2 * 2**40),
        (" 1kB ", 1000),
    ],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("8", "write 800MiB"),
        ("8B", "write 800MiB"),
        ("8i", "write 800MiB"),
        ("", "write 800MiB"),
        ("-8g", "write 800MiB"),
        ("1e3g", "write 800MiB"),
        ("8PiB", "write 800MiB"),
        ("g", "write 800MiB"),
        ("0g", "larger than 0"),
        ("0.0001k", "larger than 0"),
        ("9" * 400 + "g", "write 800MiB"),
    ],
    ids=lambda value: value[:20],
)
def test_what_is_no_size_is_refused(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text, name="--memory-limit")
    assert caught.value.message.startswith("--memory-limit ")
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1024, "1.0 KiB"),
        (40.6 * 2**20, "40.6 MiB"),
        (1.25 * 2**30, "1.25 GiB"),
        (5 * 2**40, "5120.00 GiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(1024, 2**50))
def test_a_formatted_size_reads_back_to_its_precision(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == pytest.approx(count, rel=0.05)


@given(st.integers(1, 10**6), st.sampled_from("kmgt"))
def test_a_size_is_binary_unless_it_ends_in_a_plain_b(number: int, unit: str) -> None:
    power = "kmgt".index(unit) + 1
    for suffix in (unit, unit.upper(), f"{unit}i", f"{unit.upper()}iB"):
        assert parse_bytes(f"{number}{suffix}") == number * 1024**power
    assert parse_bytes(f"{number}{unit}B") == number * 1000**power


@given(st.text(max_size=30))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    for parse in (parse_duration, parse_bytes):
        with contextlib.suppress(UsageError):
            assert 0 <= parse(text) < math.inf


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
    ("text", "amount"),
    [
        ("8h", (28800.0, "seconds")),
        ("90s", (90.0, "seconds")),
        ("30epochs", (30.0, "epochs")),
        ("2.5 EPOCHS", (2.5, "epochs")),
        ("2000000samples", (2e6, "samples")),
    ],
)
def test_an_amount_is_a_duration_or_a_count(text: str, amount: tuple[float, str]) -> None:
    assert parse_amount(text, counts=("epochs", "samples")) == amount


@pytest.mark.parametrize("text", ["", "30", "epochs", "-3epochs", "3 steps", "0epochs", "0s", "nan samples"])
def test_other_amounts_are_refused_by_the_name_they_were_given_for(text: str) -> None:
    with pytest.raises(UsageError, match=r"^--planned-run ") as refused:
        parse_amount(text, counts=("epochs", "samples"), name="--planned-run")
    assert refused.value.hint


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0.94e9, 122e9, "1/130"), (3.46, 177.0, "1/51"), (40.0, 100.0, "1/2.5"), (1.0, 12345.0, "1/12,000"),
     (0.0, 1.0, "0"), (1.0, 1.0, "1/1.0"), (1.0, 9.96, "1/10")],
)  # fmt: skip
def test_small_parts_for_people(part: float, whole: float, text: str) -> None:
    assert format_part(part, whole) == text
