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
    MemoryFacts,
    MemoryMode,
    ModelFacts,
    OptimizerFacts,
    PeakMemory,
    StepPhases,
    StepWork,
    TargetFacts,
    TrainConfig,
)
from autotune.records.measurement import Interference

GIB = 2**30
MIB = 2**20
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


def gpu(**changes: Any) -> GpuInfo:
    return GpuInfo(**{"name": "GPU", "memory_total_bytes": 80 * GIB, "memory_free_bytes": 79 * GIB, **changes})


GPU_HOST = hardware(gpus=(gpu(),))


def ceilings(
    rates: dict[str, float], *, memory: float | None = 20e9, upload: float | None = None, **changes: Any
) -> Ceilings:
    matmul = tuple(MatmulRate.model_validate({"dtype": name, "flops_per_second": rate}) for name, rate in rates.items())
    return Ceilings(matmul=matmul, memory_bytes_per_second=memory, copy_to_device_bytes_per_second=upload, **changes)


def work(products: float, traffic: float, **changes: Any) -> StepWork:
    """What a step is spent on; what products and traffic leave is overhead."""
    plain: dict[str, Any] = {
        "products_fraction": products,
        "traffic_fraction": traffic,
        "overhead_fraction": max(0.0, round(1.0 - products - traffic, 9)),
        "operations_per_step": 500.0,
        "host_syncs_per_step": 0.0,
    }
    return StepWork(**{**plain, **changes})


def memory(largest: dict[str, int | None], *, limit: int = 8 * GIB, per_sample: float = 64.0 * MIB) -> MemoryFacts:
    """fp32 modes by checkpointing, each with the largest micro batch that fits."""
    modes = tuple(
        MemoryMode.model_validate(
            {
                "precision": "fp32",
                "activation_checkpointing": name,
                "fixed_bytes": float(GIB),
                "bytes_per_sample": per_sample,
                "largest_micro_batch_size": size,
            }
        )
        for name, size in largest.items()
    )
    return MemoryFacts(
        base_bytes=0.5 * GIB,
        weights_bytes=0.1 * GIB,
        gradient_bytes=0.1 * GIB,
        optimizer_bytes=0.2 * GIB,
        limit_bytes=float(limit),
        modes=modes,
    )


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
    *,
    step_ms: float = 100.0,
    wait_ms: float = 0.0,
    samples: int = 10,
    steps: tuple[float, ...] = (),
    seen: tuple[Interference | None, Interference | None] = (None, None),
) -> Measurement:
    """Two blocks of ten steps each: `samples` a step, `wait_ms` of each step waiting; what was `seen` beside them."""
    blocks = [
        Block(optimizer_steps=10, samples=10 * samples, seconds=step_ms / 100, interference=beside) for beside in seen
    ]
    return Measurement(
        blocks=tuple(blocks),
        step_seconds=steps or (step_ms / 1000,) * 20,
        data_wait_seconds=20 * wait_ms / 1000,
        steady=True,
        warmup_steps=3,
        warmup_seconds=0.3,
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=GIB),
    )
