"""Planted facts, timings and machines for the verdict and its advice."""

from __future__ import annotations

from typing import Any

from autotune.records import (
    Block,
    Ceilings,
    DataFacts,
    GpuInfo,
    HardwareInfo,
    MatmulRate,
    Measurement,
    ModelFacts,
    OptimizerFacts,
    PeakMemory,
    StepPhases,
    TargetFacts,
    TrainConfig,
)

GIB = 2**30
BASELINE = TrainConfig(micro_batch_size=10, num_threads=4)
RATES = {"fp32": 100e9, "bf16": 300e9}


def hardware(**changes: Any) -> HardwareInfo:
    plain: dict[str, Any] = {
        "cpu_name": "CPU",
        "usable_cpu_count": 4,
        "cpu_features": ("avx2",),
        "memory_total_bytes": 16 * GIB,
        "memory_limit_bytes": 16 * GIB,
        "memory_available_bytes": 12 * GIB,
        "shared_memory_free_bytes": GIB,
        "has_cpp_compiler": True,
    }
    return HardwareInfo(**{**plain, **changes})


GPU_HOST = hardware(gpus=(GpuInfo(name="GPU", memory_total_bytes=80 * GIB, memory_free_bytes=79 * GIB),))


def ceilings(rates: dict[str, float], *, memory: float | None = 20e9, upload: float | None = None) -> Ceilings:
    matmul = tuple(MatmulRate.model_validate({"dtype": name, "flops_per_second": rate}) for name, rate in rates.items())
    return Ceilings(matmul=matmul, memory_bytes_per_second=memory, copy_to_device_bytes_per_second=upload)


def phases(
    wait: float = 0.0, copy: float = 0.0, forward: float = 30.0, backward: float = 60.0, optimizer: float = 5.0
) -> StepPhases:
    """Phases of a step in milliseconds."""
    return StepPhases(
        data_wait_seconds=wait / 1000,
        copy_seconds=copy / 1000,
        forward_seconds=forward / 1000,
        backward_seconds=backward / 1000,
        optimizer_seconds=optimizer / 1000,
    )


def target(*, compute_ms: float = 98.0, model: Any = None, data: Any = None, **changes: Any) -> TargetFacts:
    plain_model: dict[str, Any] = {
        "parameter_count": 1000,
        "parameter_bytes": 4000,
        "has_batch_norm": False,
        "has_4d_convolution": False,
        "calls_attention": False,
        "checkpointable_blocks": 0,
        "flops_per_sample": None,
    }
    plain_data: dict[str, Any] = {
        "sample_count": 10_000,
        "seconds_per_sample": 0.0001,
        "random_sources": (),
        "iterable": False,
    }
    plain: dict[str, Any] = {
        "label": "job.py:workload",
        "fingerprint": "0" * 12,
        "device": "cpu",
        "baseline": BASELINE,
        "model": ModelFacts(**{**plain_model, **(model or {})}),
        "data": DataFacts(**{**plain_data, **(data or {})}),
        "optimizer": OptimizerFacts(name="SGD", implementations=("for-loop", "foreach", "fused")),
        "phases": phases(),
        "compute_seconds_per_step": compute_ms / 1000,
        "ceilings": ceilings(RATES),
    }
    return TargetFacts(**{**plain, **changes})


def timing(
    *, step_ms: float = 100.0, wait_ms: float = 0.0, samples: int = 10, steps: tuple[float, ...] = ()
) -> Measurement:
    """Two blocks of ten steps each: `samples` a step, `wait_ms` of each step waiting."""
    block = Block(optimizer_steps=10, samples=10 * samples, seconds=step_ms / 100)
    return Measurement(
        blocks=(block, block),
        step_seconds=steps or (step_ms / 1000,) * 20,
        data_wait_seconds=20 * wait_ms / 1000,
        steady=True,
        warmup_steps=3,
        warmup_seconds=0.3,
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=GIB),
    )
