"""What a search makes best: throughput, the time of a planned run, or the memory of what is as fast."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_spec, make_state
from simulated import BASELINE, Machine, Run, make_judged, make_placebos, make_problem, run_simulated

from autotune.cli.pages.answer import list_answer
from autotune.emit.report.command import describe_command
from autotune.emit.report.wording import describe_verdict
from autotune.errors import UsageError
from autotune.records import PeakMemory, Profile, TrainConfig
from autotune.records.objective import LEAST_SPEED, MOST_MEMORY, Objective, read_objective
from autotune.records.search import PlannedRun, SearchState
from autotune.search.finals.claim import SMALLER
from autotune.search.finals.rounds import Terms, run_finals
from autotune.search.run import SearchOptions, describe_search
from autotune.search.scores.ranking import Ranking
from autotune.search.share.naming import name_study
from autotune.space import SearchSpace

ONLY = ("precision", "activation_checkpointing", "num_workers", "optimizer_implementation")
ONE, TWO, THREE = make_placebos(3)


def speed(config: TrainConfig) -> float:
    factor = 1.05 if config.precision == "bf16" else 1.0
    factor *= {"off": 1.0, "selective": 0.97, "full": 0.75}[config.activation_checkpointing]
    return factor * (1.2 if config.optimizer_implementation == "fused" else 1.0)


def memory(config: TrainConfig) -> float:
    factor = 0.85 if config.precision == "bf16" else 1.0
    factor *= {"off": 1.0, "selective": 0.9, "full": 0.5}[config.activation_checkpointing]
    factor *= 1.1 if config.optimizer_implementation == "fused" else 1.0
    return factor * (1 + 0.05 * config.num_workers)


def search(work: Path, machine: Machine, **asked: Any) -> Run:
    return run_simulated(machine, work, **({"budget": 400.0, "only": ONLY, "objective": Objective.MEMORY} | asked))


def list_configs(space: SearchSpace) -> list[TrainConfig]:
    """Return every config of a space."""
    rows = itertools.product(*space.choices.values())
    return list(dict.fromkeys(space.complete(dict(zip(space.choices, row, strict=True))) for row in rows))


@pytest.mark.slow_cases("1", "2")
@pytest.mark.parametrize("seed", range(3))
def test_the_least_memory_among_what_is_as_fast_is_found_and_proven(tmp_path: Path, seed: int) -> None:
    run = search(tmp_path, Machine(speed=speed, memory=memory, memory_noise=0.003, noise=0.01, seed=seed))
    profile = run.profile
    able = [one for one in list_configs(run.log.problem.space) if speed(one) >= LEAST_SPEED]
    least = min(able, key=memory)
    assert speed(min(list_configs(run.log.problem.space), key=memory)) < LEAST_SPEED  # the least of all is no answer
    assert (profile.verdict, profile.objective) == ("improved", Objective.MEMORY)
    assert memory(profile.config) == pytest.approx(memory(least), rel=0.01)
    assert profile.speedup is not None
    assert profile.memory_ratio is not None
    assert LEAST_SPEED < profile.speedup.low < speed(profile.config)
    assert memory(profile.config) < profile.memory_ratio.high < MOST_MEMORY


@pytest.mark.slow_cases("1", "2", "3", "4")
@pytest.mark.parametrize("seed", range(5))
def test_where_all_need_the_same_nothing_is_claimed(tmp_path: Path, seed: int) -> None:
    run = search(tmp_path, Machine(speed=lambda _config: 1.0, memory_noise=0.01, noise=0.03, seed=seed))
    assert run.profile.config == BASELINE
    assert run.profile.verdict in ("keep", "inconclusive")


def test_what_saves_memory_and_is_slower_is_not_claimed(tmp_path: Path) -> None:
    slow = Machine(
        speed=lambda config: 1.0 if config == BASELINE else 0.9,
        memory=lambda config: 1.0 if config == BASELINE else 0.7,
    )
    run = search(tmp_path, slow)
    assert (run.profile.verdict, run.profile.config) == ("keep", BASELINE)
    assert "needs less memory at your speed" in answer(run.profile)
    assert min(one.memory.used_bytes for one in run.profile.pareto) < 0.8 * max(
        one.memory.used_bytes for one in run.profile.pareto
    )  # the front tells of it all the same


def test_throughput_takes_the_fastest_whatever_it_needs(tmp_path: Path) -> None:
    run = search(tmp_path, Machine(speed=speed, memory=memory), objective=Objective.THROUGHPUT)
    assert run.profile.verdict == "improved"
    assert run.profile.config.optimizer_implementation == "fused"
    assert run.profile.config.activation_checkpointing == "off"
    assert run.profile.memory_ratio is None


@pytest.mark.parametrize(
    ("objective", "samples", "compiles"),
    [
        (Objective.TIME_TO_FINISH, 2e4, False),
        (Objective.TIME_TO_FINISH, 1e7, True),
        (Objective.THROUGHPUT, 2e4, True),
        (None, 2e4, False),
    ],
)
def test_only_the_time_to_finish_bears_what_compiling_costs(
    tmp_path: Path, objective: Objective | None, samples: float, compiles: bool
) -> None:
    machine = Machine(
        speed=lambda config: 1.3 if config.compile_mode == "default" else 1.0,
        compile_seconds=lambda config: 20.0 if config.compile_mode == "default" else 0.0,
        noise=0.005,
    )
    asked = {} if objective is None else {"objective": objective}
    planned = PlannedRun(amount=samples, unit="samples")
    problem = make_problem(machine, planned_run=planned, planned_samples=samples, **asked)
    config = BASELINE.replace(compile_mode="default")
    log_speed = math.log(1.3)
    judged = [make_judged(BASELINE, 0.0), make_judged(config, log_speed, compile_seconds=20.0)]
    leader = Ranking(judged, BASELINE, planned_samples=problem.charged_samples).leader
    assert leader is not None
    assert (leader.config == config) is compiles


def judge(config: TrainConfig, log_speed: float, share: float) -> Any:
    judged = make_judged(config, log_speed)
    peak = PeakMemory(host_bytes=round(share * 1000 * 2**20))
    measurement = judged.result.measurement
    assert measurement is not None
    return type(judged)(judged.result.replace(measurement=measurement.replace(peak_memory=peak)), judged.score)


def test_a_ranking_by_memory_leaves_out_what_is_slower_and_still_knows_it() -> None:
    judged = [judge(BASELINE, 0.0, 1.0), judge(ONE, -0.2, 0.5), judge(TWO, -0.01, 0.8), judge(THREE, 0.3, 1.2)]
    ranking = Ranking(judged, BASELINE, least_speed=math.log(LEAST_SPEED))
    assert [one.config for one in ranking.entries] == [TWO, BASELINE, THREE]
    assert ranking.leader is not None
    assert ranking.leader.config == TWO
    slow = ranking.find(ONE)
    assert slow is not None
    assert (slow.speed, slow.score) == (pytest.approx(-0.2), pytest.approx(math.log(2.0)))
    assert ranking.score_of(judged[2]) == pytest.approx(-math.log(0.8))
    # What all launches say of its speed counts before its own.
    known = Ranking(judged, BASELINE, least_speed=math.log(LEAST_SPEED), estimates={ONE.key: 0.0, TWO.key: -0.1})
    assert [one.config for one in known.entries] == [ONE, BASELINE, THREE]


@pytest.mark.parametrize(
    ("log_speed", "share", "outcome"),
    [
        (0.0, 0.8, "proven"),
        (0.0, 0.99, "no gain"),  # it saves something, and too little
        (-0.10, 0.8, "no gain"),
        (-0.025, 0.8, "unclear"),
        (0.2, 1.0, "no gain"),
    ],
)
def test_a_claim_of_less_memory_needs_the_memory_and_the_speed(log_speed: float, share: float, outcome: str) -> None:
    machine = Machine(
        speed=lambda config: math.exp(log_speed) if config == ONE else 1.0,
        memory=lambda config: share if config == ONE else 1.0,
        noise=0.008,
        memory_noise=0.002,
    )

    def launch(config: TrainConfig) -> Any:
        return machine(make_spec(config, number=len(machine.specs), purpose="final"))

    outcome_of_all = run_finals([ONE], BASELINE, launch, rounds=8, seed=0, terms=Terms(claim=SMALLER))
    (one,) = outcome_of_all.candidates
    assert one.outcome == outcome
    assert (outcome_of_all.winner is not None) == (outcome == "proven")
    if outcome == "proven":
        assert one.memory_ratio is not None
        assert one.memory_ratio.low < share < one.memory_ratio.high


def answer(profile: Profile) -> str:
    return "\n".join(line.plain for line in list_answer(profile))


def test_a_saving_is_told_as_one(tmp_path: Path) -> None:
    profile = search(tmp_path, Machine(speed=speed, memory=memory, memory_noise=0.003)).profile
    verdict = answer(profile).splitlines()[0]
    assert profile.memory_ratio is not None
    least = math.floor(100 * (1 - profile.memory_ratio.high))
    assert verdict.startswith(f"improved: at least {least} % less memory at ")
    assert "of your speed" in verdict
    assert "faster" not in verdict
    page = describe_verdict(profile)
    assert page.headline == f"At least {least} % less memory"
    assert "faster" not in page.headline + page.evidence


def test_a_resumed_search_keeps_its_objective(tmp_path: Path) -> None:
    first = search(tmp_path, Machine(speed=speed, memory=memory, stop_after=12))
    assert first.profile.evidence.stop_reason == "interrupted"
    second = search(tmp_path, Machine(speed=speed, memory=memory), folder=first.folder)
    assert second.profile.objective is Objective.MEMORY
    assert second.profile.verdict == "improved"


def test_what_was_asked_before_there_were_objectives_goes_on_alike(tmp_path: Path) -> None:
    planned = PlannedRun(amount=8.0, unit="epochs")
    for state, usual in ((make_state(), "throughput"), (make_state(planned_run=planned), "time-to-finish")):
        path = tmp_path / "search.json"
        path.write_text("".join(line for line in state.to_json().splitlines(True) if '"objective"' not in line))
        assert SearchState.model_validate_json(path.read_text()).objective == usual


def test_the_options_say_what_is_meant() -> None:
    planned = PlannedRun(amount=8.0, unit="epochs")
    target = make_state().target
    usual = [SearchOptions(), SearchOptions(planned_run=planned), SearchOptions(objective=Objective.MEMORY)]
    objectives = [describe_search(target, one).objective for one in usual]
    assert objectives == [Objective.THROUGHPUT, Objective.TIME_TO_FINISH, Objective.MEMORY]
    with pytest.raises(UsageError, match="needs the length of the training"):
        SearchOptions(objective=Objective.TIME_TO_FINISH)
    with pytest.raises(UsageError, match="--objective is 'speed'"):
        read_objective("speed", name="--objective")


def test_the_command_names_an_objective_that_is_not_the_usual_one() -> None:
    planned = PlannedRun(amount=8.0, unit="epochs")
    assert "--objective" not in describe_command(make_state(planned_run=planned))
    assert "--objective throughput" in describe_command(make_state(planned_run=planned, objective=Objective.THROUGHPUT))
    assert "--objective memory" in describe_command(make_state(objective=Objective.MEMORY))


def test_only_searches_for_the_same_share_a_study() -> None:
    planned = PlannedRun(amount=1e6, unit="samples")
    plain = name_study(make_problem(Machine()))
    memory_study = name_study(make_problem(Machine(), objective=Objective.MEMORY))
    timed = name_study(make_problem(Machine(), planned_run=planned, planned_samples=1e6))
    free = name_study(make_problem(Machine(), planned_run=planned, planned_samples=1e6, objective=Objective.THROUGHPUT))
    assert len({plain, memory_study, timed}) == 3
    assert free == plain  # how long the training is decides nothing there
