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
    NothingToCheck,
    Search,
    bf16_wins,
    make_judged,
    make_placebos,
    number_of,
    open_search,
    run_simulated,
)

from autotune.measure.confidence import NO_PILOT
from autotune.records import TrialStatus
from autotune.records.finals import FinalsRecord
from autotune.records.objective import Objective
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.plan import plan_finals, plan_more
from autotune.search.finals.prover import Prover
from autotune.search.finals.reserve import Reserve
from autotune.search.finals.risk import Pair, RiskPurse
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


def make_prover(proven: Proven) -> Prover:
    search = proven.search
    reserve = Reserve(search.log, search.budget, lambda _config: 10.0, lambda _config: 10.0, lambda _config: 5)
    return Prover(search.log, search.starter, NothingToCheck(), proven.purse, reserve)


def is_proven(proven: Proven) -> bool:
    look, _ = proven.purse.looks_at(ONE)[-1]
    return look.proven


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
    assert is_proven(proven)
    assert after.risk_share == pytest.approx(0.24)


def test_what_more_pairs_leave_open_takes_nothing_back() -> None:
    proven = prove()
    proven.machine.noise = 1.0
    after = proven.take_more()
    assert low_of(after) == low_of(proven.first)
    assert after.winner is not None
    assert after.risk_share == pytest.approx(0.6)
    assert is_proven(proven)


def test_what_more_pairs_rule_out_is_taken_back() -> None:
    proven = prove()
    proven.machine.speed = lambda config: 0.3 if number_of(config) else 1.0
    proven.machine.noise = 0.01
    pairs = len(proven.first.baseline.rates)
    # What it was proven by stays counted: that it is slower has to outweigh it.
    after = proven.take_more()
    assert len(after.baseline.rates) >= 2 * pairs
    assert after.winner is None
    assert not is_proven(proven)
    assert proven.purse.share_for(ONE.replace(num_workers=2)) < 0.6
    # Nor does it come back where still more of them leave it open.
    proven.machine.noise = 1.0
    again = plan_finals(proven.search.log, proven.search.budget, [ONE], look=proven.purse)
    assert confirm(proven.search.log, proven.search.starter, again).winner is None


@pytest.mark.parametrize("pairs", [0, 1, 2])
def test_a_stop_among_them_leaves_the_claim(pairs: int) -> None:
    proven = prove()
    proven.machine.stop_after = len(proven.machine.specs) + 2 * pairs + 1
    after = proven.take_more()
    assert low_of(after) > 1.1
    results = [*after.results, *proven.first.results]
    again = recall(proven.search.log, RiskPurse(proven.saved[-1], results=results, machine="here"))
    assert low_of(again) == low_of(after)


def test_a_search_that_dies_among_them_leaves_the_claim_and_its_risk_free() -> None:
    proven = prove()
    proven.take_more()
    written = next(record for record in proven.saved if len(record.looks) == 2 and record.looks[1].rounds)
    assert len(written.looks[1].rounds) == 1
    results = [*proven.first.results, *recall(proven.search.log, proven.purse).results]
    purse = RiskPurse(written, results=results, machine="here")
    assert low_of(recall(proven.search.log, purse)) > 1.1
    assert purse.share_for(ONE.replace(num_workers=2)) == pytest.approx(0.6)


def test_one_that_died_before_the_first_of_them_lowers_no_claim() -> None:
    proven = prove()
    proven.purse.begin(ONE, NO_PILOT, is_proven=True)
    again = RiskPurse(proven.saved[-1], results=proven.first.results, machine="here")
    assert low_of(recall(proven.search.log, again)) == low_of(proven.first)


def test_a_failure_among_them_takes_the_claim_and_says_so() -> None:
    proven = prove()
    search, machine = proven.search, proven.machine
    machine.fate = lambda config: TrialStatus.CRASHED if config == ONE else TrialStatus.COMPLETED
    prover = make_prover(proven)
    assert not prover.claim_more()
    assert search.log.finals is not None
    assert search.log.finals.winner is None
    assert any("failed in the proof" in note for note in search.log.notes)
    assert search.log.finals.failure_of(ONE)


def test_pairs_that_leave_it_open_are_told() -> None:
    proven = prove()
    proven.machine.noise = 1.0
    assert make_prover(proven).claim_more()
    assert any("left open what the first" in note for note in proven.search.log.notes)


def test_who_was_chosen_among_the_proven_has_a_part_of_the_share() -> None:
    purse, two = RiskPurse(), ONE.replace(num_workers=2)
    for config in (ONE, two):
        share = purse.begin(config, NO_PILOT)
        assert share == pytest.approx(0.6)
        one, base = make_judged(config, 0.1).result, make_judged(BASELINE, 0.0).result
        purse.add(Pair(one, base))
        purse.end(proven=True)
    assert purse.share_for(two) == pytest.approx(0.6 * 0.4 / 2)
    assert purse.share_for(ONE.replace(num_workers=4)) == pytest.approx(0.6)


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
