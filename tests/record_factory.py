"""Records for tests, valid by default and any field replaceable: a small model on four CPUs, timed at 100 samples/s.

`**changes` are fields of the record that is returned; figures that a test is about belong in the test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autotune.records import (
    Block,
    Ceilings,
    DataFacts,
    DriftLimits,
    Evidence,
    GpuInfo,
    HardwareInfo,
    Interval,
    Margin,
    MatmulRate,
    Measurement,
    MemoryFacts,
    MemoryMode,
    ModelFacts,
    OptimizerFacts,
    PeakMemory,
    ProbeReport,
    Profile,
    ProfileTarget,
    QualityCheck,
    SoftwareInfo,
    StepPhases,
    Target,
    TargetFacts,
    TrainConfig,
    TrialLimits,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Verdict,
)
from autotune.records.run import RunPlan
from autotune.records.search import SearchState
from autotune.targets.drift_limits import GivenLimits, join_limits

GIB, MIB = 2**30, 2**20
CONFIG = TrainConfig(micro_batch_size=10, num_threads=4)
RATES = {"fp32": 100e9, "bf16": 300e9}
"""Matrix products of the machine, in FLOP/s."""


# The machine


def make_gpu(**changes: Any) -> GpuInfo:
    """Return a GPU of 80 GiB, of which one is in use."""
    return GpuInfo(**{"name": "GPU", "memory_total_bytes": 80 * GIB, "memory_free_bytes": 79 * GIB, **changes})


def make_hardware(**changes: Any) -> HardwareInfo:
    """Return a machine of four CPUs and 16 GiB, without a GPU."""
    fields: dict[str, Any] = {
        "cpu_name": "CPU",
        "usable_cpu_count": 4,
        "cpu_features": ("avx2",),
        "memory_total_bytes": 16 * GIB,
        "memory_limit_bytes": 16 * GIB,
        "memory_available_bytes": 12 * GIB,
        "shared_memory_free_bytes": GIB,
        "has_cpp_compiler": True,
    }
    return HardwareInfo(**(fields | changes))


def make_software(**changes: Any) -> SoftwareInfo:
    """Return the versions of a PyTorch for CPUs."""
    return SoftwareInfo(**{"autotune": "0", "python": "3.11", "torch": "2.13.0+cpu", "platform": "Linux", **changes})


def make_ceilings(rates: Mapping[str, float] = RATES, **changes: Any) -> Ceilings:
    """Return the measured limits of a machine: matrix products by their arithmetic, in FLOP/s."""
    matmul = tuple(MatmulRate.model_validate({"dtype": name, "flops_per_second": rate}) for name, rate in rates.items())
    return Ceilings(**{"matmul": matmul, **changes})


# What was timed


def make_block(samples: int = 100, seconds: float = 1.0, *, steps: int = 10, **changes: Any) -> Block:
    """Return a block of optimizer steps that were timed together: the true samples and wall seconds of all of them."""
    return Block(optimizer_steps=steps, samples=samples, seconds=seconds, **changes)


def make_measurement(blocks: Sequence[Block] | None = None, **changes: Any) -> Measurement:
    """Return the timing of one config, two blocks of one second each; the steps of a block took the same time."""
    blocks = (make_block(), make_block()) if blocks is None else tuple(blocks)
    fields: dict[str, Any] = {
        "blocks": blocks,
        "step_seconds": tuple(
            block.seconds / block.optimizer_steps for block in blocks for _ in range(block.optimizer_steps)
        ),
        "data_wait_seconds": 0.0,
        "steady": True,
        "warmup_steps": 5,
        "warmup_seconds": 0.5,
        "compile_seconds": 0.0,
        "peak_memory": PeakMemory(host_bytes=GIB),
    }
    return Measurement(**(fields | changes))


def make_interval(estimate: float, low: float | None = None, high: float | None = None, **changes: Any) -> Interval:
    """Return an estimate of a speed-up with the ends of its 98 % interval; an end that is not given is the estimate."""
    ends = {"low": estimate if low is None else low, "high": estimate if high is None else high}
    usual = {"confidence_level": 0.98, "method": "t on paired log ratios"}
    return Interval(**{"estimate": estimate, **ends, **usual, **changes})


# A target, and what the probe finds out about it


def make_target(spec: str = "toy.py:workload", folder: object = "/", **changes: Any) -> Target:
    """Return a workload in a folder."""
    return Target(spec=spec, folder=str(folder), **changes)


def make_model(**changes: Any) -> ModelFacts:
    """Return a model of 1000 parameters that no knob is about."""
    fields: dict[str, Any] = {
        "parameter_count": 1000,
        "parameter_bytes": 4000,
        "has_batch_norm": False,
        "has_4d_convolution": False,
        "calls_attention": False,
        "checkpointable_blocks": 0,
    }
    return ModelFacts(**(fields | changes))


def make_data(**changes: Any) -> DataFacts:
    """Return a dataset of 10 000 samples, each loaded in 0.1 ms without a random number."""
    fields: dict[str, Any] = {
        "sample_count": 10_000,
        "seconds_per_sample": 1e-4,
        "random_sources": (),
        "iterable": False,
    }
    return DataFacts(**(fields | changes))


def make_optimizer(**changes: Any) -> OptimizerFacts:
    """Return an optimizer that has every implementation."""
    return OptimizerFacts(**{"name": "AdamW", "implementations": ("for-loop", "foreach", "fused"), **changes})


def make_phases(
    wait: float = 0.0, copy: float = 0.0, forward: float = 0.03, backward: float = 0.06, optimizer: float = 0.005
) -> StepPhases:
    """Return the phases of an optimizer step, in seconds."""
    return StepPhases(
        data_wait_seconds=wait,
        copy_seconds=copy,
        forward_seconds=forward,
        backward_seconds=backward,
        optimizer_seconds=optimizer,
    )


def make_mode(**changes: Any) -> MemoryMode:
    """Return the predicted memory of training in fp32 without checkpointing: 1 GiB, and 64 MiB a sample."""
    fields: dict[str, Any] = {
        "precision": "fp32",
        "activation_checkpointing": "off",
        "fixed_bytes": GIB,
        "bytes_per_sample": 64 * MIB,
    }
    return MemoryMode(**(fields | changes))


def make_memory(*modes: MemoryMode, **changes: Any) -> MemoryFacts:
    """Return the memory of a training that may use 8 GiB, with the modes that were predicted."""
    fields: dict[str, Any] = {
        "base_bytes": GIB,
        "weights_bytes": 0,
        "gradient_bytes": 0,
        "optimizer_bytes": 0,
        "limit_bytes": 8 * GIB,
        "modes": modes,
    }
    return MemoryFacts(**(fields | changes))


def make_facts(**changes: Any) -> TargetFacts:
    """Return the facts of a small model on the CPU, whose step takes 98 ms without its data."""
    fields: dict[str, Any] = {
        "label": "train.py:workload",
        "fingerprint": "0123456789ab",
        "device": "cpu",
        "baseline": CONFIG,
        "model": make_model(),
        "data": make_data(),
        "optimizer": make_optimizer(),
        "phases": make_phases(),
        "compute_seconds_per_step": 0.098,
        "ceilings": make_ceilings(),
    }
    return TargetFacts(**(fields | changes))


def make_report(**changes: Any) -> ProbeReport:
    """Return the report of a probe that finds nothing wrong."""
    fields: dict[str, Any] = {
        "hardware": make_hardware(),
        "software": make_software(),
        "target": make_facts(),
        "measurement": make_measurement(),
        "verdict": Verdict(limit="unknown", sentence="nothing"),
    }
    return ProbeReport(**(fields | changes))


# Trials, and the search they are part of


def make_spec(config: TrainConfig | None = CONFIG, **changes: Any) -> TrialSpec:
    """Return the spec of a trial that may take 60 seconds; changes are its fields, or those of its limits."""
    limits = {name: changes.pop(name) for name in [*changes] if name in TrialLimits.model_fields}
    fields: dict[str, Any] = {
        "number": 1,
        "purpose": "measure",
        "target": make_target(),
        "config": config,
        "limits": TrialLimits(**{"time_limit_seconds": 60.0, **limits}),
    }
    return TrialSpec(**(fields | changes))


def make_result(spec: TrialSpec | None = None, **changes: Any) -> TrialResult:
    """Return what a trial came to after one second: completed, nothing measured."""
    fields: dict[str, Any] = {
        "spec": spec or make_spec(),
        "status": TrialStatus.COMPLETED,
        "elapsed_seconds": 1.0,
    }
    return TrialResult(**(fields | changes))


def make_check(**changes: Any) -> QualityCheck:
    """Return a loss check that was passed: four seeds of 100 samples, at most 0.5 % worse."""
    fields: dict[str, Any] = {
        "test": "paired-losses",
        "metric": "training loss",
        "difference": None,
        "margin": Margin(amount=0.005),
        "verdict": "non-inferior",
        "seeds": 4,
        "samples": 100,
    }
    return QualityCheck(**(fields | changes))


def make_state(**changes: Any) -> SearchState:
    """Return what a search is asked when nothing is: launches of two seconds, the machine's own memory limit."""
    fields: dict[str, Any] = {
        "target": make_target(),
        "seed": 0,
        "max_drift": DriftLimits(),
        "memory_limit_bytes": None,
        "measure_seconds": 2.0,
    }
    return SearchState(**(fields | changes))


