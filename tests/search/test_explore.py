"""The exploring stage: everything is priced, nothing that is cut ends it, and it stops at what can be reached."""

from __future__ import annotations

import dataclasses
import math

import pytest
from simulated import (
    BASELINE,
    LAUNCH_SECONDS,
    Machine,
    Search,
    explore,
    make_judged,
    make_report,
    number_of,
    open_search,
)

from autotune.records import TrainConfig, TrialStatus
from autotune.search.explore.stage import Tried
from autotune.search.launch.prices import predict_compilation


def test_what_is_kept_back_is_not_touched():
    machine = Machine()
    search = open_search(machine, budget=100.0)
    assert explore(search, kept_seconds=lambda: 60.0) == "budget"
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
    search = open_search(OneSlow(), budget=100.0)
    explore(search, kept_seconds=lambda: next(kept))
    assert [one.status for one in search.log.interrupted] == [TrialStatus.INTERRUPTED]
    assert number_of(search.log.interrupted[0].spec.config) == 1
    assert len([one for one in search.log.judged if number_of(one.config) > 1]) > 2
    assert (
        search.log.prices.launch_seconds(search.log.interrupted[0].spec.config)
        > search.log.interrupted[0].elapsed_seconds
    )


def test_what_does_not_fit_the_time_counts_as_tried():
    log = open_search(Machine()).log
    log.add_judged(make_judged(BASELINE, 0.0))
    compiled = BASELINE.replace(compile_mode="default")
    price = log.prices.launch_seconds(compiled)
    assert price > LAUNCH_SECONDS + 10
    suspects = log.find_suspects(count_overdue=True)
    short, long = Tried(log, suspects, price - 1.0), Tried(log, suspects, price + 1.0)
    assert compiled in short
    assert short.too_dear
    assert compiled not in long
    assert not long.too_dear


def open_bounded(machine: Machine, bound: float | None, *, budget: float) -> Search:
    """Return a search whose probe tells of a bound on the speed-up."""
    report = make_report(machine)
    return open_search(
        machine, budget=budget, report=report.replace(verdict=report.verdict.replace(speedup_ceiling=bound))
    )


@pytest.mark.parametrize(("bound", "stops"), [(1.5, True), (1.55, True), (2.0, False), (1.2, False), (None, False)])
def test_it_stops_where_the_probes_bound_is_reached(bound, stops):
    search = open_bounded(Machine(speed=lambda one: 1.5 if number_of(one) == 3 else 1.0), bound, budget=400.0)
    assert (explore(search, count=60) == "bound") == stops
    if stops:
        assert len(search.log.judged) < 10


def test_nothing_that_is_no_faster_reaches_the_bound():
    """A bound of next to nothing must not end a search that has not found even that."""
    search = open_bounded(Machine(speed=lambda _one: 1.0, noise=0.0), 1.01, budget=100.0)
    assert explore(search) != "bound"


def test_a_proof_that_is_due_comes_before_anything_beyond_the_plan():
    search = open_search(Machine(), budget=400.0)
    assert explore(search, is_proof_due=lambda: len(search.log.judged) > 4) == "budget"
    assert len(search.log.judged) == 5


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
