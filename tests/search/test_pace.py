"""What the first steps of a launch are held against, and what becomes of one that was too slow to be timed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from record_factory import make_result
from simulated import (
    BASE_RATE,
    BASELINE,
    Machine,
    explore,
    make_curve,
    make_judged,
    make_placebos,
    open_search,
)

from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.search.launch.pace import make_pace
from autotune.search.scores.noise import summarise_noise
from autotune.search.scores.objective import Judged, score_trial
from autotune.search.scores.ranking import Ranking

ONE, TWO, *_ = make_placebos(8)


def anchor(value: float = 0.0, *, first: float | None = 2.0, pair: tuple[float, ...] = (), **changes: Any) -> Judged:
    """Return a launch of the user's settings that took one second for each of ten steps."""
    judged = make_judged(BASELINE, value)
    measurement = judged.result.measurement
    assert measurement is not None
    measurement = measurement.replace(first_step_seconds=first, warmup_step_seconds=pair, **changes)
    return Judged(judged.result.replace(measurement=measurement), judged.score)


def cut(config: Any, bound: float, number: int = 9) -> Judged:
    spec = make_judged(config, 0.0).result.spec.replace(number=number)
    result = make_result(
        spec,
        status=TrialStatus.TOO_SLOW,
        cause="slow-steps",
        error="its first step took more than 4.0s: ended",
        elapsed_seconds=4.0,
        samples_per_second_bound=bound,
    )
    limits = open_search(Machine()).log.problem.limits
    return Judged(result, score_trial(result, make_curve(), limits))


def test_the_pace_is_the_longest_first_step_and_the_highest_rate_of_the_users_settings() -> None:
    pace = make_pace(ONE, BASELINE, [anchor(0.1, first=2.0), make_judged(ONE, 2.0), anchor(first=3.0)])
    assert pace is not None
    assert pace.first_step_seconds == 3.0
    assert pace.samples_per_second == pytest.approx(BASE_RATE * math.exp(0.1))
    assert (pace.warmup_ratio, pace.compile_seconds) == (1.0, None)


def test_before_the_users_settings_were_timed_there_is_none() -> None:
    assert make_pace(ONE, BASELINE, []) is make_pace(ONE, BASELINE, [make_judged(ONE, 0.0)]) is None
    assert make_pace(ONE, BASELINE, [anchor(first=None)]) is None  # of a search by an earlier version


def test_a_larger_step_may_take_longer_and_a_smaller_one_sets_up_just_as_much() -> None:
    for factor, seconds in ((4, 8.0), (0.5, 2.0)):
        config = BASELINE.replace(micro_batch_size=int(factor * BASELINE.micro_batch_size))
        pace = make_pace(config, BASELINE, [anchor(first=2.0)])
        assert pace is not None
        assert pace.first_step_seconds == seconds


def test_what_the_second_and_third_step_are_slower_is_known() -> None:
    step = anchor().result.measurement.seconds_per_step  # type: ignore[union-attr]
    pace = make_pace(ONE, BASELINE, [anchor(pair=(3 * step, 2 * step)), anchor(pair=(0.5 * step, 0.5 * step))])
    assert pace is not None
    assert pace.warmup_ratio == pytest.approx(2.0)


@pytest.mark.parametrize(("seen", "allowed"), [(None, 180.0), (10.0, 120.0), (50.0, 200.0)])
def test_a_compilation_may_take_four_times_the_longest_that_was_seen(seen: float | None, allowed: float) -> None:
    judged = [anchor()] + ([] if seen is None else [make_judged(ONE, 0.0, compile_seconds=seen)])
    pace = make_pace(TWO.replace(compile_mode="default"), BASELINE, judged)
    assert pace is not None
    assert pace.compile_seconds == allowed


def test_a_compilation_that_is_expected_to_take_long_may() -> None:
    pace = make_pace(TWO.replace(compile_mode="max-autotune"), BASELINE, [anchor()], 240.0)
    assert pace is not None
    assert pace.compile_seconds == 360.0


def test_a_first_step_that_tries_kernels_may_take_as_long_as_one_that_compiles() -> None:
    pace = make_pace(TWO.replace(cudnn_benchmark=True), BASELINE, [anchor()])
    assert pace is not None
    assert pace.compile_seconds == 180.0


def test_where_the_training_compiles_by_itself_every_launch_may() -> None:
    pace = make_pace(ONE, BASELINE, [anchor(compile_seconds=10.0)])
    assert pace is not None
    assert pace.compile_seconds == 120.0


def test_only_a_launch_that_races_has_a_pace() -> None:
    machine = Machine()
    search = open_search(machine)
    search.log.add_judged(anchor())
    rival = search.log.schedule.make_rival(ONE)
    search.starter.launch(ONE, "measure", 60.0, rival=rival)
    search.starter.launch(BASELINE, "measure", 60.0)
    search.starter.launch(ONE, "final", 60.0)
    assert [spec.limits.pace is not None for spec in machine.specs[-3:]] == [True, False, False]


def test_the_bound_is_its_value_and_it_breaks_no_limit() -> None:
    judged = cut(ONE, 12.5)
    assert judged.score.value == math.log(12.5)
    assert set(judged.score.constraints.values()) == {0.0}
    assert judged.score.status is TrialStatus.TOO_SLOW
    assert not judged.score.feasible


@pytest.mark.parametrize("bound", [0.02, 4.0])
def test_it_is_told_and_never_ranked(bound: float) -> None:
    """Not even where the bound is above the user's settings, because what it raced is far faster."""
    judged = [anchor(), cut(ONE, bound * BASE_RATE), make_judged(TWO, 0.2), make_judged(TWO, 0.2)]
    ranking = Ranking(judged, BASELINE)
    assert ranking.score_of(judged[1]) == pytest.approx(math.log(bound))
    assert [entry.config for entry in ranking.entries] == [TWO, BASELINE]
    assert ranking.find(ONE) is None
    # One that was timed before is given up as well, and its bound is no reading of the noise.
    plain = Ranking([judged[0], make_judged(ONE, 0.1), *judged[2:]], BASELINE)
    later = Ranking([judged[0], make_judged(ONE, 0.1), *judged[1:]], BASELINE)
    assert later.find(ONE) is None
    assert later.noise == plain.noise


def test_it_counts_as_ended_early() -> None:
    judged = [anchor(), cut(ONE, 1.0), make_judged(TWO, 0.0)]
    noise = summarise_noise([one.result for one in judged], Ranking(judged, BASELINE))
    assert (noise.launches, noise.raced) == (3, 1)


def test_a_search_goes_on_after_one_and_does_not_try_it_again() -> None:
    machine = Machine(speed=lambda _config: 1.0)

    def run(spec: TrialSpec) -> TrialResult:
        result = machine(spec)
        if spec.config == ONE and spec.limits.rival is not None:
            return cut(ONE, 1.0, number=spec.number).result.replace(spec=spec)
        return result

    search = open_search(machine, budget=200.0, run_trial=run)
    explore(search, count=5)
    ends = [one.score.status for one in search.log.judged if one.config == ONE]
    assert ends == [TrialStatus.TOO_SLOW]
    assert len({one.key for one in search.log.judged}) == 6
