"""What the tests of the verdict and its advice are about: facts, timings and limits in milliseconds a step."""

from __future__ import annotations

from typing import Any

import record_factory
from record_factory import CONFIG as BASELINE
from record_factory import GIB, MIB, RATES, make_block, make_data, make_gpu, make_hardware, make_mode, make_model

from autotune.records import Ceilings, Measurement, MemoryFacts, StepPhases, StepWork, TargetFacts
from autotune.records.measurement import Interference

__all__ = ["BASELINE", "GIB", "GPU_HOST", "MIB", "RATES", "ceilings", "memory", "phases", "target", "timing", "work"]

GPU_HOST = make_hardware(gpus=(make_gpu(),))


def ceilings(
    rates: dict[str, float], *, memory: float | None = 20e9, upload: float | None = None, **changes: Any
) -> Ceilings:
    """Return measured limits: FLOP/s by arithmetic, bytes per second of the memory and to the device."""
    return record_factory.make_ceilings(
        rates, memory_bytes_per_second=memory, copy_to_device_bytes_per_second=upload, **changes
    )


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
    modes = (
        make_mode(activation_checkpointing=name, bytes_per_sample=per_sample, largest_micro_batch_size=size)
        for name, size in largest.items()
    )
    return record_factory.make_memory(
        *modes,
        base_bytes=0.5 * GIB,
        weights_bytes=0.1 * GIB,
        gradient_bytes=0.1 * GIB,
        optimizer_bytes=0.2 * GIB,
        limit_bytes=float(limit),
    )


def phases(
    wait: float = 0.0, copy: float = 0.0, forward: float = 30.0, backward: float = 60.0, optimizer: float = 5.0
) -> StepPhases:
    """Phases of a step in milliseconds."""
    return record_factory.make_phases(wait / 1000, copy / 1000, forward / 1000, backward / 1000, optimizer / 1000)


def target(*, compute_ms: float = 98.0, model: Any = None, data: Any = None, **changes: Any) -> TargetFacts:
    """Return facts, with changes of those of the model and of the data."""
    fields: dict[str, Any] = {
        "model": make_model(**(model or {})),
        "data": make_data(**(data or {})),
        "optimizer": record_factory.make_optimizer(name="SGD"),
        "compute_seconds_per_step": compute_ms / 1000,
        "ceilings": ceilings(RATES),
    }
    return record_factory.make_facts(**(fields | changes))


def timing(
    *,
    step_ms: float = 100.0,
    wait_ms: float = 0.0,
    samples: int = 10,
    steps: tuple[float, ...] = (),
    seen: tuple[Interference | None, Interference | None] = (None, None),
) -> Measurement:
    """Two blocks of ten steps each: `samples` a step, `wait_ms` of each step waiting; what was `seen` beside them."""
    return record_factory.make_measurement(
        [make_block(10 * samples, step_ms / 100, interference=beside) for beside in seen],
        step_seconds=steps or (step_ms / 1000,) * 20,
        data_wait_seconds=20 * wait_ms / 1000,
        warmup_steps=3,
        warmup_seconds=0.3,
    )
