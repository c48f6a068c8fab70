"""Time one config: samples per second over whole optimizer steps, loader, copies and optimizer included.

    canary ── warm-up until settled ──┬── block ──┬── block ──┬── ... ── enough ── canary
              (compilation apart)     sync        sync        sync

Before its warm-up and between its blocks, a trial that takes turns with another one rests, while that one runs.
There, where steps come in bursts, each block is whole ones.
What compiling takes of a block is taken off it, as the warm-up keeps compilation apart: a script that samples now and
then, or ends an epoch with a smaller batch, compiles once more for that, and a training hardly ever again. So does what
the first such batch makes libraries look for: kernels (cudnn.benchmark), or another CUDA graph.
Enough is: precise, or the time or the samples asked for are used up, or clearly slower than the rival it races.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from autotune.measure.bursts import find_bursts
from autotune.measure.clock import Clock
from autotune.measure.confidence import relative_half_width
from autotune.measure.hopeless import EarlySteps, Phase, TooSlowError
from autotune.measure.memory import MemoryMeter
from autotune.measure.racing import is_clearly_slower
from autotune.measure.timing import Timing
from autotune.measure.warmup import SLOW_STEP_SECONDS, VERY_SLOW_STEP_SECONDS, WarmUp, make_warm_up
from autotune.records.config import TrainConfig
from autotune.records.measurement import DISTURBED_SHARE, Block, Measurement, SpeedReference
from autotune.records.trial import SAMPLES_PATIENCE, Pace, Rival, TrialLimits

LEAST_BLOCK_SECONDS = 0.25
LEAST_BLOCKS = 3
LEAST_SLOW_BLOCKS = 2
"""Where a single step takes a second or more, however short the time to measure in."""
ENDLESS_STEP_SECONDS = 20.0
"""One step of such a length is a measurement too."""
LEAST_SHORT_STEPS = 4
"""Of a training that ends before it has settled, so many steps are better than no answer; marked as not steady."""
PRECISE_BLOCKS = 8
PRECISION = 0.02

_LONGEST_BLOCK = 4
"""A block may take so many times as long as it is meant to: steps of very different length would make one of many steps
endless."""
_MOST_BURSTS = 3
"""A block may take as long as so many bursts."""
_TURN_SECONDS = 0.1
"""Of a block where two take turns: a shared machine's speed wanders within a second."""
_LEAST_WAKING = 8
"""Steps of a block, before which one more is taken that is not timed, where two take turns."""
_USUAL_PERIODS = 2 * 3 * 5
"""What repeats does so each few steps, or each few times ten."""
_SETTLING_BLOCKS = 2
"""Blocks that are not timed where two take turns: the other one's start took what this one had let go of, and memory
that a virtual machine has not touched before costs it more than twice as much. Of slow steps one has to do, of very
slow ones none: what it costs is little beside them."""
_MOST_COMPILING = 3
"""Blocks that compiling is taken off; with more of them, shapes keep changing, and it counts."""
_LONG_FOR_ITS_SIZE = 2.0
"""A batch that is smaller than all before, and takes this many typical steps, is set up for."""
_MOST_COMPILE_SECONDS = 60.0
"""Of compiling in blocks, that do not use up the time to measure in."""
_SAMPLED_SHARE = 0.02
"""Of the time measured, what reading the memory of workers may take."""
_CLOCK_COSTS = 50
"""A block is at least this many times as long as reading the clock at its ends."""

Ending = Literal["precision", "time", "samples", "racing", "training"]


class TrainingEndedError(Exception):
    """Thrown into a measurement whose training takes no further step."""


Steps = Generator[None, object, Measurement]
"""A measurement that asks for one optimizer step at each yield."""


