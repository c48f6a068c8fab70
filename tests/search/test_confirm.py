"""The finals as planned: rounds from noise and gain, the same samples for all, an end by the clock, what they need."""

from __future__ import annotations

import math
from typing import Any

import pytest
from record_factory import make_check
from simulated import (
    BASELINE,
    Machine,
    NothingToCheck,
    Search,
    all_equal,
    make_judged,
    make_placebos,
    number_of,
    open_search,
)

from autotune.measure.confidence import NO_PILOT, Pilot
from autotune.records import TrainConfig, TrialStatus
from autotune.records.finals import FinalsRecord
from autotune.search.finals.claim import THRESHOLD
from autotune.search.finals.finalist import LEAST_ROUNDS, MOST_ROUNDS, Finalist, FinalsOutcome, rounds_needed
from autotune.search.finals.more_time import budget_for, seconds_to_settle
from autotune.search.finals.plan import find_pilot, plan_finals
from autotune.search.finals.prover import Prover
from autotune.search.finals.reserve import Reserve
from autotune.search.finals.risk import SHARE_OF_A_LOOK, RiskPurse
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.finals.stage import confirm, recall
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD
from autotune.search.scores.ranking import Ranking

ONE, TWO = make_placebos(2)


def searched(
    *, gain: float = 0.1, luck: float = 0.0, budget: float = 600.0, machine: Machine | None = None, **options: float
) -> Search:
    """Return a search in which every config was launched eight times, off by its luck by turns."""
    search = open_search(machine or Machine(), budget=budget, **options)
    for number in range(8):
        shift = luck * (-1) ** number
        search.log.add_judged(
            make_judged(BASELINE, shift), make_judged(ONE, gain + shift), make_judged(TWO, gain - shift)
        )
    return search


def plan_for(search: Search, candidates: list[TrainConfig], **options: Any) -> FinalsPlan:
    return plan_finals(search.log, search.budget, candidates, **options)


def hold(search: Search, plan: FinalsPlan) -> FinalsOutcome:
    pass_checks(search, *plan.finalists)
    return confirm(search.log, search.starter, plan)


def pass_checks(search: Search, *configs: TrainConfig) -> None:
    for config in configs:
        search.log.add_checks(config, (make_check(),))


def plan_one(**options: float) -> FinalsPlan:
    return plan_for(searched(**options), [ONE])


def test_more_noise_takes_more_rounds():
    rounds = [plan_one(luck=luck, budget=1e4).rounds for luck in (0.0, 0.02, 0.03, 0.05)]
    assert rounds == sorted(rounds)
    assert rounds[0] == LEAST_ROUNDS
    assert rounds[-1] > 3 * LEAST_ROUNDS


def test_a_smaller_gain_takes_more_rounds():
    rounds = [plan_one(luck=0.02, gain=gain, budget=1e4).rounds for gain in (0.5, 0.1, 0.06, 0.02)]
    assert rounds == sorted(rounds)
    assert rounds[0] == LEAST_ROUNDS
    assert rounds[-1] == MOST_ROUNDS


@pytest.mark.parametrize(
    ("affordable", "rounds", "reserve"),
    [(1, 1, 0), (2, 2, 0), (3, 5, 0), (5, 8, 0), (6, 3, 3), (9, 3, 6), (24, 3, 6), (1000, 3, 6)],
)
def test_no_round_that_fits_is_left_out_up_to_three_times_what_is_needed(affordable, rounds, reserve):
    # A launch takes three seconds, a round two of them, and the last second is kept. What may fit by the clock, though
    # its price says that it will not, is planned as well where it would be too little for a look of its own.
    plan = plan_one(gain=0.5, budget=1 + affordable * 6.0)
    assert (plan.rounds, plan.reserve) == (rounds, reserve)


def test_the_rounds_are_those_that_prove_the_gain_without_its_luck():
    search = searched(luck=0.03, gain=0.1, budget=1e4)
    plan, ranking = plan_for(search, [ONE]), search.log.ranking
    entry = ranking.find(ONE)
    assert entry is not None
    assert plan.pair_sd == pytest.approx(math.sqrt(2) * ranking.noise[0])
    assert plan.pilot == find_pilot(ranking)
    needed = rounds_needed(
        plan.pair_sd,
        ranking.shrunk_score(entry),
        most=MOST_ROUNDS,
        fewest=LEAST_ROUNDS,
        risk_share=SHARE_OF_A_LOOK,
        pilot_degrees=plan.pilot.degrees,
    )
    assert plan.rounds == needed
    assert LEAST_ROUNDS < plan.rounds < MOST_ROUNDS
    assert plan.reserve == 2 * plan.rounds


