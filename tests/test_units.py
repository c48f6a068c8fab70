from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.errors import UsageError
from autotune.units import parse_amount, parse_bytes, parse_duration


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
    with pytest.raises(UsageError, match=r"^--train-for ") as refused:
        parse_amount(text, counts=("epochs", "samples"), name="--train-for")
    assert refused.value.hint
