"""Drift: how a config's learning was compared with the baseline's, and what came of it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.codec import Record
from autotune.records.given import GivenRecord
from autotune.records.measurement import Interval, NonNegative

QualityTest = Literal[
    "tape",
    "schedule",
    "additivity",
    "gradients",
    "equal-launches",
    "exact-losses",
    "paired-losses",
    "metric",
    "samples-to-loss",
]
QualityVerdict = Literal["non-inferior", "inferior", "inconclusive"]

CHEAP_TESTS = ("tape", "schedule", "additivity", "gradients")
"""They need no training."""
TRAININGS = ("exact-losses", "paired-losses", "metric", "samples-to-loss")
"""They compare trainings."""
_PRELIMINARY = ("additivity", "gradients")


class Margin(GivenRecord):
    """How much worse a figure may get, fixed before anything is compared."""

    amount: float
    """Largest worsening allowed; negative: the improvement that is required."""
    unit: Literal["relative", "absolute"] = "relative"
    """relative: a share of the baseline's own figure; absolute: in the figure's own unit."""


class DriftLimits(GivenRecord):
    """What the user allows: `--max-loss-increase` and `--metric-limit`."""

    loss: Margin = Margin(amount=0.005)
    """For the training loss; always relative."""
    metric: Margin | None = None
    """For every metric that has none of its own; None for the same as the loss."""
    metrics: dict[str, Margin] = {}
    """By metric."""

    def of(self, metric: str) -> Margin:
        """Return what is allowed for a metric."""
        return self.metrics.get(metric, self.metric or self.loss)


class GradientEquivalence(Record):
    """What the same windows give under two settings at the same weights: gradients, or the changes of weights."""

    subject: Literal["gradients", "updates"]
    """gradients: what the optimizer is given; updates: what it does to the weights."""
    point: str
    """Where the weights stood, e.g. `initial weights` or `after 60 steps`."""
    windows: Annotated[int, Field(ge=0)]
    """Effective batches compared."""
    noise: Interval | None = None
    """Variance of the differences over that of the baseline's own from window to window; None when not finite."""
    bias: Interval | None = None
    """Size of the mean difference over the size of the mean; None when not finite."""
    steering: Interval | None = None
    """Size of the mean difference over the spread of one window's own: what a bias weighs where the mean itself has
    vanished, as after a training has converged; None where it is not known."""
    worst_layer: str = ""
    """Parameter with the largest bias among those that matter; empty when none is found."""
    worst_bias: NonNegative | None = None
    """Its bias."""
    reference_ratio: NonNegative | None = None
    """Error against float64 over the baseline's own error; None without such a reference."""
    verdict: QualityVerdict
    """non-inferior: shown to be the same; inferior: shown to differ; inconclusive: only a training can tell."""
    is_transient: bool = False
    """There is a difference, at the initial weights, that is shown to be gone later."""
    reason: str = ""
    """One sentence."""


class LossBand(Record):
    """Where the baseline's training loss went in the first samples of a training, over a few seeds."""

    samples_per_block: Annotated[int, Field(ge=1)]
    """Samples in one block of the curve."""
    means: tuple[float, ...]
    """Mean loss of each block, over the seeds."""
    seed_sd: NonNegative
    """Standard deviation over the seeds of what all blocks of a seed have in common, relative to the mean loss."""
    block_sd: NonNegative
    """Standard deviation of one block of one seed around that, relative to the mean loss."""
    seeds: Annotated[int, Field(ge=2)]
    """Seeds it rests on."""


class QualityCheck(Record):
    """One comparison of a config's learning with the baseline's."""

    test: QualityTest
    """tape: the data; schedule: steps and learning rates; additivity: parts of a batch; gradients: the same windows at
    the same weights; equal-launches: losses of launches with and without some of the changes, bit for bit, which tells
    of these alone; exact-losses: those of trainings, bit for bit; paired-losses, metric: paired seeds, one-sided 95 %
    bound against a margin; samples-to-loss: samples needed for the same loss."""
    metric: str
    """What was compared, e.g. `training loss` or `bits_per_byte`."""
    difference: Interval | None
    """Worsening against the baseline in the margin's unit (positive is worse); None when it cannot be computed."""
    margin: Margin
    """Largest worsening allowed, fixed beforehand."""
    verdict: QualityVerdict
    """non-inferior only when the upper bound is inside the margin; a missing value is never a pass."""
    seeds: Annotated[int, Field(ge=0)]
    """Paired seeds compared."""
    samples: Annotated[int, Field(ge=0)]
    """Samples trained on per seed; nothing beyond was tested."""
    reason: str = ""
    """One sentence."""
    fidelity: tuple[GradientEquivalence, ...] = ()
    """What a check of gradients rests on."""


def is_passed(checks: tuple[QualityCheck, ...]) -> bool:
    """Return whether every check showed that nothing is lost; what the gradients leave open, trainings decide."""
    trained = any(check.test in TRAININGS for check in checks)
    judged = [check for check in checks if not (trained and check.test in _PRELIMINARY and _is_open(check))]
    return bool(judged) and all(check.verdict == "non-inferior" for check in judged)


def _is_open(check: QualityCheck) -> bool:
    return check.verdict == "inconclusive"