def test_the_pilot_is_what_repeats_have_shown_and_no_guess():
    search = open_search(Machine())
    search.log.add_judged(make_judged(BASELINE, 0.0), make_judged(ONE, 0.30), make_judged(ONE, 0.20))
    ranking = search.log.ranking
    sd, degrees = ranking.noise
    squares = sd**2 * degrees - PRIOR_DEGREES * PRIOR_SD**2
    pilot = find_pilot(ranking)
    assert pilot.degrees == pytest.approx(0.5 * (degrees - PRIOR_DEGREES))
    assert pilot.sd == pytest.approx(math.sqrt(2 * squares / (degrees - PRIOR_DEGREES)))
    assert find_pilot(searched(luck=0.03).log.ranking).degrees == 6.0
    assert find_pilot(Ranking([make_judged(BASELINE, 0.0)], BASELINE)) == NO_PILOT


def test_every_launch_of_the_finals_measures_the_same_samples():
    machine = Machine(speed=lambda config: 2.0 if number_of(config) else 1.0)
    search = searched(machine=machine, gain=0.7)
    plan = plan_for(search, [ONE])
    own = [one.result.measurement for one in search.log.judged if one.config == BASELINE]
    assert plan.samples in {measurement.samples for measurement in own if measurement is not None}
    outcome = hold(search, plan)
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
    search = searched(machine=machine, luck=0.03, budget=60.0)
    plan = plan_for(search, [ONE])
    assert plan.rounds >= 5
    outcome = hold(search, plan)
    assert 2 <= len(outcome.baseline.rates) == len(outcome.candidates[0].rates) < plan.rounds
    assert machine.now <= 60.0


def test_a_stop_ends_the_finals():
    machine = Machine(stop_after=5)
    outcome = hold(search := searched(machine=machine), plan_for(search, [ONE]))
    assert len(outcome.baseline.rates) == 2
    assert len(machine.specs) == 5


def test_a_candidate_that_fails_is_out_of_the_finals():
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config == ONE else TrialStatus.COMPLETED

    search = searched(machine=Machine(fate=fate))
    outcome = hold(search, plan_for(search, [ONE]))
    assert outcome.winner is None
    assert outcome.candidates[0].failure == "crashed: planted"


def test_a_winner_that_fails_in_the_pairs_of_a_tie_is_out():
    more = ONE.replace(num_workers=2)
    purse = RiskPurse()

    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config == ONE and len(purse.looks) > 2 else TrialStatus.COMPLETED

    machine = Machine(speed=lambda config: 1.5 if number_of(config) else 1.0, noise=0.0, fate=fate)
    search = searched(machine=machine, gain=0.4, luck=0.03)
    plan = plan_for(search, [ONE], look=purse)
    search.log.add_finals(plan, hold(search, plan))
    search.log.add_judged(*[make_judged(more, 0.1) for _ in range(8)])
    outcome = hold(search, plan_for(search, [more], look=purse))
    assert len(purse.looks) > 2
    assert outcome.winner is not None
    assert outcome.winner.config == more


def test_where_the_baseline_fails_beside_a_candidate_none_is_blamed():
    machine = Machine(fate=lambda _config: TrialStatus.CRASHED)
    for seed in range(4):  # whichever comes first
        search = searched(machine=machine, seed=seed)
        outcome = hold(search, plan_for(search, [ONE]))
        assert not any(one.failure for one in outcome.candidates)


def test_nothing_is_proven_of_what_was_not_shown_to_learn_the_same():
    """What a damaged file has forgotten is shown again before it is the answer."""
    machine = Machine(speed=lambda config: 1.5 if number_of(config) else 1.0, noise=0.0)
    search, again = searched(machine=machine, gain=0.4), searched(machine=machine, gain=0.4)
    purse = RiskPurse()
    assert hold(search, plan_for(search, [ONE], look=purse)).winner is not None
    assert recall(again.log, purse).winner is None
    pass_checks(again, ONE)
    assert recall(again.log, purse).winner is not None


def test_a_candidate_whose_pairs_were_given_up_is_settled_beside_a_proven_one():
    speeds = {1: 1.5, 2: 0.99}
    machine = Machine(speed=lambda config: speeds.get(number_of(config), 1.0), noise=0.02)
    search = searched(machine=machine, gain=0.4, luck=0.02)
    purse = RiskPurse()
    for config in (ONE, TWO):
        plan = plan_for(search, [config], look=purse)
        search.log.add_finals(plan, hold(search, plan))
    assert purse.looks[-1].futile
    assert search.log.finals is not None
    assert search.log.finals.winner is not None
    assert TWO in search.log.settled


