from __future__ import annotations

import math
import random
import statistics
from collections import Counter

import pytest
from record_factory import make_spec
from simulated import BASELINE, Machine, play_finals

from autotune.measure.confidence import Pilot
from autotune.measure.student_t import student_t_quantile
from autotune.records import TrainConfig, TrialResult, TrialStatus
from autotune.search.finals.claim import CLAIM_RISK, FALSE_RISK, THRESHOLD
from autotune.search.finals.finalist import LEAST_ROUNDS, Finalist, rounds_needed, smallest_provable
from autotune.search.finals.risk import Pair
from autotune.search.finals.rounds import Terms, run_finals

FAST = BASELINE.replace(precision="bf16")
FAST_AND_MORE = FAST.replace(num_workers=2)
OTHER = BASELINE.replace(optimizer_implementation="fused")


def launcher(machine: Machine, order: list[TrainConfig] | None = None):
    def launch(config: TrainConfig) -> TrialResult:
        if order is not None:
            order.append(config)
        return machine(make_spec(config, number=len(machine.specs), purpose="final"))

    return launch


def test_a_gain_is_proven_by_its_lower_end():
    outcome = run_finals([FAST], BASELINE, launcher(Machine()), rounds=6, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST
    assert outcome.winner.ratio is not None
    assert THRESHOLD < outcome.winner.ratio.low < 1.5
    assert outcome.winner.ratio.confidence_level == pytest.approx(0.98)
    assert len(outcome.winner.rates) == len(outcome.baseline.rates) == 6


def test_two_candidates_share_the_risk():
    outcome = run_finals([FAST, OTHER], BASELINE, launcher(Machine()), rounds=6, seed=0)
    assert [one.ratio.confidence_level for one in outcome.candidates if one.ratio] == pytest.approx([0.99, 0.99])


def test_every_round_holds_every_arm_and_no_arm_is_always_first():
    order: list[TrainConfig] = []
    run_finals([FAST, OTHER], BASELINE, launcher(Machine(), order), rounds=8, seed=3)
    rounds = [order[i : i + 3] for i in range(0, 24, 3)]
    assert all({c.to_json() for c in arms} == {c.to_json() for c in (BASELINE, FAST, OTHER)} for arms in rounds)
    # Each drawn order is followed by its reverse, so whoever was first is last next time.
    assert all(first == second[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert len(Counter(arms[0].to_json() for arms in rounds)) > 1


def test_the_simpler_of_two_that_cannot_be_told_apart_wins():
    outcome = run_finals([FAST_AND_MORE, FAST], BASELINE, launcher(Machine(noise=0.02)), rounds=8, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST


def test_the_faster_wins_when_it_is_clearly_faster():
    def speed(config: TrainConfig) -> float:
        return 1.5 if config.num_workers else (1.3 if config.precision == "bf16" else 1.0)

    outcome = run_finals([FAST_AND_MORE, FAST], BASELINE, launcher(Machine(speed=speed)), rounds=8, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST_AND_MORE


def test_a_candidate_that_fails_once_is_out_and_the_others_go_on():
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config == OTHER else TrialStatus.COMPLETED

    outcome = run_finals([OTHER, FAST], BASELINE, launcher(Machine(fate=fate)), rounds=6, seed=0)
    assert outcome.candidates[0].failure == "crashed: planted"
    assert outcome.winner is not None
    assert outcome.winner.config == FAST


def test_an_unfinished_round_does_not_count():
    machine = Machine()
    launch = launcher(machine)
    outcome = run_finals([FAST], BASELINE, lambda c: launch(c) if len(machine.specs) < 7 else None, rounds=6, seed=0)
    assert len(outcome.baseline.rates) == len(outcome.candidates[0].rates) == 3


def test_one_round_proves_nothing():
    outcome = run_finals([FAST], BASELINE, launcher(Machine(noise=0)), rounds=1, seed=0)
    assert outcome.winner is None
    assert outcome.candidates[0].ratio is None


def sure(one: Finalist) -> float:
    """Return the low end at the risk of a false claim."""
    return one.speed.low_at(one.share * FALSE_RISK)


def alternate(mean: float, half: float, pairs: int) -> list[float]:
    """Return log ratios of a given mean that lie half a spread above and below it by turns."""
    return [mean + half * (-1) ** number for number in range(pairs)]


@pytest.mark.parametrize(
    ("log_ratios", "outcome"),
    [
        (alternate(0.05, 0.01, 8), "proven"),
        (alternate(0.40, 0.15, 8), "proven"),
        (alternate(0.0, 0.005, 8), "no gain"),
        (alternate(-0.30, 0.05, 8), "no gain"),
        (alternate(0.005, 0.001, 8), "no gain"),  # a gain, and too small to be one
        (alternate(0.0, 0.05, 8), "unclear"),
        (alternate(0.05, 0.10, 8), "unclear"),
        (alternate(0.0095, 0.001, 8), "unclear"),
    ],
)
def test_the_outcome_is_where_the_interval_lies(log_ratios, outcome):
    finals = play_finals(log_ratios)
    assert finals.candidates[0].log_ratios == pytest.approx(log_ratios)
    assert finals.candidates[0].outcome == outcome
    assert (finals.winner is not None) == (outcome == "proven")


def test_the_low_end_is_the_one_sided_99_percent_bound():
    log_ratios = alternate(0.05, 0.01, 8)
    ratio = play_finals(log_ratios).candidates[0].ratio
    assert ratio is not None
    error = statistics.stdev(log_ratios) / math.sqrt(8)
    assert ratio.low == pytest.approx(math.exp(0.05 - student_t_quantile(1 - CLAIM_RISK, 7) * error))
    assert ratio.estimate == pytest.approx(math.exp(0.05))


def test_a_gain_that_is_not_sure_to_be_one_at_all_is_not_claimed():
    # Six pairs: the 99 % end is 1.013, the 99.9 % end below 1.
    loose = play_finals(alternate(0.08, 0.0447, 6)).candidates[0]
    assert loose.ratio is not None
    assert loose.ratio.low > THRESHOLD
    assert sure(loose) < 1.0
    assert loose.outcome == "unclear"
    tight = play_finals(alternate(0.08, 0.030, 6)).candidates[0]
    assert sure(tight) > 1.0
    assert tight.outcome == "proven"
    error = 0.0447 * math.sqrt(6 / 5) / math.sqrt(6)
    assert sure(loose) == pytest.approx(math.exp(0.08 - student_t_quantile(1 - FALSE_RISK, 5) * error))


def test_two_candidates_share_both_risks():
    one = play_finals(alternate(0.08, 0.02, 6)).candidates[0]
    two = play_finals(alternate(0.08, 0.02, 6), alternate(0.0, 0.02, 6)).candidates[0]
    assert one.ratio is not None
    assert two.ratio is not None
    assert two.ratio.low < one.ratio.low
    error = 0.02 * math.sqrt(6 / 5) / math.sqrt(6)
    assert sure(two) == pytest.approx(math.exp(0.08 - student_t_quantile(1 - FALSE_RISK / 2, 5) * error))


def test_what_a_few_outliers_decide_is_unclear():
    # Five pairs of 24 are far off: the interval clears the threshold, the median of the pairwise means is outside.
    driven = play_finals([0.25] * 5 + alternate(0.05, 0.001, 19)).candidates[0]
    assert driven.ratio is not None
    assert driven.ratio.low > THRESHOLD
    assert sure(driven) > 1.0
    assert driven.outcome == "unclear"
    assert play_finals(alternate(0.05, 0.001, 19)).candidates[0].outcome == "proven"


def test_hopeless_finals_end_at_half_and_claim_nothing():
    finals = play_finals(alternate(-0.10, 0.02, 10), terms=Terms(pair_sd=0.03))
    assert finals.futile
    assert finals.winner is None
    assert len(finals.baseline.rates) == len(finals.candidates[0].rates) == 5


@pytest.mark.parametrize("mean", [0.03, 0.05, 0.4])
def test_promising_finals_are_not_stopped_and_never_won_early(mean):
    finals = play_finals(alternate(mean, 0.02, 10), terms=Terms(pair_sd=0.03))
    assert not finals.futile
    assert len(finals.candidates[0].rates) == 10


def test_one_promising_candidate_keeps_the_others_in():
    finals = play_finals(alternate(-0.10, 0.02, 10), alternate(0.10, 0.02, 10), terms=Terms(pair_sd=0.03))
    assert not finals.futile
    assert [len(one.rates) for one in finals.candidates] == [10, 10]


@pytest.mark.parametrize(("rounds", "looked"), [(4, False), (5, False), (6, True), (7, True)])
def test_fewer_than_three_pairs_are_no_reason_to_give_up(rounds, looked):
    finals = play_finals(alternate(-0.5, 0.02, rounds), terms=Terms(pair_sd=0.03))
    assert finals.futile == looked


def test_without_a_pilot_there_is_no_look():
    assert not play_finals(alternate(-0.5, 0.02, 10)).futile


def test_the_look_at_half_time_only_takes_claims_away():
    rng = random.Random(3)
    without = with_look = 0
    for _ in range(150):
        log_ratios = [rng.gauss(0.045, 0.042) for _ in range(10)]
        claimed = play_finals(log_ratios).winner is not None
        looked = play_finals(log_ratios, terms=Terms(pair_sd=0.042)).winner is not None
        assert claimed or not looked
        without, with_look = without + claimed, with_look + looked
    assert 20 < with_look <= without
    assert with_look > 0.9 * without


def test_the_look_at_half_time_counts_what_compiling_costs():
    finals = play_finals(alternate(0.10, 0.02, 10), terms=Terms(pair_sd=0.03), cost=0.30)
    assert finals.candidates[0].outcome == "no gain"
    assert finals.futile


def test_compiling_is_taken_off_every_pair():
    log_ratios = alternate(0.10, 0.02, 8)
    one = play_finals(log_ratios, cost=0.04).candidates[0]
    assert one.log_ratios == pytest.approx([ratio - 0.04 for ratio in log_ratios])
    assert one.outcome == "proven"
    assert play_finals(log_ratios, cost=0.10).candidates[0].outcome == "unclear"
    assert play_finals(log_ratios, cost=0.20).candidates[0].outcome == "no gain"


def test_a_look_that_leaves_little_hope_for_those_to_follow_is_futile() -> None:
    log_ratios = [0.30, 0.10, 0.30, -0.20, -0.25, -0.25]
    assert not play_finals(log_ratios, terms=Terms(pair_sd=0.2)).futile
    finals = play_finals(log_ratios, terms=Terms(pair_sd=0.2, to_follow=6))
    assert finals.futile
    assert len(finals.candidates[0].rates) == 6


def test_a_look_claims_at_its_share_of_both_risks() -> None:
    log_ratios = alternate(0.08, 0.02, 8)
    finals = play_finals(log_ratios, terms=Terms(share=0.5))
    assert finals.risk_share == 0.5
    error = statistics.stdev(log_ratios) / math.sqrt(8)
    ratio = finals.candidates[0].ratio
    assert ratio is not None
    assert ratio.low == pytest.approx(math.exp(0.08 - student_t_quantile(1 - CLAIM_RISK / 2, 7) * error))
    assert sure(finals.candidates[0]) == pytest.approx(
        math.exp(0.08 - student_t_quantile(1 - FALSE_RISK / 2, 7) * error)
    )
    assert smallest_provable(0.04, 8, risk_share=0.5) > smallest_provable(0.04, 8)


def test_pairs_of_earlier_looks_count() -> None:
    weak, strong = [0.30, 0.05, 0.25], [0.28, 0.30, 0.27]
    before = play_finals(weak)
    assert before.winner is None
    kept = [Pair(*both) for both in zip(before.candidates[0].results, before.baseline.results, strict=True)]
    heard: list[Pair] = []
    after = play_finals(strong, terms=Terms(earlier=kept, heard=heard.append, pilot=Pilot(0.08, 6.0)))
    assert after.candidates[0].log_ratios == pytest.approx([*weak, *strong])
    assert len(heard) == 3
    assert after.winner is not None


def test_what_the_search_knew_of_the_noise_lets_few_pairs_prove_a_large_gain() -> None:
    # Read at 3.0, 4.6 and 4.5 times: two degrees of freedom alone ask the impossible of them.
    log_ratios = [math.log(ratio) for ratio in (3.0, 4.6, 4.5)]
    assert play_finals(log_ratios).candidates[0].outcome == "unclear"
    known = play_finals(log_ratios, terms=Terms(share=0.6, pilot=Pilot(0.25, 2.5)))
    assert known.candidates[0].outcome == "proven"
    assert known.candidates[0].ratio is not None
    assert 1.5 < known.candidates[0].ratio.low < 3.0


@pytest.mark.parametrize("pairs", range(1, LEAST_ROUNDS + 1))
def test_the_interval_of_too_few_pairs_is_not_known(pairs: int) -> None:
    one = play_finals([0.3, 0.2, 0.1][:pairs]).candidates[0]
    assert (one.ratio is None) == (pairs < LEAST_ROUNDS)
    assert one.gain == pytest.approx(statistics.fmean([0.3, 0.2, 0.1][:pairs]))


@pytest.mark.parametrize("pair_sd", [0.01, 0.04, 0.14])
@pytest.mark.parametrize("pairs", [4, 8, 24])
def test_what_can_be_proven_is_what_the_rounds_were_planned_for(pair_sd, pairs):
    smallest = smallest_provable(pair_sd, pairs)
    power, sure, claimed = (student_t_quantile(p, pairs - 1) for p in (0.80, 1 - FALSE_RISK, 1 - CLAIM_RISK))
    error = pair_sd / math.sqrt(pairs)
    assert smallest == pytest.approx(max(1.01 * math.exp((claimed + power) * error), math.exp((sure + power) * error)))
    assert rounds_needed(pair_sd, math.log(smallest) + 1e-9, fewest=2, most=1000) == pairs
    assert rounds_needed(pair_sd, math.log(smallest) - 1e-4, fewest=2, most=1000) > pairs


def test_rounds_are_kept_within_what_is_asked_and_allowed():
    assert rounds_needed(0.01, 0.5, fewest=6, most=24) == 6
    assert rounds_needed(0.2, 0.02, fewest=6, most=24) == 24
    assert rounds_needed(0.01, 0.5, fewest=6, most=3) == 3
    assert rounds_needed(0.03, math.log(THRESHOLD), fewest=6, most=24) == 24


def test_a_gain_of_the_smallest_provable_size_is_proven_four_times_in_five():
    rng = random.Random(11)
    mean = math.log(smallest_provable(0.04, 8))
    claims = sum(play_finals([rng.gauss(mean, 0.04) for _ in range(8)]).winner is not None for _ in range(300))
    assert 0.70 < claims / 300 < 0.92


@pytest.mark.parametrize("pilot", [Pilot(), Pilot(0.07, 4.0)])
def test_identical_arms_are_claimed_faster_in_hardly_any_search(pilot: Pilot) -> None:
    equal = random.Random(1)
    claims = 0
    for seed in range(500):
        machine = Machine(blocks=1, speed=lambda _c: 1.0, noise=equal.choice([0.01, 0.03, 0.08]), seed=seed)
        terms = Terms(pilot=pilot)
        outcome = run_finals([FAST, OTHER], BASELINE, launcher(machine), rounds=6, terms=terms, seed=seed)
        claims += outcome.winner is not None
    assert claims <= 2
