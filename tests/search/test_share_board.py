"""Leases in a database: one holder of each launch and of the finals, and what becomes of a dead worker's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from optuna.distributions import CategoricalDistribution
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.search.share.address import open_storage, read_address
from autotune.search.share.board import Board, Place

GRACE = 60.0
ONE, OTHER = {"knob": 1}, {"knob": 2}
Join = Callable[[str], Board]


@dataclass
class Clock:
    now: float = 0.0
    boards: list[Board] = field(default_factory=list)

    def __call__(self) -> float:
        return self.now

    def pass_by(self, seconds: float, *, dead: tuple[Board, ...] = ()) -> None:
        """Let time go by, in which all but the dead beat."""
        until = self.now + seconds
        while self.now < until:
            self.now += 10.0
            for board in self.boards:
                if board not in dead:
                    board.beat()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> BaseStorage:
    """Return one storage for all workers: what is shared is in the database, not in it."""
    return open_storage(read_address(f"sqlite:///{tmp_path_factory.mktemp('shared')}/study.db"))


@pytest.fixture
def join(storage: BaseStorage, clock: Clock, request: pytest.FixtureRequest) -> Join:
    def join(name: str) -> Board:
        board = Board(storage, request.node.name, Place(name, f"host-{name}", f"/{name}/best.json"), GRACE, clock)
        clock.boards.append(board)
        return board

    return join


def make_reading(worker: str, number: int, knob: int, value: float | None = 0.1) -> FrozenTrial:
    return create_trial(
        state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
        value=value,
        params={"knob": knob},
        distributions={"knob": CategoricalDistribution((0, 1, 2))},
        user_attrs={"worker": worker, "number": number},
    )


def test_one_that_has_ended_its_search_is_waited_for_by_nobody(join: Join) -> None:
    a, b = join("a"), join("b")
    assert a.look().others == b.look().others == 1
    a.end_search()
    assert b.look().others == 0
    assert a.look().others == 1
    b.end_search()
    b.leave(None)
    b.end_search()  # of one that has left, or was taken for dead, it is nobody's concern
    assert a.look().others == 0


def test_a_launch_is_claimed_by_one_worker_until_it_ends(join: Join) -> None:
    a, b = join("a"), join("b")
    assert a.claim(ONE)
    assert not b.claim(ONE)
    assert b.claim(OTHER)
    assert a.look().running == (OTHER,)
    assert b.look().running == (ONE,)
    a.release(ONE, is_finished=True)
    assert b.look().running == ()
    assert b.claim(ONE)


@pytest.mark.fault(
    "F20",
    injected="a worker is silent for longer than its grace",
    outcome="one other worker launches what it ran; a second death ends that",
)
def test_what_a_dead_worker_ran_is_taken_over_by_one_other_and_never_again(join: Join, clock: Clock) -> None:
    a, b, c = join("a"), join("b"), join("c")
    assert a.claim(ONE)
    clock.pass_by(GRACE + 20, dead=(a,))
    assert b.look().inherited == ONE
    assert c.look().inherited is None
    assert c.look().running == (ONE,)
    assert not c.claim(ONE)
    assert b.look().inherited is None  # it has it already
    clock.pass_by(GRACE + 20, dead=(a, b))
    found = c.look()
    assert found.inherited is None
    assert found.running == (ONE,), "two workers have died of it"
    assert found.others == 0


def test_what_was_finished_before_its_worker_died_is_not_taken_over(join: Join, clock: Clock) -> None:
    a, b = join("a"), join("b")
    a.claim(ONE)
    a.post([make_reading("a", 3, 1)])
    clock.pass_by(GRACE + 20, dead=(a,))
    assert b.look().inherited is None


def test_a_launch_that_was_given_back_is_free_and_not_inherited(join: Join, clock: Clock) -> None:
    a, b = join("a"), join("b")
    a.claim(ONE)
    a.leave(None)
    clock.pass_by(GRACE + 20, dead=(a,))
    assert b.look().inherited is None
    assert b.claim(ONE)


def test_a_worker_that_was_taken_for_dead_joins_anew(join: Join, clock: Clock) -> None:
    a, b = join("a"), join("b")
    a.claim(ONE)
    clock.pass_by(GRACE + 20, dead=(a,))
    assert b.look().others == 0
    a.beat()
    assert b.look().others == 1
    b.release(ONE)
    assert a.claim(OTHER)
    assert b.look().running == (OTHER,)


def test_a_database_that_was_away_for_all_makes_nobody_dead(join: Join, clock: Clock) -> None:
    a, b = join("a"), join("b")
    clock.pass_by(30)
    clock.now += 3 * GRACE
    assert b.look().others == 1
    clock.now += GRACE - 20  # not a minute has been seen since
    b.forget_pulses()
    assert b.look().others == 1
    clock.pass_by(GRACE + 20, dead=(a,))
    assert b.look().others == 0


def test_the_finals_are_held_by_one_and_by_the_next_when_it_dies(join: Join, clock: Clock) -> None:
    a, b, c = join("a"), join("b"), join("c")
    assert a.take_finals() is None
    assert a.take_finals() is None
    assert b.take_finals() == Place("a", "host-a", "/a/best.json")
    assert b.look().holder == a.place
    assert a.look().holder is None
    clock.pass_by(GRACE + 20, dead=(a,))
    assert c.take_finals() is None
    assert b.look().holder == c.place


def test_an_answer_is_for_those_who_were_there(join: Join) -> None:
    a, b = join("a"), join("b")
    a.take_finals()
    a.leave(1.25)
    (answer,) = b.look().answers
    assert (answer.place, answer.low) == (a.place, 1.25)
    assert join("c").look().answers == ()
    assert b.take_finals() is None


def test_a_reading_is_kept_once_however_often_it_is_sent(join: Join) -> None:
    a, b = join("a"), join("b")
    a.post([make_reading("a", 3, 1)])
    a.post([make_reading("a", 3, 1), make_reading("a", 4, 2, None)])
    b.post([make_reading("b", 3, 1)])
    readings = [(one.user_attrs["worker"], one.user_attrs["number"], one.value) for one in b.look().readings]
    assert readings == [("a", 3, 0.1), ("a", 4, None), ("b", 3, 0.1)]


def test_what_others_wrote_of_themselves_is_shown_without_what_a_terminal_obeys(join: Join) -> None:
    a, b = join("a"), join("b")
    a.place = Place("a", "evil\x1b[2J\u202ehost", "/out")
    a.leave(None)
    a._has_left = False
    a._own = None
    a.beat()
    a.take_finals()
    assert b.look().holder == Place("a", "evil[2Jhost", "/out")
