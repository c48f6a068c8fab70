"""Two trials in turns: whose turn it is, what rests meanwhile, and that an end of one lets the other go on."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from trial_world import make_spec, open_world

from autotune.isolation import runner
from autotune.isolation.channel import turns
from autotune.isolation.channel.turns import TURNS_FILES, can_take_turns, open_turns, run_in_turns
from autotune.isolation.runner import TrialRunner
from autotune.records.trial import TrialResult, TrialStatus


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "0001", tmp_path / "0002"
    for one in found:
        one.mkdir()
    return found


def make_trial(folder: Path, name: str, blocks: int, said: list[str]) -> Callable[[], int]:
    """Return what waits, warms up, and then times so many blocks with a rest before each and after the last."""

    def run() -> int:
        turns = open_turns(folder, holds_threads=False)
        assert turns is not None
        turns.rest()
        said.append(f"{name} is warm")
        turns.rest()
        for _ in range(blocks):
            said.append(name)
            turns.rest()
        return blocks

    return run


def test_a_forked_trial_does_not_wait_for_its_own_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_SPIN_SECONDS", 60.0)
    waits = multiprocessing.get_context("fork").Process(target=turns._wait_for_threads)
    waits.start()
    waits.join(30.0)
    ended = waits.exitcode
    waits.kill()
    assert ended == 0


@pytest.mark.parametrize("late", [0, 1, None])
def test_both_start_at_a_time_and_warm_up_by_turns_whichever_is_ready_first(
    folders: tuple[Path, Path], late: int | None
) -> None:
    said: list[str] = []
    started = threading.Barrier(2)  # neither waits for the other one's end

    def make(place: int) -> Callable[[], int]:
        trial = make_trial(folders[place], "AB"[place], 4, said)

        def run() -> int:
            started.wait(timeout=60.0)
            if place == late:
                time.sleep(0.05)
            return trial()

        return run

    assert run_in_turns(folders, make(0), make(1)) == (4, 4)
    assert said == ["A is warm", "B is warm", *"ABBAABBA"]
    assert [[*one.iterdir()] for one in folders] == [[], []]


@pytest.mark.parametrize(("apart", "order"), [(True, ["A", "B"]), (False, ["B", "A"])])
def test_the_second_starts_when_the_first_has_started_where_both_at_a_time_would_take_longer(
    folders: tuple[Path, Path], apart: bool, order: list[str]
) -> None:
    started: list[str] = []
    is_second = threading.Event()

    def first() -> int:
        is_second.wait(timeout=0.5 if apart else 60.0)  # were they started at a time, the other one would be first
        started.append("A")
        return make_trial(folders[0], "A", 4, [])()

    def second() -> int:
        started.append("B")
        is_second.set()
        return make_trial(folders[1], "B", 4, [])()

    assert run_in_turns(folders, first, second, patience_seconds=0.0 if apart else 60.0) == (4, 4)
    assert started == order


@pytest.mark.parametrize("patience_seconds", [0.0, 60.0])
def test_one_that_ends_before_it_is_warm_does_not_keep_the_other_from_starting(
    folders: tuple[Path, Path], patience_seconds: float
) -> None:
    second = make_trial(folders[1], "B", 2, [])
    assert run_in_turns(folders, lambda: 0, second, patience_seconds=patience_seconds) == (0, 2)


@pytest.mark.parametrize("first_is_stuck", [False, True])
def test_the_second_is_held_where_both_at_a_time_take_too_long_but_not_for_ever(
    folders: tuple[Path, Path], first_is_stuck: bool
) -> None:
    held: list[bool] = []
    is_held, goes_on = threading.Event(), threading.Event()

    def hold(is_stopped: bool) -> None:
        held.append(is_stopped)
        (is_held if is_stopped else goes_on).set()

    def first() -> int:
        (goes_on if first_is_stuck else is_held).wait(timeout=60.0)  # stuck: it needs what the second one has
        return make_trial(folders[0], "A", 4, [])()

    def second() -> int:
        goes_on.wait(timeout=60.0)
        return make_trial(folders[1], "B", 4, [])()

    assert run_in_turns(folders, first, second, patience_seconds=0.1, hold=hold) == (4, 4)
    assert held == [True, False]


def test_nothing_is_held_once_one_of_them_has_started(folders: tuple[Path, Path]) -> None:
    held: list[bool] = []

    def second() -> int:
        time.sleep(1.0)
        return make_trial(folders[1], "B", 4, [])()

    first = make_trial(folders[0], "A", 4, [])
    assert run_in_turns(folders, first, second, patience_seconds=0.5, hold=held.append) == (4, 4)
    assert held == []


def test_the_second_is_not_started_where_the_first_could_not_be_run(folders: tuple[Path, Path]) -> None:
    started: list[str] = []

    def fail() -> int:
        raise OSError("no space left")

    def second() -> int:
        started.append("B")
        return 0

    with pytest.raises(OSError, match="no space left"):
        run_in_turns(folders, fail, second, patience_seconds=0.0)
    assert started == []


def test_what_has_no_time_left_beside_the_other_one_is_not_started(tmp_path: Path) -> None:
    spec = make_spec("trains", number=1, purpose="final")
    with TrialRunner(tmp_path / "trials", warm=False) as alone:
        found = alone._complete(spec, time.monotonic() - 1.0)
    assert (found.status, found.measurement) == (TrialStatus.INTERRUPTED, None)


@pytest.mark.parametrize(("together", "is_apart"), [(5.0, False), (9.0, True)])
def test_starts_that_take_longer_than_one_after_the_other_are_apart_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: float, is_apart: bool
) -> None:
    asked: list[float] = []
    spec = make_spec("trains", number=1, purpose="final")
    done = TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=20.0, startup_seconds=3.0)

    def take_turns(*_arguments: object, patience_seconds: float, hold: Any) -> tuple[TrialResult, TrialResult]:
        asked.append(patience_seconds)
        assert hold == alone._second._hold  # type: ignore[union-attr]
        return (done.replace(startup_seconds=together),) * 2

    monkeypatch.setattr(runner, "run_in_turns", take_turns)
    monkeypatch.setattr(TrialRunner, "_complete", lambda *_arguments, **_options: done)
    with TrialRunner(tmp_path / "trials", warm=False) as alone:
        alone(spec)
        for number in (2, 4):
            alone.run_in_turns(spec.replace(number=number), spec.replace(number=number + 1))
    assert asked == [4.5, 0.0 if is_apart else 4.5]


@pytest.mark.parametrize(("ours", "theirs"), [(1, 6), (6, 1), (0, 3), (3, 0)])
def test_where_one_has_ended_the_other_goes_on(folders: tuple[Path, Path], ours: int, theirs: int) -> None:
    said: list[str] = []
    found = run_in_turns(folders, make_trial(folders[0], "A", ours, said), make_trial(folders[1], "B", theirs, said))
    assert found == (ours, theirs)
    assert (said.count("A"), said.count("B")) == (ours, theirs)


def test_one_that_fails_before_it_is_warm_lets_the_other_run(folders: tuple[Path, Path]) -> None:
    said: list[str] = []

    def fail() -> int:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        run_in_turns(folders, fail, make_trial(folders[1], "B", 2, said))
    assert said == ["B is warm", "B", "B"]
    with pytest.raises(OSError, match="no space left"):
        run_in_turns(folders, make_trial(folders[0], "A", 2, said), fail)
    assert said[3:] == ["A is warm", "A", "A"]


def test_a_trial_alone_has_no_turns(tmp_path: Path) -> None:
    assert open_turns(tmp_path) is None
    (tmp_path / TURNS_FILES[0]).symlink_to(tmp_path / "elsewhere")
    assert open_turns(tmp_path) is None


def test_a_folder_that_holds_no_pipes_has_no_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_take_turns(tmp_path)
    assert [*tmp_path.iterdir()] == []

    def refuse(path: Path, mode: int = 0o666) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(os, "mkfifo", refuse)
    assert not can_take_turns(tmp_path)
    assert not can_take_turns(tmp_path / "missing")


@contextmanager
def started() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as child:
        assert child.stdout is not None
        child.stdout.readline()
        try:
            yield child.pid
        finally:
            child.kill()


def read_state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_what_a_trial_has_started_stands_still_while_it_rests(folders: tuple[Path, Path]) -> None:
    states: list[str] = []
    with started() as child:
        os.kill(child, 0)

        def first() -> None:
            turns = open_turns(folders[0], holds_threads=False)
            assert turns is not None
            turns.halt()
            assert turns.rest() > 0.0
            assert read_state(child) == "T"  # until the next block begins
            turns.go_on()
            while (state := read_state(child)) == "T":  # it is being woken up
                continue
            states.append(state)

        def second() -> None:
            deadline = time.monotonic() + 30.0
            while (state := read_state(child)) != "T" and time.monotonic() < deadline:  # the signal is on its way
                continue
            states.append(state)

        run_in_turns(folders, first, second)
    assert states[0] == "T"
    assert states[1] in "SR"


_LOADS_AHEAD = """
import pathlib, queue, sys, threading, time
from autotune.isolation.channel.turns import open_turns

