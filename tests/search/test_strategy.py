"""What is proposed first, what a bundle may hold, and what is left for the end."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from simulated import Machine, make_report

from autotune.knobs import Facts
from autotune.records import Advice, GainRange, TrainConfig
from autotune.records.config import changed_fields
from autotune.records.probe import Caution, ProbeReport
from autotune.search.explore.strategy import MOST_COMPILE_SHARE, Situation, suggest
from autotune.space import build_space, needs_compilation

CHEAP = {"host_allocator", "num_workers", "memory_format", "optimizer_implementation"}


def situation(*, advice: tuple[Advice, ...] = (), **changes: Any) -> Situation:
    made = make_report(Machine())
    report: ProbeReport = made.replace(advice=advice, hardware=made.hardware.replace(has_cpp_compiler=True))
    space = build_space(Facts(target=report.target, hardware=report.hardware))
    return dataclasses.replace(Situation(space, report, space.baseline, tried=[space.baseline]), **changes)


def list_plan(now: Situation) -> list[TrainConfig]:
    """Return the whole plan, as long as nothing that is tried changes anything."""
    tried = list(now.tried)
    while (config := suggest(dataclasses.replace(now, tried=tried))) is not None:
        tried.append(config)
    return tried[len(now.tried) :]


def changes(now: Situation, config: TrainConfig) -> tuple[str, ...]:
    return changed_fields(config, now.space.baseline)


def test_what_is_cheap_to_prove_is_tried_one_by_one_before_any_bundle():
    now = situation()
    plan = list_plan(now)
    first_bundle = next((place for place, one in enumerate(plan) if len(changes(now, one)) > 1), len(plan))
    alone = {changes(now, one)[0] for one in plan[:first_bundle]}
    assert CHEAP & set(now.space.choices) <= alone
    assert set(changes(now, plan[0])) <= CHEAP


def test_a_bundle_holds_only_what_has_won_alone_or_is_advised():
    now = situation()
    split = {"micro_batch_size", "gradient_accumulation_steps"}
    assert all(len(set(changes(now, one)) - split) <= 1 for one in list_plan(now))
    won = situation(effects={"precision=bf16": 0.2, "optimizer_implementation=fused": 0.1})
    bundles = [set(changes(won, one)) for one in list_plan(won) if len(changes(won, one)) > 1]
    assert {"precision", "optimizer_implementation"} in bundles


def test_what_the_probe_expects_most_of_comes_first():
    gain = GainRange(low=1.5, high=4.0)
    now = situation(advice=(Advice(knob="num_workers", reason="the loader waits", gain=gain),))
    assert changes(now, list_plan(now)[0]) == ("num_workers",)


def compile_at(seconds: float, budget: float) -> int | None:
    """Return the place in the plan of the first config that compiles; None where none does."""
    now = situation(price=lambda one: seconds if needs_compilation(one) else 3.0, budget_seconds=budget)
    plan = list_plan(now)
    assert all(one.host_allocator == "default" for one in plan if needs_compilation(one))
    return next((place for place, one in enumerate(plan) if needs_compilation(one)), None)


def test_compiling_comes_when_it_is_worth_its_price_and_not_at_all_where_that_is_a_fifth_of_the_budget():
    cheap, dear = compile_at(6.0, 1200.0), compile_at(43.0, 1200.0)
    assert cheap is not None
    assert dear is not None
    assert 0 < cheap < dear
    assert compile_at(43.0, 42.0 / MOST_COMPILE_SHARE) is None


def test_a_value_that_was_not_measured_is_tried_alone_and_last():
    now = situation()
    caution = Caution(knob="precision", value="bf16", reason="its rate was not measured")
    now = dataclasses.replace(now, space=dataclasses.replace(now.space, cautions=(caution,)))
    assert ("precision", "bf16") in now.space.unproven
    plan = list_plan(now)
    assert [one for one in plan if one.precision == "bf16"] == [plan[-1]]
    assert changes(now, plan[-1]) == ("precision",)


def test_what_costs_speed_is_not_compiled_and_comes_later():
    base = situation()
    compiled = base.space.baseline.replace(compile_mode="default")
    now = dataclasses.replace(base, incumbent=compiled, effects={"num_threads=1": -0.3})
    one_thread = [one for one in list_plan(now) if one.num_threads == 1]
    assert one_thread
    assert not any(needs_compilation(one) for one in one_thread)


def test_a_change_is_learnt_without_compiling_first():
    base = situation()
    compiled = base.space.baseline.replace(compile_mode="default")
    now = dataclasses.replace(base, incumbent=compiled, price=lambda one: 43.0 if needs_compilation(one) else 3.0)
    plan = [one for one in list_plan(now) if one.host_allocator == "glibc-tuned"]
    assert [needs_compilation(one) for one in plan[:2]] == [False, True]


@pytest.mark.parametrize("tried", [0, 1])
def test_only_what_was_not_tried_is_proposed(tried):
    now = situation()
    first = list_plan(now)[tried]
    assert suggest(dataclasses.replace(now, tried=[now.space.baseline, *list_plan(now)[: tried + 1]])) != first


def test_workers_are_tried_with_the_threads_that_they_leave_cpus_for_right_after_them():
    gain = GainRange(low=1.2, high=2.0)
    now = situation(advice=(Advice(knob="num_workers", reason="the loader waits", gain=gain),))
    first, second = list_plan(now)[:2]
    assert (first.num_workers, changes(now, first)) == (2, ("num_workers",))  # two CPUs
    assert (second.num_workers, second.num_threads, set(changes(now, second))) == (2, 1, {"num_workers", "num_threads"})
    lost = dataclasses.replace(now, effects={"num_workers=2": -0.3})
    assert second in list_plan(lost)[:4]
    assert not any(set(changes(now, one)) == {"num_workers", "num_threads"} for one in list_plan(situation()))
