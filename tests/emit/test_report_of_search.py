"""The report's parts about a whole search: its figures are the records', and those of the terminal."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from emit_records import BASELINE, TUNED, make_interval, make_profile, make_report, make_trial
from record_factory import make_state, make_target, read_drift_limits
from test_report import HOSTILE, Page, plain, search_trials
from typer.testing import CliRunner

from autotune.cli.pages.answer import list_answer
from autotune.cli.pages.explanation import print_explanation
from autotune.cli.pages.report import is_own_page
from autotune.emit.report import Origin, render_report
from autotune.emit.report.command import describe_command
from autotune.emit.report.plots import draw_losses, draw_memory, draw_timeline
from autotune.emit.report.worth import draw_worth
from autotune.format import format_bounds, format_factor
from autotune.presets import load_presets
from autotune.records import LossCurve, PeakMemory, TrialResult, TrialStatus
from autotune.records.explanation import ChangeEffect, Explanation, RefusedChanges, StepShare, TriedValue
from autotune.records.profile import OneOffCosts, ParetoPoint
from autotune.records.search import PlannedRun
from autotune.sentences.saving import describe_price, describe_saving

MIB = 2**20
EFFECTS = (
    ChangeEffect(
        names=("precision",),
        without=TUNED.replace(precision="fp32"),
        numerics="rounding",
        source="launches",
        worth=make_interval(1.284, 1.211, 1.362).replace(confidence_level=0.95),
        log_ratios=(0.25, 0.25, 0.25),
        launches=(3, 3),
        memory_bytes=-180 * MIB,
        alone=1.31,
        alone_launches=2,
    ),
    ChangeEffect(
        names=("num_workers",),
        without=TUNED.replace(num_workers=0),
        numerics="exact",
        source="search",
        worth=make_interval(1.05, 0.97, 1.14).replace(confidence_level=0.95),
        launches=(3, 2),
    ),
    ChangeEffect(names=("pin_memory",), without=TUNED.replace(pin_memory=False), numerics="exact"),
    ChangeEffect(
        names=("compile_mode",), without=TUNED.replace(compile_mode="off"), numerics="rounding", failure="crashed: x"
    ),
)


def make_explanation(**changes: Any) -> Explanation:
    fields: dict[str, Any] = {
        "label": "train.py:workload",
        "config": TUNED,
        "baseline_config": BASELINE,
        "is_proven": True,
        "together": make_interval(1.38, 1.31, 1.46).replace(confidence_level=0.95),
        "changes": EFFECTS,
        "tried": (TriedValue(knob="num_threads", value=1, launches=2, alone=0.96, best=0.96, failed={"timed_out": 1}),),
        "refused": (RefusedChanges(changes=("memory_format=channels_last",), best=1.62),),
        "measured": (
            ParetoPoint(config=TUNED, speedup=1.4, memory=PeakMemory(host_bytes=900 * MIB)),
            ParetoPoint(config=BASELINE, speedup=1.0, memory=PeakMemory(host_bytes=500 * MIB)),
        ),
        "before": StepShare(seconds=0.0320, data_wait_fraction=0.31, launches=8),
        "after": StepShare(seconds=0.0232, data_wait_fraction=0.02, launches=8),
    }
    return Explanation(**(fields | changes))


def render(**changes: Any) -> Page:
    origin = changes.pop("origin", None)
    trials = changes.pop("trials", search_trials())
    return Page(render_report(make_profile(**changes), make_report(), trials, make_explanation(), origin or Origin()))


def train(number: int, config: Any, losses: tuple[float | None, ...], seed: int = 0) -> TrialResult:
    curve = LossCurve(seed=seed, losses=losses, samples=32 * len(losses))
    return make_trial(number, config, rate=None, purpose="quality", status=TrialStatus.COMPLETED, curves=(curve,))


# ---- what each change is worth


def test_the_answer_tells_what_a_change_is_worth_where_that_is_known_well_enough() -> None:
    guess = EFFECTS[1].replace(worth=make_interval(0.82, 0.69, 0.98).replace(confidence_level=0.95))
    explanation = make_explanation(changes=(EFFECTS[0], guess, *EFFECTS[2:]))
    told = {line.plain.split()[0]: line.plain for line in list_answer(make_profile(), explanation)}
    assert "worth 1.28x (95 % 1.21-1.37, 3 pairs of fresh processes)" in told["precision"]
    assert "worth" not in told["workers"]
    assert "needed" in told["compile"]


def test_the_worth_of_a_change_is_that_of_the_record() -> None:
    words = render().words()
    for effect in EFFECTS[:2]:
        assert effect.worth is not None
        assert format_factor(effect.worth.estimate) in words
        assert f"95 % {format_bounds(effect.worth.low, effect.worth.high)}" in words
    assert "3 pairs of fresh processes; alone 1.31x (2 launches); memory -180 MiB" in words
    assert "read by the search: 3 and 2 launches" in words
    assert "without it: crashed: x" in words
    assert "31 % waiting for data" in words
    assert "alone 0.96x; 2 launches; 1 timed out" in words


def test_the_terminal_has_the_same_figures(capsys: pytest.CaptureFixture[str]) -> None:
    print_explanation(make_explanation())
    printed, words = capsys.readouterr().out, render().words()
    for figure in ("1.28x", "95 % 1.21-1.37", "1.05x", "95 % 0.97-1.14", "-180 MiB", "1.38x", "95 % 1.31-1.46"):
        assert figure in printed
        assert figure in words
    for known in (
        "not known",
        "needed",
        "crashed: x",
        "32 ms, 31 % waiting for data",
        "alone 0.96x; 2 launches",
        "layout=channels_last: at best 1.62x, and",
    ):
        assert known in printed
        assert known in words


def test_bars_are_in_the_order_of_their_figures() -> None:
    chart = draw_worth(make_explanation())
    assert chart is not None
    first, second, unknown, needed, together = chart.rows
    for row in (first, second, together):
        assert row.low_x is not None
        assert row.x is not None
        assert row.high_x is not None
        assert 0 <= row.low_x < row.x < row.high_x <= 100
    assert second.low_x is not None
    assert first.low_x is not None
    assert second.low_x < chart.one_x < first.low_x
    assert (unknown.x, unknown.worth) == (None, "not known")
    assert (needed.x, needed.worth) == (None, "needed")


def test_settings_that_stay_have_nothing_to_take_apart() -> None:
    assert draw_worth(make_explanation(changes=(), config=BASELINE)) is None


# ---- the header


def test_hours_and_money_are_reckoned_from_the_lower_end() -> None:
    costs = OneOffCosts(search_seconds=1200.0, planned_samples=1e7, planned_seconds=8 * 3600)
    profile = make_profile(speedup=make_interval(2.0, 1.6, 2.5), one_off=costs)
    told = describe_saving(profile, 1000.0, aside=0.0)
    assert told == "Your run of 8h00m takes about 4h00m, at most 5h00m: at least 3h00m less."
    paid = describe_price(profile, 1000.0, aside=0.0, price=2.5)
    assert paid == "At 2.50 an hour: at least 7.50 less for each run; the search has cost 0.83."


def test_without_a_length_an_example_is_given_and_what_is_no_step_stays() -> None:
    profile = make_profile(speedup=make_interval(2.0, 1.6, 2.5))
    told = describe_saving(profile, 1000.0, aside=0.5)
    assert told == "A training of 10h00m takes about 7h30m, at most 8h07m: at least 1h52m less."


def test_a_run_in_samples_is_as_long_as_they_take() -> None:
    costs = OneOffCosts(search_seconds=1200.0, planned_samples=7_200_000.0)
    profile = make_profile(speedup=make_interval(2.0, 1.6, 2.5), one_off=costs)
    assert describe_saving(profile, 1000.0, aside=0.0).startswith("Your run of 2h00m takes about 1h00m")
    assert describe_saving(profile, 1000.0, aside=0.5).startswith("Your run of 4h00m takes about 3h00m")


def test_nothing_is_saved_where_the_settings_stay() -> None:
    profile = make_profile(verdict="keep", config=BASELINE)
    assert describe_saving(profile, 1000.0, aside=0.0) == ""
    assert "saved" not in render(verdict="keep", config=BASELINE).words()


@pytest.mark.parametrize(
    ("asked", "command"),
    [
        ({"budget_seconds": 1200.0}, "autotune search train.py:workload --budget 20m"),
        ({"budget_seconds": 90.0, "seed": 3}, "autotune search train.py:workload --budget 90s --seed 3"),
        (
            {"max_drift": read_drift_limits(["0.2%", "accuracy:0.1pp"]), "only": ("precision",)},
            "autotune search train.py:workload --max-loss-increase 0.2% --metric-limit 0.2% "
            "--metric-limit accuracy=max-degradation=0.001 --only precision",
        ),
        (
            {"planned_run": PlannedRun(amount=1234567, unit="samples"), "world_size": 2},
            "autotune search train.py:workload --nproc-per-node 2 --train-for 1234567samples",
        ),
        (
            {"presets": (load_presets()[0], load_presets()[0].replace(name="mine"))},
            f"autotune search train.py:workload --preset {load_presets()[0].name} --preset FILE.json",
        ),
    ],
)
def test_the_command_is_that_of_the_search(asked: dict[str, Any], command: str) -> None:
    target = make_target("train.py:workload", "/home/user/project")
    assert describe_command(make_state(target=target, **asked)) == command


def test_the_page_says_how_to_repeat_it() -> None:
    target = make_target("train.py:workload", "/home/user/project")
    state = make_state(target=target, seed=7, budget_seconds=1200.0)
    origin = Origin(state=state, began=datetime(2026, 11, 24, 11, 8), folder=".autotune/x", price=2.0)
    words = render(origin=origin).words()
    assert "autotune search train.py:workload --budget 20m --seed 7" in words
    for fact in ("2026-11-24 11:08", "20m00s, 20m00s used", "Xeon Platinum 8480C, 16 CPUs, NVIDIA H200", ".autotune/x"):
        assert fact in words
    assert "At 2.00 an hour: at least" in words
    assert "Loss check: at most 0.18 % worse (95 %)" in words


# ---- charts


def test_the_timeline_is_as_long_as_the_search_and_marks_what_came_to_nothing() -> None:
    trials = [make_trial(0, purpose="probe"), make_trial(1), make_trial(2, rate=None), make_trial(3, purpose="final")]
    chart = draw_timeline(trials, 4 * 31.0 / 0.8)
    assert chart is not None
    assert sum(part.width for part in chart.parts) == pytest.approx(80.0, abs=0.1)
    (mark,) = chart.marks
    assert (mark.kind, mark.x) == ("lost", pytest.approx(40.0, abs=0.1))
    assert [name for name, *_ in chart.stages] == ["probe", "search", "final comparison", "between trials"]
    assert chart.stages[1][3] == "2 trials, 1 without a figure"
    assert chart.summary == "4 trials took 2m04s of 2m35s; 31s of it came to no figure."


def test_memory_is_drawn_from_what_was_read() -> None:
    profile = make_profile(
        pareto=(
            ParetoPoint(config=TUNED, speedup=1.4, memory=PeakMemory(host_bytes=900 * MIB)),
            ParetoPoint(config=BASELINE, speedup=1.0, memory=PeakMemory(host_bytes=500 * MIB)),
        )
    )
    chart = draw_memory(profile, make_explanation())
    assert chart is not None
    tuned, own = chart.dots
    assert (tuned.kind, own.kind) == ("front", "baseline")
    assert tuned.x > own.x  # more memory
    assert tuned.y < own.y  # faster
    assert chart.summary == "2 settings; 2 that no other beats in both."
    assert draw_memory(profile, make_explanation(measured=())) is None


def test_losses_of_both_arms_are_means_over_the_seeds_that_both_have() -> None:
    trials = [
        train(1, BASELINE, (4.0, 3.0, 2.0), seed=0),
        train(2, BASELINE, (4.0, 3.0, 3.0), seed=1),
        train(3, TUNED, (4.0, 3.0, 2.5), seed=0),
        train(4, TUNED, (4.0, 3.0, 2.5, 2.4), seed=1),
        train(5, TUNED, (9.0, 9.0, 9.0), seed=2),
    ]
    chart = draw_losses(trials, make_profile())
    assert chart is not None
    assert plain(chart.summary) == "Mean of 2 seeds; at the end 2.5000 with your settings, 2.5000 with the others."
    assert chart.samples == "96 samples"
    assert chart.baseline == chart.candidate
    assert len(chart.band.split()) == 6
    values = [float(point.split(",")[1]) for point in chart.band.split()]
    assert all(0.0 <= value <= 100.0 for value in values)


@pytest.mark.parametrize("losses", [(None, 1.0, 1.0), (1.0,)])
def test_no_training_of_both_is_no_chart(losses: tuple[float | None, ...]) -> None:
    assert draw_losses([train(1, BASELINE, (4.0, 3.0)), train(2, TUNED, losses)], make_profile()) is None


def test_hostile_text_is_harmless_in_them() -> None:
    effect = EFFECTS[0].replace(failure=HOSTILE, worth=None)
    explanation = make_explanation(changes=(effect,), note=HOSTILE, tried=make_explanation().tried)
    origin = Origin(state=make_state(target=make_target(HOSTILE.replace("\ud800", ""), "/")), folder=HOSTILE)
    page = Page(render_report(make_profile(), make_report(), search_trials(), explanation, origin))
    assert page.count("img") == 0
    assert page.count("script") == 1  # its own


# ---- whose page it is


def test_a_page_is_its_targets_own(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render_report(make_profile(), make_report(), ()))
    label = make_profile().target.label
    assert is_own_page(page, label)
    assert not is_own_page(page, "other.py:workload")
    page.write_text("<p>mine</p>")
    assert not is_own_page(page, label)
    assert not is_own_page(tmp_path / "nothing.html", label)


def test_a_price_is_no_less_than_nothing() -> None:
    from autotune.cli import app

    for price in ("-1", "nan", "inf"):
        done = CliRunner().invoke(app, ["report", "--price", price])
        assert done.exit_code == 2
