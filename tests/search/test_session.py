from __future__ import annotations

from collections import Counter

import pytest
from record_factory import read_drift_limits
from simulated import BASELINE, LAUNCH_SECONDS, Machine, all_equal, run_simulated

from autotune.errors import NothingFeasibleError, TargetError, UsageError
from autotune.records import Margin, TrainConfig, TrialStatus
from autotune.records.config import changed_fields
from autotune.search.explore.study import Study
from autotune.search.finals.risk import RiskPurse
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.ranking import Ranking


def test_a_planted_gain_is_found_proven_and_saved(tmp_path):
    run = run_simulated(Machine(), tmp_path, open_study=Study)
    profile = run.profile
    assert profile.verdict == "improved"
    assert profile.config.precision == "bf16"
    assert profile.baseline_config == BASELINE
    assert profile.speedup.low > 1.01
    assert profile.speedup.low < 1.5 < profile.speedup.high * 1.02
    assert profile.evidence.pairs >= 3
    assert all(check.verdict == "non-inferior" for check in profile.quality)
    assert profile.quality


def test_the_first_answer_is_the_baseline_and_comes_before_the_search(tmp_path):
    run = run_simulated(Machine(), tmp_path)
    assert run.saved[0].verdict == "not-tested"
    assert run.saved[0].config == BASELINE
    assert run.saved[0].evidence.stop_reason == "running"
    assert run.saved[-1] == run.profile


@pytest.mark.slow
def test_an_answer_holds_little_that_does_nothing(tmp_path):
    profile = run_simulated(Machine(), tmp_path, budget=600).profile
    assert profile.verdict == "improved"
    assert profile.config.precision == "bf16"
    assert len(changed_fields(profile.config, BASELINE)) <= 2


@pytest.mark.slow_cases("4", "5", "6", "7", "2", "3")
@pytest.mark.parametrize("seed", range(8))
def test_equal_settings_are_never_called_faster(tmp_path, seed):
    machine = Machine(speed=all_equal, noise=0.03, seed=seed)
    profile = run_simulated(machine, tmp_path, budget=150).profile
    assert profile.verdict != "improved"
    assert profile.config == BASELINE


@pytest.mark.parametrize(("budget", "seconds"), [(60.0, 1.0), (90.0, 3.0), (123.0, 3.0), (400.0, 9.0)])
@pytest.mark.fault("49", injected="budgets of 60 s to 400 s on a simulated clock", outcome="never overrun")
def test_the_budget_is_a_deadline(tmp_path, budget, seconds):
    machine = Machine(seconds=seconds)
    run_simulated(machine, tmp_path, budget=budget)
    assert machine.now <= budget


@pytest.mark.fault("16", injected="a fast setting with a higher loss", outcome="refused, with the number")
def test_a_fast_setting_that_learns_worse_is_refused_with_the_number(tmp_path):
    def loss(config: TrainConfig) -> float:
        return 1.015 if config.precision == "bf16" else 1.0

    profile = run_simulated(Machine(loss=loss, noise=0), tmp_path).profile
    assert profile.verdict == "keep"
    assert profile.config == BASELINE
    assert profile.candidate_config is not None
    assert profile.candidate_config.precision == "bf16"
    check = next(check for check in profile.quality if check.test == "paired-losses")
    assert check.verdict == "inferior"
    assert check.difference is not None
    assert check.difference.estimate == pytest.approx(0.015, rel=0.01)


@pytest.mark.slow
def test_each_refusal_is_told_with_its_figures(tmp_path):
    def loss(config: TrainConfig) -> float:
        return 1.015 if config.precision == "bf16" else 1.0

    profile = run_simulated(Machine(loss=loss, noise=0), tmp_path).profile
    told = [note for note in profile.evidence.notes if "was refused by the loss check" in note]
    assert told
    for note in told:
        assert note.startswith("precision=bf16")
        assert "(a candidate with it ran at 1.50x)" in note
        assert note.endswith("training loss worse by +1.50%, limit +0.50%")


