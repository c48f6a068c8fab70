"""Starts the trials of one search: numbers, limits and time, the same for every stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import TrainConfig, changed_fields, get_knob, is_user_knob
from autotune.records.probe import ProbeReport
from autotune.records.search import SearchState
from autotune.records.trial import GradientPlan, Rival, TrialLimits, TrialResult, TrialSpec
from autotune.search.launch.budget import Budget
from autotune.search.launch.forecast import Forecast
from autotune.search.launch.pace import make_pace
from autotune.search.launch.prices import Prices
from autotune.search.launch.suspects import Suspects
from autotune.search.progress import SearchReporter, Standing
from autotune.search.scores.objective import Judged, Limits
from autotune.search.scores.ranking import Ranking
from autotune.search.scores.schedule import Schedule
from autotune.space import classify_changes

RunTrial = Callable[[TrialSpec], TrialResult]
Purpose = Literal["measure", "final", "quality", "fidelity", "tape"]

_DEVICE_SHARE = 0.95
_HOST_SHARE = 0.92
_LEAST_SECONDS = 0.5


@dataclass(frozen=True)
class Look:
    """What a trial that is not timed looks at.

    Attributes:
        steps: optimizer steps of a quality or tape trial.
        evaluate: compute the target's metrics after them.
        seeds: to train with; empty for the search's own.
        fidelity: plan of a fidelity trial.
    """

    steps: int = 1
    evaluate: bool = False
    seeds: tuple[int, ...] = ()
    fidelity: GradientPlan | None = None


@dataclass
class Launcher:
    """Starts trials for the stages of a search.

    Attributes:
        state: what the search was asked to do.
        budget: the deadline.
        run_trial: runs one trial to its end.
        reporter: hears what happens.
        should_stop: True once the user asked to stop.
        number: of the next trial.
        judged: the search's trials so far, shared with the stages.
        written: files that a script made in its trials, all thrown away.
        written_elsewhere: files that it wrote outside of its view, which are real.
        stage: the stage at work.
        report: of the probe; None before it is done.
        planned_samples: of the final training; None when its length is not known.
        measured_seconds: inside measured blocks, over all trials.
        gate_seconds: in trials of the drift gate.
        session_start: how many of `judged` are of an earlier session.
        refused: changes that the drift gate has refused, each alone or together with others.
        samples_ratios: for configs that need more samples for the same loss, how many times as many at most.
        hopeless: configs that were not tried because they cannot run by what the probe measured.
        interrupted: launches that the end of their time or the user cut.
        startup_seconds: of a process until its first step, as the probe saw it.
    """

    state: SearchState
    budget: Budget
    run_trial: RunTrial
    reporter: SearchReporter
    should_stop: Callable[[], bool]
    number: int
    judged: list[Judged] = field(default_factory=list)
    written: set[str] = field(default_factory=set)
    written_elsewhere: set[str] = field(default_factory=set)
    stage: str = "probe"
    report: ProbeReport | None = None
    planned_samples: float | None = None
    measured_seconds: float = 0.0
    gate_seconds: float = 0.0
    session_start: int = 0
    refused: list[frozenset[str]] = field(default_factory=list)
    samples_ratios: dict[str, float] = field(default_factory=dict)
    hopeless: list[TrainConfig] = field(default_factory=list)
    interrupted: list[TrialResult] = field(default_factory=list)
    startup_seconds: float = 1.0
    _ranked: tuple[tuple[int, int], Ranking] | None = None
    _priced: tuple[tuple[ProbeReport, int, int, float], Prices] | None = None

    @property
    def known_report(self) -> ProbeReport:
        """The probe's report, once there is one."""
        assert self.report is not None
        return self.report

    @property
    def baseline(self) -> TrainConfig:
        """The user's own settings."""
        return self.known_report.target.baseline

    def enter(self, stage: str, note: str) -> None:
        """Begin a stage."""
        self.stage = stage
        self.reporter.stage_started(self.standing(), note)

    def launch(
        self,
        config: TrainConfig,
        purpose: Purpose,
        seconds: float,
        *,
        look: Look | None = None,
        ends_with_stage: bool = True,
        rival: Rival | None = None,
        measure_samples: int | None = None,
    ) -> TrialResult:
        """Run one config for at most some seconds and return its result.

        Args:
            config: the settings.
            purpose: time it, train it for its losses with every seed, or write down its gradients or its data.
            seconds: until it is killed, the kill included.
            look: at what, for a trial that is not timed.
            ends_with_stage: the time is what was left; a trial that runs into it counts as interrupted.
            rival: end the timing early once it is clearly slower than this, in its first steps if it is hopeless.
            measure_samples: time this many, whatever the precision.
        """
        target = self.known_report.target
        spec = TrialSpec(
            number=self.number,
            purpose=purpose,
            target=self.state.target,
            config=config,
            device=target.device,
            seeds=(look.seeds if look else ()) or (self.state.seed,),
            quality_steps=look.steps if look else 1,
            fidelity=look.fidelity if look else None,
            evaluate=look is not None and look.evaluate,
            random_sources=target.data.random_sources,
            baseline=None if self.state.target.script is None else target.baseline,
            training_loaders=target.training_loaders,
            limits=self._trial_limits(seconds).replace(
                ends_with_stage=ends_with_stage,
                measure_samples=measure_samples,
                rival=rival,
                pace=make_pace(config, self.baseline, self.judged) if rival is not None else None,
            ),
        )
        self.number += 1
        self.reporter.trial_started(self.standing(), config)
        result = self.run_trial(spec)
        self.measured_seconds += result.measurement.seconds if result.measurement else 0.0
        self.gate_seconds += result.elapsed_seconds if look is not None else 0.0
        self.note_written(result)
        self.reporter.trial_finished(self.standing(), result)
        return result

    def _trial_limits(self, seconds: float) -> TrialLimits:
        limits = self.limits()
        return TrialLimits(
            time_limit_seconds=max(_LEAST_SECONDS, seconds - KILL_SECONDS),
            warmup_cap_seconds=max(2.0, 2 * self.state.measure_seconds),
            measure_seconds=self.state.measure_seconds,
            seconds_per_sample=self.known_report.target.data.seconds_per_sample,
            host_memory_limit_bytes=limits.host_memory_bytes,
            device_memory_limit_bytes=limits.device_memory_bytes,
        )

    def note_written(self, result: TrialResult) -> None:
        """Remember what a script wrote in a trial."""
        self.written.update(result.written)
        self.written_elsewhere.update(result.written_elsewhere)

    def limits(self) -> Limits:
        """Return what a trial may use: the user's limit on the device's memory, or on the host's without one."""
        asked, hardware = self.state.memory_limit_bytes, self.known_report.hardware
        device = None
        if self.known_report.target.device == "cuda" and hardware.gpus:
            # A driver that does not tell its free memory reports 0; the device then sets its own limit.
            device = asked or int(_DEVICE_SHARE * hardware.gpus[0].memory_free_bytes) or None
            asked = None
        host = asked or int(_HOST_SHARE * hardware.memory_limit_bytes)
        return Limits(host_memory_bytes=host, device_memory_bytes=device, max_drift=self.state.max_drift.loss.amount)

    @property
    def _prices(self) -> Prices:
        known = (self.known_report, len(self.judged), len(self.interrupted), self.startup_seconds)
        if self._priced is None or self._priced[0] != known:
            prices = Prices(
                self.known_report,
                tuple(self.judged),
                tuple(self.interrupted),
                startup_seconds=self.startup_seconds,
                measure_seconds=self.state.measure_seconds,
            )
            self._priced = (known, prices)
        return self._priced[1]

    def predict_seconds(self, config: TrainConfig) -> float:
        """Return how long a timing launch of a config will take, from the ones seen so far, in seconds."""
        return self._prices.launch_seconds(config)

    def predict_compile_seconds(self, config: TrainConfig) -> float:
        """Return how long a first compilation will take, in seconds; 0 where nothing is compiled."""
        return self._prices.compile_seconds(config)

    def least_seconds(self) -> float:
        """Return what the cheapest launch of something new is expected to take, in seconds."""
        return self._prices.usual_seconds(self.baseline)

    def suspects(self) -> Suspects:
        """Return which values have made launches fail; one that was cut only late counts as timed out."""
        overdue = [] if self.should_stop() else self._prices.overdue()
        return Suspects([*(one.result for one in self.judged), *overdue], self.baseline)

    def ranking(self) -> Ranking:
        """Return where the configs stand."""
        state = (len(self.judged), len(self.refused))
        if self._ranked is None or self._ranked[0] != state:
            self._ranked = (state, self._rank(self.is_refused))
        return self._ranked[1]

    def ranking_of_all(self) -> Ranking:
        """Return where the configs stand, the refused ones among them."""
        return self._rank(lambda _config: False)

    def _rank(self, is_refused: Callable[[TrainConfig], bool]) -> Ranking:
        return Ranking(
            self.judged,
            self.baseline,
            planned_samples=self.planned_samples,
            is_refused=is_refused,
        )

    def is_hopeless(self, config: TrainConfig) -> bool:
        """Return whether a config cannot run by what the probe measured; each one found so is remembered."""
        if config in self.hopeless:
            return True
        is_hopeless = Forecast(self.known_report, self.limits()).is_hopeless(config)
        if is_hopeless:
            self.hopeless.append(config)
        return is_hopeless

    def is_refused(self, config: TrainConfig) -> bool:
        """Return whether a config makes a change that the drift gate has refused."""
        changes = list_changes(config, self.baseline, changed_fields(config, self.baseline)) if self.refused else ()
        return any(refused <= frozenset(changes) for refused in self.refused)

    def refuse_own_values(self, config: TrainConfig) -> None:
        """Refuse the user's own values of a config that learned something else, where nothing but them can be why."""
        classes = classify_changes(config, self.baseline, self.known_report.target.numerics)
        suspects = [name for name, kind in classes.items() if kind != "exact"]
        if suspects and all(is_user_knob(name) for name in suspects):
            self.refused.append(list_changes(config, self.baseline, suspects))

    def schedule(self) -> Schedule:
        """Return what decides which config is launched again."""
        return Schedule(self.judged, self.baseline, self.ranking(), session_start=self.session_start)

    def standing(self) -> Standing:
        """Return where the search stands."""
        best = max(self.ranking().entries, key=lambda one: one.score, default=None) if self.judged else None
        return Standing(
            stage=self.stage,
            trials=self.number,
            seconds_left=max(0.0, self.budget.seconds - self.budget.elapsed_seconds),
            baseline_samples_per_second=self._baseline_rate(),
            best_ratio=math.exp(best.score) if best else None,
            best=best.config if best else None,
        )

    def _baseline_rate(self) -> float | None:
        if self.report is None:
            return None
        if not self.judged or not self.ranking().anchors.values:
            return self.report.measurement.samples_per_second
        return math.exp(self.ranking().anchors.level_now()[0])


def list_changes(config: TrainConfig, baseline: TrainConfig, names: Iterable[str]) -> frozenset[str]:
    """Return the changes that some knobs make to the baseline, each as `name=value`."""
    changed = changed_fields(config, baseline)
    return frozenset(f"{name}={get_knob(config, name)}" for name in names if name in changed)
