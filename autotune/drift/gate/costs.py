"""What it costs to show that a config learns the same, predicted before anything is launched. Pure.

exact, equal losses seen ── nothing; a workload's loader settings still have their tape read
exact, rounding          ── the baseline's gradients unless they are there, and the candidate's
fp16, semantic, improve  ── the least trainings of both as well: `drift.least_drift_seconds`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autotune.drift.gate.screen import ALLOCATORS, OPTIMIZER, Gate, asked_tests, leave_optimizer
from autotune.drift.gate.trace_plans import SMALLEST_PLAN, count_steps, price_step
from autotune.drift.policy import USUAL_LOSS_CHECK, LossCheckPolicy
from autotune.knobs import DATA_KNOBS, DriftTest
from autotune.records.config import TrainConfig, changed_fields, is_user_knob
from autotune.records.facts import TargetFacts
from autotune.records.trial import GradientPlan
from autotune.space import REORDERING_KNOBS, classify_changes, revert_knobs


def count_tape_steps(seconds_per_step: float, policy: LossCheckPolicy) -> int:
    """Return the steps of a script's tape: 24, fewer where they would take more than half a minute.

    Args:
        seconds_per_step: as the probe read it, for a resumed search has to find the same.
        policy: how many there are at least and at most, and the seconds.
    """
    affordable = int(policy.trace_seconds / max(1e-6, seconds_per_step))
    return max(policy.least_trace_steps, min(policy.most_trace_steps, affordable))


@dataclass(frozen=True)
class ProofCosts:
    """Predicts the gate's trials of one target, in seconds of wall time.

    Attributes:
        facts: what the probe found.
        seconds_per_step: of the baseline.
        start_seconds: of a process, before its first step and after its last.
        is_script: candidates go through the steps between two points too, and a tape takes steps.
        compile_seconds: what a config spends on compiling, 0 where it does not.
        tape_steps: of a script's tape.
        policy: how much a data trace reads, and how long a trial may hang.
    """

    facts: TargetFacts
    seconds_per_step: float
    start_seconds: float
    is_script: bool
    compile_seconds: Callable[[TrainConfig], float]
    tape_steps: int
    policy: LossCheckPolicy = USUAL_LOSS_CHECK

    def of_trial(self, config: TrainConfig, plan: GradientPlan | None, *, goes_on: bool = True) -> float:
        """Return what one trial of the gate takes.

        Args:
            config: its settings.
            plan: of a look at gradients; None for a tape.
            goes_on: it takes the steps between the points.
        """
        if plan is not None:
            steps = count_steps(plan) - (0 if goes_on else plan.later_steps)
            return self.start_seconds + steps * price_step(self.seconds_per_step) + self.compile_seconds(config)
        if self.is_script:
            return self.start_seconds + self.tape_steps * self.seconds_per_step
        samples = self.policy.trace_batches * self.facts.baseline.effective_batch_size
        return self.start_seconds + samples * self.facts.data.seconds_per_sample

    def patience(self, config: TrainConfig, plan: GradientPlan | None) -> float:
        """Return how long a trial of the gate may take before it counts as hanging; arguments as of `of_trial`."""
        return self.wait_for(self.of_trial(config, plan))

    def wait_for(self, seconds: float) -> float:
        """Return how long a trial may take that is expected to take so many seconds."""
        return self.policy.patience * seconds + self.policy.patience_seconds

    def of_screening(
        self,
        config: TrainConfig | None,
        gate: Gate,
        *,
        shown: frozenset[DriftTest] = frozenset(),
    ) -> float:
        """Return what the cheap tests of a config take that were not made yet, by the smallest plan that can pass.

        Args:
            config: the settings; None for any that rounds.
            gate: knows what was made.
            shown: tests that need not be made.
        """
        baseline, plan = self.facts.baseline, gate.plan or SMALLEST_PLAN
        if not gate.repeats():
            return 0.0
        if config is None:
            return self._of_gradients(baseline, gate, plan)
        classes = classify_changes(config, baseline, self.facts.numerics)
        config = revert_knobs(config, baseline, [name for name, kind in classes.items() if kind == "semantic"])
        if gate.has_screened(config, shown=shown):
            return 0.0
        asked = asked_tests(config, baseline) - shown
        seconds = 0.0
        if "tape" in asked and gate.reads_tapes:
            seconds += self.of_trial(config, None) * (1 if gate.trials.has_run(baseline, "tape") else 2)
        if "additivity" in asked:
            seconds += 2 * self.of_trial(config, plan.replace(later_steps=0))
        others = gate.leave_shown(revert_knobs(config, baseline, DATA_KNOBS))
        if gate.find_unshown_allocators(config) is not None:
            seconds += self.start_seconds + self.tape_steps * self.seconds_per_step
            others = revert_knobs(others, baseline, ALLOCATORS)
        if "gradients" in asked and others != baseline:
            seconds += self._of_gradients(others, gate, plan)
        return seconds

    def _of_gradients(self, config: TrainConfig, gate: Gate, plan: GradientPlan) -> float:
        baseline = self.facts.baseline
        changed = {*changed_fields(config, baseline)}
        draws_otherwise = gate.draws_random and (config == baseline or bool(changed & REORDERING_KNOBS))
        look = gate.choose_plan(config, dropout=not draws_otherwise) if gate.plan else plan
        seconds = gate.price_doubts(config)
        rest = gate.find_rest(config) if draws_otherwise else None
        arithmetic = leave_optimizer(config, baseline)
        if config == baseline or not (arithmetic == baseline or gate.trials.has_looked(arithmetic, look)):
            least = gate.trials.least_seconds(arithmetic, "fidelity", look)
            seconds += max(self.of_trial(config, look, goes_on=self.is_script), least)
            seconds += 0.0 if gate.trials.has_run(baseline, "fidelity", look) else self.of_trial(baseline, look)
        if rest is not None and leave_optimizer(rest, baseline) != baseline:
            look = gate.choose_plan(rest) if gate.plan else plan
            own = self.of_trial(baseline, look)
            seconds += own if gate.trials.has_run(baseline, "fidelity", look) else 2 * own
        if any(name == OPTIMIZER or is_user_knob(name) for name in changed):
            seconds += 2 * self.of_trial(baseline, plan.replace(later_steps=0))
        return seconds
