"""The log of a search: it only grows, what is handed out stays as it is, and what follows from it is made once."""

from __future__ import annotations

import dataclasses
import math

import pytest
import record_factory
from record_factory import make_interval
from simulated import (
    BASELINE,
    LAUNCH_SECONDS,
    Machine,
    explore,
    make_judged,
    make_placebos,
    open_search,
    play_finals,
)

from autotune.isolation.runner import KILL_SECONDS
from autotune.records import QualityCheck, TrainConfig, TrialStatus
from autotune.records.quality import QualityVerdict
from autotune.search.answer.notes import describe_ending
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.launch.starter import TrialTask
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.objective import Judged, Score

ONE, TWO = make_placebos(2)


def open_log() -> SearchLog:
    log = open_search(Machine()).log
    log.add_judged(make_judged(BASELINE, 0.0), make_judged(ONE, 0.2))
    return log


def test_what_is_handed_out_does_not_grow() -> None:
    log = open_log()
    judged, refused, notes, ranking = log.judged, log.refused, log.notes, log.ranking
    log.add_judged(make_judged(TWO, 0.3))
    log.refuse(frozenset({"user_knobs.placebo=1"}))
    log.add_notes("something")
    assert (len(judged), refused, notes) == (2, (), ())
    assert ranking.find(TWO) is None
    assert log.ranking.find(TWO) is not None


def test_what_follows_is_made_once_until_it_grows() -> None:
    log = open_log()
    ranking, prices, schedule = log.ranking, log.prices, log.schedule
    log.add_notes("which changes nothing")
    assert log.ranking is ranking
    assert log.prices is prices
    assert log.schedule is schedule
    log.add_judged(make_judged(BASELINE, 0.0))
    assert log.ranking is not ranking
    assert log.prices is not prices


def test_a_step_and_a_start_take_what_launches_read_not_what_the_probe_did() -> None:
    log = open_search(Machine()).log
    probed = log.problem.report.measurement.seconds_per_step
    assert log.seconds_per_step == probed
    assert log.startup_seconds == log.problem.startup_seconds
    for startup in (3.0, 9.0, 4.0):
        one = make_judged(BASELINE, math.log(5.0))  # the machine was five times slower at the probe
        log.add_judged(dataclasses.replace(one, result=one.result.replace(startup_seconds=startup)))
    log.add_judged(make_judged(ONE, 2.0))
    assert log.seconds_per_step == pytest.approx(probed / 5, rel=1e-3)
    assert log.startup_seconds == log.prices.startup_seconds == 4.0


def test_what_is_refused_leaves_the_ranking_but_for_the_one_of_all() -> None:
    log = open_log()
    log.refuse(frozenset({"user_knobs.placebo=1"}))
    assert log.is_refused(ONE)
    assert not log.is_refused(TWO)
    assert log.ranking.find(ONE) is None
    assert log.ranking_of_all.find(ONE) is not None


def test_the_time_of_trials_is_told_apart_by_their_purpose() -> None:
    search = open_search(Machine())
    timed = search.starter.launch(BASELINE, "measure", 60.0)
    search.starter.launch(ONE, "quality", 60.0, task=TrialTask(steps=5))
    assert timed.measurement is not None
    assert search.log.measured_seconds == timed.measurement.seconds
    assert search.log.gate_seconds == LAUNCH_SECONDS
    assert search.starter.number == 3


def plan_one() -> FinalsPlan:
    return FinalsPlan([ONE], 3, pair_sd=0.02, round_seconds=6.0, samples=2000)


def test_finals_without_a_gain_are_settled_those_given_up_unless_they_were_of_an_earlier_session() -> None:
    for log_ratios, is_settled in (([0.001, -0.002, 0.0, 0.002, -0.001, 0.0], True), ([0.1, -0.1, 0.1, -0.1], False)):
        outcome = play_finals(log_ratios)
        log = open_log()
        log.add_recalled_finals(plan_one(), outcome)
        assert log.finals is outcome
        assert (ONE in log.settled) == is_settled
    outcome.candidates[0].futile = True
    log.add_recalled_finals(plan_one(), outcome)
    assert log.settled == ()
    log.add_finals(plan_one(), outcome)
    assert log.settled == (ONE,)


