"""Runs controls through the drift gate as a search would; what the gate's tests and its benchmark share.

target ── probe, once ──▶ facts ── seed ──▶ Gate, DriftGate ── control ──▶ checks: caught by which test, or passed
"""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from controls import Control

from autotune.drift.gate.loss_check import DriftPlan, LossCheck
from autotune.drift.gate.screen import Gate
from autotune.drift.policy import USUAL_LOSS_CHECK
from autotune.isolation.runner import TrialRunner
from autotune.knobs import Facts
from autotune.probe.run import probe_target
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.facts import TargetFacts
from autotune.records.probe import ProbeReport
from autotune.records.quality import DriftLimits, QualityCheck, is_passed
from autotune.records.trial import GradientPlan, Target, TrialLimits, TrialResult, TrialSpec
from autotune.space import BATCH_KNOBS, build_space, numerics_of
from autotune.targets.script import read_script

FOLDER = Path(__file__).parent
PLAN = GradientPlan(windows=16, later_steps=40)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Small models gain nothing from more threads, and what runs beside them loses most to threads that wait busily."""

_PROBE_LIMITS = TrialLimits(time_limit_seconds=45.0, measure_seconds=0.1, warmup_cap_seconds=0.5, ceilings_seconds=0.3)
_LIMITS = TrialLimits(time_limit_seconds=120.0)


@dataclass(frozen=True)
class Verdict:
    """What the gate said of a control.

    Attributes:
        checks: in the order they were made.
        caught_by: tests that found it inferior; empty for none.
        passed: shown to learn as well.
        seconds: that took; trials of the baseline that an earlier verdict shares are not in it.
    """

    checks: tuple[QualityCheck, ...]
    caught_by: tuple[str, ...]
    passed: bool
    seconds: float


@dataclass
class OpenTarget:
    """A target that was probed.

    Attributes:
        target: the workload or script.
        report: of the probe.
        runner: runs its trials.
        numbers: of the trials to come, no two of one runner alike.
        results: of all trials but the probe.
    """

    target: Target
    report: ProbeReport
    runner: Callable[[TrialSpec], TrialResult]
    numbers: Iterator[int]
    results: list[TrialResult] = field(default_factory=list)

    @property
    def facts(self) -> TargetFacts:
        return self.report.target

    def count(self, purpose: str, config: TrainConfig | None = None) -> int:
        """Return how many trials were run for a purpose, with one config or with any."""
        specs = [result.spec for result in self.results]
        return sum(spec.purpose == purpose and config in (None, spec.config) for spec in specs)

    def change(self, **changes: object) -> TrainConfig:
        return self.facts.baseline.replace(**changes)

    def launch(
        self,
        config: TrainConfig,
        purpose: Literal["fidelity", "tape", "quality"],
        *,
        seeds: tuple[int, ...],
        steps: int,
        plan: GradientPlan | None = None,
        evaluate: bool = False,
    ) -> TrialResult:
        facts = self.facts
        spec = TrialSpec(
            number=next(self.numbers),
            purpose=purpose,
            target=self.target,
            config=config,
            device=facts.device,
            seeds=seeds,
            quality_steps=steps,
            evaluate=evaluate,
            fidelity=plan,
            random_sources=facts.data.random_sources,
            baseline=None if self.target.script is None else facts.baseline,
            training_loaders=facts.training_loaders,
            limits=_LIMITS,
        )
        self.results.append(self.runner(spec))
        return self.results[-1]

    def open_gate(
        self, seed: int = 0, plan: GradientPlan = PLAN, *, facts: TargetFacts | None = None, looks_closer: bool = True
    ) -> Gate:
        """Return a gate in which nothing has been tested.

        Args:
            seed: of its trials.
            plan: what is looked at first.
            facts: other ones than the probe's.
            looks_closer: there is time for more windows where these leave it open.
        """

        def run(
            config: TrainConfig, purpose: Literal["fidelity", "tape"], *, plan: GradientPlan | None, steps: int
        ) -> TrialResult:
            return self.launch(config, purpose, seeds=(seed,), steps=steps, plan=plan)

        knows_order = self.target.script is None
        return Gate(facts or self.facts, plan, run, knows_order=knows_order, affords=lambda _plan: looks_closer)

    def open_drift_gate(self, seed: int = 0, steps: int = USUAL_LOSS_CHECK.good_steps) -> LossCheck:
        """Return a gate of trainings; no two seeds share one of theirs."""
        plan = DriftPlan(steps=steps, evaluate=bool(self.facts.metrics), candidates=1)
        return LossCheck(self.facts, DriftLimits(), plan, lambda config, plan: self._train(config, plan, seed))

    def offers_split(self) -> bool:
        """Return whether a search would try other micro batch sizes."""
        return "micro_batch_size" in build_space(Facts(target=self.facts, hardware=self.report.hardware)).choices

    def explain_no_split(self) -> str:
        """Return why it would not."""
        return " ".join({one.reason for one in self.report.ruled_out if one.knob == "micro_batch_size"})

    def _train(self, config: TrainConfig, plan: DriftPlan, seed: int) -> TrialResult:
        steps = max(1, round(plan.steps * self.facts.baseline.effective_batch_size / config.effective_batch_size))
        seeds = tuple(range(plan.seeds * seed, plan.seeds * (seed + 1)))
        # A script trains once in a process.
        groups = [seeds] if self.target.script is None else [(one,) for one in seeds]
        results = [self.launch(config, "quality", seeds=group, steps=steps, evaluate=plan.evaluate) for group in groups]
        return results[-1].replace(curves=tuple(curve for result in results for curve in result.curves))


class GateRuns:
    """Judges controls with one runner; every target is probed once, and every seed's gates know their trials.

    Args:
        runner: runs all trials.
        plan: what is looked at.
    """

    def __init__(self, runner: TrialRunner, *, plan: GradientPlan = PLAN) -> None:
        self._runner, self._plan = runner, plan
        self._numbers = itertools.count(1)  # 0 is every probe's
        self._targets: dict[tuple[str, tuple[str, ...]], OpenTarget] = {}
        self._gates: dict[tuple[int, int, bool], tuple[Gate, LossCheck]] = {}

    def open_target(self, name: str, knobs: tuple[str, ...] = ()) -> OpenTarget:
        """Return a target that has been probed: a workload of this folder, or a command line with a script of it."""
        if (name, knobs) not in self._targets:
            target = _read_target(name, knobs)
            report, _ = probe_target(target, self._runner, limits=_PROBE_LIMITS)
            self._targets[name, knobs] = OpenTarget(target, report, self._runner, self._numbers)
        return self._targets[name, knobs]

    def judge(self, control: Control, seed: int = 0) -> Verdict:
        """Return what a search with a seed would say of a control."""
        opened = self.open_target(control.target, control.knobs)
        config = opened.change(**control.changes)
        # What the probe found not to be additive is never offered: its class is taken off to see the gate's own test.
        held = not BATCH_KNOBS.isdisjoint(changed_fields(config, opened.facts.baseline)) and not opened.offers_split()
        gate, drift_gate = self._open_gates(opened, seed, without_class=held)
        began = time.monotonic()
        checks = run_checks(gate, drift_gate, config)
        caught_by = tuple(check.test for check in checks if check.verdict == "inferior")
        return Verdict(checks, caught_by, is_passed(checks), time.monotonic() - began)

    def close(self, control: Control) -> None:
        """Forget what is known of a control's target but its facts; captures take a lot of room."""
        opened = self.open_target(control.target, control.knobs)
        for key in [key for key in self._gates if key[0] == id(opened)]:
            gate, _ = self._gates.pop(key)
            gate.discard()
        opened.results.clear()

    def _open_gates(self, opened: OpenTarget, seed: int, *, without_class: bool) -> tuple[Gate, LossCheck]:
        key = (id(opened), seed, without_class)
        if key not in self._gates:
            facts = take_class_off(opened.facts) if without_class else opened.facts
            self._gates[key] = (opened.open_gate(seed, self._plan, facts=facts), opened.open_drift_gate(seed))
        return self._gates[key]


