"""Are a profile's settings any good here? A few pairs of fresh processes, its settings against the target's own.

    pair 1: own profile    pair 2: profile own    pair 3: own profile    pair 4: profile own     (orders drawn)

The settings are used where the pairs show a gain and rule out a loss worth mentioning; else the target's own are: what
was measured elsewhere is a reason to try them, not to trust them. One failed launch of theirs is enough.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from autotune.engine.allocator import PRELOAD, exchange_malloc, launch_environment
from autotune.format import count, format_duration, format_factor, format_factor_down, format_rate
from autotune.isolation.runner import KILL_SECONDS, TrialRunner, starts_warm
from autotune.machine.hardware import read_hardware
from autotune.records.config import TrainConfig
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Interval
from autotune.records.objective import LEAST_SPEED, MOST_MEMORY, Objective
from autotune.records.run import Reverification
from autotune.records.trial import Target, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.scratch import scratch_folder
from autotune.search.finals.claim import find_claim
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.rounds import Terms, run_finals
from autotune.sentences.objective import describe_gain
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.settings.choice import Settings
from autotune.train.settings.differences import printable

_SEED = 0
_LONGEST_REASON = 200


RunTrial = Callable[[TrialSpec], TrialResult]


@dataclass(frozen=True)
class ReverifyOptions:
    """How a re-verification is run, and who follows it.

    Attributes:
        should_stop: polled; True ends it, and the target's own settings are used.
        say: told what goes on, one line at a time.
        random_sources: generators that a workload's samples draw from, see `find_random_sources`.
        world_size: processes that train together.
        policy: the training's thresholds.
        now: the clock.
    """

    should_stop: Callable[[], bool] = lambda: False
    say: Callable[[str], None] = lambda _text: None
    random_sources: tuple[str, ...] = ()
    world_size: int = 1
    policy: TrainPolicy = TRAIN_POLICY
    now: Callable[[], float] = time.monotonic


def reverify_in_processes(settings: Settings, target: Target, frame: ReverifyOptions) -> Reverification:
    """Return whether a profile's settings are to be used, from launches in fresh processes of this machine.

    Call it while this process holds no memory of the device.

    Args:
        settings: that need it.
        target: what is trained.
        frame: how it is run, and who follows it.

    Raises:
        UsageError: a script's command cannot be started.
        OSError: the temporary folder cannot be written.
    """
    with _processes(settings, target, frame) as runner:
        return reverify(settings, target, frame, run_trial=runner)


def reverify(settings: Settings, target: Target, frame: ReverifyOptions, *, run_trial: RunTrial) -> Reverification:
    """Return whether a profile's settings are to be used, from launches that a callable runs.

    Args:
        settings: that need it.
        target: what is trained.
        frame: how it is run, and who follows it.
        run_trial: runs one trial to its end.
    """
    hardware = read_hardware()
    try:
        launch_environment(settings.config, hardware.host_allocators)
    except ValueError as error:
        return _refuse(settings, f"your own settings are used: the profile's {printable(str(error))}")
    pairs, limit = frame.policy.verify_pairs, format_duration(frame.policy.verify_seconds)
    frame.say(
        f"re-verification: {pairs} pairs of fresh processes, the profile's settings against your own, at most {limit}"
    )
    launches = _Launches(settings, target, frame, run_trial, _make_limits(hardware, frame), began=frame.now())
    claim = find_claim(_find_objective(settings))
    outcome = run_finals(
        [settings.config],
        settings.baseline_config,
        launches.launch,
        rounds=pairs,
        seed=_SEED,
        terms=Terms(claim=claim),
    )
    end = "it was stopped" if frame.should_stop() else f"{limit} were over"
    found = _decide(settings, outcome, frame.policy, end=end)
    frame.say(f"re-verification: {found.reason}")
    return found


@dataclass
class _Launches:
    """Starts the launches of one re-verification.

    Attributes:
        settings: that need it.
        target: what is trained.
        frame: how it is run, and who follows it.
        run_trial: runs one trial to its end.
        limits: of a launch; the time is that of all of them.
        began: when the first one began, by the frame's clock.
        number: of launches so far.
        seconds: of the last launch of the own settings and of the profile's.
    """

    settings: Settings
    target: Target
    frame: ReverifyOptions
    run_trial: RunTrial
    limits: TrialLimits
    began: float
    number: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    def launch(self, config: TrainConfig) -> TrialResult | None:
        """Return one launch; None when the time is up or the user stopped."""
        whose = "profile's" if config == self.settings.config else "own"
        left = self.began + self.limits.time_limit_seconds - self.frame.now() - KILL_SECONDS
        if self.frame.should_stop() or left < max(self.frame.policy.verify_least_seconds, self.seconds.get(whose, 0.0)):
            return None
        result = self.run_trial(self._make_spec(config, left))
        self.number += 1
        if result.status is TrialStatus.INTERRUPTED:
            return None
        self.seconds[whose] = result.elapsed_seconds
        measured = result.measurement
        told = result.status.value if measured is None else format_rate(measured.samples_per_second)
        self.frame.say(f"  {self.number}/{2 * self.frame.policy.verify_pairs} {whose} settings: {told}")
        return result

    def _make_spec(self, config: TrainConfig, seconds: float) -> TrialSpec:
        is_script = self.target.script is not None
        return TrialSpec(
            number=self.number,
            purpose="final",
            target=self.target,
            config=config,
            world_size=self.frame.world_size,
            random_sources=() if is_script else self.frame.random_sources,
            baseline=self.settings.baseline_config if is_script else None,
            training_loaders=self.settings.training_loaders,
            limits=self.limits.replace(time_limit_seconds=seconds),
        )


def _make_limits(hardware: HardwareInfo, frame: ReverifyOptions) -> TrialLimits:
    # A driver that does not tell its free memory reports 0; the device then sets its own limit.
    policy = frame.policy
    free = hardware.gpus[0].memory_free_bytes if len(hardware.gpus) == 1 else 0  # of several, which it is is not known
    device = int(policy.verify_device_share * free)
    return TrialLimits(
        time_limit_seconds=frame.policy.verify_seconds,
        warmup_cap_seconds=policy.verify_warmup_share * policy.verify_measure_seconds,
        measure_seconds=policy.verify_measure_seconds,
        ends_with_stage=True,  # what runs into the limit had no time, and says nothing about the settings
        host_memory_limit_bytes=int(policy.verify_host_share * hardware.memory_limit_bytes),
        device_memory_limit_bytes=device or None,
    )


@contextmanager
def _processes(settings: Settings, target: Target, frame: ReverifyOptions) -> Iterator[TrialRunner]:
    """Yield what runs trials in fresh processes, the profile's allocators taken out of this process's environment.

    It may have been started with them, and the launches of the own settings would inherit them.
    """
    allocators = read_hardware().host_allocators
    try:
        wanted = launch_environment(settings.config, allocators)
    except ValueError:
        wanted = {}
    taken = {name: value for name, value in wanted.items() if os.environ.get(name) == value}
    for name in taken:
        del os.environ[name]
    others = exchange_malloc(taken.get(PRELOAD, ""))
    if others:  # the user's own, which the launches of the own settings have too
        os.environ[PRELOAD] = others
    try:
        with (
            scratch_folder() as scratch,
            TrialRunner(
                scratch,
                host_allocators=allocators,
                should_stop=frame.should_stop,
                warm=starts_warm(target, _find_objective(settings)),
            ) as runner,
        ):
            yield runner
    finally:
        os.environ.update(taken)


def _find_objective(settings: Settings) -> Objective:
    return settings.profile.objective if settings.profile is not None else Objective.THROUGHPUT


def _decide(settings: Settings, outcome: FinalsOutcome, policy: TrainPolicy, *, end: str) -> Reverification:
    base, (one,) = outcome.baseline, outcome.candidates
    pairs = len(one.rates)
    if base.failure:
        why = printable(base.failure, most=_LONGEST_REASON)
        return _refuse(settings, f"your own settings are used: they fail here, so nothing could be compared ({why})")
    if one.failure:
        why = printable(one.failure, most=_LONGEST_REASON)
        return _refuse(settings, f"your own settings are used: the profile's fail here ({why})", pairs=pairs)
    if pairs < policy.verify_least_pairs:
        told = f"your own settings are used: {count(pairs, 'pair')} finished when {end}, too few to tell"
        return _refuse(settings, told, pairs=pairs)
    speedup = one.speed.interval_at(policy.verify_confidence)
    least = format_factor_down(speedup.low)
    figures = f"{format_factor(speedup.estimate)} your own here, at least {least} (95 %, {pairs} pairs)"
    is_better, floor = speedup.estimate > 1.0, 1.0
    if one.claim.saving:
        saved, floor = math.exp(one.gain or 0.0), LEAST_SPEED
        is_better = saved > 1 / MOST_MEMORY and speedup.estimate >= floor
        figures += f", {describe_gain(Objective.MEMORY, saved)}"
    if is_better and speedup.low >= floor - policy.verify_largest_loss:
        reason = f"the profile's settings are used: they run at {figures}"
        return Reverification(
            differences=settings.differences, speedup=speedup, pairs=pairs, trusted=True, reason=reason
        )
    found = "slower" if speedup.high < floor else "which does not rule out a loss"
    reason = f"your own settings are used: the profile's run at {figures}, {found}"
    return _refuse(settings, reason, pairs=pairs, speedup=speedup)


def _refuse(settings: Settings, reason: str, *, pairs: int = 0, speedup: Interval | None = None) -> Reverification:
    return Reverification(differences=settings.differences, speedup=speedup, pairs=pairs, trusted=False, reason=reason)
