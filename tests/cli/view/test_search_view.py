"""What is seen of a running search: the same words in a pipe and on a terminal, and never at the search's cost."""

from __future__ import annotations

import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from consoles import HOSTILE, Broken, make_console, read, strip
from emit_records import BASELINE, make_facts, make_report, make_trial
from rich.cells import cell_len

from autotune.cli.view import search
from autotune.cli.view.console import RaisingConsole
from autotune.cli.view.live import BlockView
from autotune.cli.view.search import SearchView, search_view
from autotune.records import TrainConfig, TrialStatus
from autotune.search.progress import SearchProgress

PROBE = make_report(target=make_facts(baseline=BASELINE))
FASTER = BASELINE.replace(num_workers=4)
SLOWER = BASELINE.replace(num_workers=2)
PROGRESS = SearchProgress("search", 1, 48.0, baseline_samples_per_second=1000.0, best_ratio=1.25, best=FASTER)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(search.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def tell_all(view: SearchView) -> None:
    view.stage_started(PROGRESS, "9 settings to vary")
    view.trial_started(PROGRESS, None)
    view.probed(PROBE)
    view.trial_started(PROGRESS, FASTER)
    view.trial_finished(PROGRESS, make_trial(1, FASTER, rate=1250.0))
    view.told("something to know at once")


def test_a_pipe_gets_a_line_for_all_that_happens(clock: Clock) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 60.0, is_live=False)
    tell_all(view)
    view.view.tick()
    stage, probed, trial, told = read(console).splitlines()
    assert stage == "search: 9 settings to vary (48s left)"
    assert probed == PROBE.verdict.sentence
    assert trial == "#1 1.25x, 1,250 samples/s, 9 GiB, best so far: workers=4"
    assert told == "something to know at once"


@pytest.mark.parametrize("verbose", [False, True])
def test_the_log_of_a_launch_that_failed_is_named_and_each_one_where_all_is_told(clock: Clock, verbose: bool) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 60.0, is_live=False, verbose=verbose)
    view.opened(Path("/work/.autotune/toy-1"))
    tell_all(view)
    view.trial_finished(PROGRESS, make_trial(2, SLOWER, rate=None, status=TrialStatus.TIMED_OUT, error="late"))
    view.view.tick()
    lines = read(console).splitlines()
    fine, failed = (line for line in lines if line.startswith("#"))
    assert fine.endswith("log .autotune/toy-1/trials/0001/log.txt") is verbose
    assert failed.endswith("timed out: late: workers=2; log .autotune/toy-1/trials/0002/log.txt")
    ruled_out = [line for line in lines if line.startswith("  ruled out: ")]
    assert len(ruled_out) == (len(PROBE.ruled_out) if verbose else 0)
    assert PROBE.ruled_out


def test_a_pipe_gets_a_sign_of_life_each_minute_in_which_nothing_happens(clock: Clock) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 600.0, is_live=False)
    for second in range(200):
        clock.now = 1000.0 + second
        if second == 30:
            view.told("something")
        view.view.tick()
    assert read(console).splitlines() == [
        "something",
        "... still at work, 8m30s left",
        "... still at work, 7m30s left",
    ]


def test_the_own_settings_are_no_best_of_themselves(clock: Clock) -> None:
    progress = replace(PROGRESS, best=BASELINE, best_ratio=1.0)
    console = make_console(width=70)
    view = SearchView(console, 60.0, is_live=True)
    with view.view.opened():
        view.probed(PROBE)
        view.trial_started(progress, FASTER)
        view.trial_finished(progress, make_trial(1, BASELINE, rate=1000.0))
        view.view.tick()
        shown = strip(read(console))
    assert "best: your settings, so far" in shown
    assert "best so far" not in shown


def test_a_terminal_gets_a_block_that_is_gone_at_the_end(clock: Clock) -> None:
    console = make_console(width=70)
    view = SearchView(console, 60.0, is_live=True)
    assert isinstance(view.view, BlockView)
    with view.view.opened():
        tell_all(view)
        clock.now += 15.0
        view.view.tick()
        lines = strip(read(console)).split("\n")
        assert "search: 9 settings to vary" in "".join(lines)
        assert "something to know at once" in "".join(lines)
        assert [line.strip("\r").rpartition("\r")[2] for line in lines[-4:-2]] == [
            "now:  workers=4",
            "best: 1.25x your 1,000 samples/s, unconfirmed (workers=4)",
        ]
        assert lines[-2].strip("\r") == "search, 45s left; Ctrl-C keeps what is known"
        assert max(map(cell_len, re.split(r"[\r\n]+", strip(read(console))))) <= 70
    assert read(console).rstrip().endswith("\x1b[2K") or "\x1b[?25h" in read(console)


