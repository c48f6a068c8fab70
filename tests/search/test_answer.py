"""From what was measured to the profile: verdict, numbers of the confirmation, and what is paid back when."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from record_factory import make_check, make_interval
from simulated import BASE_RATE, BASELINE, Machine, make_judged, make_placebos, make_report, play_finals

from autotune.records import Margin, Profile, QualityCheck
from autotune.records.quality import QualityVerdict
from autotune.records.trial import LossCurve
from autotune.search.answer.findings import Findings
from autotune.search.answer.profile import WORTH_PROVING, build_profile
from autotune.search.finals.finalist import FinalsOutcome, smallest_provable
from autotune.search.finals.more_time import budget_for
from autotune.search.finals.rounds import FinalsPlan, Terms
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Ranking
from autotune.sentences.answer import describe_speedup

ONE, TWO = make_placebos(2)
FASTER = [0.21, 0.19, 0.20, 0.22, 0.18, 0.20]
UNCLEAR = [0.10, -0.05, 0.09, -0.02, 0.11, -0.03]
NO_GAIN = [0.001, -0.002, 0.0, 0.002, -0.001, 0.0]
BUDGET = 600.0


def answer(
    finals: FinalsOutcome | None, *, planned_rounds: int = 6, elapsed: float = 300.0, measured: float = 120.0
) -> Profile:
    """Return the profile of a search of four launches and some finals."""
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.25, compile_seconds=30.0), make_judged(ONE, 0.23)]
    judged.append(make_judged(TWO, None))
    findings = Findings(
        make_report(Machine()),
        judged=tuple(judged),
        plan=FinalsPlan([ONE], planned_rounds, pair_sd=0.02, round_seconds=6.0, samples=2000) if finals else None,
        finals=finals,
        stop_reason="budget",
        elapsed_seconds=elapsed,
        measured_seconds=measured,
    )
    return build_profile(findings, Ranking(judged, BASELINE), budget_seconds=BUDGET)


@pytest.mark.parametrize(
    ("log_ratios", "verdict"), [(FASTER, "improved"), (NO_GAIN, "keep"), (UNCLEAR, "inconclusive")]
)
def test_the_verdict_is_what_the_pairs_show(log_ratios, verdict):
    profile = answer(play_finals(log_ratios))
    assert profile.verdict == verdict
    assert profile.config == (ONE if verdict == "improved" else BASELINE)
    assert profile.candidate_config == ONE
    assert profile.baseline_config == BASELINE
    assert profile.speedup.estimate == pytest.approx(math.exp(statistics.fmean(log_ratios)))


def test_what_is_clearly_faster_and_was_not_tested_is_not_ruled_out_with_another():
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.03), make_judged(TWO, 0.25), make_judged(TWO, 0.23)]
    finals = play_finals(NO_GAIN)
    profile = end(judged, finals=finals)
    assert (profile.verdict, profile.candidate_config) == ("inconclusive", TWO)
    assert profile.candidate is not None
    assert profile.candidate.reason == "there was no time for its loss check"
    assert end(judged[:2], finals=finals).verdict == "keep"
    assert end([*judged[:2], make_judged(TWO, 0.06)], finals=finals).verdict == "keep"


def test_without_finals_the_baseline_is_kept_and_the_hope_is_told():
    profile = answer(None)
    assert (profile.verdict, profile.config, profile.candidate_config) == ("inconclusive", BASELINE, ONE)
    assert profile.speedup is None
    assert profile.candidate is not None
    assert profile.candidate.speedup_estimate == pytest.approx(math.exp(0.24))
    assert not profile.candidate.passed_checks
    assert profile.evidence.confirmation is None
    assert profile.evidence.notes == ()
    told = "inconclusive: keep your settings (best candidate about 1.27x, in the search alone)"
    assert describe_speedup(profile) == told


def check(verdict):
    difference = make_interval(0.0, confidence_level=0.9, method="planted")
    return make_check(difference=difference, verdict=verdict)


@pytest.mark.parametrize(
    ("verdicts", "shown"),
    [
        (["non-inferior", "inferior", "inferior", "inferior"], 0),
        (["non-inferior", "inferior", "non-inferior", "inconclusive"], 2),
        (["inferior"] * 4, 2),
        (["inconclusive", "inferior", "inferior", "inferior"], 2),
    ],
)
def test_the_candidate_shown_without_finals_is_the_fastest_that_passed_else_the_fastest_refused(verdicts, shown):
    configs = make_placebos(4)
    values = (0.0, 0.05, 0.1, 0.15)  # the fourth was never launched alone
    judged = [make_judged(config, value) for config, value in zip((BASELINE, *configs[:3]), values, strict=True)]
    checks = [(config, (check(verdict),)) for config, verdict in zip(configs, verdicts, strict=True)]
    findings = Findings(make_report(Machine()), judged=tuple(judged), checks=tuple(checks))
    profile = build_profile(findings, Ranking(judged, BASELINE), budget_seconds=BUDGET)
    assert profile.candidate_config == configs[shown]


def test_one_pair_is_no_confirmation():
    profile = answer(play_finals([0.2]))
    assert (profile.verdict, profile.config, profile.speedup) == ("inconclusive", BASELINE, None)
    assert profile.evidence.confirmation is None
    assert profile.evidence.pairs == 1


def test_pairs_that_are_too_few_for_an_interval_have_none():
    finals = play_finals([0.2, 0.3])
    finals.candidates[0].ratio = None
    profile = answer(finals)
    assert (profile.verdict, profile.speedup) == ("inconclusive", None)
    told = profile.evidence.confirmation
    assert told is not None
    assert told.log_ratios == pytest.approx((0.2, 0.3))
    assert told.interval is told.smallest_detectable is told.wanted_speedup is None
    assert profile.candidate is not None
    assert profile.candidate.speedup_estimate == pytest.approx(math.exp(0.25))
    assert "too few to tell" in profile.candidate.reason


def test_the_verdict_is_keep_only_where_the_upper_bound_is_below_one_percent():
    below, above = [x + 0.005 for x in NO_GAIN], [x + 0.009 for x in NO_GAIN]
    assert answer(play_finals(below)).verdict == "keep"
    assert answer(play_finals(above)).verdict == "inconclusive"


@pytest.mark.parametrize("log_ratios", [FASTER, NO_GAIN, UNCLEAR])
def test_the_confirmation_holds_the_pairs_and_what_follows_from_them(log_ratios):
    told = answer(play_finals(log_ratios), planned_rounds=8).evidence.confirmation
    assert told is not None
    assert told.pairs_planned == 8
    assert told.log_ratios == pytest.approx(tuple(log_ratios))
    assert len(told.candidate_first) == 6
    assert sum(told.candidate_first) == 3
    assert told.interval.confidence_level == pytest.approx(0.95)
    walsh = [(a + b) / 2 for i, a in enumerate(log_ratios) for b in log_ratios[i:]]
    assert told.hodges_lehmann == pytest.approx(math.exp(statistics.median(walsh)))
    assert told.smallest_detectable == pytest.approx(smallest_provable(statistics.stdev(log_ratios), 6))
    assert told.expected_speedup == pytest.approx(math.exp(0.24))
    assert told.shrunk_speedup is not None
    assert 1.0 < told.shrunk_speedup <= told.expected_speedup
    assert not told.futile


def test_only_what_is_unclear_asks_for_more_budget():
    told = {name: answer(play_finals(logs)).evidence.confirmation for name, logs in (("f", FASTER), ("n", NO_GAIN))}
    assert all(one is not None and one.wanted_speedup is one.budget_needed_seconds is None for one in told.values())
    unclear = answer(play_finals(UNCLEAR)).evidence.confirmation
    assert unclear is not None
    wanted = max(math.exp(statistics.fmean(UNCLEAR)), WORTH_PROVING)
    assert unclear.wanted_speedup == pytest.approx(wanted)
    needed = budget_for(math.log(wanted), pair_sd=statistics.stdev(UNCLEAR), pair_seconds=6.0, budget_seconds=BUDGET)
    assert unclear.budget_needed_seconds == pytest.approx(needed)
    assert needed > BUDGET


def test_finals_that_ended_at_half_say_so():
    profile = answer(play_finals([x - 0.5 for x in FASTER], terms=Terms(pair_sd=0.02)))
    assert profile.verdict == "keep"
    assert profile.evidence.confirmation is not None
    assert profile.evidence.confirmation.futile
    assert profile.evidence.pairs == len(profile.evidence.confirmation.log_ratios) == 3


def test_costs_are_paid_back_at_the_lower_end_of_the_gain():
    profile = answer(play_finals(FASTER), elapsed=300.0)
    one_off, low = profile.one_off, profile.speedup.low
    assert one_off.compile_seconds == 30.0
    assert one_off.search_seconds == 300.0
    # By hand: a sample takes 1 / BASE_RATE seconds with the baseline, and at most 1 / low of that with the winner.
    saved = (1 - 1 / low) / BASE_RATE
    assert one_off.break_even_samples is not None
    assert one_off.search_break_even_samples is not None
    assert one_off.break_even_samples == pytest.approx(30.0 / saved, rel=0.001)
    assert one_off.search_break_even_samples == pytest.approx(330.0 / saved, rel=0.001)


def test_the_samples_that_pay_back_are_those_after_which_both_runs_are_even():
    profile = answer(play_finals(FASTER), elapsed=300.0)
    samples, low = profile.one_off.break_even_samples, profile.speedup.low
    assert samples is not None
    base_seconds = samples / BASE_RATE
    assert base_seconds / low + 30.0 == pytest.approx(base_seconds, rel=0.01)


@pytest.mark.parametrize("log_ratios", [NO_GAIN, UNCLEAR])
def test_without_a_gain_nothing_is_paid_back(log_ratios):
    one_off = answer(play_finals(log_ratios)).one_off
    assert one_off.break_even_samples is one_off.search_break_even_samples is None


@pytest.mark.parametrize(("elapsed", "measured", "share"), [(300.0, 120.0, 0.4), (300.0, 400.0, 1.0), (0.0, 0.0, None)])
def test_the_measured_share_is_of_the_time_used(elapsed, measured, share):
    fraction = answer(None, elapsed=elapsed, measured=measured).evidence.measured_fraction
    assert fraction == (None if share is None else pytest.approx(share))


def test_the_evidence_counts_trials_pairs_and_rates():
    evidence = answer(play_finals(FASTER)).evidence
    assert evidence.trials == {"completed": 3, "crashed": 1}
    assert evidence.pairs == 6
    assert evidence.baseline_samples_per_second == pytest.approx(BASE_RATE)
    assert evidence.samples_per_second == pytest.approx(statistics.fmean(BASE_RATE * math.exp(x) for x in FASTER))
    assert evidence.noise is not None
    assert evidence.noise.launches == 3 + 12
    assert evidence.stop_reason == "budget"


def test_two_candidates_share_the_time_of_a_round():
    finals = play_finals(UNCLEAR, [-x for x in UNCLEAR])
    profile = answer(finals)
    assert profile.verdict == "inconclusive"
    assert finals.best is not None
    assert profile.candidate_config == finals.best.config


def test_the_baselines_trainings_become_the_band_of_the_final_one():
    curves = tuple(
        LossCurve(seed=seed, losses=tuple(2.0 + 0.01 * seed + 1.0 / (1 + step) for step in range(64)), samples=1024)
        for seed in range(4)
    )
    findings = Findings(make_report(Machine()), baseline_curves=curves)
    band = build_profile(findings, Ranking([], BASELINE), budget_seconds=BUDGET).evidence.loss_band
    assert band is not None
    assert (band.seeds, band.samples_per_block, len(band.means)) == (4, 64, 16)
    assert answer(None).evidence.loss_band is None


# ---- how it ended


def end(judged: Sequence[Judged], **known: Any) -> Profile:
    """Return the profile of a search without finals."""
    findings = Findings(make_report(Machine()), judged=tuple(judged), **known)
    ranking = Ranking(judged, BASELINE)
    return build_profile(findings, ranking, budget_seconds=BUDGET)


def make_gradient_check(verdict: QualityVerdict) -> QualityCheck:
    return make_check(
        test="gradients",
        metric="gradients",
        margin=Margin(amount=0.0),
        verdict=verdict,
        seeds=1,
        samples=0,
        reason=f"planted {verdict}",
    )


def test_where_nothing_but_the_baseline_was_measured_nothing_is_said_to_be_kept():
    judged = [make_judged(BASELINE, 0.0), make_judged(TWO, None)]
    profile = end(judged, interrupted=1, knobs=("precision", "num_workers"), launch_seconds=8.0)
    assert (profile.verdict, profile.config, profile.speedup) == ("not-tested", BASELINE, None)
    found = profile.evidence.not_tested
    assert found is not None
    assert found.outcomes == {"crashed": 1, "interrupted": 1}
    assert found.settings == ("num_workers", "precision")
    assert found.settings_known == 2
    # By hand: two settings, the launch that was cut and the baseline's, and at least half as much again as this one.
    assert found.budget_needed_seconds == pytest.approx(max(1.5 * BUDGET, 4 * 8.0 / 0.4))
    longer = end(judged, interrupted=1, knobs=("precision", "num_workers"), launch_seconds=800.0).evidence.not_tested
    assert longer is not None
    assert longer.budget_needed_seconds == pytest.approx(4 * 800.0 / 0.4, rel=0.05)  # the probe's seconds beside it


def test_a_setting_that_was_started_is_not_untried():
    judged = [make_judged(BASELINE, 0.0), make_judged(BASELINE.replace(num_workers=2), None)]
    found = end(judged, knobs=("num_workers",), launch_seconds=8.0).evidence.not_tested
    assert found is not None
    assert (found.settings, found.budget_needed_seconds) == ((), None)


def test_what_was_measured_and_did_not_win_is_kept():
    profile = end([make_judged(BASELINE, 0.0), make_judged(ONE, -0.3)])
    assert (profile.verdict, profile.candidate, profile.evidence.not_tested) == ("keep", None, None)


def test_the_interrupted_launches_are_in_the_tally():
    trials = end([make_judged(BASELINE, 0.0), make_judged(TWO, None)], interrupted=2).evidence.trials
    assert trials == {"completed": 1, "crashed": 1, "interrupted": 2}
    assert "interrupted" not in end([make_judged(BASELINE, 0.0)]).evidence.trials


def test_the_candidate_is_the_fastest_that_passed_its_checks_not_the_first_that_was_checked():
    three, four = (config for config in make_placebos(4)[2:])
    judged = [make_judged(BASELINE, 0.0), make_judged(ONE, 0.4), make_judged(TWO, 0.1), make_judged(three, 0.2)]
    judged.append(make_judged(four, 0.5))
    refused, passed = (make_gradient_check("inferior"),), (make_gradient_check("non-inferior"),)
    profile = end(judged, checks=[(ONE, refused), (TWO, passed), (three, passed)])
    assert profile.candidate_config == three
    assert profile.quality == passed
    assert profile.candidate is not None
    assert profile.candidate.passed_checks
    assert profile.candidate.speedup_estimate == pytest.approx(math.exp(0.2))
    assert profile.candidate.reason == "there was no time for its finals"
    only_refused = end(judged[:3], checks=[(TWO, refused), (ONE, refused)])
    assert only_refused.candidate_config == ONE
    assert only_refused.candidate is not None
    assert not only_refused.candidate.passed_checks
    assert "planted inferior" in only_refused.candidate.reason


def test_a_winner_is_no_candidate():
    assert answer(play_finals(FASTER)).candidate is None
    unclear = answer(play_finals(UNCLEAR)).candidate
    assert unclear is not None
    assert unclear.pairs == 6
    assert unclear.speedup_estimate == pytest.approx(math.exp(statistics.fmean(UNCLEAR)))


@pytest.mark.parametrize(("log_ratio", "is_told"), [(0.0, False), (-0.3, False), (-0.5, True), (0.5, True)])
def test_a_probe_that_the_first_launch_does_not_bear_out_is_told_of(log_ratio, is_told):
    report = make_report(Machine())
    probed = math.log(report.measurement.samples_per_second / BASE_RATE)
    judged = [make_judged(BASELINE, probed + log_ratio), make_judged(BASELINE, probed)]
    notes = build_profile(
        Findings(report, judged=tuple(judged)), Ranking(judged, BASELINE), budget_seconds=BUDGET
    ).evidence
    assert any("the probe read" in note for note in notes.notes) == is_told
