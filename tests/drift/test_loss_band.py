"""The band of the baseline's losses, and the two watches: what is healthy stays quiet, what is not is found."""

from __future__ import annotations

import json
import math
import random

import pytest

from autotune.drift.compare.loss_band import BLOCKS, BandWatch, calibrate_band
from autotune.drift.guard.loss_rise import RiseWatch, Tolerance
from autotune.drift.guard.loss_watch import LARGE, LONGEST_EPOCH, SLOW, SOON, LossWatch
from autotune.records.trial import LossCurve

BATCH, STEPS = 16, 160
TOLERANCE = Tolerance(of_level=0.1, of_drop=0.05)


def level(step: int) -> float:
    return 1.0 + 2.0 * math.exp(-step / 60.0)


def draw_losses(seed: int, *, steps: int = STEPS, seed_sd: float = 0.01, noise: float = 0.05) -> list[float]:
    source = random.Random(seed)
    luck = source.gauss(0.0, seed_sd)
    return [level(step) * (1.0 + luck + source.gauss(0.0, noise)) for step in range(steps)]


def draw_curves(count: int, *, first: int = 0, **parts: float) -> list[LossCurve]:
    seeds = range(first, first + count)
    return [LossCurve(seed=s, losses=tuple(draw_losses(s, **parts)), samples=STEPS * BATCH) for s in seeds]  # type: ignore[arg-type]


def feed(watch: LossWatch, losses: list[float], *, rate: float = 1.0, line: int = 10):
    """Return what the watch says of losses handed over line by line, and the step at which it does."""
    for at in range(0, len(losses), line):
        some = losses[at : at + line]
        step = at + len(some)
        rise = watch.record(some, step=step, samples=step * BATCH, learning_rate=rate)
        if rise is not None:
            return step, rise
    return None


def test_the_band_is_where_the_seeds_went():
    band = calibrate_band(draw_curves(8))
    assert (band.seeds, len(band.means)) == (8, BLOCKS)
    assert band.samples_per_block == STEPS // BLOCKS * BATCH
    for block, mean in enumerate(band.means):
        middle = level(10 * block + 5)
        assert mean == pytest.approx(middle, rel=0.05)
    assert 0.002 < band.seed_sd < 0.03
    assert 0.05 / math.sqrt(10) / 2 < band.block_sd < 0.05 / math.sqrt(10) * 3


@pytest.mark.parametrize(
    "curves",
    [
        [],
        draw_curves(2),
        [LossCurve(seed=s, losses=(1.0, 0.9, 0.8), samples=48) for s in range(4)],
        [curve.replace(losses=tuple(loss - 5.0 for loss in curve.losses)) for curve in draw_curves(4)],
        [curve.replace(losses=(None, *curve.losses[1:])) for curve in draw_curves(4)],
    ],
    ids=["nothing", "two seeds", "three steps", "a negative loss", "not finite"],
)
def test_without_enough_there_is_no_band(curves):
    assert calibrate_band(curves) is None


def test_a_broken_seed_is_left_out():
    broken = draw_curves(1, first=50)[0].replace(losses=(None,) * STEPS)
    assert calibrate_band([*draw_curves(4), broken]) == calibrate_band(draw_curves(4))


def test_a_seed_that_strays_widens_the_band():
    curves = draw_curves(4)
    late = [loss * (1.3 if 40 <= step < 90 else 1.0) for step, loss in enumerate(curves[0].losses)]
    strays = [curves[0].replace(losses=tuple(late)), *curves[1:]]
    assert calibrate_band(strays).block_sd > 2 * calibrate_band(curves).block_sd


def test_healthy_seeds_stay_in_the_band_and_a_higher_loss_leaves_it():
    alarms = caught = 0
    for number in range(60):
        band = calibrate_band(draw_curves(4, first=100 * number))
        fresh = draw_losses(100 * number + 50)
        alarms += feed(LossWatch(band, allowed=0.005, epoch_steps=None), fresh) is not None
        found = feed(LossWatch(band, allowed=0.005, epoch_steps=None), [1.3 * loss for loss in fresh])
        caught += found is not None
    assert alarms <= 2
    assert caught >= 57


