"""Warm-up and blocks of a training by a clock that only moves when a step says so: every number is exact."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from scripted_steps import LIMITS, LONG_WARM, PLAIN, STEP, WARM, FakeClock, Scripted

from autotune.engine.loop import Mark, StepOutcome
from autotune.measure.clock import Clock, CudaClock, HostClock, PausableClock, clock_for
from autotune.measure.throughput import TrainingEndedError, finite_or_none
from autotune.measure.timing import DivergedError, make_timing
from autotune.measure.warmup import backlog_steps
from autotune.records import Block, Measurement, PeakMemory, TrainConfig, TrialLimits
from autotune.records.measurement import Interference, SpeedReference

FEW_WORKERS = PLAIN.replace(num_workers=2, prefetch_factor=4)
"""A backlog of 10 steps."""
MANY_WORKERS = PLAIN.replace(num_workers=8, prefetch_factor=4)
"""A backlog of 34 steps."""


def test_even_steps_are_timed_exactly() -> None:
    script = Scripted([STEP])
    measured = script.measure()
    assert measured == Measurement(
        blocks=(Block(optimizer_steps=2, samples=20, seconds=0.25),) * 8,
        step_seconds=(STEP,) * 16,
        data_wait_seconds=0.0,
        steady=True,
        unsettled="",
        warmup_steps=WARM,
        warmup_seconds=WARM * STEP,
        first_step_seconds=STEP,
        warmup_step_seconds=(STEP, STEP),
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=123),
        canary=None,
        ended_by="precision",
    )
    assert measured.samples_per_second == 80.0
    assert script.steps == script.timing.samples // 10 == WARM + 16


@pytest.mark.parametrize(("least", "cap", "steps"), [(0, 100.0, WARM), (30, 100.0, 30), (30, 2.5, 21)])
def test_a_warm_up_may_have_to_be_as_long_as_another(least: int, cap: float, steps: int) -> None:
    measured = Scripted([STEP]).measure(limits=LIMITS.replace(least_warmup_steps=least, warmup_cap_seconds=cap))
    assert (measured.warmup_steps, measured.steady) == (steps, True)


@pytest.mark.parametrize(("duration", "steps"), [(2.0**-10, 256), (0.0625, 4), (0.1875, 2), (0.25, 1), (0.75, 1)])
def test_a_block_is_whole_steps_of_a_quarter_second_or_more(duration: float, steps: int) -> None:
    measured = Scripted([duration]).measure()
    assert {block.optimizer_steps for block in measured.blocks} == {steps}
    assert {block.seconds for block in measured.blocks} == {steps * duration}
    assert {block.samples for block in measured.blocks} == {steps * 10}


def test_a_block_of_uneven_steps_takes_a_quarter_second_or_more() -> None:
    measured = Scripted([0.125, 0.0625] * 500).measure()
    assert min(block.seconds for block in measured.blocks) >= 0.25


@pytest.mark.parametrize(
    ("cost", "steps"),
    [(0.0, 2), (2.0**-8, 2), (2.0**-6, 6), (2.0**-3, 25)],
)
def test_a_clock_that_is_costly_to_read_makes_blocks_longer(cost: float, steps: int) -> None:
    # 50 readings of 1/64 s make 25/32 s: six of the 9/64 s that a step takes with one of them.
    measured = Scripted([STEP], clock=FakeClock(cost)).measure()
    assert {block.optimizer_steps for block in measured.blocks} == {steps}


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (PLAIN, 0),
        (PLAIN.replace(prefetch_factor=8), 0),
        (PLAIN.replace(num_workers=1), 4),
        (FEW_WORKERS, 10),
        (MANY_WORKERS, 34),
        (PLAIN.replace(num_workers=2, prefetch_factor=4, gradient_accumulation_steps=4), 3),
        (PLAIN.replace(num_workers=16, prefetch_factor=4, gradient_accumulation_steps=3), 22),
    ],
)
def test_the_backlog_is_what_the_workers_had_ready(config: TrainConfig, steps: int) -> None:
    assert backlog_steps(config) == steps


def test_the_backlog_is_used_up_before_timing() -> None:
    measured = Scripted([STEP] * 34 + [0.5]).measure(MANY_WORKERS)
    assert measured.warmup_steps == 34
    assert set(measured.step_seconds) == {0.5}
    assert measured.samples_per_second == 20.0


def test_warm_up_goes_on_until_the_steps_have_settled() -> None:
    measured = Scripted([4.0, 0.75, 0.75, 0.75, STEP]).measure()
    # The first step is never typical; the last of the three slow ones leaves both windows after ten more.
    assert (measured.steady, measured.warmup_steps) == (True, 14)
    assert measured.warmup_seconds == 6.25 + 10 * STEP
    assert set(measured.step_seconds) == {STEP}


def test_compilation_is_kept_apart_and_starts_the_warm_up_anew() -> None:
    script = Scripted([10.0, STEP, 5.0, STEP], compiled=lambda step: step in (0, 2))
    measured = script.measure(limits=LIMITS.replace(warmup_cap_seconds=2.0))
    assert measured.warmup_steps == 3 + 10
    assert measured.warmup_seconds == 15.0 + 11 * STEP
    assert measured.compile_seconds == 15.0 - 2 * STEP
    assert measured.steady
    assert set(measured.step_seconds) == {STEP}


def test_graphs_compiled_before_the_training_are_none_of_its_own() -> None:
    script = Scripted([STEP])
    script.graphs = 7
    assert script.measure() == Scripted([STEP]).measure()


def test_long_steps_settle_in_fewer() -> None:
    measured = Scripted([0.5]).measure()
    assert (measured.steady, measured.warmup_steps, measured.warmup_seconds) == (True, LONG_WARM, LONG_WARM * 0.5)


def test_a_training_that_compiles_again_and_again_uses_its_cap_up_between_compilations() -> None:
    script = Scripted([STEP], compiled=lambda step: step % 4 == 0)
    measured = script.measure(limits=LIMITS.replace(warmup_cap_seconds=6 * STEP))
    assert (measured.warmup_steps, measured.unsettled) == (8, "the first steps")
    assert [block.recompiled for block in measured.blocks] == [True, False] * 4


def test_the_backlog_filled_during_a_compilation_is_used_up_too() -> None:
    script = Scripted([STEP] * 5 + [20.0] + [STEP] * 34 + [0.5], compiled=lambda step: step == 5)
    measured = script.measure(MANY_WORKERS)
    assert measured.warmup_steps == 6 + 34
    assert set(measured.step_seconds) == {0.5}


def test_a_slow_first_step_without_compilation_is_no_compile_time() -> None:
    measured = Scripted([10.0, STEP]).measure(limits=LIMITS.replace(warmup_cap_seconds=2.0))
    assert measured.compile_seconds == 0.0
    assert measured.warmup_seconds == 10.0 + 10 * STEP
    assert measured.steady


def test_the_cap_does_not_count_the_first_step() -> None:
    measured = Scripted([9.0, STEP]).measure(MANY_WORKERS, LIMITS.replace(warmup_cap_seconds=0.5))
    assert measured.warmup_steps == 1 + 4
    assert not measured.steady
    assert (len(measured.blocks), measured.ended_by) == (8, "precision")


def test_what_settles_at_the_cap_itself_is_steady() -> None:
    measured = Scripted([STEP]).measure(limits=LIMITS.replace(warmup_cap_seconds=10 * STEP))
    assert (measured.warmup_steps, measured.steady) == (WARM, True)


def moving(name: str) -> Callable[[int], dict[str, float | None]]:
    return lambda step: {name: float(step), "what stands still": 1.0, "what there is not": None}


@pytest.mark.parametrize(
    ("script", "config", "cap", "reason"),
    [
        (Scripted([STEP]), PLAIN, 0.25, "the first steps"),
        (Scripted([STEP], compiled=lambda step: step == 3), PLAIN, 0.5, "the first steps"),
        (Scripted([STEP]), MANY_WORKERS, 2.0, "what the loader had ready"),
        (Scripted([STEP] * 10 + [1.0]), PLAIN, 10.0 * STEP, "the time of a step"),
        (Scripted([2.0**k for k in range(12)]), PLAIN, 1000.0, "the time of a step"),
        (Scripted([STEP]).watch(moving("the loss scale")), PLAIN, 3.0, "the loss scale"),
        (Scripted([STEP]).watch(moving("the device's memory")), PLAIN, 3.0, "the device's memory"),
        (Scripted([STEP]).watch(lambda step: {}, load_seconds=50.0), PLAIN, 3.0, "the device's clock"),
    ],
)
def test_a_warm_up_that_is_cut_off_says_what_had_not_settled(
    script: Scripted, config: TrainConfig, cap: float, reason: str
) -> None:
    measured = script.measure(config, LIMITS.replace(warmup_cap_seconds=cap))
    assert (measured.steady, measured.unsettled) == (False, reason)
    assert measured.blocks


def test_only_waiting_inside_the_blocks_counts_as_waiting() -> None:
    measured = Scripted([STEP], wait=0.03125).measure()
    assert measured.data_wait_seconds == 16 * 0.03125
    assert measured.data_wait_fraction == 0.25


def test_the_device_is_waited_for_at_the_ends_of_a_block_only() -> None:
    script = Scripted([0.0625])
    measured = script.measure()
    once_for_its_cost = 1
    assert script.clock.synchronized == measured.warmup_steps + once_for_its_cost + 2 * len(measured.blocks)


def test_memory_is_reset_after_the_warm_up_and_sampled_after_each_block() -> None:
    script = Scripted([STEP])
    script.measure()
    expected = [*["step"] * WARM, "reset", "sample", *["step", "step", "sample"] * 8, "read memory"]
    assert script.events == expected


def test_memory_that_takes_long_to_read_is_read_less_often_and_leaves_the_time_to_measure_in() -> None:
    script = Scripted([STEP])
    script.sample_seconds = 5 * STEP
    measured = script.measure()
    assert len(measured.blocks) == 8
    assert script.events[WARM:] == [
        "reset",
        "sample",
        "step",
        "step",
        "sample",
        *["step"] * 14,
        "sample",
        "read memory",
    ]


def test_the_canary_is_asked_before_the_first_step_and_after_the_memory_was_read() -> None:
    script = Scripted([STEP]).with_canary(0.5, 0.75)
    measured = script.measure()
    assert measured.canary == SpeedReference(before_seconds=0.5, after_seconds=0.75)
    assert script.events.count("canary") == 2
    assert script.events[0] == "canary"
    assert script.events[-2:] == ["read memory", "canary"]
    assert measured.replace(canary=None) == Scripted([STEP]).measure()


def test_the_canary_is_asked_twice_of_a_training_that_ends_early() -> None:
    script = Scripted([STEP]).with_canary(0.5, 0.75)
    assert script.measure_until(WARM + 3).canary == SpeedReference(before_seconds=0.5, after_seconds=0.75)


def test_no_second_canary_without_a_measurement() -> None:
    script = Scripted([STEP]).with_canary(0.5)
    with pytest.raises(TrainingEndedError):
        script.measure_until(3)
    assert script.events.count("canary") == 1


def test_interference_is_read_once_for_each_block_and_outside_of_it() -> None:
    script = Scripted([STEP]).with_interference()
    measured = script.measure()
    assert [block.interference for block in measured.blocks] == [Interference(major_faults=k) for k in range(8)]
    assert {block.seconds for block in measured.blocks} == {0.25}
    assert measured.step_seconds == (STEP,) * 16
    block = ["start", "step", "step", "read interference", "sample"]
    assert script.events[WARM + 2 : -1] == block * 8


def test_interference_of_a_block_without_a_step_is_not_kept() -> None:
    script = Scripted([STEP]).with_interference()
    measured = script.measure_until(WARM + 2)
    assert [block.interference for block in measured.blocks] == [Interference(major_faults=0)]


def test_interference_that_nobody_watches_is_unknown() -> None:
    assert {block.interference for block in Scripted([STEP]).measure().blocks} == {None}


@pytest.mark.parametrize("inside", [0, 1])
def test_what_compiling_takes_is_taken_off_its_block(inside: int) -> None:
    at = WARM + 2 * 3 + inside
    durations = [STEP] * at + [100.0, STEP]
    limits = LIMITS.replace(measure_samples=200)
    measured = Scripted(durations, compiled=lambda step: step == at).measure(limits=limits)
    assert {block.seconds / block.optimizer_steps for block in measured.blocks} == {STEP}
    assert set(measured.step_seconds) == {STEP}
    assert not any(block.recompiled for block in measured.blocks)
    assert measured.compile_seconds == 100.0 - STEP
    assert measured.samples >= 200
    assert measured.ended_by == "samples"


def test_no_more_is_taken_off_than_compiling_took() -> None:
    script = Scripted([STEP] * WARM + [10.0, STEP], compiled=lambda step: step == WARM)
    script.timing.compile_seconds = lambda: 4.0 * script.graphs
    measured = script.measure()
    assert measured.blocks[0].seconds == measured.step_seconds[0] == 6.0
    assert measured.compile_seconds == 4.0


def test_what_the_first_short_batch_is_set_up_for_is_taken_off() -> None:
    short = {WARM + 4, WARM + 10}
    durations = [4.0 if step in short else STEP for step in range(WARM + 12)]
    measured = Scripted(durations, samples=lambda step: 6 if step in short else 10).measure()
    assert [block.seconds / block.optimizer_steps for block in measured.blocks].count(STEP) == len(measured.blocks) - 1
    assert sorted(measured.step_seconds)[-2:] == [STEP, 4.0]  # the second one is no first one any more
    assert measured.compile_seconds == 0.0


def test_what_a_short_batch_is_waited_for_counts() -> None:
    script = Scripted([STEP] * WARM + [4.0, STEP], samples=lambda step: 6 if step == WARM else 10)
    plain = script.step

    def step(mark: Mark) -> StepOutcome:
        # As long a wait before, of the warm-up, is none of this step's.
        script.set_wait({WARM - 1: STEP, WARM: 3.875}.get(script.steps, 0.0))
        return plain(mark)

    script.step = step  # type: ignore[method-assign]
    assert max(script.measure().step_seconds) == 4.0


def test_a_graph_that_is_captured_for_a_short_batch_is_a_part_of_compiling() -> None:
    script = Scripted([STEP] * WARM + [4.0, STEP], samples=lambda step: 6 if step == WARM else 10)
    measured = script.measure(PLAIN.replace(compile_mode="default"))
    assert measured.compile_seconds == 4.0 - STEP


def test_a_long_step_of_a_usual_batch_counts() -> None:
    measured = Scripted([STEP] * (WARM + 4) + [4.0, STEP]).measure()
    assert max(measured.step_seconds) == 4.0


def test_batches_that_keep_getting_smaller_are_no_setting_up() -> None:
    durations = [STEP] * WARM + [4.0] * 6 + [STEP]
    measured = Scripted(durations, samples=lambda step: max(1, 10 - max(0, step + 1 - WARM))).measure()
    assert list(measured.step_seconds).count(4.0) == 3


def test_nothing_is_taken_off_for_what_was_compiled_while_the_clock_stood_still() -> None:
    script = Scripted([STEP] * WARM + [10.0, STEP], compiled=lambda step: step == WARM)
    clock = PausableClock(script.clock)
    script.timing.clock = clock
    plain = script.timing.compiled_graphs

    def validate() -> int:
        clock.aside_seconds += 1.0 * (script.steps == WARM + 1)
        return plain()

    script.timing.compiled_graphs = validate
    measured = script.measure()
    assert measured.blocks[0].recompiled
    assert measured.blocks[0].seconds > 8.0


def test_compiling_counts_where_shapes_keep_changing() -> None:
    compiled = {WARM + 2 * block for block in range(5)}
    durations = [4.0 if step in compiled else STEP for step in range(WARM + 12)]
    measured = Scripted(durations, compiled=lambda step: step in compiled).measure()
    assert [block.recompiled for block in measured.blocks][:6] == [False] * 3 + [True] * 2 + [False]
    assert [block.seconds > 4.0 for block in measured.blocks][:6] == [False] * 3 + [True] * 2 + [False]


@pytest.mark.parametrize(
    ("bad", "value"), [*((bad, math.nan) for bad in (0, 3, 10, 11, 12, 13, 20)), (12, math.inf), (12, -math.inf)]
)
def test_a_loss_that_is_not_finite_is_reported_with_its_step(bad: int, value: float) -> None:
    script = Scripted([STEP], loss=lambda step: value if step >= bad else 1.0)
    with pytest.raises(DivergedError, match=f"not finite at optimizer step {bad}$") as caught:
        script.measure()
    assert caught.value.step == bad
    assert script.steps <= max(WARM, bad + 2)  # not trained on for the rest of the trial


def test_losses_come_back_in_order_and_are_read_once() -> None:
    script = Scripted([STEP], loss=lambda step: float(step))
    script.measure()
    assert script.timing.read_losses() == tuple(float(step) for step in range(WARM + 16))
    assert script.timing.losses == []
    script.timing.take_step(script.step)
    assert script.timing.read_losses() == tuple(float(step) for step in range(WARM + 17))


def test_a_timing_watches_the_loss_scale_and_has_a_canary() -> None:
    scales = iter([2.0, 1.0])
    timing = make_timing(torch.device("cpu"), read_scale=lambda: next(scales))
    assert [timing.watched() for _ in range(2)] == [
        {"the device's memory": None, "the loss scale": 2.0},
        {"the device's memory": None, "the loss scale": 1.0},
    ]
    assert make_timing(torch.device("cpu")).watched() == {"the device's memory": None, "the loss scale": None}
    assert timing.canary is not None
    assert (timing.load_seconds, make_timing(torch.device("cuda")).load_seconds) == (0.0, 2.0)


def test_a_timing_reads_the_clock_it_is_given() -> None:
    clock = FakeClock()
    assert make_timing(torch.device("cpu"), clock=clock).clock is clock
    assert type(make_timing(torch.device("cpu")).clock) is HostClock


@pytest.mark.parametrize(
    ("value", "recorded"), [(1.5, 1.5), (math.nan, None), (math.inf, None), (-math.inf, None), (0.0, 0.0)]
)
def test_a_record_holds_none_for_what_is_not_finite(value: float, recorded: float | None) -> None:
    assert finite_or_none(value) == recorded


def test_the_host_clock_gives_the_time_between_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    counter = itertools.chain([10.0, 11.0, 11.5, 13.5], itertools.repeat(14.0))
    monkeypatch.setattr("autotune.measure.clock.time", SimpleNamespace(perf_counter=lambda: next(counter)))
    clock = HostClock()
    assert clock.now() == 10.0
    for _ in range(3):
        clock.mark()
    clock.synchronize()
    assert clock.now() == 14.0
    assert clock.take_intervals() == [0.5, 2.0]
    assert clock.take_intervals() == []


@pytest.mark.parametrize(("device", "kind"), [("cpu", HostClock), ("cuda", CudaClock)])
def test_each_device_has_its_clock(device: str, kind: type[Clock]) -> None:
    assert type(clock_for(torch.device(device))) is kind


def test_a_block_of_bursts_ends_after_four_times_its_length() -> None:
    # Every tenth step waits for a batch: counted by the fast ones, a block would be 64 steps and 3.5 seconds.
    script = Scripted([*([2.0**-8] * 9 + [0.5]) * 60])
    measured = script.measure(limits=LIMITS.replace(warmup_cap_seconds=4.0, measure_seconds=6.0))
    assert all(1.0 <= block.seconds <= 1.5 for block in measured.blocks)
    assert measured.seconds <= 7.5


class Resting:
    """The end of a pair's other trial: each rest takes ten seconds by the clock."""

    def __init__(self, script: Scripted, *, alone: bool = False) -> None:
        self._script, self._alone = script, alone

    def enter(self, phase: object) -> None:
        pass

    def end_step(self, seconds: float) -> None:
        pass

    def halt(self) -> None:
        self._script.note("halt")

    def go_on(self) -> None:
        self._script.note("go on")

    def rest(self) -> float:
        self._script.note("rest")
        if self._alone:
            return 0.0
        self._script.clock.seconds += 10.0
        return 10.0


