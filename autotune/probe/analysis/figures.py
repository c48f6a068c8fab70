"""The numbers a verdict and its advice are made of, derived from the probe's records; pure.

step:   |<- wait ->|<------------------------- rest of the step ------------------------->|    end to end
phases: |  data    | copy | forward | backward | optimizer |     each one synchronised, as shares of their sum
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.arithmetics import FASTER_PRODUCTS
from autotune.probe.analysis.policy import USUAL, VerdictPolicy
from autotune.records.ceilings import Ceilings, MatmulRate
from autotune.records.facts import StepPhases, TargetFacts
from autotune.records.measurement import Measurement


@dataclass(frozen=True)
class StepFigures:
    """One optimizer step of the baseline in numbers.

    Attributes:
        step_seconds: mean wall time of a step, end to end.
        samples_per_step: mean samples a step trained on.
        wait_seconds: part of it spent waiting for the loader.
        compute_seconds: a step on a batch that is on the device already.
        copy_fraction: share of the phases' sum spent moving batches.
        model_fraction: share of the phases' sum spent in forward and backward.
        optimizer_fraction: share of the phases' sum spent in the optimizer.
        arithmetic: the measured arithmetic the baseline's matrix products are held against.
        flops_per_second: model operations per second of wall time; None when not countable.
        ceiling_flops_per_second: the rate that arithmetic keeps up here; None when not measured, as the next.
        burst_flops_per_second: its best rate.
        is_emulated: the device was seen to emulate it; it has no rate then.
        policy: from where on a figure says something.
    """

    step_seconds: float
    samples_per_step: float
    wait_seconds: float
    compute_seconds: float
    copy_fraction: float
    model_fraction: float
    optimizer_fraction: float
    arithmetic: str
    flops_per_second: float | None
    ceiling_flops_per_second: float | None
    burst_flops_per_second: float | None
    is_emulated: bool
    policy: VerdictPolicy = USUAL

    @property
    def wait_fraction(self) -> float:
        """Share of a step spent waiting for the loader."""
        return self.wait_seconds / self.step_seconds

    @property
    def compute_fraction(self) -> float:
        """Share of a step that is neither waiting nor copying: what the shares of `StepWork` are shares of."""
        return max(0.0, 1.0 - self.wait_fraction - self.copy_fraction)

    @property
    def is_input_bound(self) -> bool:
        """Waiting is more than a tenth of a step, or most of what a step takes beyond its computation.

        Source: Mohan et al. 2021 (arXiv 2007.06775), the differential method.
        """
        if self.wait_fraction > self.policy.input_wait_fraction:
            return True
        slower = self.step_seconds > self.policy.input_step_ratio * self.compute_seconds
        return slower and self.wait_seconds > self.policy.most * (self.step_seconds - self.compute_seconds)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation: operations per second over the sustained rate; None when either is unknown.

        Source: Chowdhery et al. 2022 (arXiv 2204.02311), appendix B, with a measured instead of a data sheet's rate.
        """
        return divide(self.flops_per_second, self.ceiling_flops_per_second)

    @property
    def burst_mfu(self) -> float | None:
        """The same over the best measured rate, which a long run does not keep up."""
        return divide(self.flops_per_second, self.burst_flops_per_second)


def derive_figures(facts: TargetFacts, measurement: Measurement, *, policy: VerdictPolicy = USUAL) -> StepFigures:
    """Return the figures of the baseline."""
    phases, step_seconds = facts.phases, measurement.seconds_per_step
    flops_per_sample = facts.model.flops_per_sample
    arithmetic = name_arithmetic(facts)
    rate = facts.rates.find_rate(arithmetic)
    return StepFigures(
        step_seconds=step_seconds,
        samples_per_step=measurement.samples / sum(block.optimizer_steps for block in measurement.blocks),
        wait_seconds=measurement.data_wait_fraction * step_seconds,
        compute_seconds=facts.compute_seconds_per_step,
        copy_fraction=_share(phases.copy_seconds, phases),
        model_fraction=_share(phases.forward_seconds + phases.backward_seconds, phases),
        optimizer_fraction=_share(phases.optimizer_seconds, phases),
        arithmetic=arithmetic,
        flops_per_second=flops_per_sample * measurement.samples_per_second if flops_per_sample else None,
        ceiling_flops_per_second=facts.rates.sustained_flops_per_second(arithmetic),
        burst_flops_per_second=facts.rates.flops_per_second(arithmetic),
        is_emulated=rate is not None and rate.emulated,
        policy=policy,
    )


def divide(part: float | None, whole: float | None) -> float | None:
    """Return a ratio; None when a number is missing, the whole is nothing or the ratio is beyond all numbers."""
    if part is None or whole is None or whole <= 0:
        return None
    ratio = part / whole
    return ratio if math.isfinite(ratio) else None


def optimizer_share(phases: StepPhases) -> float:
    """Return the optimizer's share of the computation: of forward, backward and itself."""
    computation = phases.forward_seconds + phases.backward_seconds + phases.optimizer_seconds
    return phases.optimizer_seconds / computation if computation > 0 else 0.0


def fastest_arithmetic(ceilings: Ceilings) -> MatmulRate | None:
    """Return the arithmetic with the best measured rate; None when none was measured, emulated ones left out."""
    real = (rate for rate in ceilings.matmul if not rate.emulated)
    return max(real, key=lambda rate: rate.flops_per_second, default=None)


def name_arithmetic(facts: TargetFacts) -> str:
    """Return the arithmetic of the baseline's matrix products and convolutions."""
    baseline = facts.baseline
    if baseline.precision != "fp32":
        return baseline.precision
    precision, faster = FASTER_PRODUCTS[facts.device]
    # cuDNN uses TF32 for convolutions unless told otherwise, whatever matrix products may use.
    is_faster = baseline.matmul_precision == precision or (facts.device == "cuda" and facts.model.has_4d_convolution)
    return faster if is_faster and facts.rates.flops_per_second(faster) is not None else "fp32"


def _share(seconds: float, phases: StepPhases) -> float:
    return seconds / phases.seconds if phases.seconds > 0 else 0.0
