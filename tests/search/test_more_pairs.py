"""After a proof: the time that is left goes to more pairs of the winner, which claim more of its gain."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from record_factory import make_check
from simulated import (
    BASELINE,
    Machine,
    Search,
    bf16_wins,
    make_judged,
    make_placebos,
    number_of,
    open_search,
    run_simulated,
)

from autotune.records.finals import FinalsRecord
from autotune.records.objective import Objective
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.plan import plan_finals, plan_more
from autotune.search.finals.risk import RiskPurse
from autotune.search.finals.stage import confirm, recall

(ONE,) = make_placebos(1)


@dataclass
class Proven:
    """A search that has proven a gain, with few pairs."""

    machine: Machine
    search: Search
    first: FinalsOutcome
    purse: RiskPurse
    saved: list[FinalsRecord] = field(default_factory=list)

    def take_more(self) -> FinalsOutcome:
        plan = plan_more(self.search.log, self.search.budget, ONE, self.purse)
        assert plan is not None
        assert plan.rounds >= plan.kept
        return confirm(self.search.log, self.search.starter, plan)


def prove(*, budget: float = 600.0, noise: float = 0.02, gain: float = 0.2) -> Proven:
    machine = Machine(speed=lambda config: math.exp(gain) if number_of(config) else 1.0, noise=noise, seed=2)
    search = open_search(machine, budget=budget)
    for number in range(8):
        shift = noise * (-1) ** number
        search.log.add_judged(make_judged(BASELINE, shift), make_judged(ONE, gain + shift))
    search.log.add_checks(ONE, (make_check(),))
    saved: list[FinalsRecord] = []
    purse = RiskPurse(machine="here", save=saved.append)
    plan = plan_finals(search.log, search.budget, [ONE], look=purse)
    first = confirm(search.log, search.starter, plan)
    assert first.winner is not None
    search.log.add_finals(plan, first)
    return Proven(machine, search, first, purse, saved)


def low_of(outcome: FinalsOutcome) -> float:
    assert outcome.winner is not None
    assert outcome.winner.ratio is not None
    return outcome.winner.ratio.low


def test_more_pairs_claim_more_of_the_gain_at_what_is_left_of_the_risk() -> None:
    proven = prove()
    few = len(proven.first.baseline.rates)
    after = proven.take_more()
    assert len(after.baseline.rates) >= 2 * few
    assert low_of(after) > low_of(proven.first)
    assert low_of(after) < math.exp(0.2)
    assert [look.share for look in proven.purse.looks] == pytest.approx([0.6, 0.24])
    assert proven.purse.is_proven(ONE)
    assert after.risk_share == pytest.approx(0.24)


def test_what_more_pairs_leave_open_takes_nothing_back() -> None:
    proven = prove()
    proven.machine.noise = 1.0
    after = proven.take_more()
    assert low_of(after) == low_of(proven.first)
    assert after.winner is not None
    assert after.risk_share == pytest.approx(0.6)
    assert proven.purse.is_proven(ONE)


def test_what_more_pairs_rule_out_is_taken_back() -> None:
    proven = prove()
    proven.machine.speed = lambda config: 0.3 if number_of(config) else 1.0
    proven.machine.noise = 0.01
    pairs = len(proven.first.baseline.rates)
    # What it was proven by stays counted: that it is slower has to outweigh it.
    after = proven.take_more()
    assert len(after.baseline.rates) >= 2 * pairs
    assert after.winner is None
    assert not proven.purse.is_proven(ONE)
    assert proven.purse.share_for(ONE.replace(num_workers=2)) < 0.6


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_a_stop_among_them_leaves_the_claim(pairs: int) -> None:
    proven = prove()
    proven.machine.stop_after = len(proven.machine.specs) + 2 * pairs + 1
    after = proven.take_more()
    assert low_of(after) > 1.1
    results = [*after.results, *proven.first.results]
    again = recall(proven.search.log, RiskPurse(proven.saved[-1], results=results, machine="here"))
    assert low_of(again) == low_of(after)


def test_without_the_time_for_twice_as_many_there_are_none() -> None:
    proven = prove()
    search, pairs = proven.search, len(proven.first.baseline.rates)
    plan = plan_more(search.log, search.budget, ONE, proven.purse)
    assert plan is not None
    for left, is_planned in ((pairs - 0.5, False), (pairs + 0.5, True)):
        proven.machine.now = search.budget.seconds - left * plan.round_seconds
        assert (plan_more(search.log, search.budget, ONE, proven.purse) is not None) == is_planned


def test_memory_has_none() -> None:
    machine = Machine()
    search = open_search(machine, objective=Objective.MEMORY)
    assert plan_more(search.log, search.budget, ONE, RiskPurse()) is None


def test_a_search_keeps_time_for_them_and_spends_it(tmp_path: Path) -> None:
    run = run_simulated(Machine(speed=bf16_wins, noise=0.03), tmp_path, only=("precision", "num_workers"))
    record = run.folder.read_finals()
    assert record is not None
    looks = [look for look in record.looks if look.candidate == run.profile.config]
    assert run.profile.verdict == "improved"
    assert [look.share for look in looks] == pytest.approx([0.6, 0.24])
    assert len(looks[1].rounds) >= len(looks[0].rounds)
    assert run.profile.evidence.pairs == sum(len(look.rounds) for look in looks)
    assert run.machine.now <= 240.0