def open_runner(folder: Path, environment: dict[str, str] | None = None) -> TrialRunner:
    """Return a runner for workloads and scripts alike; a context manager."""
    return TrialRunner(folder, environment={**ENVIRONMENT, **(environment or {})})


def run_checks(gate: Gate, drift_gate: LossCheck, config: TrainConfig) -> tuple[QualityCheck, ...]:
    """Return the cheap checks of a config, and those of trainings where it needs them."""
    screened = gate.screen(config)
    assert screened is not None, "time is never up here"
    if any(check.verdict == "inferior" for check in screened):
        return screened
    numerics = numerics_of(config, gate.facts.baseline, gate.facts.numerics)
    compared = numerics == "exact" or any(check.test == "gradients" for check in screened)
    if is_passed(screened) and compared and numerics != "semantic" and config.precision != "fp16":
        return screened
    trained = drift_gate.check(config)
    assert trained is not None, "time is never up here"
    return (*screened, *trained)


def take_class_off(facts: TargetFacts) -> TargetFacts:
    """Return the facts of a target whose batch might be split, for all that the probe has found."""
    return facts.replace(numerics={name: kind for name, kind in facts.numerics.items() if name not in BATCH_KNOBS})


def _read_target(name: str, knobs: tuple[str, ...]) -> Target:
    if ".py:" in name:
        return Target(spec=name, folder=str(FOLDER))
    return Target(spec=name, folder=str(FOLDER), script=read_script([sys.executable, *shlex.split(name)], knobs=knobs))
