from __future__ import annotations

import math

import pytest
from record_factory import make_check, make_interval, make_profile, make_result, make_spec

from autotune.format import count, format_budget
from autotune.records import (
    DriftLimits,
    Interval,
    Margin,
    Profile,
    QualityCheck,
    TrainConfig,
)
from autotune.records.measurement import GpuState, Interference
from autotune.records.profile import Candidate, Confirmation, Evidence, MachineNoise, NotTested, OneOffCosts
from autotune.records.quality import GradientEquivalence, QualityVerdict
from autotune.records.trial import GradientPlan
from autotune.sentences.answer import (
    describe_break_even,
    describe_candidate,
    describe_power,
    describe_speedup,
    describe_untested,
    list_evidence,
)
from autotune.sentences.loss_check import (
    describe_check,
    describe_drift,
    describe_limits,
    describe_refusal,
    format_drift,
    format_margin,
)
from autotune.sentences.noise import describe_busy_machine, describe_interference, describe_noise
from autotune.sentences.trials import describe_result

QUIET = MachineNoise(launch_sd=0.012, degrees_of_freedom=9.0, block_sd=0.01, launches=20, blocks=160)


def interval(estimate: float, low: float, high: float, level: float) -> Interval:
    return make_interval(estimate, low, high, confidence_level=level, method="t")


def profile(verdict: str = "improved", *, estimate: float = 1.38, **changes: object) -> Profile:
    confirmation = Confirmation(
        pairs_planned=8,
        log_ratios=(math.log(estimate),) * 8,
        interval=interval(estimate, 1.30, 1.46, 0.95),
        hodges_lehmann=estimate,
        smallest_detectable=1.17,
        wanted_speedup=1.05,
        budget_needed_seconds=5000.0,
    )
    fields: dict[str, object] = {
        "verdict": verdict,
        "config": TrainConfig(num_workers=2),
        "baseline_config": TrainConfig(),
        "speedup": interval(estimate, 1.319, 1.47, 0.98),
        "evidence": Evidence(pairs=8, confirmation=confirmation, noise=QUIET, measured_fraction=0.423),
    }
    return make_profile(**(fields | changes))


def test_a_busy_machine_is_told_with_what_to_do_unless_a_gain_was_proven() -> None:
    busy = QUIET.replace(interference=Interference(foreign_cpu_fraction=0.853))
    evidence = Evidence(noise=busy)
    told = "a machine as busy as that hides gains: search again when it is quieter"
    assert told in list_evidence(profile("keep", evidence=evidence))
    assert told not in list_evidence(profile(evidence=evidence))
    assert describe_busy_machine(QUIET.replace(interference=Interference(foreign_cpu_fraction=0.1))) is None
    assert describe_busy_machine(QUIET) is None


def test_a_check_names_its_metric_once() -> None:
    reason = "gradients, after 200 steps: no difference"
    assert describe_check(make_check(test="gradients", metric="gradients", reason=reason)) == f"{reason}: not worse"
    told = describe_check(make_check(test="tape", metric="training data", reason="equal byte for byte"))
    assert told == "training data: equal byte for byte: not worse"


def test_the_headline_is_the_lower_end_rounded_down() -> None:
    text = describe_speedup(profile())
    assert text == "improved: at least 1.31x faster (point 1.38x, 95 % 1.30-1.46, 8 pairs)"


def test_the_headline_of_a_planned_run_is_about_the_whole_of_it() -> None:
    planned = profile(one_off=OneOffCosts(planned_samples=1e6))
    assert "at least 1.31x faster over the planned run (point" in describe_speedup(planned)


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ("inconclusive", "inconclusive: keep your settings (best candidate 1.38x, 95 % 1.30-1.46, 8 pairs)"),
        ("keep", "keep your settings (best candidate 1.38x, 95 % 1.30-1.46, 8 pairs)"),
    ],
)
def test_without_a_claim_the_settings_are_kept(verdict: str, text: str) -> None:
    assert describe_speedup(profile(verdict)) == text


def test_without_finals_there_is_no_figure() -> None:
    text = "keep your settings: nothing that was measured beat them"
    assert describe_speedup(profile("keep", evidence=Evidence())) == text


def test_an_inconclusive_answer_says_what_could_have_been_shown_and_what_it_takes() -> None:
    text = describe_power(profile("inconclusive"))
    assert text == (
        "with this noise 8 pairs show a gain of 1.17x or more; to show 1.05x takes --budget 84m or a quieter machine"
    )
    assert describe_power(profile("improved")) is None
    assert describe_power(profile("inconclusive", evidence=Evidence())) is None