def test_the_next_best_is_taken_when_the_best_learns_worse(tmp_path):
    def speed(config: TrainConfig) -> float:
        gain = 1.5 if config.precision == "bf16" else 1.0
        return gain * (1.3 if config.optimizer_implementation == "fused" else 1.0)

    def loss(config: TrainConfig) -> float:
        return 1.2 if config.precision == "bf16" else 1.0

    profile = run_simulated(Machine(speed=speed, loss=loss), tmp_path, budget=600).profile
    assert profile.verdict == "improved"
    assert (profile.config.precision, profile.config.optimizer_implementation) == ("fp32", "fused")


@pytest.mark.slow_cases("crashed", "unsupported")
@pytest.mark.parametrize("status", [TrialStatus.OUT_OF_MEMORY, TrialStatus.CRASHED, TrialStatus.UNSUPPORTED])
@pytest.mark.fault(
    "18",
    injected="bf16 out of memory, crashed, unsupported",
    outcome="the search ends with an answer; the failures are counted",
)
def test_settings_that_fail_are_results_not_accidents(tmp_path, status):
    def fate(config: TrainConfig) -> TrialStatus:
        return status if config.precision == "bf16" else TrialStatus.COMPLETED

    profile = run_simulated(Machine(speed=all_equal, fate=fate), tmp_path).profile
    assert profile.config == BASELINE
    assert profile.evidence.trials[status] >= 1


@pytest.mark.fault("19", injected="every trial crashes", outcome="the target's error, with the first cause")
def test_a_baseline_that_fails_is_the_targets_error(tmp_path):
    with pytest.raises(TargetError, match=r"toy.py:workload fails with its own settings \(crashed\): planted"):
        run_simulated(Machine(fate=lambda _config: TrialStatus.CRASHED), tmp_path)


@pytest.mark.fault(
    "49",
    injected="a budget of 20 s for launches of 3 s",
    outcome="refused once the baseline is measured, with the budget that would do",
)
def test_a_budget_that_cannot_hold_the_finals_is_refused_with_the_need(tmp_path):
    with pytest.raises(UsageError, match="too small for this target") as refused:
        run_simulated(Machine(), tmp_path, budget=20)
    assert "at least" in refused.value.hint


@pytest.mark.slow
def test_what_is_launched_again_is_the_baseline_a_challenger_or_an_elite(tmp_path):
    launches = run_simulated(Machine(), tmp_path, budget=300).log.judged
    again = 0
    for place, one in enumerate(launches):
        earlier = launches[:place]
        if one.config == BASELINE or all(one.key != other.key for other in earlier):
            continue
        again += 1
        ranking = Ranking(earlier, BASELINE)
        top = {ranking.contender.key} if ranking.contender else set()
        top |= {entry.key for entry in ranking.entries[: 1 + USUAL_POLICY.top_k] if entry.score > 0}
        assert one.key in top
    assert again >= 5
    assert len({one.key for one in launches}) > 15


@pytest.mark.slow
def test_new_settings_are_at_least_half_of_a_search(tmp_path):
    launches = run_simulated(Machine(), tmp_path, budget=300).log.judged
    assert len({one.key for one in launches}) >= len(launches) / 2


def test_a_stopped_search_keeps_what_was_finished_and_says_so(tmp_path):
    run = run_simulated(Machine(stop_after=6), tmp_path)
    assert run.profile.verdict in ("keep", "inconclusive")
    assert run.profile.config == BASELINE
    assert run.profile.evidence.stop_reason == "interrupted"
    finished = [result for result in run.folder.read_trials() if result.status is TrialStatus.COMPLETED]
    assert len(finished) == 5  # six were started: five finished, and the one that was cut


