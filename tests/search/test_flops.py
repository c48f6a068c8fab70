"""The profile carries what a training needs to tell its FLOPs utilization, for the settings it is trained with."""

from __future__ import annotations

from typing import Any

import pytest
from simulated import BASELINE, Machine, make_report

from autotune.records import Ceilings, Evidence, MatmulRate, TargetFacts
from autotune.search.answer.findings import Findings
from autotune.search.answer.profile import add_flops, build_profile
from autotune.search.scores.ranking import Ranking

CEILINGS = Ceilings(
    matmul=(
        MatmulRate(dtype="fp32", flops_per_second=5.2e13, sustained_flops_per_second=5.0e13),
        MatmulRate(dtype="tf32", flops_per_second=4.0e14),
        MatmulRate(dtype="bf16", flops_per_second=7.4e14, sustained_flops_per_second=6.5e14),
    )
)


def make_gpu_facts(*, flops_per_sample: float | None = 2e9, device: str = "cuda", **changes: Any) -> TargetFacts:
    facts = make_report(Machine()).target
    model = facts.model.replace(flops_per_sample=flops_per_sample, has_4d_convolution=False)
    return facts.replace(model=model, device=device, ceilings=CEILINGS, **changes)


@pytest.mark.parametrize(
    ("changes", "device", "peak"),
    [
        ({"precision": "fp32"}, "cuda", 5.0e13),
        ({"precision": "fp32", "matmul_precision": "high"}, "cuda", 4.0e14),
        ({"precision": "fp32", "matmul_precision": "high"}, "cpu", 5.0e13),
        ({"precision": "bf16"}, "cuda", 6.5e14),
        ({"precision": "fp16"}, "cuda", None),
    ],
)
def test_the_rate_is_that_of_the_settings_arithmetic(changes: Any, device: str, peak: float | None) -> None:
    found = add_flops(Evidence(pairs=3), make_gpu_facts(device=device), BASELINE.replace(**changes))
    assert (found.pairs, found.flops_per_sample, found.peak_flops_per_second) == (3, 2e9, peak)


@pytest.mark.parametrize("flops_per_sample", [None, 0.0])
def test_operations_that_were_not_counted_are_not_known(flops_per_sample: float | None) -> None:
    found = add_flops(Evidence(), make_gpu_facts(flops_per_sample=flops_per_sample), BASELINE)
    assert found.flops_per_sample is None


def test_a_profile_has_them() -> None:
    report = make_report(Machine())
    findings = Findings(report.replace(target=make_gpu_facts(device="cpu")))
    evidence = build_profile(findings, Ranking([], BASELINE), budget_seconds=60.0).evidence
    assert (evidence.flops_per_sample, evidence.peak_flops_per_second) == (2e9, 5.0e13)