def measure_throughput(timing: Timing, config: TrainConfig, limits: TrialLimits, memory: MemoryMeter) -> Steps:
    """Warm up, then time blocks of whole optimizer steps; whoever iterates takes the steps.

    Raises:
        DivergedError: a loss is not finite.
        TooSlowError: the first steps are hopelessly slower than the rival's.
        TrainingEndedError: it was thrown in, and not one step had been timed.
    """
    _wait_for_turn(timing)
    canary_before = _time_canary(timing)
    rival, early = _rival_now(limits.rival, canary_before), EarlySteps()
    began, aside = timing.clock.now(), timing.aside_seconds()
    warm_up, unsettled, short = yield from _warm_up(timing, config, limits, rival, early)
    warmup_seconds, warmup_aside = timing.clock.now() - began, timing.aside_seconds() - aside
    memory.reset_device()
    memory.sample()
    timing.forget_waits()
    timed = TimedBlocks(limits, None if unsettled else rival, warm_up.step_seconds)
    if short is not None:
        timed.blocks, timed.step_seconds, timed.ended = [short], list(warm_up.later_steps), True
    try:
        ending = yield from _time_blocks(timing, warm_up, timed, memory)
    finally:
        timing.go_on()  # stopped workers would never end
    if not timed.blocks:
        raise TrainingEndedError
    peak = memory.read()
    captured = timed.setup_seconds if config.compile_mode != "off" else 0.0
    return Measurement(
        blocks=tuple(timed.blocks),
        step_seconds=tuple(timed.step_seconds),
        data_wait_seconds=timing.data_wait_seconds,
        steady=not unsettled,
        unsettled=unsettled,
        warmup_steps=warm_up.steps - (short.optimizer_steps if short else 0),
        warmup_seconds=warmup_seconds - (short.seconds if short else 0.0),
        warmup_aside_seconds=warmup_aside,
        first_step_seconds=early.first_seconds,
        warmup_step_seconds=early.pair,
        compile_seconds=warm_up.compile_seconds + timed.compile_seconds + captured,
        peak_memory=peak,
        canary=_read_canary(timing, canary_before),
        ended_by=ending,
    )


def _wait_for_turn(timing: Timing) -> None:
    """Let the other one of a pair warm up first, or start."""
    timing.halt()
    timing.rest()
    timing.go_on()


def _time_blocks(
    timing: Timing, warm_up: WarmUp, timed: TimedBlocks, memory: MemoryMeter
) -> Generator[None, object, Ending]:
    """Time blocks until it is enough, with a rest before and after each where two take turns; return why it is."""
    timing.halt()
    timed.is_in_turns = timing.rest() > 0.0
    plan = _plan_blocks(timing, warm_up, timed)
    if timed.is_in_turns:
        timed.ended = timed.ended or (yield from _settle(timing, plan, warm_up.block_step_seconds))
        timing.forget_waits()
    now = timing.clock.now
    began, rested, sampled, is_sampled = now(), 0.0, 0.0, True
    while (ending := timed.find_ending(now() - began - rested - sampled)) is None:
        timed.ended = yield from _time_block(timing, plan, timed)
        is_sampled = sampled <= _SAMPLED_SHARE * (now() - began)  # while it is read, workers load ahead
        if is_sampled:
            before = now()
            memory.sample()
            sampled += now() - before
        timing.read_losses()
        rested += timing.rest()
    if not is_sampled:
        memory.sample()
    return ending


@dataclass(frozen=True)
class _BlockPlan:
    """When a block is full.

    Attributes:
        steps: that it has at least.
        longest: seconds after which it ends with fewer.
        long_seconds: that its last step takes at least; 0 where steps are alike.
    """

    steps: int
    longest: float
    long_seconds: float = 0.0

    def is_full(self, taken: int, seconds: float, last_seconds: float) -> bool:
        """Return whether a block of some steps, which took some seconds, needs no further one."""
        if taken == 0:
            return False
        return seconds >= self.longest or (taken >= self.steps and last_seconds >= self.long_seconds)


