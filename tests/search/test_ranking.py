"""Where configs stand: anchored scores, jumps of the machine, noise, and how little luck the best may keep."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from simulated import BASE_RATE, BASELINE, make_judged, make_placebos, number_of

from autotune.records import TrainConfig
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import ANCHOR_SPACING, PRIOR_DEGREES, PRIOR_SD, Ranking, compile_cost

ONE, TWO, THREE, *_ = PLACEBOS = make_placebos(40)
FILLERS = make_placebos(140)[40:]
LOG_RATE = math.log(BASE_RATE)

Launches = list[tuple[TrainConfig, float | None]]


def rank(launches: Launches, *, planned: float | None = None) -> Ranking:
    judged = [make_judged(config, value) for config, value in launches]
    return Ranking(judged, BASELINE, planned_samples=planned)


def anchors_between(values: list[float], between: int = ANCHOR_SPACING, level: float | None = None) -> Launches:
    """Return anchors of given values with launches of other configs between each two, at the level of the later."""
    launches: Launches = [(BASELINE, values[0])]
    fresh = iter(FILLERS)
    for value in values[1:]:
        launches += [(next(fresh), value if level is None else level) for _ in range(between)]
        launches.append((BASELINE, value))
    return launches


def test_nothing_is_ranked_before_the_baseline_was_launched():
    ranking = rank([(ONE, 0.3)])
    assert ranking.entries == ()
    assert ranking.incumbent is ranking.contender is ranking.leader is None
    assert ranking.score_of(make_judged(ONE, 0.3)) is None
    with pytest.raises(ValueError, match="the baseline was never launched"):
        ranking.baseline_level.level_now()


def test_a_single_anchor_is_the_level_everywhere():
    ranking = rank([(ONE, 0.3), (BASELINE, 0.1), (TWO, 0.2)])
    for place in (0, 1, 2, 50):
        assert ranking.baseline_level.level(place) == pytest.approx((LOG_RATE + 0.1, 1.0))


def test_the_level_is_the_mean_of_the_anchors_nearer_ones_weighing_more():
    # Anchors at places 0, 4 and 6 with 0.00, 0.03 and 0.02; seen from place 5 they are 5, 1 and 1 launches away.
    launches: Launches = [(BASELINE, 0.0), *((one, 0.0) for one in PLACEBOS[:3]), (BASELINE, 0.03), (PLACEBOS[3], 0.0)]
    ranking = rank([*launches, (BASELINE, 0.02)])
    far, near = math.exp(-5 / 8), math.exp(-1 / 8)
    mean = (far * 0.0 + near * 0.03 + near * 0.02) / (far + 2 * near)
    worth = (far + 2 * near) ** 2 / (far**2 + 2 * near**2)
    assert ranking.baseline_level.level(5) == pytest.approx((LOG_RATE + mean, worth))
    assert 2 < worth < 3
    score = next(one for one in ranking.entries if one.config == PLACEBOS[3]).score
    assert score == pytest.approx(-mean)


def test_the_level_now_is_that_of_the_next_place():
    ranking = rank([(BASELINE, 0.0), (ONE, 0.1), (BASELINE, 0.02), (TWO, 0.1)])
    assert ranking.baseline_level.level_now() == ranking.baseline_level.level(4)


def test_the_level_stays_on_one_side_of_a_jump():
    ranking = rank(anchors_between([0.0, 0.01, 0.0, -0.5, -0.51, -0.5]))
    assert ranking.baseline_level.jumps == 1
    spacing = ANCHOR_SPACING + 1
    for place in (0, spacing, 2 * spacing, spacing + 3):
        assert ranking.baseline_level.level(place)[0] == pytest.approx(LOG_RATE, abs=0.01)
    for place in (3 * spacing, 5 * spacing, 4 * spacing + 3, 6 * spacing):
        assert ranking.baseline_level.level(place)[0] == pytest.approx(LOG_RATE - 0.5, abs=0.01)


def test_what_was_launched_around_a_jump_is_shaky_and_nothing_else():
    launches = anchors_between([0.0, 0.01, 0.0, -0.5, -0.51, -0.5])
    shaky = {one.key: one.across_change for one in rank(launches).entries}
    spacing = ANCHOR_SPACING + 1
    for place, (config, _) in enumerate(launches):
        if config != BASELINE:
            assert shaky[config.key] == (2 * spacing < place < 3 * spacing,)


@pytest.mark.parametrize("sd", [0.005, 0.02, 0.1])
def test_noise_is_hardly_ever_taken_for_a_jump(sd):
    rng = random.Random(4)
    found = sum(rank(anchors_between([rng.gauss(0, sd) for _ in range(9)], 1)).baseline_level.jumps for _ in range(200))
    assert found / (200 * 8) < 0.02


@pytest.mark.parametrize("place", [1, 4, 6])
def test_a_jump_much_larger_than_the_noise_is_found(place):
    rng = random.Random(5)
    missed = 0
    for _ in range(50):
        values = [rng.gauss(0, 0.02) - (0.35 if index >= place else 0.0) for index in range(8)]
        missed += rank(anchors_between(values, 1)).baseline_level.jumps != 1
    assert missed <= 2


def test_a_last_anchor_far_off_asks_for_another_one():
    values = [0.0, 0.01, -0.01, 0.0]
    assert not rank(anchors_between(values)).baseline_level.may_have_changed
    suspect = rank(anchors_between([*values, -0.4]))
    assert (suspect.baseline_level.may_have_changed, suspect.baseline_level.jumps) == (True, 0)
    confirmed = rank(anchors_between([*values, -0.4, -0.41]))
    assert (confirmed.baseline_level.may_have_changed, confirmed.baseline_level.jumps) == (False, 1)


def test_one_slow_launch_of_the_baseline_is_noise_and_no_change_of_the_machine():
    ranking = rank(anchors_between([0.0, 0.01, -0.01, 0.0, -0.5, 0.01, 0.0, -0.01]))
    assert ranking.baseline_level.jumps == 0
    assert ranking.noise[0] > 0.1


def test_a_slowdown_and_the_recovery_from_it_are_both_found():
    values = [0.0, 0.01, -0.01, -0.36, -0.35, 0.0, 0.01, -0.01]
    assert rank(anchors_between(values)).baseline_level.jumps == 2


def test_a_jump_of_the_machine_is_not_launch_noise():
    ranking = rank(anchors_between([0.0, 0.01, 0.0, -0.5, -0.51, -0.5]))
    assert ranking.baseline_level.jumps == 1
    assert ranking.noise[0] < 0.04


def test_after_a_jump_of_the_machine_the_fastest_leads_still():
    simple = BASELINE.replace(precision="bf16")
    rich = simple.replace(num_workers=2)
    launches = anchors_between([0.0, 0.0, 0.0, -0.5, -0.5, -0.5])
    best = rank([*launches, *[(rich, -0.2), (simple, -0.3)] * 3]).leader
    assert best is not None
    assert best.config == rich


def test_a_slow_drift_of_the_machine_does_not_change_who_is_best():
    # The machine loses 40 % over the search. The truly best config comes last, a poor one first.
    rng = random.Random(6)
    true = [0.0, *(-0.10 + 0.01 * number for number in range(32))]
    launches: list[tuple[TrainConfig, float]] = []
    for number, config in enumerate(PLACEBOS[:32]):
        for one in [BASELINE, config] if number % ANCHOR_SPACING == 0 else [config]:
            drift = -0.5 * len(launches) / 36
            launches.append((one, true[number_of(one)] + drift + rng.gauss(0, 0.005)))
    launches.append((BASELINE, -0.5))
    raw = {number_of(config): value for config, value in launches if config != BASELINE}
    ranking = rank([*launches])
    scores = {number_of(one.config): one.score for one in ranking.entries if one.config != BASELINE}
    assert max(raw, key=lambda number: raw[number]) <= 16  # by throughput alone an early, poor one would win
    assert max(scores, key=lambda number: scores[number]) >= 28
    assert ranking.baseline_level.jumps == 0
    anchored = statistics.fmean((score - true[number]) ** 2 for number, score in scores.items())
    naive = statistics.fmean((value - true[number]) ** 2 for number, value in raw.items())
    assert anchored < 0.05 * naive


def test_noise_is_the_guess_before_anything_is_repeated():
    assert rank([(BASELINE, 0.0), (ONE, 0.4)]).noise == pytest.approx((PRIOR_SD, PRIOR_DEGREES))


def test_noise_comes_from_anchors_in_a_row_so_that_drift_is_none():
    values = [0.00, -0.10, -0.20, -0.30]
    ranking = rank(anchors_between(values, 1))
    squares = PRIOR_DEGREES * PRIOR_SD**2 + 3 * 0.10**2 / 2
    assert ranking.noise == pytest.approx((math.sqrt(squares / 5), 5.0))
    assert ranking.noise[0] < statistics.stdev(values)


def test_one_launch_of_the_baseline_tells_nothing_of_the_noise():
    ranking = rank([(BASELINE, 0.0)])
    assert ranking.noise == pytest.approx((PRIOR_SD, PRIOR_DEGREES))
    assert ranking.baseline_level.values == pytest.approx((LOG_RATE,))


def test_repeats_of_any_config_tell_the_noise():
    ranking = rank([(BASELINE, 0.0), (ONE, 0.1), (ONE, 0.3), (ONE, 0.2), (TWO, 0.5)])
    squares = PRIOR_DEGREES * PRIOR_SD**2 + 0.1**2 + 0.1**2
    assert ranking.noise == pytest.approx((math.sqrt(squares / 4), 4.0))


@pytest.mark.parametrize("sd", [0.01, 0.03, 0.1])
def test_the_noise_estimate_finds_the_true_one(sd):
    rng = random.Random(7)
    found = []
    for _ in range(30):
        launches: Launches = []
        for config in PLACEBOS[:30]:
            launches += [(BASELINE, rng.gauss(0, sd))] if len(launches) % 9 == 0 else []
            launches += [(config, rng.gauss(0, sd)), (config, rng.gauss(0, sd))]
        found.append(rank(launches).noise[0])
    assert statistics.median(found) == pytest.approx(sd, rel=0.25)


def test_block_noise_is_that_within_launches_only():
    ratios = (0.1, -0.1)
    judged = [make_judged(config, value, block_ratios=ratios) for config, value in ((BASELINE, 0.0), (ONE, 5.0))]
    assert Ranking(judged, BASELINE).block_sd == pytest.approx(math.sqrt(2 * 0.1**2))
    assert rank([(BASELINE, 0.0)]).block_sd == pytest.approx(0.0, abs=1e-9)
    assert rank([(BASELINE, None)]).block_sd == pytest.approx(0.0, abs=1e-9)


def test_the_baseline_is_the_incumbent_until_another_was_launched_twice():
    once: Launches = [(BASELINE, 0.0), (ONE, 0.4)]
    incumbent, contender = rank(once).incumbent, rank(once).contender
    assert incumbent is not None
    assert incumbent.config == BASELINE
    assert contender is not None
    assert contender.config == ONE
    twice = rank([*once, (ONE, 0.3)])
    assert twice.incumbent is not None
    assert twice.incumbent.config == ONE
    assert twice.incumbent.score == pytest.approx(0.35)
    assert twice.contender is None


def test_a_challenger_has_to_look_better_than_the_incumbent():
    launches: Launches = [(BASELINE, 0.0), (ONE, 0.4), (ONE, 0.4), (TWO, 0.39)]
    assert rank(launches).contender is None
    better = rank([*launches, (THREE, 0.41)]).contender
    assert better is not None
    assert better.config == THREE
    assert rank([(BASELINE, 0.0), (ONE, -0.01)]).contender is None


def test_a_challenger_that_was_lucky_once_does_not_become_the_incumbent():
    ranking = rank([(BASELINE, 0.0), (ONE, 0.2), (ONE, 0.2), (TWO, 0.3), (TWO, 0.0)])
    assert ranking.incumbent is not None
    assert ranking.incumbent.config == ONE
    assert ranking.contender is None


def test_a_shaky_launch_makes_no_incumbent():
    launches = anchors_between([0.0, 0.0, 0.0, -0.5, -0.5, -0.5])
    spacing = ANCHOR_SPACING + 1
    launches[2 * spacing + 2] = launches[2 * spacing + 4] = (ONE, 0.5)
    ranking = rank(launches)
    entry = ranking.find(ONE)
    assert entry is not None
    assert entry.valid_launches == 0
    assert ranking.incumbent is not None
    assert ranking.incumbent.config == BASELINE


def test_sound_launches_outvote_shaky_ones():
    launches = anchors_between([0.0, 0.0, 0.0, -0.5, -0.5, -0.5])
    spacing = ANCHOR_SPACING + 1
    launches[2 * spacing + 2] = (ONE, 0.5)
    launches[4 * spacing + 2] = (ONE, -0.4)
    entry = rank(launches).find(ONE)
    assert entry is not None
    assert entry.across_change == (True, False)
    assert entry.score == pytest.approx(0.1, abs=0.001)


def test_the_best_of_many_equal_configs_is_shrunk_to_almost_nothing():
    rng = random.Random(8)
    raw, shrunk = [], []
    for _ in range(40):
        launches: Launches = []
        for number, config in enumerate(PLACEBOS):
            launches += [(BASELINE, rng.gauss(0, 0.03))] if number % ANCHOR_SPACING == 0 else []
            launches.append((config, rng.gauss(0, 0.03)))
        ranking = rank(launches)
        raw.append(max(one.score for one in ranking.entries))
        shrunk.append(max(map(ranking.shrunk_score, ranking.entries)))
    assert statistics.fmean(raw) > 0.06
    # What is left is the luck of the baseline's own launches, which all configs share.
    assert statistics.fmean(shrunk) < 0.025


def test_the_best_of_configs_that_truly_differ_keeps_what_is_its_own():
    rng = random.Random(9)
    errors, lucky = [], []
    for _ in range(60):
        true = [0.0, *(rng.gauss(0, 0.10) for _ in PLACEBOS)]
        launches: Launches = [(BASELINE, 0.0)] * 3
        launches += [(config, true[number_of(config)] + rng.gauss(0, 0.05)) for config in [*PLACEBOS, *PLACEBOS[:5]]]
        ranking = rank(launches)
        best = max(ranking.entries, key=lambda one: one.score)
        errors.append(ranking.shrunk_score(best) - true[number_of(best.config)])
        lucky.append(best.score - true[number_of(best.config)])
    assert statistics.fmean(lucky) > 0.03
    assert abs(statistics.fmean(errors)) < 0.5 * statistics.fmean(lucky)


def test_the_baseline_itself_is_worth_exactly_one():
    ranking = rank([(BASELINE, 0.3), (ONE, 0.9), (BASELINE, 0.1), (TWO, -0.9)])
    base = ranking.find(BASELINE)
    assert base is not None
    assert (base.score, ranking.shrunk_score(base)) == (0.0, 0.0)


@pytest.mark.parametrize("order", [(True, False), (False, True), (False, False)])
def test_a_config_that_broke_a_limit_once_is_infeasible(order):
    judged = [make_judged(BASELINE, 0.0), *(make_judged(ONE, 0.5, feasible=feasible) for feasible in order)]
    ranking = Ranking(judged, BASELINE)
    assert ranking.find(ONE) is None
    assert ranking.leader == ranking.find(BASELINE)


def test_a_config_that_crashed_once_is_infeasible():
    assert rank([(BASELINE, 0.0), (ONE, 0.5), (ONE, None)]).find(ONE) is None
    assert rank([(BASELINE, 0.0), (ONE, None)]).find(ONE) is None


def test_compiling_costs_its_time_at_the_rate_of_the_run():
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.5, compile_seconds=30.0)]
    rate = BASE_RATE * math.exp(0.5)
    for planned in (1e4, 1e5, 1e8):
        entry = Ranking(judged, BASELINE, planned_samples=planned).find(ONE)
        assert entry is not None
        assert entry.score == pytest.approx(0.5 - math.log1p(30.0 * rate / planned))
        # The same as comparing the times of the whole run.
        whole = (planned / BASE_RATE) / (planned / rate + 30.0)
        assert math.exp(entry.score) == pytest.approx(whole)
    free = Ranking(judged, BASELINE).find(ONE)
    assert free is not None
    assert free.score == pytest.approx(0.5)


def test_what_the_study_is_told_is_what_the_ranking_says():
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.5, compile_seconds=30.0)]
    ranking = Ranking(judged, BASELINE, planned_samples=1e5)
    entry = ranking.find(ONE)
    assert entry is not None
    assert ranking.score_of(judged[1]) == pytest.approx(entry.score)
    assert ranking.score_of(judged[0]) == pytest.approx(0.0)


def test_a_baseline_that_compiles_too_takes_nothing_from_the_others():
    judged = [make_judged(BASELINE, 0.0, compile_seconds=30.0), make_judged(ONE, 0.03, compile_seconds=30.0)]
    entry = Ranking(judged, BASELINE, planned_samples=1e6).find(ONE)
    assert entry is not None
    assert entry.score == pytest.approx(0.03, abs=0.002)


def test_only_the_first_compilation_counts():
    launches = [make_judged(ONE, 0.0, compile_seconds=seconds).result for seconds in (30.0, 2.0, 0.0)]
    assert compile_cost(launches, 0.0, 1e5) == pytest.approx(math.log1p(30.0 * BASE_RATE / 1e5))
    assert compile_cost(launches[2:], 30.0, 1e5) == pytest.approx(math.log1p(30.0 * BASE_RATE / 1e5))
    assert compile_cost([], 0.0, 1e5) == 0.0


def test_code_that_another_config_compiled_is_not_free():
    compiled = BASELINE.replace(compile_mode="default")
    also = compiled.replace(host_allocator="tcmalloc")
    judged = [make_judged(BASELINE, 0.0), make_judged(compiled, 0.3, compile_seconds=67.0)]
    first = Ranking(judged, BASELINE, planned_samples=1e5)
    judged.append(make_judged(also, 0.3, compile_seconds=4.0))
    both = Ranking(judged, BASELINE, planned_samples=1e5, before=first)
    one, other = both.find(compiled), both.find(also)
    assert one is not None
    assert other is not None
    assert one.speed == pytest.approx(other.speed, abs=1e-9)
    assert both.speed_of(judged[2]) == pytest.approx(other.speed, abs=1e-9)


def test_a_short_run_prefers_what_needs_no_compilation():
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.5, compile_seconds=60.0), make_judged(TWO, 0.2)]

    def find_best(planned: float) -> TrainConfig:
        return max(Ranking(judged, BASELINE, planned_samples=planned).entries, key=lambda one: one.score).config

    assert find_best(1e5) == TWO
    assert find_best(1e7) == ONE


def settled(launches: Launches, repeats: int) -> Ranking:
    """Return a ranking in which each launch is repeated, so that the noise is well known to be small."""
    return rank([one for one in [(BASELINE, 0.0), *launches] for _ in range(repeats)])


def test_a_change_has_to_be_worth_a_hundredth():
    simple = BASELINE.replace(precision="bf16")
    rich = simple.replace(num_workers=2, prefetch_factor=4)
    for ahead, leads in ((0.015, simple), (0.10, rich)):
        leader = settled([(rich, 0.90 + ahead), (simple, 0.90)], 8).leader
        assert leader is not None
        assert leader.config == leads


def test_what_all_launches_say_of_a_config_decides_who_leads():
    workers, bf16 = BASELINE.replace(num_workers=1), BASELINE.replace(precision="bf16")
    judged = [make_judged(BASELINE, 0.0), make_judged(workers, 0.30), make_judged(bf16, 0.28)]
    by_readings = Ranking(judged, BASELINE).leader
    by_all = Ranking(judged, BASELINE, estimates={workers.key: 0.10, bf16.key: 0.25}).leader
    assert by_readings is not None
    assert by_all is not None
    assert (by_readings.config, by_all.config) == (workers, bf16)


def test_where_nothing_stands_out_the_baseline_leads():
    best = rank([(BASELINE, 0.0), (ONE, 0.02), (TWO, 0.01)]).leader
    assert best is not None
    assert best.config == BASELINE


def test_the_score_of_a_launch_is_found_by_the_launch_itself():
    judged: list[Judged] = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.2), make_judged(ONE, 0.4)]
    ranking = Ranking([*judged, make_judged(TWO, None)], BASELINE)
    assert [ranking.score_of(one) for one in judged] == pytest.approx([0.0, 0.2, 0.4])
    assert ranking.score_of(make_judged(TWO, None)) is None


@pytest.mark.parametrize("seed", range(5))
def test_launch_by_launch_it_is_the_ranking_of_all_of_them(seed: int) -> None:
    """What one takes over from the ranking before is as if it were made anew, also where that was never looked at."""
    rng = random.Random(seed)
    configs = [BASELINE, *PLACEBOS[:6]]
    launches = [
        make_judged(rng.choice(configs), rng.choice([None, *(rng.gauss(0, 0.1) for _ in range(9))])) for _ in range(60)
    ]
    ranking = None
    for count in range(len(launches) + 1):
        ranking = Ranking(launches[:count], BASELINE, planned_samples=1e6, before=ranking)
        if rng.random() < 0.7:
            anew = Ranking(launches[:count], BASELINE, planned_samples=1e6)
            assert ranking.entries == anew.entries
            assert [*map(ranking.shrunk_score, ranking.entries)] == [*map(anew.shrunk_score, anew.entries)]


def estimate(launched: list[tuple[TrainConfig, float, float]]) -> Ranking:
    """Return a ranking of configs, each with what it read and what a model makes of it."""
    judged = [make_judged(BASELINE, 0.0) for _ in range(6)] + [make_judged(one, read) for one, read, _ in launched]
    return Ranking(judged, BASELINE, estimates={one.key: told for one, _, told in launched})


def test_where_changes_do_not_add_up_a_config_is_what_it_read():
    # What a sum makes of each is 0.3 off, and launches are not.
    others = [(one, 0.1 * (-1) ** place, 0.1 * (-1) ** place + 0.3) for place, one in enumerate(PLACEBOS[2:10])]
    leader = estimate([(ONE, 0.6, 0.3), (TWO, 0.4, 0.45), *others]).leader
    assert leader is not None
    assert leader.config == ONE


def test_one_lucky_launch_is_not_believed_where_all_others_add_up():
    others = [(one, 0.1, 0.1 + 0.01 * (-1) ** place) for place, one in enumerate(PLACEBOS[2:10])]
    ranking = estimate([(ONE, 0.6, 0.3), (TWO, 0.4, 0.41), *others])
    assert ranking.leader is not None
    assert ranking.leader.config == TWO
    lucky = ranking.find(ONE)
    assert lucky is not None
    assert ranking.estimate_speed(lucky) == pytest.approx(0.3, abs=0.01)
