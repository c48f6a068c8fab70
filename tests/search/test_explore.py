"""The exploring stage: everything is priced, nothing that is cut ends it, and it stops at what can be reached."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from simulated import (
    BASELINE,
    LAUNCH_SECONDS,
    Machine,
    Placebos,
    make_curve,
    make_judged,
    make_launcher,
    make_placebos,
    make_situation,
    number_of,
)

from autotune.records import TrainConfig, TrialStatus
from autotune.search.explore.stage import Explorer, Tried
from autotune.search.launch.launcher import Launcher
from autotune.search.launch.prices import predict_compilation


def explore(launcher: Launcher, *, count: int = 100, **asked: Any) -> str:
    study = Placebos(make_placebos(count))
    return Explorer(launcher, study, lambda _now: None, make_situation(launcher), make_curve(), **asked).run()


def test_what_is_kept_back_is_not_touched():
    machine = Machine()
    launcher = make_launcher(machine, budget=100.0)
    assert explore(launcher, kept_seconds=lambda: 60.0) == "budget"
    assert 100.0 - 60.0 - 2 * LAUNCH_SECONDS < machine.now <= 100.0 - 60.0


def test_a_launch_that_is_cut_does_not_end_the_stage():
    """One that takes far longer than the others is cut by the end of its time; what still fits is launched after it."""

    @dataclasses.dataclass
    class OneSlow(Machine):
        def __call__(self, spec):
            usual = self.seconds
            self.seconds = 25.0 if number_of(spec.config or BASELINE) == 1 else usual
            try:
                return super().__call__(spec)
            finally:
                self.seconds = usual

    kept = iter([88.0] * 4 + [60.0] * 1000)  # while nothing leads more is kept back
    launcher = make_launcher(OneSlow(), budget=100.0)
    explore(launcher, kept_seconds=lambda: next(kept))
    assert [one.status for one in launcher.interrupted] == [TrialStatus.INTERRUPTED]
    assert number_of(launcher.interrupted[0].spec.config) == 1
    assert len([one for one in launcher.judged if number_of(one.config) > 1]) > 2
    assert launcher.predict_seconds(launcher.interrupted[0].spec.config) > launcher.interrupted[0].elapsed_seconds


def test_what_does_not_fit_the_time_counts_as_tried():
    launcher = make_launcher(Machine())
    launcher.judged.append(make_judged(BASELINE, 0.0))
    compiled = BASELINE.replace(compile_mode="default")
    price = launcher.predict_seconds(compiled)
    assert price > LAUNCH_SECONDS + 10
    short, long = Tried(launcher, price - 1.0), Tried(launcher, price + 1.0)
    assert compiled in short
    assert short.too_dear
    assert compiled not in long
    assert not long.too_dear


@pytest.mark.parametrize(("bound", "stops"), [(1.5, True), (1.55, True), (2.0, False), (1.2, False), (None, False)])
def test_it_stops_where_the_probes_bound_is_reached(bound, stops):
    launcher = make_launcher(Machine(speed=lambda one: 1.5 if number_of(one) == 3 else 1.0), budget=400.0)
    report = launcher.known_report
    launcher.report = report.replace(verdict=report.verdict.replace(speedup_ceiling=bound))
    assert (explore(launcher, count=60) == "bound") == stops
    if stops:
        assert len(launcher.judged) < 10


def test_nothing_that_is_no_faster_reaches_the_bound():
    """A bound of next to nothing must not end a search that has not found even that."""
    launcher = make_launcher(Machine(speed=lambda _one: 1.0, noise=0.0), budget=100.0)
    report = launcher.known_report
    launcher.report = report.replace(verdict=report.verdict.replace(speedup_ceiling=1.01))
    assert explore(launcher) != "bound"


def test_a_proof_that_is_due_comes_before_anything_beyond_the_plan():
    launcher = make_launcher(Machine(), budget=400.0)
    assert explore(launcher, is_proof_due=lambda: len(launcher.judged) > 4) == "budget"
    assert len(launcher.judged) == 5


def test_compiling_is_priced_by_the_operations_and_then_by_what_was_seen():
    facts = Machine().find_facts()
    config = TrainConfig(compile_mode="default")
    guess = predict_compilation(config, facts, [])
    assert predict_compilation(TrainConfig(), facts, []) == 0.0
    assert predict_compilation(config.replace(compile_mode="max-autotune"), facts, []) > guess
    seen = make_judged(config, 0.1, compile_seconds=3 * guess).result
    again = make_judged(config, 0.1, compile_seconds=1.0).result  # found in the cache
    other = config.replace(num_threads=1)
    assert predict_compilation(other, facts, [seen, again]) == pytest.approx(3 * guess)


def test_more_operations_take_longer_to_compile():
    work = {"products_fraction": 1.0, "traffic_fraction": 0.0, "overhead_fraction": 0.0, "host_syncs_per_step": 0}

    def price(operations: int) -> float:
        facts = Machine(facts={"work": {**work, "operations_per_step": operations}}).find_facts()
        facts = facts.model_validate(facts.model_dump())
        return predict_compilation(TrainConfig(compile_mode="default"), facts, [])

    assert price(100) < price(1000) < price(10_000)
    assert math.isfinite(price(10**6))
