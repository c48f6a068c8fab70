"""The drift gate on scripts whose truth is known: it sees only what their hooks see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from controls import Control
from gate_runs import GateRuns, open_runner
from script_controls import SCRIPT_NEGATIVE, SCRIPT_POSITIVE

from autotune.drift.gate.culprit import find_culprit
from autotune.records.trial import GradientPlan

PLAN = GradientPlan(windows=8, later_steps=10)
"""A script goes through every step of it in each of its processes."""
MISSED = {
    "script-skipped-batch": "a step that is left out shows in no window in common, and steps between are not counted",
}
QUICK = ("script-dropped-batch", "script-bf16", "script-micro-batch")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GateRuns]:
    with open_runner(tmp_path_factory.mktemp("trials")) as runner:
        yield GateRuns(runner, plan=PLAN)


def by_target(controls: tuple[Control, ...]) -> list[Any]:
    """Return parameters in an order in which controls of one command follow each other."""
    return [
        pytest.param(control, id=control.name, marks=list(marks_of(control.name)))
        for control in sorted(controls, key=lambda control: control.target)
    ]


def marks_of(name: str) -> Iterator[pytest.MarkDecorator]:
    if name not in QUICK:
        yield pytest.mark.slow
    if name in MISSED:
        yield pytest.mark.xfail(strict=True, reason=MISSED[name])


@pytest.mark.slow
@pytest.mark.parametrize("control", by_target(SCRIPT_NEGATIVE))
@pytest.mark.fault("16", injected="scripts with a planted mistake", outcome="refused; never chosen")
def test_a_mistake_in_a_script_is_caught(runs: GateRuns, control: Control) -> None:
    verdict = runs.judge(control)
    assert control.caught_by in verdict.caught_by, verdict.checks
    assert not verdict.passed


@pytest.mark.slow
@pytest.mark.parametrize("control", by_target(SCRIPT_POSITIVE))
def test_what_is_right_in_a_script_passes(runs: GateRuns, control: Control) -> None:
    verdict = runs.judge(control)
    assert verdict.passed, verdict.checks
    assert verdict.caught_by == ()


@pytest.mark.slow
def test_the_guilty_change_of_a_script_alone_is_dropped(runs: GateRuns) -> None:
    scaled = SCRIPT_NEGATIVE[0]
    opened = runs.open_target(scaled.target, scaled.knobs)
    gate = opened.open_gate(plan=PLAN)
    innocent = {"num_workers": 2, "optimizer_implementation": "fused"}
    config = opened.change(**innocent, **scaled.changes)
    checks = gate.screen(config)
    assert checks is not None
    blame = find_culprit(gate, config, checks)
    assert blame.knobs == ("user_knobs.fault",)
    assert blame.rest == opened.change(**innocent)
