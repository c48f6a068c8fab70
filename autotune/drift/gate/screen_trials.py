"""The trials of the drift gate: each is run once, and what the baseline wrote down is kept for all candidates."""

from __future__ import annotations

from typing import Literal, Protocol

from autotune.drift.gate.trace_plans import count_steps
from autotune.drift.record.trace_file import GradientTrace, discard_captures, read_trace
from autotune.records.config import TrainConfig
from autotune.records.trial import GradientPlan, TrialResult

GatePurpose = Literal["fidelity", "tape"]

_LEAST_OF_OWN = 0.6
"""Of what the own settings took: with less time the same at faster ones is not begun, for it would be cut."""
AGAIN = 2.0
"""Times what a trial had when it was cut, before it is begun once more."""


class Run(Protocol):
    """Runs one trial of the gate."""

    def __call__(
        self, config: TrainConfig, purpose: GatePurpose, *, plan: GradientPlan | None, steps: int
    ) -> TrialResult | None:
        """Return its result; None when the time is up or the user stopped."""
        ...


class GateTrials:
    """Runs trials, and remembers them.

    Args:
        run: runs one.
        baseline: the user's own settings.
        tape_steps: optimizer steps of which a script's data are looked at.
        repeats_steps: candidates go through the steps between two points too, as scripts do.
    """

    def __init__(self, run: Run, baseline: TrainConfig, *, tape_steps: int, repeats_steps: bool) -> None:
        self._run, self._baseline, self._tape_steps = run, baseline, tape_steps
        self._repeats_steps = repeats_steps
        self._results: dict[str, TrialResult] = {}
        self._cut: dict[str, float] = {}
        self._captures: dict[str, GradientTrace | None] = {}

    def launch(self, config: TrainConfig, purpose: GatePurpose, plan: GradientPlan | None = None) -> TrialResult | None:
        """Return the result of a trial, run when there is none yet; None when there was no time for it."""
        key = _key(config, purpose, plan)
        if key not in self._results:
            result = self._run(config, purpose, plan=plan, steps=self._tape_steps)
            if result is None:
                return None
            self._results[key] = result
        return self._results[key]

    def recall(self, result: TrialResult) -> None:
        """Take up a trial of an earlier session, which need not be run again."""
        spec = result.spec
        if spec.config is not None:
            self._results[_key(spec.config, spec.purpose, spec.fidelity)] = result

    def has_run(self, config: TrainConfig, purpose: GatePurpose, plan: GradientPlan | None = None) -> bool:
        """Return whether a trial was run."""
        return _key(config, purpose, plan) in self._results

    def has_looked(self, config: TrainConfig, plan: GradientPlan) -> bool:
        """Return whether gradients were written down by a plan, at whichever weights."""
        return self._find_look(config, plan) is not None

    def read_look(self, config: TrainConfig, plan: GradientPlan) -> GradientTrace | None:
        """Return what was written down by a plan, at whichever weights; None where nothing was."""
        found = self._find_look(config, plan)
        return None if found is None else self.read(found)

    def _find_look(self, config: TrainConfig, plan: GradientPlan) -> TrialResult | None:
        looks = (one for one in self._results.values() if one.spec.config == config)
        return next((one for one in looks if _anywhere(one.spec.fidelity) == plan), None)

    def note_cut(self, config: TrainConfig, purpose: GatePurpose, plan: GradientPlan | None, seconds: float) -> None:
        """Take notice of a trial that was not done after so many seconds."""
        self._cut[_key(config, purpose, _anywhere(plan))] = seconds

    def least_seconds(self, config: TrainConfig, purpose: GatePurpose, plan: GradientPlan | None) -> float:
        """Return the seconds with less of which a trial would be cut, as far as is known; 0 where nothing is."""
        own = self._results.get(_key(self._baseline, purpose, _anywhere(plan)))
        cut = self._cut.get(_key(config, purpose, _anywhere(plan)), 0.0)
        if own is None:
            return AGAIN * cut
        share = 1.0
        if plan is not None and not self._repeats_steps:
            share -= plan.later_steps / count_steps(plan)
        return max(AGAIN * cut, _LEAST_OF_OWN * share * own.elapsed_seconds)

    @property
    def draws_random(self) -> bool:
        """The baseline was seen to draw random numbers: there is dropout or the like."""
        return any(one.draws_random for one in self._results.values() if one.spec.config == self._baseline)

    def find_baseline(self) -> GradientTrace | None:
        """Return what some trial of the baseline wrote down, at the most points; None where none did."""
        found = (self.read(one) for one in self._results.values() if one.spec.config == self._baseline)
        traces = (trace for trace in found if trace is not None and trace.points)
        return max(traces, key=lambda trace: len(trace.points), default=None)

    def read(self, result: TrialResult) -> GradientTrace | None:
        """Return what a trial wrote down; the baseline's are kept, for they are compared again and again."""
        if result.captures is None:
            return None
        if result.captures in self._captures:
            return self._captures[result.captures]
        found = read_trace(result.captures)
        if result.spec.config == self._baseline:
            self._captures[result.captures] = found
        return found if found is not None and found.points else None

    def discard(self) -> None:
        """Delete what the trials wrote down: for a large model it is large."""
        self._captures.clear()
        for result in self._results.values():
            if result.captures is not None:
                discard_captures(result.captures)


def _anywhere(plan: GradientPlan | None) -> GradientPlan | None:
    """Return a plan at whichever weights."""
    return None if plan is None else plan.replace(weights=None)


def _key(config: TrainConfig, purpose: str, plan: GradientPlan | None) -> str:
    return f"{purpose} {config.key} {plan.model_dump_json() if plan else ''}"
