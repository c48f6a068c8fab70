"""The exploring stage: everything is priced, nothing that is cut ends it, and it stops at what can be reached."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_check
from simulated import (
    BASELINE,
    LAUNCH_SECONDS,
    Machine,
    Placebos,
    Search,
    UnsavedStudy,
    explore,
    make_judged,
    make_report,
    number_of,
    open_search,
)

from autotune.records import TrainConfig, TrialStatus
from autotune.records.facts import StepWork
from autotune.records.probe import Caution
from autotune.records.search import Preset
from autotune.search.answer.notes import describe_untried
from autotune.search.explore.stage import Explorer, Tried, find_dear_values, list_own
from autotune.search.explore.study import Proposal
from autotune.search.launch.prices import group_by_code, predict_compilation
from autotune.search.scores.objective import Judged
from autotune.sentences.settings import list_changes
from autotune.space import SearchSpace


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


def test_own_settings_that_run_out_of_their_time_are_launched_again_with_more_of_it_and_nothing_is_blamed():
    """A script that writes samples of what it has learned after its first step takes longer than its probe foretold."""
    machine = Machine(seconds=30.0)
    search = open_search(machine, budget=600.0)
    explore(search)
    first, second, *others = search.log.judged
    assert (first.config, first.result.status) == (BASELINE, TrialStatus.TIMED_OUT)
    assert (second.config, second.result.status) == (BASELINE, TrialStatus.COMPLETED)
    assert others
    assert {one.result.status for one in others} == {TrialStatus.COMPLETED}
    assert search.log.prices.launch_seconds(BASELINE) == 30.0


def test_own_settings_that_never_come_to_their_end_are_not_all_that_is_launched():
    search = open_search(Machine(seconds=1e4), budget=600.0)
    explore(search)
    assert [one.config == BASELINE for one in search.log.judged[:3]] == [True, True, False]


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


def test_a_proof_that_is_due_comes_before_anything_new():
    search = open_search(Machine(), budget=400.0)
    assert explore(search, is_proof_due=lambda: len(search.log.judged) > 4) == "budget"
    assert len(search.log.judged) == 5


FASTER = BASELINE.replace(precision="bf16", num_workers=2)


def explore_around(
    effect: float, *, is_due: bool = False, proof_seconds: float = 0.0, kept_seconds: float = 0.0
) -> list[TrainConfig]:
    """Return what is launched beside the baseline where one faster config is proposed, a part of which is exact.

    What is kept for a proof is so from the moment that it leads.
    """
    search = open_search(Machine(noise=0.0), budget=400.0)
    study = Placebos([FASTER])
    study.expected = effect
    Explorer(
        search.log,
        search.starter,
        study,
        kept_seconds=lambda: kept_seconds * (search.log.ranking.find(FASTER) is not None),
        is_proof_due=lambda: is_due and search.log.ranking.find(FASTER) is not None,
        proof_seconds=lambda config: proof_seconds if config.precision == "bf16" else 0.0,
    ).run()
    found = (one.config for one in search.log.judged if one.config != BASELINE)
    return list(dict.fromkeys(found))


def test_what_is_exact_in_the_best_is_launched_by_itself_before_its_proof() -> None:
    exact = BASELINE.replace(num_workers=2)
    assert explore_around(0.1, is_due=True) == [FASTER, exact]
    assert explore_around(0.1, is_due=False, proof_seconds=1000.0) == [FASTER, exact]  # there is no time for its own
    assert explore_around(0.1, is_due=False) == [FASTER, exact]  # at once: it tells what the rest brings
    assert explore_around(0.01, is_due=True) == [FASTER]  # it promises next to nothing
    assert explore_around(0.1, kept_seconds=393.0) == [FASTER, exact]  # all time is kept to prove the best
    assert explore_around(0.01, kept_seconds=393.0) == [FASTER]
    assert explore_around(0.03, kept_seconds=393.0, proof_seconds=375.0) == [FASTER]  # it would cost the best's proof
    assert explore_around(0.3, kept_seconds=393.0, proof_seconds=375.0) == [FASTER, exact]  # and is worth it


def test_what_is_left_of_the_best_without_what_was_refused_is_launched_next() -> None:
    search = open_search(Machine(noise=0.0), budget=400.0)
    rest, refused = BASELINE.replace(memory_format="channels_last", num_workers=2), frozenset({"precision=bf16"})
    study = Placebos([rest.replace(precision="bf16")])

    def refuse(_config: TrainConfig) -> None:
        search.log.refuse(refused)

    Explorer(search.log, search.starter, study, look_at=refuse).run()
    found = (one.config for one in search.log.judged if one.config != BASELINE)
    assert list(dict.fromkeys(found))[:2] == [rest.replace(precision="bf16"), rest]


@dataclasses.dataclass
class Explored:
    """What the model proposed, the launches of known configs left out."""

    search: Search
    configs: list[TrainConfig]


def explore_space(
    machine: Machine, space: SearchSpace, *, budget: float = 600.0, presets: tuple[Preset, ...] = (), **asked: Any
) -> Explored:
    """Explore a space by the search's own study, which is not kept on disk."""
    search = open_search(machine, budget=budget, space=space, presets=presets)
    explore_on(search, [], **asked)
    return Explored(search, list_new(search))