@pytest.mark.slow
def test_a_resumed_search_runs_only_what_is_missing(tmp_path):
    first = run_simulated(Machine(stop_after=16), tmp_path, open_study=Study)
    before = [result.spec for result in first.folder.read_trials()]
    machine = Machine(seed=first.machine.seed)
    second = run_simulated(machine, tmp_path, folder=first.folder, open_study=Study)
    assert second.profile.verdict == "improved"
    assert [spec.purpose for spec in machine.specs].count("probe") == 0
    known = [spec.config for spec in before if spec.purpose == "measure" and spec.config != BASELINE]
    again = Counter(spec.config.to_json() for spec in machine.specs if spec.purpose == "measure" and spec.config)
    assert known
    # What is known is launched again only as often as a search without a break would have done.
    assert all(again[config.to_json()] < USUAL_POLICY.most_repeats for config in known if config is not None)
    assert any(again[config.to_json()] == 0 for config in known if config is not None)
    assert min(spec.number for spec in machine.specs) > max(spec.number for spec in before)


@pytest.mark.slow
@pytest.mark.fault(
    "29",
    injected="result.json of one trial cut to 200 characters",
    outcome="that trial is left out, the search goes on",
)
@pytest.mark.fault("30", injected="text in place of study.db", outcome="rebuilt from the trials")
def test_a_resumed_search_survives_a_damaged_database_and_a_torn_result(tmp_path):
    first = run_simulated(Machine(stop_after=8), tmp_path, open_study=Study)
    first.folder.database.write_text("this is no database")
    torn = first.folder.trials / "0003" / "result.json"
    torn.write_text(torn.read_text()[:200])
    second = run_simulated(Machine(seed=first.machine.seed), tmp_path, folder=first.folder, open_study=Study)
    assert second.profile.verdict == "improved"


def test_a_memory_limit_below_the_baselines_own_need_is_refused(tmp_path):
    with pytest.raises(NothingFeasibleError, match=r"your own settings use 500 MiB, more than the 100 MiB allowed"):
        run_simulated(Machine(), tmp_path, memory_limit_bytes=100 * 2**20)


def test_a_resumed_search_goes_on_with_the_pairs_of_its_finals(tmp_path):
    whole = run_simulated(Machine(), tmp_path).machine.specs
    first_final = next(i for i, spec in enumerate(whole) if spec.purpose == "final")
    first = run_simulated(Machine(stop_after=first_final + 5), tmp_path)
    assert first.profile.verdict != "improved"
    before = first.folder.read_finals()
    assert before is not None
    assert [len(look.rounds) for look in before.looks] == [2]
    machine = Machine(seed=first.machine.seed + 1)
    second = run_simulated(machine, tmp_path, folder=first.folder)
    after = second.folder.read_finals()
    assert after is not None
    assert after.looks[0] == before.looks[0]
    assert after.looks[1].candidate == before.looks[0].candidate
    assert after.looks[1].share == pytest.approx(0.24)
    assert after.looks[1].proven
    assert second.profile.verdict == "improved"
    purse = RiskPurse(after, results=second.folder.read_trials(), machine=after.machine)
    assert len(purse.pairs_of(before.looks[0].candidate)) == sum(len(look.rounds) for look in after.looks)


def test_a_stop_in_the_finals_keeps_the_rounds_that_were_finished(tmp_path):
    whole = run_simulated(Machine(), tmp_path).machine.specs
    first_final = next(i for i, spec in enumerate(whole) if spec.purpose == "final")
    run = run_simulated(Machine(stop_after=first_final + 5), tmp_path)
    assert run.profile.evidence.stop_reason == "interrupted"
    assert run.profile.evidence.pairs >= 2


@pytest.mark.slow
def test_what_failed_the_drift_check_is_not_tried_again_with_more_on_top(tmp_path):
    def speed(config: TrainConfig) -> float:
        return (1.5 if config.precision == "bf16" else 1.0) * (1.2 if config.num_workers else 1.0)

    def loss(config: TrainConfig) -> float:
        return 1.05 if config.precision == "bf16" else 1.0

    run = run_simulated(Machine(speed=speed, loss=loss), tmp_path, budget=400)
    checked = [spec.config for spec in run.machine.specs if spec.purpose == "quality"]
    assert sum(config is not None and config.precision == "bf16" for config in checked) == 1
    assert run.profile.verdict == "improved"
    assert run.profile.config.precision == "fp32"
    assert run.profile.config.num_workers > 0