def test_the_plan_told_is_of_the_finals_that_the_answer_is_about() -> None:
    log = open_log()
    first, of_another = plan_one(), dataclasses.replace(plan_one(), finalists=[TWO])
    outcome = play_finals([0.21, 0.19, 0.20, 0.22])  # of the first: what came after it showed less
    log.add_finals(first, outcome)
    log.add_finals(of_another, outcome)
    assert log.finals_plan is first


def test_where_the_users_own_settings_drift_from_their_probe_there_is_an_end() -> None:
    """A script that seeds itself by the clock may have had luck in its probe."""
    log = open_search(Machine()).log
    own = make_judged(BASELINE, 0.0)
    drift = Score(own.score.value, {"drift": 0.1}, TrialStatus.DRIFTED)
    log.add_judged(dataclasses.replace(own, score=drift))
    assert not any("was left out" in note for note in describe_ending(log, is_stopped=False))


@pytest.mark.parametrize(
    ("gain", "verdict", "is_told"),
    [(0.5, None, True), (0.5, "inconclusive", False), (0.5, "inferior", False), (0.21, None, False)],
)
def test_what_was_faster_than_the_finals_and_never_checked_is_told_of(
    gain: float, verdict: QualityVerdict | None, is_told: bool
) -> None:
    log = open_log()
    log.add_judged(make_judged(TWO, gain))
    if verdict is not None:
        log.add_checks(TWO, make_check(verdict, 0.1))
    log.add_finals(plan_one(), play_finals([0.21, 0.19, 0.20, 0.22]))
    told = [note for note in describe_ending(log, is_stopped=False) if "no time for its proof" in note]
    assert len(told) == is_told
    assert all(note.startswith("placebo=2 ran at 1.65x") for note in told)


def make_check(verdict: QualityVerdict, more: float) -> tuple[QualityCheck, ...]:
    difference = make_interval(more, confidence_level=0.9, method="planted")
    check = record_factory.make_check(test="samples-to-loss", difference=difference, verdict=verdict)
    return (check,)


def test_more_samples_count_only_of_checks_that_were_passed() -> None:
    log = open_log()
    assert log.samples_ratio_of(ONE) == 1.0
    log.add_checks(ONE, make_check("inferior", 0.5))
    assert log.samples_ratio_of(ONE) == 1.0
    log.add_checks(TWO, make_check("non-inferior", 0.1))
    assert log.samples_ratio_of(TWO) == pytest.approx(1.1)
    assert log.checks_of(TWO) == make_check("non-inferior", 0.1)


def test_a_search_goes_by_the_policy_that_it_is_handed() -> None:
    patient = dataclasses.replace(USUAL_POLICY, least_trial_seconds=0.0, patience=7.0)
    machine = Machine()
    search = open_search(machine, budget=200.0, policy=patient)
    explore(search, count=2)
    price = search.log.prices.launch_seconds(BASELINE)
    assert machine.specs[-1].limits.time_limit_seconds == pytest.approx(7.0 * price - KILL_SECONDS)


def test_a_policy_can_ask_for_the_baseline_more_often() -> None:
    def share(**changes: float) -> float:
        policy = dataclasses.replace(USUAL_POLICY, **changes)  # type: ignore[arg-type]
        search = open_search(Machine(noise=0.0), budget=300.0, policy=policy)
        explore(search)
        launches = [one.config for one in search.log.judged]
        return launches.count(BASELINE) / len(launches)

    assert share(anchor_seconds=2 * LAUNCH_SECONDS) > 1.5 * share()


def test_losses_that_differ_between_launches_of_the_own_settings_refuse_nothing() -> None:
    search = open_search(Machine())
    log, own = search.log, search.starter.launch(BASELINE, "measure", 60.0)

    def add(config: TrainConfig, factor: float) -> Judged:
        curves = tuple(one.replace(losses=tuple(factor * loss for loss in one.losses)) for one in own.curves)
        return log.add_launch(own.replace(spec=own.spec.replace(config=config), curves=curves))

    log.add_launch(own)
    assert add(ONE, 2.0).score.status is TrialStatus.DRIFTED
    assert not log.notes
    assert add(BASELINE, 2.0).score.status is TrialStatus.COMPLETED
    assert add(TWO, 2.0).score.feasible
    assert [one.score.status for one in log.judged] == 4 * [TrialStatus.COMPLETED]
    add(BASELINE, 3.0)
    (note,) = log.notes
    assert "differ from launch to launch" in note