def no_seconds(_config: TrainConfig) -> float:
    return 0.0


def explore_on(search: Search, known: list[tuple[Judged, float | None]], **asked: Any) -> str:
    space, proof_seconds = search.log.problem.space, asked.get("proof_seconds", no_seconds)

    def price(config: TrainConfig) -> float:
        return search.log.prices.launch_seconds(config) + proof_seconds(config)

    study = UnsavedStudy(Path("study.db"), space, seed=0, known=known, price=price)
    return Explorer(search.log, search.starter, study, **asked).run()


def list_new(search: Search) -> list[TrainConfig]:
    return list(dict.fromkeys(one.config for one in search.log.judged if one.config != BASELINE))


WORK = StepWork(
    products_fraction=1.0, traffic_fraction=0.0, overhead_fraction=0.0, host_syncs_per_step=0, operations_per_step=100
)
CHOICES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16"),
    "host_allocator": ("default", "glibc-tuned"),
    "num_workers": (0, 1, 2),
    "compile_mode": ("off", "default"),
}


def make_space(*cautions: Caution, **choices: tuple[Any, ...]) -> SearchSpace:
    return SearchSpace(baseline=BASELINE, choices=choices or CHOICES, ruled_out=(), cautions=cautions)


def test_own_presets_are_launched_first_and_as_they_are():
    settings = {"precision": "bf16", "num_workers": 2, "matmul_precision": "high"}
    own = Preset(name="ours", description="What we do", settings=settings)
    explored = explore_space(Machine(), make_space(), presets=(own,), budget=120.0)
    assert explored.configs[0] == BASELINE.replace(precision="bf16", num_workers=2)


@pytest.mark.parametrize(("budget", "all_fit"), [(600.0, True), (60.0, False)])
def test_values_of_own_knobs_are_seen_alone_before_anything_else(budget, all_fit):
    """As many as a fifth of the budget holds: one that does not go with bf16 is never seen without it otherwise."""
    space = make_space(**CHOICES, **{"user_knobs.padding": (None, *"abcdefgh")})
    first, own = explore_space(Machine(), space, budget=budget).configs, list_own(space)
    assert first[0] == own[0]
    assert (first[: len(own)] == own) == all_fit


def test_a_value_that_nothing_measured_speaks_for_comes_alone_and_late():
    caution = Caution(knob="precision", value="bf16", reason="its rate was not measured")
    choices = {name: CHOICES[name] for name in ("precision", "host_allocator", "num_workers")}
    explored = explore_space(Machine(), make_space(caution, **choices))
    places = [place for place, config in enumerate(explored.configs) if config.precision == "bf16"]
    assert places[0] == 5  # after all six without it
    best = explored.search.log.ranking.entries
    first = explored.configs[places[0]]
    assert first.replace(precision="fp32") in [BASELINE, *(one.config for one in best)]
    assert len(places) > 1  # it works: then it is a value like any other


def test_a_compilation_that_takes_a_fifth_of_the_budget_comes_late():
    machine = Machine(
        speed=lambda one: 1.5 if one.compile_mode != "off" else 1.0,
        compile_seconds=lambda one: 150.0 * (one.compile_mode != "off"),
        facts={"work": WORK.replace(operations_per_step=6500)},
    )
    explored = explore_space(machine, make_space(), budget=600.0)
    modes = [config.compile_mode for config in explored.configs]
    assert modes.index("default") >= 6  # of the 12 without it one is the baseline