def _plan_blocks(timing: Timing, warm_up: WarmUp, timed: TimedBlocks) -> _BlockPlan:
    """Return when a block is full.

    Two in turns that time the same number of samples do so in as many blocks, however fast they are.
    """
    limits, least = timed.limits, _block_seconds(timing.clock)
    if not timed.is_in_turns:
        steps = math.ceil(least / max(warm_up.block_step_seconds, 1e-9))
        return _BlockPlan(max(1, steps), _LONGEST_BLOCK * least)
    bursts = find_bursts(warm_up.settled_steps)
    longest = _LONGEST_BLOCK * least if bursts is None else max(_LONGEST_BLOCK * least, _MOST_BURSTS * bursts.seconds)
    if limits.measure_samples is not None:
        blocks = max(PRECISE_BLOCKS, round(limits.measure_seconds / _TURN_SECONDS))
        samples_per_step = timing.samples / warm_up.steps
        steps = max(1, math.ceil(limits.measure_samples / samples_per_step / blocks))
        longest = math.inf if bursts is None else longest
    else:
        typical = warm_up.block_step_seconds if bursts is None else bursts.step_seconds
        steps = max(1, math.ceil(_TURN_SECONDS / max(typical, 1e-9)))
    if bursts is not None:
        return _BlockPlan(steps, longest, bursts.long_seconds)
    if steps >= _LEAST_WAKING:
        # What is not timed is not to be always the same one of each few, as where batches come from as many workers.
        while math.gcd(steps + 1, _USUAL_PERIODS) > 1:
            steps += 1
    return _BlockPlan(steps, longest)


def _settle(timing: Timing, plan: _BlockPlan, step_seconds: float) -> Generator[None, object, bool]:
    """Take the first turns without timing them; return whether the training ended."""
    slow = (step_seconds >= SLOW_STEP_SECONDS) + (step_seconds >= VERY_SLOW_STEP_SECONDS)
    ended = False
    for _ in range(_SETTLING_BLOCKS - slow):
        timing.go_on()
        if not ended:
            _, ended = yield from _take_steps(timing.clock, plan)
            timing.clock.synchronize()
        timing.halt()
        timing.rest()
    return ended


def _take_steps(clock: Clock, plan: _BlockPlan) -> Generator[None, object, tuple[int, bool]]:
    """Take the steps of a block, each of them marked; return how many, and whether the training ended."""
    taken, last = 0, 0.0
    began = before = clock.now()
    clock.mark()
    while not plan.is_full(taken, before - began, last):
        try:
            yield
        except TrainingEndedError:
            return taken, True
        clock.mark()
        taken, now = taken + 1, clock.now()
        last, before = now - before, now
    return taken, False


def _wake(timing: Timing) -> Generator[None, object, bool]:
    """Take a step that is not timed: in the rest the caches were another's; return whether the training ended."""
    try:
        yield
    except TrainingEndedError:
        return True
    timing.clock.synchronize()
    return False


def finite_or_none(value: float) -> float | None:
    """Return a number as a record holds it: None for what is not finite."""
    return value if math.isfinite(value) else None


