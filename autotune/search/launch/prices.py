"""What launches will take, from the ones seen so far. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.records.config import CompileMode, TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.scores.objective import Judged
from autotune.space import find_code, needs_compilation

LEAST_MEASURED_STEPS = 3
"""Of a training whose steps are long."""

_CLOSING = 0.3
"""Seconds from the last block of a launch to its result."""
_RERUN = 1.5
"""Of what a launch took until the end of its time cut it: what it is priced at from then on."""
_START_SECONDS = 15.0
_SECONDS_PER_OPERATION = 0.015
"""Of one micro-batch. Eight public scripts on two cores took 11 to 67 s, 0.56 to 0.98 of what this says."""
_OPERATIONS_PER_CALL = 1.3
"""Of a function of PyTorch that is called from Python, where steps were not profiled: those of two recurrent nets made
1.0 and 1.3, others 0.1 to 0.5."""
_UNKNOWN_SECONDS = 45.0
"""What a first compilation is taken to cost where neither operations nor calls were counted and none was seen."""
_FACTORS: dict[CompileMode, float] = {"max-autotune": 2.0, "max-autotune-no-cudagraphs": 2.0}
"""Autotuning times several kernels for each product."""
_TRITON_FACTOR = 3.0
"""Of these on a GPU, where each is compiled first: tens of them."""
_VARYING_FACTOR = 8.0
"""Of all of it where batches differ in their shapes: each graph is compiled for one, then for any, and guarded. (Two
public scripts were not done after 106 and 145 s, one of them at four times what it would say without.)"""
CACHED_SHARE = 0.85
"""Of a compilation: what a second launch is taken to save until one was seen (seen: 0.80 to 0.94)."""
Compiled = dict[tuple[str, ...], list[tuple[TrainConfig, float]]]
"""Configs that were compiled, with the seconds of that, in order, by the code that they share."""


@dataclass(frozen=True)
class Prices:
    """Predicts how long timing launches take.

    Attributes:
        report: of the probe.
        seen: the search's launches so far, in order.
        interrupted: launches that the end of their time or the user cut; they are not among `seen`.
        startup_seconds: of a process beside its steps, mostly until its first one.
        measure_seconds: that one launch measures.
    """

    report: ProbeReport
    seen: Sequence[Judged]
    interrupted: Sequence[TrialResult]
    startup_seconds: float
    measure_seconds: float

    def launch_seconds(self, config: TrainConfig) -> float:
        """Return how long a launch of a config will take: more than the time in which it was cut before."""
        cut = [one.elapsed_seconds for one in self.interrupted if one.spec.config == config]
        return max(self.usual_seconds(config), _RERUN * max(cut, default=0.0))

    def usual_seconds(self, config: TrainConfig) -> float:
        """Return the same by the launches that came to their end."""
        own = self._completed.get(config.key)
        if own:
            return predict_again(own) if needs_compilation(config) else max(one.elapsed_seconds for one in own)
        return self.first_seconds(config)

    def pair_seconds(self, config: TrainConfig | None) -> float:
        """Return how long a pair takes, of a config and the user's own settings: in turns it is the one launch's.

        None is for any config that compiles nothing.
        """
        base = self.launch_seconds(self._baseline)
        if config is None:
            return self._plain_seconds if self._takes_turns else 2 * base
        launched = self._completed.get(config.key)
        is_in_turns = any(one.reference is not None for one in launched) if launched else self._takes_turns
        return self.launch_seconds(config) + (0.0 if is_in_turns else base)

    def first_seconds(self, config: TrainConfig) -> float:
        """Return how long the first launch of a config will take."""
        return self._plain_seconds + self.compile_seconds(config)

    def compile_seconds(self, config: TrainConfig) -> float:
        """Return how long a first compilation will take; 0 where nothing is compiled."""
        return predict_compilation(config, self.report.target, self._compiled)

    def overdue(self) -> list[TrialResult]:
        """Return launches that were cut only after twice what the baseline's take: they count as timed out."""
        usual = 2 * max(self.usual_seconds(self._baseline), self._plain_seconds)
        return [
            one.replace(status=TrialStatus.TIMED_OUT)
            for one in self.interrupted
            if one.spec.config is not None and one.elapsed_seconds > usual + self.compile_seconds(one.spec.config)
        ]

    @cached_property
    def _completed(self) -> dict[str, list[TrialResult]]:
        """The launches that came to their end, by their settings."""
        found: dict[str, list[TrialResult]] = {}
        for one in self.seen:
            if one.result.status is TrialStatus.COMPLETED:
                found.setdefault(one.key, []).append(one.result)
        return found

    @cached_property
    def _compiled(self) -> Compiled:
        return group_by_code([one.result for one in self.seen])

    @cached_property
    def _plain_seconds(self) -> float:
        """What a launch takes that compiles nothing."""
        completed = [one for one in self.seen if one.result.status is TrialStatus.COMPLETED]
        plain = [one.result for one in completed if not needs_compilation(one.config)]
        alike = [one for one in plain if (one.reference is not None) == self._takes_turns] or plain
        return statistics.median([one.elapsed_seconds for one in alike]) if alike else self._guess_seconds()

    @cached_property
    def _takes_turns(self) -> bool:
        """Whether the launches that come are taken to be in turns: the last one beside the user's settings was."""
        last = next((one.result for one in reversed(self.seen) if one.config != self._baseline), None)
        return last is not None and last.reference is not None

    @property
    def _baseline(self) -> TrainConfig:
        return self.report.target.baseline

    def _guess_seconds(self) -> float:
        measurement = self.report.measurement
        # However long a step is, a few of them are measured.
        measured = max(self.measure_seconds, LEAST_MEASURED_STEPS * measurement.seconds_per_step)
        guess = self.startup_seconds + measurement.warmup_seconds + measured + _CLOSING
        # What cuts the user's own settings was too short: it says nothing of them.
        own = [one.result for one in self.seen if one.config == self._baseline]
        cut = [one.elapsed_seconds for one in own if one.status is TrialStatus.TIMED_OUT]
        return max(guess, _RERUN * max(cut, default=0.0))


