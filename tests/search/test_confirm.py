"""The finals as planned: rounds from noise and gain, the same samples for all, an end by the clock, what they need."""

from __future__ import annotations

import math

import pytest
from simulated import BASELINE, Machine, all_equal, make_judged, make_launcher, make_placebos, number_of

from autotune.records import TrainConfig, TrialStatus
from autotune.search.budget import FINALS_SHARE
from autotune.search.confirm import GOOD_ROUNDS, FinalsPlan, budget_for, confirm, plan_finals
from autotune.search.finals import MOST_ROUNDS, SHARE_OF_A_LOOK, THRESHOLD, rounds_needed
from autotune.search.launcher import Launcher

ONE, TWO = make_placebos(2)


def searched(
    *, gain: float = 0.1, luck: float = 0.0, budget: float = 600.0, machine: Machine | None = None, **options: float
) -> Launcher:
    """Return a launcher after a search in which every config was launched eight times, off by its luck by turns."""
    launcher = make_launcher(machine or Machine(), budget=budget, **options)
    for number in range(8):
        shift = luck * (-1) ** number
        launcher.judged += [
            make_judged(BASELINE, shift),
            make_judged(ONE, gain + shift),
            make_judged(TWO, gain - shift),
        ]
    return launcher


def plan_one(**options: float) -> FinalsPlan:
    return plan_finals(searched(**options), [ONE])


def test_more_noise_takes_more_rounds():
    rounds = [plan_one(luck=luck, budget=150.0).rounds for luck in (0.0, 0.02, 0.03, 0.05)]
    assert rounds == sorted(rounds)
    assert rounds[0] == GOOD_ROUNDS
    assert rounds[-1] > 2 * GOOD_ROUNDS


def test_a_smaller_gain_takes_more_rounds():
    rounds = [plan_one(luck=0.02, gain=gain, budget=150.0).rounds for gain in (0.5, 0.1, 0.06, 0.02)]
    assert rounds == sorted(rounds)
    assert rounds[0] == GOOD_ROUNDS
    assert rounds[-1] == int(149.0 / 6.0)


def test_more_budget_buys_more_rounds_also_where_the_search_saw_a_large_gain():
    rounds = [plan_one(gain=0.5, budget=budget).rounds for budget in (60.0, 150.0, 600.0, 1e5)]
    assert rounds == [GOOD_ROUNDS, GOOD_ROUNDS, 24, MOST_ROUNDS]


@pytest.mark.parametrize(("affordable", "reserve"), [(6, 0), (8, 0), (9, 3), (16, 10), (24, 18)])
def test_what_time_is_left_for_is_a_reserve_where_it_is_worth_a_second_look(affordable: int, reserve: int) -> None:
    plan = plan_one(gain=0.5, budget=1 + affordable * 6.0)
    assert (plan.rounds, plan.reserve) == (GOOD_ROUNDS, reserve)


def test_the_rounds_are_those_that_prove_the_gain_without_its_luck():
    launcher = searched(luck=0.03, gain=0.1, budget=150.0)
    plan, ranking = plan_finals(launcher, [ONE]), launcher.ranking()
    entry = ranking.find(ONE)
    assert entry is not None
    assert plan.pair_sd == pytest.approx(math.sqrt(2) * ranking.noise[0])
    assert plan.rounds == rounds_needed(plan.pair_sd, entry.shrunk, most=MOST_ROUNDS, fewest=GOOD_ROUNDS)
    assert GOOD_ROUNDS < plan.rounds < MOST_ROUNDS


@pytest.mark.parametrize(("seconds", "rounds"), [(12.0, 1), (13.0, 2), (25.0, 4), (31.0, 5), (150.0, 6)])
def test_no_more_rounds_than_the_time_left_allows(seconds, rounds):
    # A launch takes three seconds, a round two of them, and the last second is kept.
    assert plan_one(budget=seconds).rounds == rounds


def test_candidates_are_dropped_before_rounds_are():
    both = plan_finals(searched(budget=1 + 9.0 * GOOD_ROUNDS), [ONE, TWO])
    assert both.finalists == [ONE, TWO]
    assert both.round_seconds == pytest.approx(9.0)
    fewer = plan_finals(searched(budget=9.0 * GOOD_ROUNDS), [ONE, TWO])
    assert fewer.finalists == [ONE]
    assert fewer.round_seconds == pytest.approx(6.0)
    assert fewer.rounds == GOOD_ROUNDS


def test_every_launch_of_the_finals_measures_the_same_samples():
    machine = Machine(speed=lambda config: 2.0 if number_of(config) else 1.0)
    launcher = searched(machine=machine, gain=0.7)
    plan = plan_finals(launcher, [ONE])
    own = [one.result.measurement for one in launcher.judged if one.config == BASELINE]
    assert plan.samples in {measurement.samples for measurement in own if measurement is not None}
    outcome = confirm(launcher, plan)
    assert {spec.limits.measure_samples for spec in machine.specs} == {plan.samples}
    assert {spec.limits.rival for spec in machine.specs} == {None}
    assert {spec.purpose for spec in machine.specs} == {"final"}
    measured = {r.measurement.samples for one in (outcome.baseline, outcome.candidates[0]) for r in one.results}
    assert len(measured) == 1
    assert outcome.winner is not None
    assert outcome.winner.ratio is not None
    assert outcome.winner.ratio.low < 2.0 < outcome.winner.ratio.high