def test_what_compiles_holds_nothing_else_that_was_not_seen_to_work():
    """Once it has worked itself, that is only what is compiled anew."""
    explored = explore_space(Machine(speed=lambda one: 2.0 if one.compile_mode != "off" else 1.0), make_space())
    seen: set[str] = set()
    for config in explored.configs:
        changes = set(list_changes(config, BASELINE))
        if "compile=default" in seen & changes:
            assert changes - seen <= {"malloc=glibc-tuned", "workers=1", "workers=2"}
        elif "compile=default" in changes:
            assert changes - seen == {"compile=default"}
        seen |= changes
    assert "compile=default" in seen


@pytest.mark.parametrize(
    ("seconds", "left", "dear"),
    [
        (50.0, 100.0, {}),
        (70.0, 100.0, {"precision=bf16": 8.0}),
        (70.0, 600.0, {}),  # there is time for it
        (250.0, 600.0, {"precision=bf16": 8.0}),
    ],
)
def test_until_the_first_proof_one_that_takes_much_of_what_is_left_counts_several_times(seconds, left, dear):
    asked: list[dict[str, float]] = []

    class Listening(UnsavedStudy):
        def propose(self, *closed: Any, **others: Any) -> Proposal | None:
            asked.append(dict(closed[2]) if len(closed) > 2 else {})
            return super().propose(*closed, **others)

    choices = {name: CHOICES[name] for name in ("precision", "num_workers", "compile_mode")}
    machine = Machine()
    search = open_search(machine, budget=600.0, space=make_space(**choices))
    machine.now = 600.0 - left
    study = Listening(None, search.log.problem.space, seed=0)

    def proof_seconds(config: TrainConfig) -> float:
        return 0.0 if config.precision == "fp32" and config.compile_mode == "off" else seconds

    Explorer(search.log, search.starter, study, proof_seconds=proof_seconds).run()
    assert asked[0] == dear
    search.log.add_attempt(BASELINE)
    asked.clear()
    Explorer(search.log, search.starter, study, proof_seconds=proof_seconds).run()
    assert [one for one in asked if one] == []


