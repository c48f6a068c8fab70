"""The target of a replayed search: one knob that changes nothing but the pace."""

from __future__ import annotations

from functools import cache

from autotune.machine.hardware import read_hardware, read_software
from autotune.records.ceilings import Ceilings
from autotune.records.config import KnobValue, TrainConfig
from autotune.records.facts import DataFacts, ModelFacts, OptimizerFacts, StepPhases, TargetFacts
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import ProbeReport, Verdict
from autotune.records.trial import Target
from autotune.selftest.placebo import KNOB

BLOCK_SAMPLES = 250
TARGET = Target(spec="placebo", folder=".")


def make_report(values: tuple[KnobValue, ...], measurement: Measurement) -> ProbeReport:
    """Return what a probe says of it: this machine, and its baseline measured."""
    hardware, software = _read_machine()
    return ProbeReport(
        hardware=hardware,
        software=software,
        target=make_facts(values),
        measurement=measurement,
        verdict=Verdict(limit="compute", sentence="simulated", speedup_ceiling=None),
        advice=(),
        ruled_out=(),
        elapsed_seconds=0.0,
    )


@cache
def _read_machine() -> tuple[HardwareInfo, SoftwareInfo]:
    return read_hardware(), read_software()


@cache
def make_facts(values: tuple[KnobValue, ...]) -> TargetFacts:
    """Return what is known of it; its only knob has these values, the baseline's first."""
    return TargetFacts(
        label=TARGET.spec,
        fingerprint="0" * 12,
        device="cpu",
        baseline=TrainConfig(micro_batch_size=BLOCK_SAMPLES, user_knobs={KNOB: values[0]}),
        knobs={KNOB: values},
        numerics={f"user_knobs.{KNOB}": "exact"},
        model=ModelFacts(
            parameter_count=1,
            parameter_bytes=4,
            has_batch_norm=False,
            has_4d_convolution=False,
            calls_attention=False,
            checkpointable_blocks=0,
            flops_per_sample=None,
        ),
        data=DataFacts(sample_count=4096, seconds_per_sample=1e-6, random_sources=(), iterable=False),
        optimizer=OptimizerFacts(name="SGD", implementations=("for-loop",)),
        phases=StepPhases(
            data_wait_seconds=0.0,
            copy_seconds=0.0,
            forward_seconds=0.1,
            backward_seconds=0.1,
            optimizer_seconds=0.05,
        ),
        compute_seconds_per_step=0.25,
        ceilings=Ceilings(),
    )
