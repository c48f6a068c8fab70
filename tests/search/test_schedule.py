"""What is launched again, what it races against, and how whole searches spend their launches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from simulated import BASELINE, Machine, Search, all_equal, explore_placebos, make_judged, make_placebos, number_of

from autotune.measure.student_t import student_t_quantile
from autotune.records import TrainConfig
from autotune.records.measurement import Interference
from autotune.records.trial import Rival
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.baseline_level import ANCHOR_SPACING
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Ranking
from autotune.search.scores.schedule import Schedule

ONE, TWO, THREE, *REST = PLACEBOS = make_placebos(40)


def schedule(judged: list[Judged]) -> Schedule:
    return Schedule(judged, BASELINE, Ranking(judged, BASELINE))


def slower(count: int, *, elapsed: float = 1.0, canary: float | None = None) -> list[Judged]:
    """Return launches of new configs that are no better than the baseline."""
    return [make_judged(config, -0.2, elapsed=elapsed, canary=canary) for config in REST[:count]]


def test_a_search_begins_with_the_baseline():
    assert schedule([]).find_due() == BASELINE


def test_right_after_an_anchor_something_new_is_tried():
    assert schedule([make_judged(BASELINE, 0.0)]).find_due() is None


@pytest.mark.parametrize("between", range(ANCHOR_SPACING + 3))
def test_the_baseline_is_due_after_eight_launches(between):
    # A repeat every fourth launch is something else; here nothing is worth one.
    due = schedule([make_judged(BASELINE, 0.0), *slower(between)]).find_due()
    assert (due == BASELINE) == (between >= ANCHOR_SPACING)


@pytest.mark.parametrize(
    ("count", "each", "is_due"), [(1, 119.0, False), (1, 120.0, True), (3, 39.0, False), (3, 41.0, True)]
)
def test_the_baseline_is_due_after_two_minutes(count, each, is_due):
    assert USUAL_POLICY.anchor_seconds == 120.0
    due = schedule([make_judged(BASELINE, 0.0, elapsed=500.0), *slower(count, elapsed=each)]).find_due()
    assert (due == BASELINE) == is_due


def test_launches_slower_than_two_minutes_still_leave_time_for_something_new():
    assert schedule([make_judged(BASELINE, 0.0, elapsed=500.0)]).find_due() is None


@pytest.mark.parametrize(
    ("between", "canary", "is_due"),
    [(2, 1.5, False), (3, 1.5, True), (3, 1.14, False), (3, 1.16, True), (3, 1 / 1.16, True), (3, None, False)],
)
def test_a_canary_that_moved_calls_for_the_baseline(between, canary, is_due):
    judged = [make_judged(BASELINE, 0.0, canary=1.0), *slower(between - 1, canary=1.0)]
    judged.append(make_judged(ONE, -0.2, elapsed=1.0, canary=canary))
    assert (schedule(judged).find_due() == BASELINE) == is_due


def busy(judged: Judged, share: float) -> Judged:
    """Return a launch during which others used some of the CPUs."""
    measurement = judged.result.measurement
    assert measurement is not None
    blocks = tuple(block.replace(interference=Interference(foreign_cpu_fraction=share)) for block in measurement.blocks)
    return replace(judged, result=judged.result.replace(measurement=measurement.replace(blocks=blocks)))


def test_a_baseline_that_others_disturbed_is_launched_once_more_and_is_no_anchor_beside_a_quiet_one():
    slow, quiet = busy(make_judged(BASELINE, -0.9), 0.3), busy(make_judged(BASELINE, 0.0), 0.05)
    assert schedule([slow]).find_due() == BASELINE
    assert schedule([slow, slow]).find_due() is None  # they never leave it alone
    assert schedule([slow, quiet]).find_due() is None
    assert schedule([quiet]).find_due() is None
    # What was launched beside the slow one is no faster for that.
    level = Ranking([slow, make_judged(ONE, 0.2), quiet, make_judged(TWO, 0.5)], BASELINE).baseline_level
    assert (len(level), level.level(1)[0]) == (1, pytest.approx(level.level(3)[0]))
    assert len(Ranking([slow, slow], BASELINE).baseline_level) == 2


@pytest.mark.parametrize("between", range(6))
def test_none_of_the_first_launches_is_of_what_is_known(between):
    """Anything new tells more; a session that goes on begins with the baseline, and is no further for it."""
    assert USUAL_POLICY.repeat_contender_after == 2
    own = make_judged(BASELINE, 0.0)
    for start in ([own], [own, own, own]):
        judged = [*start, make_judged(ONE, 0.05), *slower(between)]
        assert (schedule(judged).find_due() == ONE) == (between >= 4)
        assert schedule(judged).find_due(exhausted=True) == ONE


def test_the_baseline_comes_before_a_challenger():
    judged = [make_judged(BASELINE, 0.0), *slower(7), make_judged(ONE, 0.3)]
    assert schedule(judged).find_due() == BASELINE


def test_one_that_was_launched_twice_is_no_challenger_any_more():
    assert schedule([make_judged(BASELINE, 0.0), make_judged(ONE, 0.3), make_judged(ONE, 0.3)]).find_due() is None


def test_what_fails_is_never_launched_again():
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.3), make_judged(ONE, None)]
    assert schedule(judged).find_due() is None
    assert schedule(judged).find_due(exhausted=True) is None


def elites(*launches: int, since: int) -> list[Judged]:
    """Return a search with some winners of so many launches, and so many new configs since the last repeat."""
    judged = [make_judged(BASELINE, 0.0)]
    for config, count in zip(PLACEBOS, launches, strict=False):
        judged += [make_judged(config, 0.3 - 0.01 * number_of(config))] * count
    judged += [make_judged(BASELINE, 0.0)]
    return judged + slower(since)


def test_every_fourth_launch_is_of_the_best_five_with_the_fewest():
    assert schedule(elites(3, 2, 3, since=2)).find_due() is None
    assert schedule(elites(3, 2, 3, since=3)).find_due() == TWO
    assert schedule(elites(3, 3, 2, since=3)).find_due() == THREE


def test_an_elite_is_one_of_five_and_faster_than_the_baseline():
    assert schedule(elites(4, 4, 4, 4, 4, 1, since=3)).find_due() is None
    assert schedule([make_judged(BASELINE, 0.0)] * 2 + slower(5)).find_due(exhausted=True) is None


def test_an_elite_has_had_enough_after_four_launches():
    most = USUAL_POLICY.most_repeats
    assert schedule(elites(*[most] * 5, since=3)).find_due() is None
    assert schedule(elites(most, most - 1, since=3)).find_due() == TWO


@pytest.mark.parametrize(
    ("launches", "expected"),
    [((USUAL_POLICY.most_repeats, USUAL_POLICY.most_repeats + 1), ONE), ((USUAL_POLICY.last_repeats,) * 2, None)],
)
def test_where_nothing_new_is_left_what_the_noise_cannot_tell_apart_has_more(launches, expected):
    judged = [make_judged(BASELINE, 0.0)]
    for config, count in zip((ONE, TWO), launches, strict=True):
        judged += [make_judged(config, 0.3)] * count
    search = schedule([*judged, make_judged(BASELINE, 0.0), *slower(3)])
    assert search.find_due() is None
    assert search.find_due(exhausted=True) == expected


def test_what_is_clearly_behind_is_not_launched_again():
    judged = [make_judged(BASELINE, 0.0)]
    for config, value in ((ONE, 0.9), (TWO, 0.1)):
        judged += [make_judged(config, value)] * USUAL_POLICY.most_repeats
    assert schedule([*judged, make_judged(BASELINE, 0.0), *slower(3)]).find_due(exhausted=True) is None


def test_where_nothing_new_is_left_the_best_are_launched_at_once():
    assert schedule(elites(2, 3, since=0)).find_due() is None
    assert schedule(elites(2, 3, since=0)).find_due(exhausted=True) == ONE


def around_a_jump(config: TrainConfig, value: float) -> list[Judged]:
    """Return a search in which a config was launched between two anchors around a slowdown."""
    before = [judged for _ in range(3) for judged in (make_judged(BASELINE, 0.0), *slower(1))]
    after = [make_judged(BASELINE, -0.5), *slower(1), make_judged(BASELINE, -0.5)]
    return [*before, make_judged(BASELINE, 0.0), make_judged(config, value), *after]


def test_a_shaky_one_near_the_top_is_launched_again():
    judged = around_a_jump(ONE, 0.2)
    ranking = Ranking(judged, BASELINE)
    assert ranking.baseline_level.jumps == 1
    assert schedule(judged).find_due() == ONE


def make_rival(config: TrainConfig, *, luck: float = 0.0, score: float = 0.3, repeats: int = 3) -> Rival | None:
    judged = []
    for number in range(repeats):
        shift = luck * (-1) ** number
        judged += [make_judged(BASELINE, shift, canary=2.0), make_judged(ONE, score + shift)]
    return schedule([*judged, make_judged(TWO, min(score, 0.1))]).make_rival(config)


def test_neither_the_baseline_nor_the_incumbent_races():
    assert make_rival(BASELINE) is None
    assert make_rival(ONE) is None
    assert make_rival(TWO) is not None
    assert make_rival(THREE) is not None


def test_nothing_races_before_the_baseline_was_launched():
    assert schedule([]).make_rival(ONE) is None
    assert schedule([make_judged(TWO, 0.1)]).make_rival(ONE) is None


def test_only_what_is_hopeless_loses_a_race_while_the_noise_is_a_guess():
    guessed = schedule([make_judged(BASELINE, 0.0), make_judged(ONE, 0.3), make_judged(ONE, 0.3)]).make_rival(TWO)
    assert guessed is not None
    assert guessed.margin >= math.log(3)
    seen = make_rival(TWO)
    assert seen is not None
    assert seen.margin < math.log(1.5)


def test_the_rival_is_the_incumbent_at_the_baselines_level_now():
    rival = make_rival(THREE, score=0.3)
    assert rival is not None
    # Shrunk, so a little slower than it was seen; never slower than the baseline.
    assert math.exp(-0.31) / 1000 < rival.seconds_per_sample < math.exp(-0.25) / 1000
    assert rival.canary_seconds == 2.0
    slow = make_rival(THREE, score=-0.3)
    assert slow is not None
    assert slow.seconds_per_sample == pytest.approx(1 / 1000)


def test_the_margin_grows_with_the_noise():
    margins = [rival.margin for luck in (0.0, 0.02, 0.05, 0.2) if (rival := make_rival(THREE, luck=luck)) is not None]
    assert len(margins) == 4
    assert margins == sorted(margins)
    assert margins[-1] > 5 * margins[0]


def test_the_margin_holds_the_luck_of_all_launches_compared():
    judged = [make_judged(BASELINE, 0.0), make_judged(BASELINE, 0.0), make_judged(ONE, 0.3), make_judged(ONE, 0.3)]
    judged += [make_judged(BASELINE, 0.0), make_judged(ONE, 0.3)]
    ranking = Ranking(judged, BASELINE)
    rival = schedule(judged).make_rival(TWO)
    assert rival is not None
    noise, degrees = ranking.noise
    launch = noise**2 * (1 + 1 / ranking.baseline_level.level_now()[1] + 1.5 / 3)
    t = student_t_quantile(USUAL_POLICY.racing_confidence, degrees)
    assert rival.margin == pytest.approx(t * math.sqrt(launch + ranking.block_sd**2 / 8), rel=1e-6)


def is_raced(judged: Judged) -> bool:
    measurement = judged.result.measurement
    return measurement is not None and measurement.ended_by == "racing"


def share_raced(searches: list[Search]) -> float:
    """Return the share of launches, the baseline's left out, that racing ended."""
    launches = [one for search in searches for one in search.log.judged if one.config != BASELINE]
    assert len(launches) > 200
    return sum(map(is_raced, launches)) / len(launches)