class Hearing(UnsavedStudy):
    """A study that notes what is said to be lost."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.lost: list[list[str]] = []

    def propose(self, *closed: Any, **others: Any) -> Proposal | None:
        self.lost.append(sorted("+".join(sorted(one)) for one in others["lost"]))
        return super().propose(*closed, **others)


def explore_hearing(search: Any, seconds: float) -> Hearing:
    """Explore to the end where showing that bf16 learns the same takes some seconds."""
    study = Hearing(None, search.log.problem.space, seed=0)
    proof_seconds = lambda config: seconds * (config.precision == "bf16")  # noqa: E731
    Explorer(search.log, search.starter, study, proof_seconds=proof_seconds).run()
    return study


def open_late(**options: Any) -> Any:
    def speed(config: TrainConfig) -> float:
        return 2.0 if config.precision == "bf16" else 1.0

    choices = {name: CHOICES[name] for name in ("precision", "num_workers", "host_allocator")}
    return open_search(Machine(speed=speed, noise=0.002), space=make_space(**choices), budget=600.0, **options)


def test_what_was_timed_and_cannot_be_proven_any_more_is_lost():
    lost = explore_hearing(open_late(), 565.0).lost
    first = lost.index(["precision=bf16"])
    assert set(map(len, lost[:first])) == {0}  # as long as there is time for it


def test_what_can_be_proven_is_not_lost_nor_what_has_passed():
    assert not any(explore_hearing(open_late(), 0.0).lost)
    search = open_late()
    search.log.add_checks(BASELINE.replace(precision="bf16"), (make_check(verdict="non-inferior"),))
    assert not any(explore_hearing(search, 565.0).lost)


def test_a_knob_of_the_users_own_never_waits_for_what_its_proof_takes():
    space = make_space(**{"user_knobs.kernel": ("old", "new"), "num_workers": (0, 1, 2)})
    machine = Machine(
        speed=lambda one: 3.0 if one.user_knobs["kernel"] == "new" else 1.0, knobs={"kernel": ("old", "new")}
    )
    space = dataclasses.replace(space, baseline=machine.find_facts().baseline)
    explored = explore_space(machine, space, proof_seconds=lambda one: 100.0 * (one.user_knobs["kernel"] == "new"))
    assert "new" in [config.user_knobs["kernel"] for config in explored.configs[:4]]


@pytest.mark.parametrize(("is_open", "without"), [(True, 4), (False, 1)])  # one is what is exact in the best
def test_of_three_proposals_two_go_without_what_gradients_have_left_open(is_open: bool, without: int):
    """It is much faster, and may not be shown to learn the same: then something else has to be known."""

    def speed(config: TrainConfig) -> float:
        return (2.0 if config.precision == "bf16" else 1.0) * (1.1 if config.host_allocator != "default" else 1.0)

    left_open = [frozenset({"precision=bf16"})] if is_open else []
    explored = explore_space(Machine(speed=speed, noise=0.0), make_space(), list_open=lambda: left_open)
    first = explored.configs[:6]
    assert sum(config.precision != "bf16" for config in first) == without
    assert len({config.precision for config in explored.configs}) == 2


@pytest.mark.parametrize(("seconds", "dear"), [(120.0, ["compile_mode=default"]), (200.0, [])])
def test_dear_is_what_takes_longer_than_there_is_time(seconds, dear):
    machine = Machine(facts={"work": WORK.replace(operations_per_step=9000)})  # about 150 s
    log = open_search(machine, space=make_space()).log
    assert find_dear_values(log, seconds) == dear
    tried = Tried(log, log.find_suspects(count_overdue=True), seconds)
    assert [*map(set, tried.together)] == [{value} for value in dear]
    assert tried.too_dear == bool(dear)


@pytest.mark.parametrize("launches", [1, 4, 7])
def test_a_resumed_search_proposes_what_it_would_have_without_the_stop(launches):
    """On a machine without noise, until another config is launched again than would have been.

    A resumed search launches the baseline first: the machine may be another one, and every later repeat is shifted.
    """

    def speed(config: TrainConfig) -> float:
        return (1.3 if config.precision == "bf16" else 1.0) * (1.1 if config.num_workers == 2 else 1.0)

    whole = explore_space(Machine(speed=speed, noise=0.0), make_space())
    stopped = open_search(Machine(speed=speed, noise=0.0, stop_after=launches), space=make_space())
    explore_on(stopped, [])
    resumed = open_search(Machine(speed=speed, noise=0.0), space=make_space())
    for one in stopped.log.judged:
        resumed.log.add_earlier_launch(one.result)
    explore_on(resumed, [(one, resumed.log.ranking.score_of(one)) for one in resumed.log.judged])
    assert list_new(resumed)[: launches + 3] == whole.configs[: launches + 3]


def test_before_a_proof_the_leader_is_launched_without_what_may_be_worth_nothing():
    def speed(config: TrainConfig) -> float:
        return 1.3 if config.precision == "bf16" else 1.0

    machine = Machine(speed=speed, noise=0.002)
    search = open_search(machine, space=make_space())
    assert explore_on(search, [], is_proof_due=lambda: len(search.log.judged) >= 4) == "budget"
    best = search.log.ranking.leader
    assert best is not None
    assert best.config == BASELINE.replace(precision="bf16")
    assert len(search.log.judged) < 12


def test_compiling_is_priced_by_the_operations_and_then_by_what_was_seen():
    facts = Machine().find_facts()
    config = TrainConfig(compile_mode="default")
    guess = predict_compilation(config, facts, {})
    assert predict_compilation(TrainConfig(), facts, {}) == 0.0
    assert predict_compilation(config.replace(compile_mode="max-autotune"), facts, {}) > guess
    seen = make_judged(config, 0.1, compile_seconds=3 * guess).result
    again = make_judged(config, 0.1, compile_seconds=1.0).result  # found in the cache
    other = config.replace(num_threads=1)
    assert predict_compilation(other, facts, group_by_code([seen, again])) == pytest.approx(3 * guess)


@pytest.mark.parametrize(("calls", "seconds"), [(None, 45.0), (1_000, 34.5), (10_000, 210.0)])
def test_compiling_what_was_not_profiled_is_priced_by_the_calls(calls: int | None, seconds: float) -> None:
    facts = Machine().find_facts()
    facts = facts.replace(work=None, model=facts.model.replace(calls_per_step=calls))
    assert predict_compilation(TrainConfig(compile_mode="default"), facts, {}) == pytest.approx(seconds)


def test_what_compiles_the_same_code_finds_it_in_the_cache_and_other_code_is_priced_anew() -> None:
    facts = Machine().find_facts()
    config = TrainConfig(compile_mode="default")
    seen = [make_judged(config, 0.1, compile_seconds=40.0).result]
    same = config.replace(host_allocator="tcmalloc", optimizer_implementation="fused", num_workers=2)
    half = config.replace(precision="bf16")
    assert predict_compilation(same, facts, group_by_code(seen)) == pytest.approx(6.0)  # a guess
    assert predict_compilation(half, facts, group_by_code(seen)) == pytest.approx(40.0)
    for seconds in (3.0, 4.0, 5.0):
        seen.append(make_judged(same, 0.1, compile_seconds=seconds).result)
    assert predict_compilation(same.replace(num_workers=4), facts, group_by_code(seen)) == pytest.approx(4.0)
    assert predict_compilation(half, facts, group_by_code(seen)) == pytest.approx(
        40.0
    )  # those that were found tell nothing of it


@pytest.mark.parametrize(("shapes", "times"), [(None, 1), (1, 1), (2, 1), (9, 8)])
def test_batches_of_many_shapes_take_longer_to_compile(shapes: int | None, times: int):
    facts = Machine().find_facts()
    varying = facts.replace(data=facts.data.replace(batch_shapes=shapes))
    config = TrainConfig(compile_mode="default")
    assert predict_compilation(config, varying, {}) == pytest.approx(times * predict_compilation(config, facts, {}))


def test_more_operations_take_longer_to_compile():
    work = {"products_fraction": 1.0, "traffic_fraction": 0.0, "overhead_fraction": 0.0, "host_syncs_per_step": 0}

    def price(operations: int) -> float:
        facts = Machine(facts={"work": {**work, "operations_per_step": operations}}).find_facts()
        facts = facts.model_validate(facts.model_dump())
        return predict_compilation(TrainConfig(compile_mode="default"), facts, {})

    assert price(100) < price(1000) < price(10_000)
    assert math.isfinite(price(10**6))


def test_micro_batches_of_a_step_are_compiled_once() -> None:
    work = {"products_fraction": 1.0, "traffic_fraction": 0.0, "overhead_fraction": 0.0, "host_syncs_per_step": 0}

    def price(operations: int, accumulation: int) -> float:
        facts = Machine(facts={"work": {**work, "operations_per_step": operations}}).find_facts()
        baseline = facts.baseline.replace(gradient_accumulation_steps=accumulation)
        facts = facts.model_validate({**facts.model_dump(), "baseline": baseline})
        return predict_compilation(TrainConfig(compile_mode="default"), facts, {})

    assert price(4000, 4) == pytest.approx(price(1000, 1))


@pytest.mark.parametrize(
    ("proof", "told"),
    [
        (200.0, ["3m20s here; --budget 15m"]),
        (300.0, ["5m00s here; --budget 15m"]),
        (600.0, ["10m00s here; --budget 25m"]),
        (30.0, []),
        (math.inf, []),
    ],
)
def test_a_precision_that_waits_for_its_long_loss_check_is_told_of(proof: float, told: list[str]):
    space = SearchSpace(baseline=BASELINE, choices={"precision": ("fp32", "bf16")}, ruled_out=())
    search = open_search(Machine(), space=space)
    search.log.add_launch(search.starter.launch(BASELINE, "measure", 60.0))
    notes = describe_untried(search.log, lambda _config: proof, budget_seconds=600.0)
    waits = "precision=bf16 was not tried; showing that it learns the same would take about"
    assert notes == [f"{waits} {one} has time for it" for one in told]
    search.log.add_launch(search.starter.launch(BASELINE.replace(precision="bf16"), "measure", 60.0))
    assert describe_untried(search.log, lambda _config: proof, budget_seconds=600.0) == []
