"""Whole pages as they are printed, from fixed records: in a pipe, on terminals of 60, 80 and 120 columns, in ASCII.

The pages are beside this file. When one changes on purpose, write them again and read what `git diff` shows:

    AUTOTUNE_WRITE_PAGES=1 python -m pytest tests/cli/pages/test_whole_pages.py
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from consoles import make_console, read, strip
from emit_records import BASELINE, TUNED, make_profile
from page_records import make_cpu_report
from rich.cells import cell_len
from training_records import make_live_report, make_summary

from autotune.cli.pages import answer, layout
from autotune.cli.pages.comparison import print_comparison
from autotune.cli.pages.probe import print_report
from autotune.cli.pages.training import print_summary
from autotune.cli.view.training_words import describe_evaluation, describe_short_line
from autotune.records import Candidate, ProfileTarget
from autotune.records.comparison import LossPair, RunComparison, RunSide, SettingPair
from autotune.records.profile import OneOffCosts

WRITE = "AUTOTUNE_WRITE_PAGES=1 python -m pytest tests/cli/pages/test_whole_pages.py"
FOLDER = Path(__file__).parent / "snapshots"
WAYS = {"pipe": None, "60": 60, "80": 80, "120": 120, "ascii": 80}


def show_answer() -> None:
    planned = OneOffCosts(search_seconds=1140.0, planned_samples=36_000_000.0)
    answer.print_lines(layout.result_console(), answer.list_answer(make_profile(one_off=planned)))


def show_kept() -> None:
    refused = Candidate(config=TUNED, speedup_estimate=1.02, pairs=4, passed_checks=True, reason="no gain was shown")
    kept = make_profile(verdict="keep", config=BASELINE, candidate=refused, candidate_config=TUNED)
    answer.print_lines(layout.result_console(), answer.list_answer(kept))


def show_comparison() -> None:
    target = ProfileTarget(label="train.py:gpt", fingerprint="0123456789ab")
    sides = [
        RunSide(
            folder=f"runs/gpt-00{number}",
            target=target,
            state="finished",
            origin=origin,
            seed=0,
            config=BASELINE,
            planned_steps=1000,
            planned_epochs=None,
            steps=1000,
            epochs=2,
            samples=64_000,
            samples_per_second=rate,
            promised_samples_per_second=None,
            training_seconds=64_000 / rate,
            peak_memory_bytes=memory * 2**20,
            loss=loss,
            metrics={},
            best=None,
        )
        for number, origin, rate, loss, memory in (
            (1, "baseline", 160.0, 1.905, 472),
            (2, "profile", 179.2, 1.904, 475),
        )
    ]
    loss = LossPair(from_samples=57_600, to_samples=64_000, first=1.91, second=1.911, first_lines=9, second_lines=9)
    print_comparison(
        RunComparison(
            first=sides[0],
            second=sides[1],
            settings=(SettingPair(name="num_workers", first=0, second=2),),
            throughput_ratio=1.12,
            training_time_ratio=1 / 1.12,
            loss=loss,
            notes=("one pair of runs: no interval",),
        )
    )


def show_training() -> None:
    console = layout.result_console()
    for step in (12_340, 24_680):
        report = make_live_report(step=step, remaining_seconds=3780.0 - step / 10)
        console.print(describe_short_line(report, 12_200.0))
        console.print(f"  {describe_evaluation(report)}")
    print_summary(make_summary())


PAGES: dict[str, Callable[[], None]] = {
    "answer": show_answer,
    "kept": show_kept,
    "comparison": show_comparison,
    "training": show_training,
    "probe": lambda: print_report(make_cpu_report()),
}


@contextmanager
def printed(way: str) -> Iterator[list[str]]:
    """Yield a list that has in the end what was printed in a way."""
    width, encoding = WAYS[way], "ascii" if way == "ascii" else "utf-8"
    console = make_console(width or 100, encoding=encoding, is_terminal=width is not None)
    shown: list[str] = []
    with mock.patch.object(layout, "result_console", return_value=console):
        yield shown
    shown.append("\n".join(line.rstrip() for line in strip(read(console)).replace("\r", "").split("\n")))


def render(page: str, way: str) -> str:
    with printed(way) as shown:
        PAGES[page]()
    return shown[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_what_it_was(page: str, way: str) -> None:
    shown, file = render(page, way), FOLDER / f"{page}-{way}.txt"
    if os.environ.get("AUTOTUNE_WRITE_PAGES"):
        file.write_text(shown, encoding="utf-8")
    assert shown == file.read_text(encoding="utf-8"), f"on purpose? then: {WRITE}"


@pytest.mark.parametrize("page", PAGES)
def test_a_page_fits_its_terminal(page: str) -> None:
    for way, width in WAYS.items():
        if width is not None:
            assert max(map(cell_len, render(page, way).splitlines())) <= width
    assert render(page, "ascii").isascii()