@dataclass
class TimedBlocks:
    """The blocks so far and what ends them; apart from them what setting up took in them beyond a typical step."""

    limits: TrialLimits
    rival: Rival | None
    typical_seconds: float = math.inf
    blocks: list[Block] = field(default_factory=list)
    compile_seconds: float = 0.0
    setup_seconds: float = 0.0
    compiling: int = 0
    setting_up: int = 0
    step_seconds: list[float] = field(default_factory=list)
    ended: bool = False
    is_in_turns: bool = False

    def take(
        self,
        block: Block,
        step_seconds: list[float],
        *,
        compile_seconds: float,
        smaller: Sequence[tuple[int, float]],
    ) -> None:
        """Take a block, without what compiling took of its longest step, as long as that is not the rule.

        Args:
            block: as it was timed.
            step_seconds: of its steps, by events on a GPU.
            compile_seconds: what compiling took in it.
            smaller: places of steps with fewer samples than any before, and how long these waited for the loader.
        """
        if block.recompiled and self.compiling < _MOST_COMPILING and step_seconds:
            longest = max(range(len(step_seconds)), key=step_seconds.__getitem__)
            spent = min(compile_seconds, step_seconds[longest] - self.typical_seconds)
            if spent > 0.0:
                self.compiling += 1
                self.compile_seconds += spent
                step_seconds[longest] -= spent
                block = block.replace(seconds=block.seconds - spent, recompiled=False)
        for place, waited in smaller[: _MOST_COMPILING - self.setting_up]:
            work = step_seconds[place] - waited
            if work > _LONG_FOR_ITS_SIZE * self.typical_seconds:
                spent = work - self.typical_seconds
                self.setting_up += 1
                self.setup_seconds += spent
                step_seconds[place] -= spent
                block = block.replace(seconds=block.seconds - spent)
        self.blocks.append(block)
        self.step_seconds += step_seconds

    def find_ending(self, elapsed: float) -> Ending | None:
        """Return why no further block is to be timed; None to go on."""
        limits, blocks = self.limits, self.blocks
        elapsed -= min(self.compile_seconds + self.setup_seconds, _MOST_COMPILE_SECONDS)
        if self.ended:
            return "training"
        if self._lags():
            return "racing"
        if limits.measure_samples is not None:
            if sum(block.samples for block in blocks) >= limits.measure_samples:
                return "samples"
            return "time" if blocks and elapsed >= SAMPLES_PATIENCE * limits.measure_seconds else None
        least = self._least_blocks()
        if len(blocks) < least:
            overruns = blocks and least == LEAST_BLOCKS and elapsed >= 2 * limits.measure_seconds
            return "time" if overruns else None
        if elapsed >= (limits.measure_seconds / 2 if self.is_in_turns else limits.measure_seconds):
            return "time"
        if self.is_in_turns:  # for both to be done at a time
            return None
        rates = [block.samples / block.seconds for block in blocks]
        precise = len(blocks) >= PRECISE_BLOCKS and relative_half_width(rates) <= PRECISION
        return "precision" if precise else None

    def _least_blocks(self) -> int:
        """Return how many blocks there must be; of short steps fewer do where the time is up twice."""
        last = self.blocks[-1] if self.blocks else None
        if last is None or last.optimizer_steps > 1 or last.seconds < SLOW_STEP_SECONDS:
            return LEAST_BLOCKS
        return 1 if last.seconds >= ENDLESS_STEP_SECONDS else LEAST_SLOW_BLOCKS

    def _lags(self) -> bool:
        if self.rival is None:
            return False
        sound = [block for block in self.blocks if not block.recompiled]
        paces = [block.seconds / block.samples / self.rival.seconds_per_sample for block in sound]
        ratios = [math.log(pace) for pace in paces]
        return is_clearly_slower(ratios, block_sd=self.rival.block_sd, margin=self.rival.margin)


def _rival_now(rival: Rival | None, canary_seconds: float | None) -> Rival | None:
    """Return the rival as it would be now: where the machine itself has become slower, so would it."""
    if rival is None or rival.canary_seconds is None or canary_seconds is None:
        return rival
    slowdown = max(1.0, canary_seconds / rival.canary_seconds)
    return rival.replace(seconds_per_sample=slowdown * rival.seconds_per_sample)


def _read_canary(timing: Timing, before: float | None) -> SpeedReference | None:
    after = None if before is None else _time_canary(timing)
    return None if before is None or after is None else SpeedReference(before_seconds=before, after_seconds=after)


def _time_canary(timing: Timing) -> float | None:
    try:
        return timing.canary() if timing.canary else None
    except RuntimeError:  # no memory left, or an operation that the script's own settings forbid
        return None


def _block_seconds(clock: Clock) -> float:
    began = clock.now()
    clock.synchronize()
    return max(LEAST_BLOCK_SECONDS, _CLOCK_COSTS * (clock.now() - began))