@pytest.mark.parametrize(
    ("planned", "outcome"), [(None, "proven"), (1e8, "proven"), (1e4, "no gain")], ids=["unknown", "long", "short"]
)
def test_compiling_turns_the_gain_of_a_short_run_into_none(planned, outcome):
    machine = Machine(
        speed=lambda config: 1.3 if number_of(config) else 1.0,
        compile_seconds=lambda config: 20.0 if number_of(config) else 0.0,
    )
    search = open_search(machine, planned_samples=planned)
    search.log.add_judged(make_judged(BASELINE, 0.0), make_judged(ONE, 0.26, elapsed=23.0))
    finals = hold(search, plan_for(search, [ONE]))
    assert finals.candidates[0].outcome == outcome
    assert finals.baseline.cost == 0.0
    cost = 0.0 if planned is None else math.log1p(20.0 * 1300.0 / planned)
    assert finals.candidates[0].cost == pytest.approx(cost, rel=0.02)


def test_a_compilation_that_the_search_paid_counts_for_the_run():
    # Later launches find it cached; the run to come may not.
    search = open_search(Machine(speed=lambda config: 1.3 if number_of(config) else 1.0), planned_samples=1e4)
    search.log.add_judged(make_judged(BASELINE, 0.0), make_judged(ONE, 0.26, compile_seconds=20.0))
    finals = hold(search, plan_for(search, [ONE]))
    assert finals.candidates[0].cost == pytest.approx(math.log1p(20.0 * 1300.0 / 1e4), rel=0.02)
    assert finals.candidates[0].outcome == "no gain"