def test_the_evidence_is_listed_line_by_line() -> None:
    lines = list_evidence(profile("inconclusive", one_off=OneOffCosts(search_seconds=65.0)))
    assert lines[0].startswith("with this noise 8 pairs")
    assert lines[1] == "noise: launches of one setting differ by 1.2 % (standard deviation)"
    assert lines[2] == "search 1m05s (no trial), 42 % of it inside measured blocks"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(30, "1m"), (61, "2m"), (3 * 3600 - 1, "180m"), (3 * 3600, "3h"), (3 * 3600 + 1, "4h"), (80 * 3600, "4d")],
)
def test_a_budget_is_rounded_up(seconds: float, text: str) -> None:
    assert format_budget(seconds) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"baseline_range": 1.31}, "your own settings by up to 1.31x"),
        ({"machine_changes": 1}, "the machine changed its speed 1 time"),
        ({"not_steady": 2}, "2 of 20 launches not steady"),
        ({"raced": 3}, "3 of 20 launches ended early as clearly slower"),
        ({"disturbed": 4}, "4 of 160 blocks disturbed"),
        ({"interference": Interference(steal_fraction=0.07)}, "7 % stolen by the hypervisor"),
    ],
)
def test_what_made_the_noise_is_said(changes: dict[str, object], words: str) -> None:
    assert describe_noise(QUIET.replace(**changes)).endswith("; " + words)


def test_interference_is_the_mean_over_the_blocks_that_told() -> None:
    readings = [Interference(foreign_cpu_fraction=0.1), Interference(foreign_cpu_fraction=0.5), None, Interference()]
    assert describe_interference(readings) == ["30 % of the CPUs used by others"]
    assert describe_interference([Interference(foreign_cpu_fraction=0.04), None]) == []
    held = Interference(gpu=GpuState(slowdowns=("thermal", "power-cap")))
    assert describe_interference([held]) == ["the GPU was held down (power-cap, thermal)"]


def test_break_even_names_the_compilation_only_where_there_was_one() -> None:
    assert describe_break_even(OneOffCosts()) is None
    costs = OneOffCosts(search_seconds=60.0, break_even_samples=0.0, search_break_even_samples=12_345.6)
    assert describe_break_even(costs) == "the search is paid back after 12,346 samples"
    compiled = costs.replace(compile_seconds=20.0, break_even_samples=4000.0)
    assert describe_break_even(compiled) == (
        "the compilation is paid back after 4,000 samples, the search is paid back after 12,346 samples"
    )


def test_counts_have_their_noun() -> None:
    assert (count(1, "pair"), count(1200, "pair"), count(2, "launch", "launches")) == (
        "1 pair",
        "1,200 pairs",
        "2 launches",
    )


RELATIVE = Margin(amount=0.005)
ABSOLUTE = Margin(amount=0.001, unit="absolute")


@pytest.mark.parametrize(
    ("worsening", "relative", "absolute"),
    [
        (0.0012, "+0.12%", "+0.0012"),
        (-0.25, "-25.00%", "-0.2500"),
        (0.0, "+0.00%", "+0.0000"),
        (12.34567, "+1234.57%", "+12.3457"),
        (-0.000034, "-0.00%", "-3.4e-05"),  # four decimals would show nothing of it
    ],
)
def test_a_worsening_is_shown_in_the_unit_of_its_margin(worsening: float, relative: str, absolute: str) -> None:
    assert format_drift(worsening, RELATIVE) == relative
    assert format_drift(worsening, ABSOLUTE) == absolute


@pytest.mark.parametrize(
    ("margin", "text"),
    [(RELATIVE, "+0.50%"), (ABSOLUTE, "+0.0010"), (Margin(amount=-0.01, unit="absolute"), "-0.0100")],
)
def test_a_margin_is_shown_in_its_own_unit(margin: Margin, text: str) -> None:
    assert format_margin(margin) == text


def test_the_limits_are_one_line() -> None:
    assert describe_limits(DriftLimits()) == "loss +0.50%, metrics +0.50%"
    limits = DriftLimits(metric=ABSOLUTE, metrics={"accuracy": Margin(amount=-0.01, unit="absolute")})
    assert describe_limits(limits) == "loss +0.50%, metrics +0.0010, accuracy -0.0100"


def check_of(margin: Margin, verdict: QualityVerdict) -> QualityCheck:
    difference = interval(0.0012, -0.001, 0.0034, 0.90)
    return make_check(
        test="metric", metric="accuracy", difference=difference, margin=margin, verdict=verdict, samples=1280
    )


@pytest.mark.parametrize(
    ("margin", "shown"),
    [(RELATIVE, "+0.12% (-0.10% to +0.34%), limit +0.50%"), (ABSOLUTE, "+0.0012 (-0.0010 to +0.0034), limit +0.0010")],
)
def test_a_check_is_shown_in_the_unit_of_its_margin(margin: Margin, shown: str) -> None:
    check = check_of(margin, "inconclusive")
    assert describe_check(check) == f"accuracy: {shown}, 4 seeds x 1,280 samples: not proven"
    assert describe_check(check.replace(difference=None)).startswith("accuracy: not measured, limit +0.")