def test_what_is_allowed_is_not_an_alarm():
    band = calibrate_band(draw_curves(6, seed_sd=1e-4, noise=1e-3))
    worse = [1.02 * loss for loss in draw_losses(99, seed_sd=0.0, noise=1e-3)]
    assert feed(LossWatch(band, allowed=0.05, epoch_steps=None), worse) is None
    step, rise = feed(LossWatch(band, allowed=0.005, epoch_steps=None), worse)
    assert step <= STEPS // 2
    assert rise.clean_step == 0
    assert "2 % above the baseline's" in rise.found


def test_blocks_are_found_by_samples_whatever_the_lines():
    band = calibrate_band(draw_curves(4))
    losses = draw_losses(7)
    excesses = []
    for line in (1, 7, 10, 33):
        watch = BandWatch(band, allowed=0.0)
        for at in range(0, STEPS, line):
            some = losses[at : at + line]
            watch.record(some, step=at + len(some), samples=(at + len(some)) * BATCH, since=at * BATCH)
        excesses.append((watch.looks, pytest.approx(watch.excess)))
    assert all(one == excesses[0] for one in excesses)
    assert excesses[0][0] == BLOCKS - 1  # the last one ends with the next sample


def test_a_training_that_starts_inside_a_block_leaves_that_out():
    watch = BandWatch(calibrate_band(draw_curves(4)), allowed=0.0)
    begun = 35
    watch.record([level(35)] * 30, step=begun + 30, samples=(begun + 30) * BATCH, since=begun * BATCH)
    assert (watch.block, watch.looks) == (6, 2)


def test_a_watch_that_is_told_its_first_losses_in_the_middle_does_not_spread_them_over_all_blocks_before():
    band = calibrate_band(draw_curves(4))
    fresh, told = (LossWatch(band, allowed=0.0, epoch_steps=None) for _ in range(2))
    for at in range(40, 60, 10):
        losses = [level(at)] * 10
        assert fresh.record(losses, step=at + 10, samples=(at + 10) * BATCH, learning_rate=1.0) is None
    told._samples = 40 * BATCH
    for at in range(40, 60, 10):
        losses = [level(at)] * 10
        assert told.record(losses, step=at + 10, samples=(at + 10) * BATCH, learning_rate=1.0) is None
    assert fresh.capture()["band"] == told.capture()["band"]
    assert (fresh._band.block, fresh._band.looks) == (5, 1)


def test_an_order_that_never_changes_is_held_against_whole_epochs_only():
    """A stretch of hard samples in each epoch, as in data that is sorted."""
    source = random.Random(9)
    losses = [(1.0 if step % 3000 < 1500 else 2.0) + source.gauss(0.0, 0.1) for step in range(60_000)]
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=3000), losses) is not None
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=3000, is_shuffled=False), losses) is None
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=None, is_shuffled=False), losses) is None
    risen = [loss + (0.5 if step >= 45_000 else 0.0) for step, loss in enumerate(losses)]
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=3000, is_shuffled=False), risen)[0] > 45_000


def test_a_loss_of_exactly_nothing_is_healthy_and_one_that_leaves_it_is_not():
    assert run_rise([0.0] * 5000) is None
    assert run_rise([0.5] * 5000) is None
    assert run_rise([0.0] * 3000 + [0.5] * 2000)[0] > 3000


def run_rise(losses: list[float], *, window: int = 50, rates: list[float] | None = None):
    watch = RiseWatch(window, TOLERANCE)
    for at in range(0, len(losses), 10):
        rise = watch.record(losses[at : at + 10], step=at + 10, learning_rate=1.0 if rates is None else rates[at])
        if rise is not None:
            return at + 10, rise
    return None


def plateau(seed: int, steps: int, noise: float = 0.3) -> list[float]:
    source = random.Random(seed)
    return [level(step) + source.gauss(0.0, noise) for step in range(steps)]


