"""A race between settings of one training: launches in interleaved rounds, trainings from the same seeds.

own settings ─┐ rounds of fresh processes, one launch of each arm a round, in balanced random order ──▶ paired ratios
arms ─────────┘ trainings, from seeds that no search has used ──▶ drift checks
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.drift.gate.loss_check import DriftPlan, LossCheck
from autotune.measure.confidence import paired_ratio
from autotune.records import ProbeReport, Target, TrainConfig, TrialLimits, TrialResult, TrialSpec
from autotune.records.codec import Record
from autotune.records.config import KnobValue, changed_fields, get_knob
from autotune.records.measurement import Interval
from autotune.records.quality import DriftLimits, QualityCheck
from autotune.search.finals.rounds import run_finals

FIRST_SEED = 1000
"""Of the trainings: none that a search uses."""

CONFIDENCE_LEVEL = 0.95
MEASURE_SECONDS = 4.0
_LAUNCH_SECONDS, _TRAINING_SECONDS = 300.0, 1800.0


class Outcome(Record):
    """One arm of a race."""

    arm: str
    """Its name; `own` for the training's own settings."""
    changes: dict[str, KnobValue | None]
    """What differs from the own settings, by knob."""
    samples_per_second: tuple[float, ...]
    """Of each launch."""
    speedup: Interval | None
    """Over the own settings, paired; None for these themselves, with fewer than two launches, and where one failed."""
    failure: str
    """Why a launch of it failed; empty when none did."""
    checks: tuple[QualityCheck, ...]
    """Of its trainings against those of the own settings."""


@dataclass
class Course:
    """Where a race is run.

    Attributes:
        target: what is trained.
        report: of its probe, which knows the own settings.
        runner: of the trials.
    """

    target: Target
    report: ProbeReport
    runner: Callable[[TrialSpec], TrialResult]

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self.seconds: dict[str, float] = {}

    def run(
        self, arms: Mapping[str, TrainConfig], limits: DriftLimits, *, rounds: int, steps: int
    ) -> tuple[Outcome, ...]:
        """Return the outcome of each arm, the own settings' first.

        Args:
            arms: settings by name.
            limits: of the drift.
            rounds: of launches.
            steps: optimizer steps of each training; four seeds of each arm.
        """
        own = self.report.target.baseline
        began = time.monotonic()
        launched = self._race([*arms.values()], rounds=rounds)
        self.seconds["race"] = time.monotonic() - began
        learned: dict[str, tuple[QualityCheck, ...]] = {key_of(own): ()}
        gate = self._open_gate(limits, steps=steps, candidates=len(arms))
        outcomes = []
        for arm, config in {"own": own, **arms}.items():
            rates, failure = launched[key_of(config)]
            ratio = None if failure or config == own else find_ratio(rates, launched[key_of(own)][0])
            if key_of(config) not in learned:
                # What is slower needs more samples for nothing; what is faster may need as many more as that pays for.
                worth = 1.005 if ratio is None else max(1.005, ratio.estimate)
                learned[key_of(config)] = gate.check(config, speedup=worth) or ()
            outcome = Outcome(
                arm=arm,
                changes={name: get_knob(config, name) for name in changed_fields(config, own)},
                samples_per_second=tuple(rates),
                speedup=ratio,
                failure=failure,
                checks=learned[key_of(config)],
            )
            outcomes.append(outcome)
        self.seconds["trainings"] = time.monotonic() - began - self.seconds["race"]
        return tuple(outcomes)

    def _open_gate(self, limits: DriftLimits, *, steps: int, candidates: int) -> LossCheck:
        facts = self.report.target
        # Named one by one, the metrics are compared whatever an arm changes, its effective batch included.
        named = limits.replace(metrics={name: limits.of(name) for name in facts.metrics})
        return LossCheck(facts, named, DriftPlan(steps, bool(facts.metrics), candidates), self._train)

    def _race(self, configs: Sequence[TrainConfig], *, rounds: int) -> dict[str, tuple[list[float], str]]:
        """Return samples per second of each launch, and why there are none, by config; the own settings among them."""
        own = self.report.target.baseline
        distinct = {key_of(one): one for one in configs if one != own}
        finals = run_finals([*distinct.values()], own, self._time, rounds=rounds, seed=FIRST_SEED)
        return {key_of(one.config): (one.rates, one.failure) for one in (finals.baseline, *finals.candidates)}

    def _time(self, config: TrainConfig) -> TrialResult:
        limits = TrialLimits(time_limit_seconds=_LAUNCH_SECONDS, measure_seconds=MEASURE_SECONDS)
        return self._launch(config, "final", limits)

    def _train(self, config: TrainConfig, plan: DriftPlan) -> TrialResult:
        own = self.report.target.baseline.effective_batch_size
        steps = max(1, round(plan.steps * own / config.effective_batch_size))
        seeds = tuple(range(FIRST_SEED, FIRST_SEED + plan.seeds))
        limits = TrialLimits(time_limit_seconds=_TRAINING_SECONDS)
        return self._launch(config, "quality", limits, seeds=seeds, quality_steps=steps, evaluate=plan.evaluate)

    def _launch(
        self, config: TrainConfig, purpose: Literal["final", "quality"], limits: TrialLimits, **asked: object
    ) -> TrialResult:
        spec = {
            "number": next(self._numbers),
            "purpose": purpose,
            "target": self.target,
            "config": config,
            "random_sources": self.report.target.data.random_sources,
            "limits": limits,
            **asked,
        }
        result = self.runner(TrialSpec.model_validate(spec))
        rate = f" {result.measurement.samples_per_second:.1f} samples/s" if result.measurement else ""
        print(f"  {purpose}: {result.status}{rate} {result.error}", file=sys.stderr, flush=True)
        return result


def key_of(config: TrainConfig) -> str:
    """Return what tells two configs apart."""
    return config.model_dump_json()


def find_ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval | None:
    """Return the paired ratio of two arms, round by round; None where one of them has fewer than two launches."""
    pairs = min(len(ours), len(theirs))
    return paired_ratio(ours[:pairs], theirs[:pairs], confidence_level=CONFIDENCE_LEVEL) if pairs > 1 else None