@pytest.mark.slow_cases("0.0-0.1", "0.03-0.01")
@pytest.mark.parametrize("sd", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("block_sd", [0.0, 0.03])
def test_equal_configs_are_hardly_ever_ended_early(sd, block_sd):
    searches = [
        explore_placebos(Machine(speed=all_equal, noise=sd, block_noise=block_sd, blocks=8, seed=seed), budget=500)
        for seed in range(3)
    ]
    assert share_raced(searches) < 0.01


@pytest.mark.slow_cases("0.01")
@pytest.mark.parametrize("sd", [0.01, 0.03, 0.10])
def test_configs_of_half_the_speed_are_mostly_ended_early(sd):
    def half(config: TrainConfig) -> float:
        return 0.5 if number_of(config) else 1.0

    searches = [
        explore_placebos(Machine(speed=half, noise=sd, block_noise=0.02, blocks=8, seed=seed), budget=500)
        for seed in range(2)
    ]
    assert share_raced(searches) > 0.75
    blocks = [len(one.result.measurement.blocks) for s in searches for one in s.log.judged if is_raced(one)]
    assert sum(blocks) / len(blocks) < 3
    equal = explore_placebos(Machine(speed=all_equal, noise=sd, block_noise=0.02, blocks=8), budget=500)
    assert min(len(search.log.judged) for search in searches) > 1.2 * len(equal.log.judged)


def slide(now: float) -> float:
    return 1.0 - 0.3 * min(1.0, now / 230)


def drop(now: float) -> float:
    return 0.7 if now > 100 else 1.0


def drifting(drift: Callable[[float], float], *, canary: bool, seeds: int = 4) -> list[Search]:
    return [
        explore_placebos(
            Machine(
                speed=all_equal,
                noise=0.02,
                block_noise=0.02,
                blocks=8,
                seed=seed,
                drift=drift,
                canary=(lambda now: 0.001 / drift(now)) if canary else None,
            ),
            budget=500,
        )
        for seed in range(seeds)
    ]


@pytest.mark.parametrize("canary", [False, True])
def test_a_machine_that_slows_down_bit_by_bit_ends_no_equal_config_early(canary):
    searches = drifting(slide, canary=canary)
    assert share_raced(searches) < 0.01
    # What came late is not taken for slow.
    late = [
        score for search in searches for one in search.log.judged[-10:] if (score := search.log.ranking.score_of(one))
    ]
    assert abs(sum(late) / len(late)) < 0.03


def test_a_machine_that_slows_down_at_once_ends_launches_only_until_the_next_anchor():
    searches = drifting(drop, canary=False)
    assert share_raced(searches) < 0.10
    for search in searches:
        assert search.log.ranking.baseline_level.jumps == 1
        places = [place for place, one in enumerate(search.log.judged) if is_raced(one)]
        assert len(places) <= ANCHOR_SPACING
        entries = {one.key: one for one in search.log.ranking.entries}
        assert all(entries[search.log.judged[place].key].across_change[0] for place in places)


def launched_around_the_drop(search: Search) -> list[int]:
    """Return which configs were launched between the drop and the next anchor."""
    began, found = 0.0, []
    for one in search.log.judged:
        if began > 100 and one.config == BASELINE:
            return found
        found += [number_of(one.config)] if began > 100 else []
        began += one.result.elapsed_seconds
    raise AssertionError("no anchor after the slowdown")


def test_a_good_config_that_was_launched_just_after_a_slowdown_is_not_forgotten():
    forgotten = 0
    for seed in range(4):
        plain = {"noise": 0.02, "block_noise": 0.02, "blocks": 8, "seed": seed, "drift": drop}
        first = launched_around_the_drop(explore_placebos(Machine(speed=all_equal, **plain), budget=500))[-1]
        good = Machine(speed=lambda config, first=first: 1.15 if number_of(config) == first else 1.0, **plain)
        count = Counter(number_of(one.config) for one in explore_placebos(good, budget=500).log.judged)
        forgotten += count[first] == 1
    assert forgotten == 0


def test_with_a_canary_a_sudden_slowdown_ends_nothing_and_brings_the_anchor_forward():
    seen, blind = drifting(drop, canary=True), drifting(drop, canary=False)
    assert share_raced(seen) == 0.0
    waits = [len(launched_around_the_drop(search)) for search in seen]
    assert sum(waits) < sum(len(launched_around_the_drop(search)) for search in blind)
    assert max(waits) <= 4


def speed_of(config: TrainConfig) -> float:
    """Return a speed between 0.8 and 1.4: a few are good, 17 is the best and 5 the next."""
    number = number_of(config)
    return {0: 1.0, 17: 1.4, 5: 1.32, 30: 1.24, 11: 1.16}.get(number, 0.8 + 0.003 * number)


@pytest.fixture(scope="module")
def long_searches() -> list[Search]:
    return [
        explore_placebos(
            Machine(speed=speed_of, noise=0.03, block_noise=0.02, blocks=8, seed=seed), budget=900, count=60
        )
        for seed in range(4)
    ]


def test_the_best_configs_own_the_most_launches(long_searches):
    for search in long_searches:
        count = Counter(number_of(one.config) for one in search.log.judged)
        assert [min(count[number], USUAL_POLICY.most_repeats) for number in (17, 5, 30, 11)] == [4] * 4
        others = [count[number] for number in count if number not in (0, 17, 5, 30, 11)]
        assert len(others) == 56
        assert sum(others) / len(others) < 1.3
        assert max(search.log.ranking.entries, key=lambda one: one.score).config == PLACEBOS[16]


def test_the_baseline_is_never_more_than_eight_launches_away(long_searches):
    for search in long_searches:
        places = [place for place, one in enumerate(search.log.judged) if one.config == BASELINE]
        assert places[0] == 0
        assert max(late - early for early, late in pairwise(places)) == ANCHOR_SPACING + 1


def test_a_new_incumbent_was_launched_twice_or_leads_by_more_than_luck(long_searches):
    for search in long_searches:
        incumbents = set()
        for place in range(1, len(search.log.judged)):
            incumbent = Ranking(search.log.judged[:place], BASELINE).incumbent
            assert incumbent is not None
            assert incumbent.config == BASELINE or incumbent.valid_launches >= 2 or incumbent.score > 0.1
            incumbents.add(number_of(incumbent.config))
        assert {0, 5, 17} <= incumbents