def measure_in_turns(step: float, limits: TrialLimits, *, alone: bool = False) -> tuple[Measurement, list[str]]:
    script = Scripted([step])
    script.timing.progress = Resting(script, alone=alone)
    return script.measure(limits=limits), script.events


def test_what_takes_turns_rests_before_and_after_each_block_and_no_rest_is_timed() -> None:
    measured, events = measure_in_turns(STEP, LIMITS.replace(measure_seconds=4.0))
    blocks = (Block(optimizer_steps=1, samples=10, seconds=STEP),) * 16
    assert measured.blocks == blocks  # two seconds: the other one has as many
    assert measured.ended_by == "time"
    assert events.count("rest") == 20
    assert [one for one in events if one in ("halt", "rest", "go on", "step")] == [
        *("halt", "rest", "go on"),  # the other one is to be ready too, or warms up first
        *["step"] * WARM,
        *("halt", "rest"),
        *("go on", "step", "halt", "rest") * 18,  # the first two while the other one's start is still felt
        "go on",
    ]
    assert measured.warmup_seconds == WARM * STEP


@pytest.mark.parametrize("step", [2.0**-10, 2.0**-8, 2.0**-6])
def test_two_in_turns_time_as_many_samples_in_as_many_blocks_however_fast_they_are(step: float) -> None:
    limits = LIMITS.replace(measure_seconds=2.0, measure_samples=4000)
    measured, events = measure_in_turns(step, limits)
    # Twenty of 20 steps, but 23 with the first: it is to be another one of each two, three or five in the next block.
    assert len(measured.blocks) == 19
    assert {block.samples for block in measured.blocks} == {220}
    assert {block.seconds for block in measured.blocks} == {22 * step}
    assert measured.ended_by == "samples"
    # The first step after a rest has the caches of the other one.
    last = len(events) - events[::-1].index("rest") - 1
    before = len(events[:last]) - events[:last][::-1].index("rest") - 1
    assert events[before:last].count("step") == 23


def test_what_may_rest_and_is_alone_is_timed_as_ever() -> None:
    measured, _ = measure_in_turns(STEP, LIMITS, alone=True)
    assert measured.blocks == (Block(optimizer_steps=2, samples=20, seconds=0.25),) * 8
    assert measured.ended_by == "precision"