def test_finals_end_at_the_deadline_with_what_is_finished():
    machine = Machine(seconds=4.0)  # slower than in the search
    launcher = searched(machine=machine, luck=0.03, budget=60.0)
    plan = plan_finals(launcher, [ONE])
    assert plan.rounds >= 8
    outcome = confirm(launcher, plan)
    assert 2 <= len(outcome.baseline.rates) == len(outcome.candidates[0].rates) < plan.rounds
    assert machine.now <= 60.0


def test_a_stop_ends_the_finals():
    machine = Machine(stop_after=5)
    outcome = confirm(launcher := searched(machine=machine), plan_finals(launcher, [ONE]))
    assert len(outcome.baseline.rates) == 2
    assert len(machine.specs) == 5


def test_a_candidate_that_fails_is_out_of_the_finals():
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config == ONE else TrialStatus.COMPLETED

    launcher = searched(machine=Machine(fate=fate))
    outcome = confirm(launcher, plan_finals(launcher, [ONE]))
    assert outcome.winner is None
    assert outcome.candidates[0].failure == "crashed: planted"


@pytest.mark.parametrize(
    ("planned", "outcome"), [(None, "faster"), (1e8, "faster"), (1e4, "no gain")], ids=["unknown", "long", "short"]
)
def test_compiling_turns_the_gain_of_a_short_run_into_none(planned, outcome):
    machine = Machine(
        speed=lambda config: 1.3 if number_of(config) else 1.0,
        compile_seconds=lambda config: 20.0 if number_of(config) else 0.0,
    )
    launcher = make_launcher(machine, planned_samples=planned)
    launcher.judged += [make_judged(BASELINE, 0.0), make_judged(ONE, 0.26, elapsed=23.0)]
    finals = confirm(launcher, plan_finals(launcher, [ONE]))
    assert finals.candidates[0].outcome == outcome
    assert finals.baseline.cost == 0.0
    cost = 0.0 if planned is None else math.log1p(20.0 * 1300.0 / planned)
    assert finals.candidates[0].cost == pytest.approx(cost, rel=0.02)


def test_a_compilation_that_the_search_paid_counts_for_the_run():
    # Later launches find it cached; the run to come may not.
    launcher = make_launcher(Machine(speed=lambda config: 1.3 if number_of(config) else 1.0), planned_samples=1e4)
    launcher.judged += [make_judged(BASELINE, 0.0), make_judged(ONE, 0.26, compile_seconds=20.0)]
    finals = confirm(launcher, plan_finals(launcher, [ONE]))
    assert finals.candidates[0].cost == pytest.approx(math.log1p(20.0 * 1300.0 / 1e4), rel=0.02)
    assert finals.candidates[0].outcome == "no gain"


def test_hopeless_finals_give_their_time_back():
    machine = Machine(speed=all_equal, noise=0.001)
    launcher = searched(machine=machine, luck=0.03, gain=0.08)
    plan = plan_finals(launcher, [ONE])
    outcome = confirm(launcher, plan)
    assert plan.rounds >= 8
    assert outcome.futile
    assert len(machine.specs) == 2 * (plan.rounds // 2)


@pytest.mark.parametrize(("pair_sd", "gain"), [(0.02, 0.03), (0.02, 0.10), (0.1, 0.10), (0.1, 0.3)])
def test_the_budget_that_is_asked_for_holds_the_pairs_in_its_finals(pair_sd, gain):
    pairs = rounds_needed(pair_sd, gain, most=10_000, fewest=2, risk_share=SHARE_OF_A_LOOK)
    needed = budget_for(gain, pair_sd=pair_sd, pair_seconds=6.0, budget_seconds=10.0)
    assert needed == pytest.approx(max(15.0, pairs * 6.0 / FINALS_SHARE))
    assert needed * FINALS_SHARE >= pairs * 6.0 * 0.999


def test_no_budget_is_named_where_finals_never_have_so_many_rounds():
    assert rounds_needed(0.1, 0.03, most=10_000, fewest=2) > MOST_ROUNDS
    assert budget_for(0.03, pair_sd=0.1, pair_seconds=6.0, budget_seconds=10.0) is None


def test_a_longer_budget_is_asked_for_than_was_given():
    assert budget_for(1.0, pair_sd=0.001, pair_seconds=1.0, budget_seconds=3600.0) == 5400.0


@pytest.mark.parametrize("log_speedup", [0.0, math.log(THRESHOLD), -1.0])
def test_no_budget_proves_what_is_not_above_the_threshold(log_speedup):
    with pytest.raises(ValueError, match="no budget proves"):
        budget_for(log_speedup, pair_sd=0.01, pair_seconds=1.0, budget_seconds=60.0)
