"""How much the machine's figures varied, and why: counted over blocks and launches."""

from __future__ import annotations

import math

import pytest
from simulated import BASELINE, make_judged, make_placebos

from autotune.records import Block
from autotune.records.measurement import GpuState, Interference
from autotune.records.trial import TrialResult
from autotune.search.scores.noise import mean_interference, summarise_noise
from autotune.search.scores.ranking import PRIOR_DEGREES, PRIOR_SD, Ranking

ONE, TWO = make_placebos(2)


def block(interference: Interference | None = None, *, recompiled: bool = False) -> Block:
    return Block(optimizer_steps=1, samples=1, seconds=1.0, interference=interference, recompiled=recompiled)


def with_blocks(result: TrialResult, *blocks: Block, **changes: object) -> TrialResult:
    assert result.measurement is not None
    return result.replace(measurement=result.measurement.replace(blocks=blocks, **changes))


def test_nothing_that_was_watched_is_no_interference():
    assert mean_interference([]) is None
    assert mean_interference([block(), block()]) is None


def test_fractions_are_averaged_over_the_blocks_that_tell_them():
    seen = [
        block(Interference(foreign_cpu_fraction=0.1, steal_fraction=0.0)),
        block(Interference(foreign_cpu_fraction=0.3)),
        block(),
    ]
    mean = mean_interference(seen)
    assert mean is not None
    assert mean.foreign_cpu_fraction == pytest.approx(0.2)
    assert mean.steal_fraction == 0.0
    assert mean.throttled_fraction is None
    assert mean.gpu is None


@pytest.mark.parametrize(("faults", "total"), [((3, None, 4), 7), ((0, 0), 0), ((None, None), None)])
def test_page_faults_are_added_up(faults, total):
    mean = mean_interference([block(Interference(major_faults=count)) for count in faults])
    assert mean is not None
    assert mean.major_faults == total


@pytest.mark.parametrize(("slowed", "told"), [(1, ("thermal",)), (0, ())])
def test_a_gpu_that_was_held_back_in_a_tenth_of_the_blocks_is_named(slowed, told):
    states = [GpuState(sm_clock_mhz=1000 + 100 * (i % 2), power_watts=100.0, temperature_celsius=60) for i in range(10)]
    states[:slowed] = [states[0].model_copy(update={"slowdowns": ("thermal",)})] * slowed
    mean = mean_interference([block(Interference(gpu=state)) for state in states])
    assert mean is not None
    assert mean.gpu == GpuState(sm_clock_mhz=1050, power_watts=100.0, temperature_celsius=60, slowdowns=told)


def test_a_slowdown_of_one_block_in_eleven_is_left_out():
    states = [GpuState(slowdowns=("power-cap",)), *[GpuState()] * 10]
    mean = mean_interference([block(Interference(gpu=state)) for state in states])
    assert mean is not None
    assert mean.gpu == GpuState()


def test_what_a_proofs_launches_differ_by_counts_too():
    judged = make_judged(BASELINE, 0.0)
    ranking = Ranking([judged], BASELINE)
    before = summarise_noise([judged.result], ranking)
    final = judged.result.replace(spec=judged.result.spec.replace(purpose="final"))
    rate = final.measurement.samples_per_second
    launches = []
    for factor in (0.8, 1.0, 1.25):
        blocks = tuple(one.replace(seconds=one.seconds / factor) for one in final.measurement.blocks)
        launches.append(final.replace(measurement=final.measurement.replace(blocks=blocks)))
    assert launches[0].measurement.samples_per_second == pytest.approx(0.8 * rate)
    after = summarise_noise([judged.result, *launches], ranking)
    assert after.degrees_of_freedom == before.degrees_of_freedom + 2
    squares = before.launch_sd**2 * before.degrees_of_freedom + 2 * math.log(1.25) ** 2
    assert after.launch_sd == pytest.approx(math.sqrt(squares / after.degrees_of_freedom))


def test_launches_and_blocks_are_counted_by_what_became_of_them():
    plain = make_judged(ONE, 0.1).result
    launches = [
        with_blocks(plain, block(), block(recompiled=True)),
        with_blocks(plain, block(Interference(steal_fraction=0.06)), block(Interference(steal_fraction=0.04))),
        with_blocks(plain, block(), steady=False, unsettled="the device's memory"),
        with_blocks(plain, block(Interference(throttled_fraction=0.5)), ended_by="racing"),
        make_judged(TWO, None).result,
    ]
    noise = summarise_noise(launches, Ranking([make_judged(BASELINE, 0.0)], BASELINE))
    assert (noise.launches, noise.not_steady, noise.raced) == (4, 1, 1)
    assert (noise.blocks, noise.disturbed) == (6, 3)
    assert noise.interference is not None
    assert noise.interference.steal_fraction == pytest.approx(0.05)


def test_the_noise_is_that_of_the_ranking():
    judged = [make_judged(config, value) for config, value in [(BASELINE, 0.0), (ONE, 0.2), (BASELINE, -0.05)]]
    ranking = Ranking(judged, BASELINE)
    noise = summarise_noise([one.result for one in judged], ranking)
    assert noise.launch_sd == pytest.approx(math.sqrt((PRIOR_DEGREES * PRIOR_SD**2 + 0.05**2 / 2) / 3))
    assert noise.degrees_of_freedom == pytest.approx(3.0)
    assert noise.baseline_range == pytest.approx(math.exp(0.05))
    assert noise.machine_changes == 0
    assert noise.interference is None


def test_a_change_of_the_machine_is_counted():
    values = [0.0, 0.01, 0.0, -0.5, -0.51, -0.5]
    ranking = Ranking([make_judged(BASELINE, value) for value in values], BASELINE)
    noise = summarise_noise([], ranking)
    assert noise.machine_changes == 1
    assert noise.baseline_range == pytest.approx(math.exp(0.52))


def test_before_anything_was_launched_there_is_only_the_guess():
    noise = summarise_noise([], Ranking([], BASELINE))
    assert (noise.launch_sd, noise.degrees_of_freedom) == (PRIOR_SD, PRIOR_DEGREES)
    assert (noise.baseline_range, noise.launches, noise.blocks) == (1.0, 0, 0)