batches = queue.Queue()

def load():
    while True:
        time.sleep(0.001)
        batches.put(1)

threading.Thread(target=load, daemon=True).start()
turns = open_turns(pathlib.Path(sys.argv[1]))
turns.rest()
turns.rest()
while batches.qsize() < 20:  # it does load
    time.sleep(0.001)
turns.halt()
before = batches.qsize()
seconds = turns.rest()
print(seconds, batches.qsize() - before)
"""


def test_a_thread_that_loads_ahead_stands_still_while_its_trial_rests(folders: tuple[Path, Path]) -> None:
    def first() -> tuple[float, int]:
        child = [sys.executable, "-c", _LOADS_AHEAD, str(folders[0])]
        seconds, batches = subprocess.run(child, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        return float(seconds), int(batches)

    def second() -> None:
        turns = open_turns(folders[1], holds_threads=False)
        assert turns is not None
        turns.rest()
        turns.rest()
        time.sleep(0.5)  # the other one rests
        turns.rest()

    (seconds, batches), _ = run_in_turns(folders, first, second)
    assert seconds > 0.4
    assert batches <= 20


@pytest.mark.slow
@pytest.mark.parametrize("warm", [False, True])
def test_two_real_trials_time_the_same_samples(tmp_path: Path, warm: bool) -> None:
    with open_world(tmp_path, warm=warm) as world:
        specs = [
            make_spec("trains", number=number, purpose="final", measure_samples=1600, measure_seconds=0.5)
            for number in (1, 2)
        ]
        ours, theirs = world.runner.run_in_turns(*specs)
        again, _ = world.runner.run_in_turns(*(one.replace(number=one.number + 2) for one in specs))
    for one in (ours, theirs, again):
        assert one.status is TrialStatus.COMPLETED, one.error
        assert one.measurement is not None
        assert one.measurement.samples >= 1600
        assert one.measurement.ended_by == "samples"  # which a fast machine has in one block


@pytest.mark.slow
def test_a_trial_that_crashes_beside_another_costs_that_one_nothing(tmp_path: Path) -> None:
    with open_world(tmp_path, warm=False) as world:
        fails = make_spec("raises", number=1, purpose="final", measure_samples=800)
        works = make_spec("trains", number=2, purpose="final", measure_samples=800)
        for specs in ((fails, works), (works.replace(number=3), fails.replace(number=4))):
            by_toy = dict(zip([one.target.spec for one in specs], world.runner.run_in_turns(*specs), strict=True))
            assert by_toy[fails.target.spec].status is TrialStatus.CRASHED
            assert by_toy[works.target.spec].status is TrialStatus.COMPLETED


@pytest.mark.slow
def test_a_trial_that_is_held_stands_still_and_tells_where_it_was_at_its_deadline(tmp_path: Path) -> None:
    with open_world(tmp_path, warm=False) as world:
        found: list[TrialResult] = []
        spec = make_spec("hangs", number=1, purpose="final", seconds=20.0)
        thread = threading.Thread(target=lambda: found.append(world.runner(spec)))
        thread.start()
        while world.runner._running is None:
            time.sleep(0.01)
        trial = psutil.Process(world.runner._running)
        states = list[str]()
        for is_held, seconds in ((True, 0.5), (False, 10.0), (True, 0.5)):  # it is to hang before it is held again
            world.runner._hold(is_held)
            time.sleep(seconds)
            states.append(trial.status())
        thread.join()
    stopped = psutil.STATUS_STOPPED
    assert (states[0], states[2]) == (stopped, stopped)
    assert states[1] != stopped
    assert found[0].status is TrialStatus.TIMED_OUT
    assert "most recent call first" in (tmp_path / "0001" / "log.txt").read_text()


@pytest.mark.slow
def test_both_have_ended_when_their_time_is_over(tmp_path: Path) -> None:
    with open_world(tmp_path, warm=False) as world:
        specs = [make_spec("hangs", number=number, purpose="final", seconds=12.0) for number in (1, 2)]
        began = time.monotonic()
        ours, theirs = world.runner.run_in_turns(*specs)
        took = time.monotonic() - began
    assert (ours.status, theirs.status) == (TrialStatus.TIMED_OUT, TrialStatus.TIMED_OUT)
    assert took < 1.3 * max(ours.elapsed_seconds, theirs.elapsed_seconds)