def _warm_up(
    timing: Timing, config: TrainConfig, limits: TrialLimits, rival: Rival | None, early: EarlySteps
) -> Generator[None, object, tuple[WarmUp, str, Block | None]]:
    """Return the warm-up, what had not settled at its end, and all there is of a training that ended in it."""
    clock, graphs = timing.clock, timing.compiled_graphs()
    warm_up = make_warm_up(config, limits, graphs=graphs, least_seconds=timing.load_seconds)
    first_samples = 0
    timing.phase = Phase.STEPPING if config.compile_mode == "off" else Phase.COMPILING
    timing.enter(Phase.LOADING)
    while True:
        before, waited, trained, compiled = clock.now(), timing.data_wait_seconds, timing.samples, warm_up.graphs
        try:
            yield
        except TrainingEndedError:
            timing.read_losses()
            if warm_up.steps < LEAST_SHORT_STEPS:
                raise
            rest, samples = warm_up.later_steps, timing.samples - first_samples
            recompiled = timing.compiled_graphs() != graphs
            block = Block(optimizer_steps=len(rest), samples=samples, seconds=sum(rest), recompiled=recompiled)
            return warm_up, "the training ended before", block
        clock.synchronize()
        seconds = clock.now() - before
        warm_up.take(seconds, graphs=timing.compiled_graphs(), watched=timing.watched())
        first_samples = first_samples or timing.samples
        work = seconds - (timing.data_wait_seconds - waited)
        timing.end_step(work)
        is_pair = early.take(work, timing.samples - trained, compiled=warm_up.graphs != compiled)
        _judge_early(timing, early, limits.pace, rival, is_pair=is_pair)
        unsettled = warm_up.find_unsettled()
        # What races is held against its rival before its time is up, for it may be up because it is hopeless.
        is_judged = limits.pace is None or rival is None or len(early.pair) == 2
        is_over = is_judged and warm_up.charged_seconds >= limits.warmup_cap_seconds
        if is_over or not (unsettled or warm_up.steps < limits.least_warmup_steps):
            timing.phase = Phase.MEASURING
            timing.read_losses()
            return warm_up, unsettled, None


def _judge_early(timing: Timing, early: EarlySteps, pace: Pace | None, rival: Rival | None, *, is_pair: bool) -> None:
    """End a launch whose first steps are hopeless, unless others took the CPUs in them: then its blocks will tell.

    Raises:
        TooSlowError: they are.
    """
    if rival is None or pace is None:
        return
    watch = timing.interference
    if watch is not None and not early.pair:
        watch.start()
    hopeless = early.find_hopeless(pace, rival) if is_pair else None
    if hopeless is None:
        return
    # Seen beside a busy neighbour: 0.9 s for steps of 0.1 s.
    if watch is None or watch.read().taken_fraction <= DISTURBED_SHARE:
        raise TooSlowError(hopeless)


def _time_block(timing: Timing, plan: _BlockPlan, timed: TimedBlocks) -> Generator[None, object, bool]:
    """Add a block and the seconds of its steps, nothing where none was taken; return whether the training ended."""
    clock, graphs = timing.clock, timing.compiled_graphs()
    compiled, aside = timing.compile_seconds(), timing.aside_seconds()
    clock.synchronize()
    if timing.interference is not None:
        timing.interference.start()
    timing.go_on()
    # Of whole bursts no step may be missing, for it could be always the long one: what it is too long is taken off.
    if timed.is_in_turns and plan.steps >= _LEAST_WAKING and not plan.long_seconds and (yield from _wake(timing)):
        timing.halt()
        return True
    clock.take_intervals()
    timing.smaller_steps.clear()
    samples, steps, began = timing.samples, timing.steps, clock.now()
    taken, ended = yield from _take_steps(clock, plan)
    clock.synchronize()
    seconds = clock.now() - began
    timing.halt()
    if taken == 0:
        return ended
    block = Block(
        optimizer_steps=taken,
        samples=timing.samples - samples,
        seconds=seconds,
        interference=timing.interference.read() if timing.interference is not None else None,
        recompiled=timing.compiled_graphs() != graphs,
        rank_seconds=timing.read_ranks(),
    )
    # What was compiled while the clock stood still is not in the block: then nothing is taken off it.
    spent = timing.compile_seconds() - compiled if timing.aside_seconds() == aside else 0.0
    step_seconds = clock.take_intervals()
    if plan.long_seconds and len(step_seconds) >= _LEAST_WAKING and step_seconds[0] < plan.long_seconds:
        cold = max(0.0, step_seconds[0] - statistics.median(step_seconds))
        block, step_seconds[0] = block.replace(seconds=seconds - cold), step_seconds[0] - cold
    smaller = [(step - steps, waited) for step, waited in timing.smaller_steps]
    timed.take(block, step_seconds, compile_seconds=spent, smaller=smaller)
    return ended
