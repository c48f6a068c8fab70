"""Hopeless launches in real processes: ended within their first steps, and nothing else is."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_spec, make_target
from test_script_trials import Project, open_project
from trial_world import World, open_world

from autotune.records import TrainConfig
from autotune.records.trial import Pace, Rival, TrialResult, TrialStatus
from autotune.targets.script import read_script, script_label

PACE = Pace(first_step_seconds=0.05, samples_per_second=300.0)
RIVAL = Rival(seconds_per_sample=1 / 300, block_sd=0.05, margin=1.1)
LIMIT_SECONDS = 120.0
MUCH_SOONER = LIMIT_SECONDS / 4
"""A hopeless launch costs a small part of its time limit, on a busy machine too."""


@pytest.fixture(scope="module", params=["warm", pytest.param("cold", marks=pytest.mark.slow)])
def world(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[World]:
    with open_world(tmp_path_factory.mktemp("world"), warm=request.param == "warm") as world:
        yield world
        assert world.find_strays() == {}


def launch(world: World, *, pace: Pace | None = PACE, rival: Rival | None = RIVAL, **knobs: Any) -> TrialResult:
    result, _ = world.run("slow", purpose="measure", seconds=LIMIT_SECONDS, pace=pace, rival=rival, user_knobs=knobs)
    assert world.find_strays() == {}
    return result


@pytest.mark.slow
def test_a_first_step_that_does_not_end_is_ended(world: World) -> None:
    result = launch(world, first=1000.0)
    assert (result.status, result.cause) == (TrialStatus.TOO_SLOW, "slow-steps")
    assert result.elapsed_seconds < MUCH_SOONER
    assert result.error.startswith("its first step took more than ")
    assert result.samples_per_second_bound is not None
    assert 0 < result.samples_per_second_bound < 300.0 / 50
    assert "in meet_fate" in world.log(world.trials - 1)  # its stacks, for whoever wants to know why


def test_two_slow_steps_end_it_from_within(world: World) -> None:
    result = launch(world, later=0.5)
    assert (result.status, result.cause) == (TrialStatus.TOO_SLOW, "slow-steps")
    assert result.error.startswith("its second and third step took ")
    assert result.samples_per_second_bound == pytest.approx(8 / 0.5, rel=0.2)
    assert result.measurement is None


def test_a_second_step_that_does_not_end_is_ended(world: World) -> None:
    result = launch(world, later=1000.0)
    assert (result.status, result.cause) == (TrialStatus.TOO_SLOW, "slow-steps")
    assert result.error.startswith("its second step took more than ")
    assert result.elapsed_seconds < MUCH_SOONER


@pytest.mark.parametrize("race", [{}, {"pace": None}, {"rival": None}])
def test_settings_as_fast_as_the_rivals_are_measured(world: World, race: dict[str, None]) -> None:
    result = launch(world, turns=True, **race)
    assert (result.status, result.error) == (TrialStatus.COMPLETED, "")
    assert result.measurement is not None
    assert result.measurement.first_step_seconds is not None
    assert len(result.measurement.warmup_step_seconds) == 2


def test_a_slow_launch_without_a_rival_is_measured(world: World) -> None:
    assert launch(world, rival=None, first=4.0).status is TrialStatus.COMPLETED


@pytest.mark.slow
def test_a_first_step_that_compiles_has_its_time(world: World) -> None:
    assert launch(world, first=4.0).status is TrialStatus.TOO_SLOW
    compiles = launch(world, first=4.0, pace=PACE.replace(compile_seconds=60.0))
    assert compiles.status is TrialStatus.COMPLETED, compiles.error
    endless = launch(world, first=1000.0, pace=PACE.replace(compile_seconds=2.0))
    assert (endless.status, endless.cause) == (TrialStatus.TIMED_OUT, "compile-timeout")
    assert endless.samples_per_second_bound is None


SCRIPT = """
import argparse, os, subprocess, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from autotune.machine import interference
interference._compare_cpu = lambda _before, _after: (0.0, 0.0)  # nobody else uses the machine
parser = argparse.ArgumentParser()
parser.add_argument("--drag", type=float, default=0.02)
args = parser.parse_args()
time.sleep(4.0)  # a start that takes long is no slow step
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = DataLoader(TensorDataset(torch.randn(800, 4), torch.randn(800, 1)), batch_size=8)
for epoch in range(100):
    for x, y in data:
        loss = (model(x) - y).square().mean()
        subprocess.run([sys.executable, "-c", f"import time; time.sleep({args.drag})"])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with open_project(tmp_path) as project:
        project.write(SCRIPT, "drags.py")
        yield project


def run_script(project: Project, drag: float) -> TrialResult:
    script = read_script((sys.executable, "drags.py", "--drag", str(drag)))
    number, project.world.trials = project.world.trials, project.world.trials + 1
    pace, rival = (
        PACE.replace(first_step_seconds=0.2, samples_per_second=80.0),
        RIVAL.replace(seconds_per_sample=1 / 80),
    )
    baseline = TrainConfig(micro_batch_size=8, num_threads=1, optimizer_implementation="for-loop")
    spec = make_spec(
        baseline.replace(num_workers=1),
        number=number,
        target=make_target(script_label(script.command), project.folder, script=script),
        baseline=baseline,
        device="cpu",
        time_limit_seconds=LIMIT_SECONDS,
        warmup_cap_seconds=0.5,
        measure_seconds=0.1,
        pace=pace,
        rival=rival,
    )
    result = project.world.runner(spec)
    assert project.world.find_strays() == {}
    return result


@pytest.mark.slow
@pytest.mark.parametrize(("drag", "which"), [(1000.0, "its first step took more"), (2.0, "its second and third step")])
def test_a_hopeless_script_is_ended_with_all_of_its_processes(project: Project, drag: float, which: str) -> None:
    result = run_script(project, drag)
    assert (result.status, result.cause) == (TrialStatus.TOO_SLOW, "slow-steps"), result.error
    assert result.error.startswith(which)
    assert result.samples_per_second_bound is not None
    assert result.samples_per_second_bound < 80.0 / 4
    assert result.elapsed_seconds < MUCH_SOONER


@pytest.mark.slow
def test_a_script_as_fast_as_the_rival_is_measured(project: Project) -> None:
    result = run_script(project, 0.02)
    assert (result.status, result.error) == (TrialStatus.COMPLETED, "")