@pytest.mark.slow
def test_a_setting_that_changes_the_training_needs_the_metric(tmp_path):
    machine = Machine(
        speed=lambda c: 2.0 if c.user_knobs.get("variant") == "b" else 1.0, noise=0, knobs={"variant": ("a", "b")}
    )
    run = run_simulated(machine, tmp_path)
    assert run.profile.verdict == "keep"
    assert run.profile.config.user_knobs == {"variant": "a"}
    assert run.log.refused == (frozenset({"user_knobs.variant=b"}),)
    assert any("variant=b was refused" in note and "metric" in note for note in run.profile.evidence.notes)


class SlowStart(Machine):
    """Every process takes ten seconds until its first step."""

    def __call__(self, spec):
        return super().__call__(spec).replace(startup_seconds=10.0)


@pytest.mark.parametrize(("budget", "is_looked_at"), [(180.0, False), (600.0, True)])
def test_a_leader_whose_loss_check_takes_a_tenth_of_the_budget_is_looked_at_when_it_is_to_be_proven(
    tmp_path, budget, is_looked_at
):
    machine = SlowStart(seconds=12.0, noise=0.002)
    run_simulated(machine, tmp_path, budget=budget, only=("precision",))
    purposes = [spec.purpose for spec in machine.specs]
    places = [place for place, spec in enumerate(machine.specs) if spec.config and spec.config.precision == "bf16"]
    assert ("fidelity" in purposes[places[0] : places[0] + 3]) == is_looked_at


BOTH_METRICS = {"metrics": {"accuracy": "maximize", "error": "minimize"}, "evaluate_seconds": 0.1}


@pytest.mark.slow
def test_each_metric_is_judged_by_its_own_limit(tmp_path):
    def metrics(config: TrainConfig) -> dict[str, float | None]:
        return {"accuracy": 0.8, "error": 0.005 if config.precision == "bf16" else 0.0}

    limits = read_drift_limits(["1%", "error:max-degradation=0.01"])
    profile = run_simulated(Machine(metrics=metrics, facts=BOTH_METRICS), tmp_path, max_drift=limits).profile
    assert profile.verdict == "improved"
    trained = [check for check in profile.quality if check.test in ("paired-losses", "metric")]
    assert [(check.metric, check.margin) for check in trained] == [
        ("training loss", Margin(amount=0.01)),
        ("accuracy", Margin(amount=0.01)),
        ("error", Margin(amount=0.01, unit="absolute")),
    ]


