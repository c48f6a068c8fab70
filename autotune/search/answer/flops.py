"""What a training's model FLOPs utilization is reckoned with: the operations of a sample, the rate of this machine."""

from __future__ import annotations

from autotune.probe.analysis.figures import name_arithmetic
from autotune.records.config import TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.profile import Evidence


def add_flops(evidence: Evidence, facts: TargetFacts, config: TrainConfig) -> Evidence:
    """Return the evidence with both, as far as the probe found them.

    Args:
        evidence: of a profile.
        facts: of its target; the same operations are counted with any settings, recomputed ones not again.
        config: the settings whose arithmetic is held against the machine's rate, as the probe does for the baseline.
    """
    arithmetic = name_arithmetic(facts.replace(baseline=config))
    return evidence.replace(
        flops_per_sample=facts.model.flops_per_sample or None,
        peak_flops_per_second=facts.ceilings.sustained_flops_per_second(arithmetic),
    )