def test_a_refusal_tells_what_was_shown_from_what_was_not() -> None:
    refused, begins = (
        ["precision=bf16"],
        "precision=bf16 was refused by the loss check (a candidate with it ran at 1.50x)",
    )
    worse = describe_refusal(refused, [check_of(ABSOLUTE, "inferior")], math.log(1.5))
    assert worse == f"{begins}: accuracy worse by +0.0012, limit +0.0010"
    unclear = describe_refusal(refused, [check_of(ABSOLUTE, "inconclusive")], math.log(1.5))
    assert unclear == f"{begins}: accuracy was not shown to stay within +0.0010: +0.0012, up to +0.0034"


# ---- endings in which nothing is proven


def end(verdict: str, evidence: Evidence, candidate: Candidate | None = None) -> Profile:
    return profile(verdict, speedup=None, evidence=evidence, candidate=candidate)


def test_nothing_measured_is_not_called_kept_and_tells_what_would_try_it() -> None:
    found = NotTested(
        outcomes={"timed_out": 1, "interrupted": 2},
        left_out=1,
        settings=("precision", "user_knobs.width"),
        settings_known=11,
        budget_needed_seconds=350.0,
    )
    told = end("not-tested", Evidence(not_tested=found))
    assert describe_speedup(told) == "not tested: nothing but your own settings could be measured; keep them"
    assert describe_untested(told) == [
        "3 candidates were started and none could be timed: 2 interrupted, 1 timed out",
        "1 candidate was left out, as they cannot run here",
        "not tried: 2 of 11 settings: precision, width",
        "about 6m would try them: autotune search --resume --budget 6m",
    ]
    assert set(describe_untested(told)) <= set(list_evidence(told))
    assert describe_untested(profile()) == []


@pytest.mark.parametrize(("known", "why"), [(2, "each was tried and failed"), (0, "there is none to try here")])
def test_where_no_budget_helps_none_is_named(known: int, why: str) -> None:
    lines = describe_untested(end("not-tested", Evidence(not_tested=NotTested(settings_known=known))))
    assert lines == ["no candidate was started", f"a larger budget would not help: of the settings {why}"]


def test_pairs_that_are_too_few_have_no_interval() -> None:
    few = Confirmation(pairs_planned=8, log_ratios=(0.2, 0.3), hodges_lehmann=1.28, extra_seconds_needed=200.0)
    candidate = Candidate(config=TrainConfig(), speedup_estimate=1.284, pairs=2, passed_checks=True, reason="too few")
    told = end("inconclusive", Evidence(pairs=2, confirmation=few), candidate)
    text = "inconclusive: keep your settings (best candidate about 1.28x, 2 pairs, too few for an interval)"
    assert describe_speedup(told) == text
    power = describe_power(told)
    assert power == (
        "2 pairs are too few to tell anything; about 4m more would settle it: autotune search --resume --budget 4m"
    )
    assert describe_candidate(told) == "about 1.28x, learns as well, not proven faster: too few"


def test_a_candidate_that_was_refused_is_not_praised() -> None:
    refused = Candidate(config=TrainConfig(), speedup_estimate=1.5, reason="its loss check was not passed: x")
    told = end("keep", Evidence(), refused)
    assert describe_speedup(told) == "keep your settings: nothing that was measured beat them and learned as well"
    assert describe_candidate(told) == "about 1.50x, its loss check was not passed: x"
    assert describe_candidate(profile()) is None


@pytest.mark.parametrize(
    ("is_transient", "told"),
    [
        (False, "are the same at initial weights and after 10 steps;"),
        (True, "are the same after 10 steps, at initial weights but for what is gone by then;"),
    ],
)
def test_what_of_the_gradients_is_gone_later_is_told(is_transient: bool, told: str) -> None:
    first = GradientEquivalence(
        subject="gradients", point="initial weights", windows=12, verdict="non-inferior", is_transient=is_transient
    )
    later = first.replace(point="after 10 steps", is_transient=False)
    steps = first.replace(subject="updates", is_transient=False)
    check = make_check(test="gradients", metric="gradients", fidelity=(first, later, steps))
    assert told in (describe_drift(make_profile(quality=(check,))) or "")


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        (GradientPlan(windows=8), "gradients of 8 batches"),
        (GradientPlan(windows=16, later_steps=40), "gradients of 16 batches at the start and after 40 steps"),
        (
            GradientPlan(windows=64, first_windows=16, later_steps=40, dropout=False),
            "gradients of 16 batches at the start and of 64 after 40 steps, without dropout",
        ),
    ],
)
def test_a_look_at_gradients_is_told_with_its_batches(plan: GradientPlan, told: str) -> None:
    result = make_result(make_spec(purpose="fidelity", fidelity=plan), captures="captures.npz")
    assert describe_result(result, None) == told