def test_a_long_plateau_is_healthy():
    assert sum(run_rise(plateau(seed, 30_000)) is not None for seed in range(12)) == 0


def test_heavy_tails_are_healthy():
    source = random.Random(5)
    losses = [level(step) + 0.1 * math.exp(source.gauss(0.0, 1.5)) for step in range(30_000)]
    assert run_rise(losses) is None


def test_a_spike_is_forgiven_and_a_rise_is_not():
    losses = plateau(1, 6000)
    spiked = [loss + (9.0 if 3000 <= step < 3200 else 0.0) for step, loss in enumerate(losses)]
    assert run_rise(spiked) is None
    risen = [loss + (0.4 if step >= 3000 else 0.0) for step, loss in enumerate(losses)]
    step, rise = run_rise(risen)
    assert 3000 < step <= 4500
    assert 0 < rise.clean_step <= 3000


def test_a_rise_is_found_as_surely_after_a_long_time():
    losses = [loss + (0.6 if step >= 40_000 else 0.0) for step, loss in enumerate(plateau(2, 42_000))]
    step, rise = run_rise(losses)
    assert 40_000 < step <= 41_500
    assert 38_000 < rise.clean_step <= 40_000


def test_a_learning_rate_that_rises_starts_anew():
    restart = 3000
    losses = [loss + (0.6 if step >= restart else 0.0) for step, loss in enumerate(plateau(3, 6000))]
    falling = [1.0 - step / 7000 for step in range(6000)]
    restarted = [rate + (0.5 if step >= restart else 0.0) for step, rate in enumerate(falling)]
    assert run_rise(losses, rates=falling) is not None
    assert run_rise(losses, rates=restarted) is None
    again = [loss + (0.8 if step >= 4500 else 0.0) for step, loss in enumerate(losses)]
    assert run_rise(again, rates=restarted)[0] > 4500


def test_ups_and_downs_within_an_epoch_are_healthy_in_windows_of_epochs():
    source = random.Random(4)
    losses = [
        (1.0 + 2.0 * math.exp(-step / 3000)) * (0.85 + 0.3 * (step % 700) / 700) + source.gauss(0.0, 0.1)
        for step in range(60_000)
    ]
    watch = LossWatch(None, allowed=0.0, epoch_steps=700)
    assert watch._rises[1].window_steps == 700
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=700), losses) is None


@pytest.mark.parametrize(
    ("epoch_steps", "window"), [(None, SLOW), (30, 990), (700, 700), (4000, 4000), (LONGEST_EPOCH + 1, SLOW)]
)
def test_slow_windows_are_whole_epochs_where_these_are_short(epoch_steps, window):
    rises = LossWatch(None, allowed=0.0, epoch_steps=epoch_steps)._rises
    assert [one.window_steps for one in rises] == [SOON, window]
    assert rises[0].tolerance == LARGE


def test_losses_that_are_not_finite_are_left_to_the_loop():
    losses = plateau(6, 4000)
    holes = [math.nan if step % 97 == 0 else loss for step, loss in enumerate(losses)]
    assert feed(LossWatch(None, allowed=0.0, epoch_steps=None), holes) is None


@pytest.mark.parametrize("cut", [330, 2500, 3190])
def test_a_captured_watch_goes_on_as_if_nothing_had_happened(cut):
    band = calibrate_band(draw_curves(4))
    losses = [loss + (0.5 if step >= 3000 else 0.0) for step, loss in enumerate(plateau(8, 5000))]
    losses[:STEPS] = draw_losses(77)
    whole = feed(LossWatch(band, allowed=0.005, epoch_steps=700), losses)
    first, second = (LossWatch(band, allowed=0.005, epoch_steps=700) for _ in range(2))
    assert feed(first, losses[:cut]) is None
    second.restore(json.loads(json.dumps(first.capture())))
    for at in range(cut, len(losses), 10):
        some = losses[at : at + 10]
        rise = second.record(some, step=at + 10, samples=(at + 10) * BATCH, learning_rate=1.0)
        if rise is not None:
            break
    assert whole == (at + 10, rise)