def predict_compilation(config: TrainConfig, facts: TargetFacts, compiled: Compiled) -> float:
    """Return how long the first compilation of a config will take, in seconds; 0 where nothing is compiled.

    What another config has compiled already, with another malloc or optimizer, is found in the cache.

    Args:
        config: the settings.
        facts: of the target; its operations a step are what is compiled.
        compiled: by launches so far, which say by how much the prediction is off.
    """
    if not needs_compilation(config):
        return 0.0
    shared = compiled.get(find_code(config), [])
    if shared:
        again = [seconds for _, seconds in shared[1:]]
        return statistics.median(again) if again else (1.0 - CACHED_SHARE) * shared[0][1]
    firsts = [launches[0] for launches in compiled.values()]
    ratios = [seconds / _predict(one, facts) for one, seconds in firsts]
    return (statistics.median(ratios) if ratios else 1.0) * _predict(config, facts)


def predict_again(own: Sequence[TrialResult]) -> float:
    """Return how long one more launch of a config that was compiled before will take, in seconds.

    Only the first launch compiles anew: the others find its work in the search's own cache.
    """
    compiled = own[0].measurement.compile_seconds if own[0].measurement else 0.0
    return max((one.elapsed_seconds for one in own[1:]), default=own[0].elapsed_seconds - CACHED_SHARE * compiled)


def _predict(config: TrainConfig, facts: TargetFacts) -> float:
    operations = facts.work.operations_per_step if facts.work is not None else None
    if operations is None and facts.model.calls_per_step:
        operations = _OPERATIONS_PER_CALL * facts.model.calls_per_step
    seconds = _UNKNOWN_SECONDS
    if operations is not None:
        # Every micro-batch of a step runs the same code.
        seconds = _START_SECONDS + _SECONDS_PER_OPERATION * operations / facts.baseline.gradient_accumulation_steps
    if facts.data.has_varying_shapes:
        seconds *= _VARYING_FACTOR
    factor = _FACTORS.get(config.compile_mode, 1.0)
    return seconds * (factor * _TRITON_FACTOR if factor > 1.0 and facts.device == "cuda" else factor)


def group_by_code(seen: Sequence[TrialResult]) -> Compiled:
    """Return the configs that were compiled and timed, with the seconds of that, in order, by the code they share."""
    groups: Compiled = {}
    for one in seen:
        config, measured = one.spec.config, one.measurement
        if config is not None and measured is not None and needs_compilation(config):
            groups.setdefault(find_code(config), []).append((config, measured.compile_seconds))
    return groups
