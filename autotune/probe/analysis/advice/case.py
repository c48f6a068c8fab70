"""What every adviser is given and gives: one case, and the gain that a saving of time would be; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.format import format_factor, format_share
from autotune.probe.analysis.advice.policy import USUAL, AdvicePolicy
from autotune.probe.analysis.figures import StepFigures, divide, optimizer_share
from autotune.probe.analysis.pipeline import PipelinePlan
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.facts import Switched, TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import GainRange, Limit

# A step is never all saved, whatever the shares add up to.
_MOST_SAVED = 0.95

Finding = tuple[str, GainRange | None] | None
"""The reason to try a knob, and what to expect of it; None when there is no reason."""


@dataclass(frozen=True)
class Case:
    """A probe, as the advisers see it.

    Attributes:
        facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
        figures: the baseline's step in numbers.
        plan: what its input pipeline needs.
        limit: what binds a step.
        offered: values that the space has for each knob.
        policy: what is promised where it was not measured.
    """

    facts: TargetFacts
    measurement: Measurement
    hardware: HardwareInfo
    figures: StepFigures
    plan: PipelinePlan
    limit: Limit
    offered: dict[str, tuple[KnobValue, ...]]
    policy: AdvicePolicy = USUAL

    @property
    def baseline(self) -> TrainConfig:
        """The user's own settings."""
        return self.facts.baseline

    @property
    def on_gpu(self) -> bool:
        """The target runs on a CUDA device."""
        return self.facts.device == "cuda"

    @property
    def model_share(self) -> str:
        """Forward and backward, in words."""
        return f"forward and backward take {format_share(self.figures.model_fraction)} of a step"

    @property
    def products_fraction(self) -> float:
        """Share of a step in matrix products; forward and backward as a whole when they were not told apart."""
        work = self.facts.work
        return self.figures.model_fraction if work is None else work.products_fraction * self.figures.compute_fraction

    @property
    def traffic_fraction(self) -> float:
        """Share of a step in the model's own memory traffic, the optimizer's left out; 0 when not told apart."""
        if self.facts.work is None:
            return 0.0
        own = self.facts.work.traffic_fraction - optimizer_share(self.facts.phases)
        return max(0.0, own) * self.figures.compute_fraction

    @property
    def overhead_fraction(self) -> float:
        """Share of a step in the calling of operations; 0 when not told apart."""
        return 0.0 if self.facts.work is None else self.facts.work.overhead_fraction * self.figures.compute_fraction

    def find_switched(self, knob: str) -> Switched | None:
        """Return which value of a knob, of those that were tried in the running training, was the fastest."""
        tried = [one for one in self.facts.switched if one.knob == knob and one.value in self.offered[knob]]
        return max(tried, key=lambda one: one.log_speedup, default=None)

    @property
    def loader_speedup(self) -> float:
        """Speed-up at which the loader, with the user's own workers, becomes the limit of a faster computation."""
        if self.baseline.num_workers == 0:
            return math.inf  # loading and computing take turns: the waiting is a share like any other
        seconds = self.facts.data.loader_seconds_per_step
        if seconds is None and self.limit == "input" and self.on_gpu:
            seconds = self.figures.step_seconds
        ratio = divide(self.figures.step_seconds, seconds)
        return math.inf if ratio is None else max(1.0, ratio)


def expect(saved: float, *, sure: float = 0.0, risk: float = 1.0) -> GainRange:
    """Return the speed-up of a step of which a share is saved.

    Source: Amdahl 1967: 1 / (1 - saved), where `factor` times faster over a share saves `share * (1 - 1 / factor)`.

    Args:
        saved: share of a step that the change saves when it does all it can.
        sure: part of that which it saves even when little goes well.
        risk: factor on the cautious end, below 1 for a change that may cost time.
    """
    saved = min(_MOST_SAVED, max(0.0, saved))
    high = 1.0 / (1.0 - saved)
    return GainRange(low=min(high, risk / (1.0 - sure * saved)), high=high)


def tell_switched(tried: Switched) -> Finding:
    """Return the reason to try what was tried in the running training; None where it was not faster."""
    if tried.log_speedup <= 0.0:
        return None
    low, high = (math.exp(tried.log_speedup + sign * tried.log_sd) for sign in (-1, 1))
    reason = f"{tried.value}, for some steps of the running training, ran {format_factor(math.exp(tried.log_speedup))}"
    return f"{reason} as fast", GainRange(low=low, high=high)


def limit_gain(gain: GainRange, most: float) -> GainRange:
    """Return a gain that is nowhere above what is possible."""
    return GainRange(low=min(gain.low, most), high=min(gain.high, most))


def rank_gain(gain: GainRange | None) -> float:
    """Return the geometric mean of a range, 1 without one: what advice is sorted by."""
    return 1.0 if gain is None else math.sqrt(gain.low * gain.high)