@pytest.mark.parametrize(
    ("measured", "limit", "told"),
    [
        ({"accuracy": 0.8, "error": 0.3}, "error:0.1pp", "error worse by +0.1000, limit +0.0010"),
        pytest.param(
            {"accuracy": 0.79, "error": 0.2},
            "accuracy:1%",
            "accuracy worse by +1.25%, limit +1.00%",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"accuracy": 0.805, "error": 0.2},
            "accuracy:min-improvement=0.01",
            "accuracy worse by -0.0050, limit -0.0100",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"accuracy": 0.8, "error": None},
            "error:9%",
            "no finite error for seed 0; the baseline has 0.2",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_metric_that_is_worse_refuses_a_candidate(tmp_path, measured, limit, told):
    def metrics(config: TrainConfig) -> dict[str, float | None]:
        return measured if config.precision == "bf16" else {"accuracy": 0.8, "error": 0.2}

    machine = Machine(metrics=metrics, facts=BOTH_METRICS, noise=0)
    profile = run_simulated(machine, tmp_path, max_drift=read_drift_limits([limit])).profile
    assert profile.verdict == "keep"
    assert any(note.endswith(told) for note in profile.evidence.notes)


def test_a_metric_that_is_still_zero_stands_in_nobodys_way_where_the_gradients_are_the_same(tmp_path):
    facts = {"metrics": {"map50": "maximize"}, "evaluate_seconds": 0.1}
    machine = Machine(metrics=lambda _config: {"map50": 0.0}, facts=facts, noise=0)
    profile = run_simulated(machine, tmp_path).profile
    assert profile.verdict == "improved"
    told = "map50 was not compared: under your own settings it is still 0"
    assert any(note.startswith(told) for note in profile.evidence.notes)


@pytest.mark.slow
def test_a_metric_that_gets_worse_than_zero_does(tmp_path):
    machine = Machine(
        metrics=lambda config: {"error": 0.1 if config.precision == "bf16" else 0.0},
        facts={"metrics": {"error": "minimize"}, "evaluate_seconds": 0.1},
        noise=0,
    )
    assert run_simulated(machine, tmp_path).profile.verdict == "keep"


@pytest.mark.slow
def test_a_required_improvement_that_could_not_be_measured_is_none(tmp_path):
    facts = {**BOTH_METRICS, "evaluate_seconds": None}
    limits = read_drift_limits(["error:min-improvement=0.01"])
    profile = run_simulated(Machine(facts=facts), tmp_path, max_drift=limits).profile
    assert profile.verdict == "inconclusive"
    assert ("error", "inconclusive") in [(check.metric, check.verdict) for check in profile.quality]
    assert any("accuracy, error" in note and "no time to evaluate" in note for note in profile.evidence.notes)


def test_a_limit_of_a_metric_that_the_target_lacks_ends_the_search(tmp_path):
    machine = Machine(facts=BOTH_METRICS)
    with pytest.raises(UsageError, match="given for 'f1', and the training has no metric of that name") as caught:
        run_simulated(machine, tmp_path, max_drift=read_drift_limits(["f1:0.1pp"]))
    assert caught.value.hint == "its metrics are accuracy, error"
    assert [spec.purpose for spec in machine.specs] == ["probe"]


def test_a_trial_cut_by_the_end_of_a_stage_is_run_again_on_resume(tmp_path):
    first = run_simulated(Machine(seconds=5.0), tmp_path, budget=130)
    assert not [r for r in first.folder.read_trials() if r.status is TrialStatus.TIMED_OUT]


@pytest.mark.slow
def test_a_baseline_that_was_slow_once_takes_nobody_to_a_check_or_the_finals(tmp_path):
    """What runs at half the speed looks five times as fast beside a launch that the machine slowed down tenfold."""

    def speed(config: TrainConfig) -> float:
        return 1.0 if config == BASELINE else 0.5

    machine = Machine(speed=speed, drift=lambda now: 0.1 if LAUNCH_SECONDS <= now < 2 * LAUNCH_SECONDS else 1.0)
    run = run_simulated(machine, tmp_path)
    assert {spec.purpose for spec in machine.specs} == {"probe", "measure"}
    assert run.profile.verdict == "keep"


@pytest.mark.slow
def test_a_leader_that_cannot_be_checked_in_time_does_not_end_the_search(tmp_path):
    machine = Machine(facts={**BOTH_METRICS, "evaluate_seconds": 500.0})
    limits = read_drift_limits(["error:min-improvement=0.01"])  # takes trainings that are evaluated
    run = run_simulated(machine, tmp_path, max_drift=limits, budget=240)
    assert machine.now > 0.75 * 240
    assert run.profile.verdict == "inconclusive"


def test_where_nothing_leads_the_time_for_a_proof_goes_on_being_searched(tmp_path):
    machine = Machine(speed=lambda config: 1.0 if config == BASELINE else 0.8)
    run = run_simulated(machine, tmp_path, budget=60)
    assert machine.now > 60 - 2 * LAUNCH_SECONDS
    assert run.profile.verdict == "keep"