def make_profile(**changes: Any) -> Profile:
    """Return an answer proven to be 1.3 times as fast: 1300 samples/s; with the user's own settings: keep them."""
    fields: dict[str, Any] = {
        "verdict": "improved",
        "config": CONFIG.replace(precision="bf16"),
        "baseline_config": CONFIG,
        "speedup": make_interval(1.3, 1.2, 1.4),
        "target": ProfileTarget(label="train.py:workload", fingerprint="0123456789ab"),
        "hardware": make_hardware(),
        "software": make_software(),
        "evidence": Evidence(baseline_samples_per_second=1000.0, samples_per_second=1300.0),
    }
    merged = fields | changes
    if merged["config"] == merged["baseline_config"] and "verdict" not in changes:
        merged["verdict"] = "keep"
    return Profile(**merged)


def read_drift_limits(
    older: Sequence[str] = (), *, loss: str | None = None, metrics: Sequence[str] = ()
) -> DriftLimits:
    """Return what options of the command line allow together."""
    return join_limits(GivenLimits(loss, metrics, older).read())


# The final training


def make_plan(config: TrainConfig = CONFIG, **changes: Any) -> RunPlan:
    """Return the plan of a training of one epoch; the user's own settings are the same unless given."""
    fields: dict[str, Any] = {
        "target": ProfileTarget(label="train.py:workload", fingerprint="0123456789ab"),
        "asked_config": config,
        "config": config,
        "baseline_config": config,
        "seed": 0,
        "steps": None,
        "epochs": 1,
    }
    return RunPlan(**(fields | changes))