def test_hopeless_finals_give_their_time_back():
    machine = Machine(speed=all_equal, noise=0.001)
    search = searched(machine=machine, luck=0.03, gain=0.08)
    plan = plan_for(search, [ONE])
    outcome = hold(search, plan)
    assert plan.rounds >= 6
    assert outcome.futile
    assert len(machine.specs) == 2 * (plan.rounds // 2)


@pytest.mark.parametrize(("gain", "looks"), [(0.5, 1), (0.06, 2)])
def test_the_reserve_is_a_second_look_where_the_first_leaves_it_open(gain, looks):
    # The search saw 0.5, which a few pairs prove, and not 0.1.
    machine = Machine(speed=lambda config: math.exp(gain) if number_of(config) else 1.0, noise=0.02, seed=4)
    search = searched(machine=machine, gain=0.5, luck=0.02)
    purse = RiskPurse()
    plan = plan_for(search, [ONE], look=purse)
    outcome = hold(search, plan)
    assert len(purse.looks) == looks
    assert len(outcome.candidates[0].rates) == plan.rounds + (looks - 1) * plan.reserve
    assert outcome.winner is not None


def test_what_comes_after_a_proof_has_the_whole_share_again():
    speeds = {1: 1.2, 2: 1.5}
    machine = Machine(speed=lambda config: speeds.get(number_of(config), 1.0), noise=0.01)
    search = searched(machine=machine, gain=0.18)
    search.log.add_judged(*[make_judged(TWO, 0.4) for _ in range(30)])
    purse = RiskPurse()
    hold(search, plan_for(search, [ONE], look=purse))
    outcome = hold(search, plan_for(search, [TWO], look=purse))
    assert [look.candidate for look in purse.looks] == [ONE, TWO]
    assert [look.share for look in purse.looks] == [SHARE_OF_A_LOOK, SHARE_OF_A_LOOK]
    assert outcome.winner is not None
    assert outcome.winner.config == TWO
    assert len(outcome.baseline.rates) == len(outcome.winner.rates)


@pytest.mark.parametrize("is_proven", [False, True])
def test_after_a_proof_nothing_is_explored_that_could_not_be_proven_any_more(is_proven: bool):
    """Before it a candidate to go on with is worth the time that is left; then there is an answer to give."""
    machine = Machine(speed=lambda config: 1.5 if number_of(config) else 1.0, noise=0.0)
    search = searched(machine=machine, gain=0.4 if is_proven else -0.1, luck=0.03)
    if is_proven:
        plan = plan_for(search, [ONE])
        search.log.add_finals(plan, hold(search, plan))
    machine.now = search.budget.seconds - 15.0
    reserve = Reserve(search.log, search.budget, lambda _config: 10.0, lambda _config: 10.0, lambda _config: 5)
    kept = Prover(search.log, search.starter, NothingToCheck(), RiskPurse(), reserve).kept_seconds()
    assert kept == (pytest.approx(reserve.seconds_for(None)) if is_proven else 0.0)


def test_the_simpler_of_two_gets_as_many_pairs_as_the_faster_before_it_stands():
    """It is proven first, with few pairs: its own wide interval may be all that ties the two."""
    more = ONE.replace(num_workers=2)
    machine = Machine(speed=lambda config: 1.52 if config == more else (1.5 if number_of(config) else 1.0), noise=0.0)
    search = searched(machine=machine, gain=0.4, luck=0.03)
    purse = RiskPurse()
    first = hold(search, plan_for(search, [ONE], look=purse))
    assert first.winner is not None
    search.log.add_finals(plan_for(search, [ONE], look=purse), first)
    search.log.add_judged(*[make_judged(more, 0.1) for _ in range(8)])  # a lead so small asks for many pairs
    outcome = hold(search, plan_for(search, [more], look=purse))
    pairs = {one.config.num_workers: len(one.rates) for one in outcome.candidates}
    assert outcome.winner is not None
    assert outcome.winner.config == ONE
    assert pairs[0] == pairs[2]
    assert pairs[2] > LEAST_ROUNDS


def test_later_finals_go_on_with_the_pairs_and_a_smaller_share():
    machine = Machine(speed=lambda config: 1.05 if number_of(config) else 1.0, noise=0.04, seed=1)
    search = searched(machine=machine, gain=0.4, luck=0.02)
    purse = RiskPurse()
    first = hold(search, plan_for(search, [ONE], look=purse, seconds=24.0))
    pairs = len(first.candidates[0].rates)
    assert first.winner is None
    assert pairs == 4
    plan = plan_for(search, [ONE], look=purse)
    assert plan.kept == pairs
    second = hold(search, plan)
    assert len(second.candidates[0].rates) > pairs
    assert second.candidates[0].log_ratios[:pairs] == first.candidates[0].log_ratios
    assert [look.share for look in purse.looks[:2]] == pytest.approx([0.6, 0.24])


def test_finals_are_recalled_by_another_session():
    machine = Machine(speed=lambda config: 1.05 if number_of(config) else 1.0, noise=0.04, seed=1)
    search = searched(machine=machine, gain=0.4, luck=0.02)
    saved: list[FinalsRecord] = []
    purse = RiskPurse(machine="here", save=saved.append)
    first = hold(search, plan_for(search, [ONE], look=purse, seconds=24.0))
    results = [*first.baseline.results, *first.candidates[0].results]
    record = FinalsRecord.model_validate_json(saved[-1].to_json())
    again = recall(search.log, RiskPurse(record, results=results, machine="here"))
    assert again.candidates[0].log_ratios == first.candidates[0].log_ratios
    assert again.candidates[0].ratio == first.candidates[0].ratio
    assert again.next_share == first.next_share
    elsewhere = RiskPurse(record, results=results, machine="elsewhere")
    assert elsewhere.pairs_of(ONE) == []
    assert elsewhere.share_for(ONE) == pytest.approx(0.24)


@pytest.mark.parametrize(("pair_sd", "gain"), [(0.02, 0.03), (0.02, 0.10), (0.1, 0.10), (0.1, 0.3)])
def test_the_budget_that_is_asked_for_holds_the_pairs_in_its_finals(pair_sd, gain):
    pairs = rounds_needed(pair_sd, gain, most=10_000, fewest=2, risk_share=SHARE_OF_A_LOOK)
    needed = budget_for(gain, pair_sd=pair_sd, pair_seconds=6.0, budget_seconds=10.0)
    assert needed == pytest.approx(max(15.0, pairs * 6.0 / 0.33))


def test_no_budget_is_named_where_finals_never_have_so_many_rounds():
    assert rounds_needed(0.1, 0.03, most=10_000, fewest=2) > MOST_ROUNDS
    assert budget_for(0.03, pair_sd=0.1, pair_seconds=6.0, budget_seconds=10.0) is None


def test_a_longer_budget_is_asked_for_than_was_given():
    assert budget_for(1.0, pair_sd=0.001, pair_seconds=1.0, budget_seconds=3600.0) == 5400.0


@pytest.mark.parametrize("log_speedup", [0.0, math.log(THRESHOLD), -1.0])
def test_no_budget_proves_what_is_not_above_the_threshold(log_speedup):
    with pytest.raises(ValueError, match="no budget proves"):
        budget_for(log_speedup, pair_sd=0.01, pair_seconds=1.0, budget_seconds=60.0)


def test_the_time_that_would_settle_it_is_that_of_the_pairs_still_to_come():
    one = Finalist(ONE, log_ratios=[0.10, 0.02, 0.08, 0.04], pilot=Pilot(0.05, 4.0))
    seconds = seconds_to_settle(one, 1.06, share=0.24, pair_seconds=6.0)
    assert seconds is not None
    total = 4 + round(seconds / 6.0)
    assert total > 5
    found = rounds_needed(one.pair_sd, math.log(1.06), fewest=2, most=99, risk_share=0.24, pilot_degrees=4.0)
    assert found == total
    assert seconds_to_settle(one, 1.0105, share=0.24, pair_seconds=6.0) is None
