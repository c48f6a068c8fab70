from __future__ import annotations

import math
import random
import statistics
from itertools import islice

import pytest
from record_factory import make_block, make_measurement, make_result, make_spec

from autotune.records import TrialStatus
from autotune.selftest.machines import MACHINES, Noise, Recorded, read_paces


def launches(noise: Noise, count: int, blocks: int = 20, seed: int = 0) -> list[list[float]]:
    start = noise(random.Random(seed))
    return [list(islice(start(), blocks)) for _ in range(count)]


def test_launches_and_blocks_differ_as_planted() -> None:
    drawn = launches(Noise(launch=0.05, block=0.02), 4000)
    within = statistics.fmean(statistics.variance(blocks) for blocks in drawn)
    between = statistics.variance(statistics.fmean(blocks) for blocks in drawn)
    assert math.sqrt(within) == pytest.approx(0.02, rel=0.03)
    assert math.sqrt(between - within / 20) == pytest.approx(0.05, rel=0.05)


def test_a_drift_is_a_random_walk_from_launch_to_launch() -> None:
    ends = [launches(Noise(launch=0.0, block=0.0, drift=0.01), 25, 1, seed)[-1][0] for seed in range(2000)]
    assert statistics.stdev(ends) == pytest.approx(0.01 * math.sqrt(25), rel=0.06)


def test_slow_launches_and_spikes_come_as_often_as_planted() -> None:
    drawn = launches(Noise(launch=0.0, block=0.0, slow_launches=0.2, slowdown=0.5, spikes=0.1, spike=0.3), 3000)
    slow = [blocks for blocks in drawn if min(blocks) >= 0.5]
    assert len(slow) / 3000 == pytest.approx(0.2, abs=0.03)
    spiked = sum(pace - min(blocks) > 0.29 for blocks in drawn for pace in blocks)
    assert spiked / 60_000 == pytest.approx(0.1, abs=0.01)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_repeats_itself_from_a_seed(name: str) -> None:
    assert launches(MACHINES[name], 5, seed=3) == launches(MACHINES[name], 5, seed=3)
    assert launches(MACHINES[name], 5, seed=3) != launches(MACHINES[name], 5, seed=4)


def test_recorded_launches_begin_at_any_block_and_are_whole() -> None:
    recorded = [[float(10 * launch + block) for block in range(4)] for launch in range(20)]
    start = Recorded(recorded)(random.Random(1))
    middle = statistics.median(statistics.fmean(blocks) for blocks in recorded)
    seen = set()
    for _ in range(300):
        drawn = [pace + middle for pace in islice(start(), 8)]
        assert sorted(drawn[:4]) == recorded[int(drawn[0]) // 10]
        assert drawn[4:] == drawn[:4]
        seen.add(drawn[0])
    assert len(seen) > 60


def test_recorded_launches_follow_each_other_as_they_ran() -> None:
    recorded = [[float(10 * launch + block) for block in range(4)] for launch in range(20)]
    middle = statistics.median(statistics.fmean(blocks) for blocks in recorded)
    firsts = set()
    for seed in range(40):
        start = Recorded(recorded)(random.Random(seed))
        drawn = [int(next(start()) + middle) // 10 for _ in range(30)]
        assert drawn == [(drawn[0] + step) % 20 for step in range(30)]
        firsts.add(drawn[0])
    assert len(firsts) > 10


@pytest.mark.parametrize("recorded", [[], [[0.0, 0.1, 0.2]] * 19, [[0.0, 0.1]] * 40])
def test_too_little_is_not_replayed(recorded: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="are too few: give 20"):
        Recorded(recorded)


def test_paces_are_those_of_timed_launches_that_ran_to_their_end() -> None:
    spec = make_spec(None)
    measurement = make_measurement([make_block(10, 1.0, steps=1), make_block(20, 4.0, steps=2)])
    timed = make_result(spec, measurement=measurement)
    raced = timed.replace(measurement=measurement.replace(ended_by="racing"))
    crashed = make_result(spec, status=TrialStatus.CRASHED)
    assert read_paces([timed, raced, crashed]) == [[pytest.approx(math.log(0.1)), pytest.approx(math.log(0.2))]]
