"""The benchmark that lets many workers search a recorded table together."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import optuna
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from scale import Fleet, World, cross, make_worlds


@pytest.fixture(scope="module")
def world() -> World:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return make_worlds(["gpt"])[0]


def test_a_crossed_table_multiplies_what_its_parts_gain(world: World) -> None:
    crossed = cross(world, world)
    assert len(crossed.seconds) == len(world.seconds) ** 2
    assert crossed.truths[crossed.best] == pytest.approx(2 * world.truths[world.best])
    assert crossed.truths[crossed.make_key(crossed.baseline)] == 0.0


def test_more_workers_find_it_sooner_and_launch_more(world: World) -> None:
    one, many = (Fleet(world, "model", workers, 0.02, seed=0) for workers in (1, 4))
    one.run()
    many.run()
    assert many.reached < one.reached < math.inf
    assert many.launches > one.launches


def test_no_worker_is_faster_than_its_launches(world: World) -> None:
    """The baseline, the config and the same config once more, one after the other."""
    fleet = Fleet(world, "model", 64, 0.01, seed=0)
    fleet.run()
    assert fleet.reached >= world.seconds[world.make_key(world.baseline)] + 2 * min(world.seconds.values())


def test_each_worker_begins_with_the_baseline(world: World) -> None:
    fleet = Fleet(world, "random", 3, 0.05, seed=0)
    begun = [fleet._begin(worker).key for worker in fleet._workers]
    assert begun == [world.make_key(world.baseline)] * 3