def test_no_line_of_a_block_is_wider_than_the_terminal(clock: Clock) -> None:
    console = make_console(width=40)
    view = SearchView(console, 60.0, is_live=True)
    tell_all(view)
    assert isinstance(view.view, BlockView)
    with console.capture() as capture:
        console.print(view.view.draw())
    lines = strip(capture.get()).splitlines()
    assert lines[0].startswith("now:  ")
    assert max(map(cell_len, lines)) <= 40


def test_what_was_said_stays_on_the_terminal(clock: Clock) -> None:
    console = make_console(width=60)
    view = SearchView(console, 60.0, is_live=True)
    with view.view.opened():
        for number in range(30):
            view.told(f"line {number} {HOSTILE}")
    shown = strip(read(console))
    assert [int(number) for number in re.findall(r"line (\d+) ", shown)] == [*range(30)]
    assert "\x07" not in shown


@pytest.mark.parametrize(
    ("purpose", "config", "line"),
    [
        ("measure", BASELINE, "#7 1,000 samples/s, 9 GiB: your settings"),
        ("final", FASTER, "proof #7 1.00x, 1,000 samples/s, 9 GiB: workers=4"),
        ("fidelity", FASTER, "loss check #7 1.00x, 1,000 samples/s, 9 GiB: workers=4"),
    ],
)
def test_a_line_begins_with_the_result(clock: Clock, purpose: str, config: TrainConfig, line: str) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 60.0, is_live=False)
    view.probed(PROBE)
    view.trial_finished(PROGRESS, make_trial(7, config, rate=1000.0, purpose=purpose))
    view.view.tick()
    assert read(console).splitlines()[1] == line


def test_what_speedups_are_of_is_told_once_a_launch_of_the_own_settings_counts(clock: Clock) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 60.0, is_live=False)
    view.probed(PROBE)
    for number, config in enumerate((BASELINE, FASTER, SLOWER), start=1):
        view.trial_started(replace(PROGRESS, baseline_samples_per_second=None if number == 1 else 800.0), config)
        view.trial_finished(PROGRESS, make_trial(number, config, rate=1000.0))
    view.view.tick()
    assert read(console).splitlines()[1:] == [
        "#1 1,000 samples/s, 9 GiB: your settings",
        "1x is 800 samples/s: your settings, as they run now",
        "#2 1.00x, 1,000 samples/s, 9 GiB, best so far: workers=4",
        "#3 1.00x, 1,000 samples/s, 9 GiB: workers=2",
    ]


def test_a_proofs_launches_are_told_beside_the_own_settings_launch_in_it(clock: Clock) -> None:
    console = make_console(is_terminal=False)
    view = SearchView(console, 60.0, is_live=False)
    view.probed(PROBE)
    for number, config, rate in ((1, FASTER, 900.0), (2, BASELINE, 800.0), (3, FASTER, 904.0)):
        view.trial_finished(PROGRESS, make_trial(number, config, rate=rate, purpose="final"))
    view.view.tick()
    assert read(console).splitlines()[1:] == [
        "proof #1 0.90x, 900 samples/s, 9 GiB: workers=4",  # of 1,000, for none was launched in the proof yet
        "proof #2 800 samples/s, 9 GiB: your settings",
        "proof #3 1.13x, 904 samples/s, 9 GiB: workers=4",
    ]


@pytest.mark.parametrize("is_live", [False, True])
def test_a_terminal_that_is_gone_ends_no_search(is_live: bool) -> None:
    console = RaisingConsole(file=Broken(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = SearchView(console, 60.0, is_live=is_live)
    with view.view.opened():
        tell_all(view)
        view.view.tick()


@pytest.mark.parametrize(("term", "is_terminal", "is_live"), [("dumb", True, False), ("xterm", False, False),
                                                              ("xterm", True, True)])  # fmt: skip
def test_the_view_is_the_one_that_fits_stderr(
    monkeypatch: pytest.MonkeyPatch, term: str, is_terminal: bool, is_live: bool
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    with search_view(60.0) as view:
        assert isinstance(view.view, BlockView) is is_live
        view.told("something")
    assert sys.stderr is stream
    assert "something" in stream.getvalue() or is_live
