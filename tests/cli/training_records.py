"""Planted reports and summaries of trainings: one that went well, one that stepped down."""

from __future__ import annotations

from typing import Any

from autotune.records import ProfileTarget, TrainConfig
from autotune.records.run import Best, GuardSummary, StepDown, TrainingSummary
from autotune.train.report import Report

GIB = 2**30
PLANNED = TrainConfig(
    micro_batch_size=64,
    gradient_accumulation_steps=2,
    precision="bf16",
    compile_mode="default",
    num_workers=8,
    pin_memory=True,
)
SAFER = PLANNED.replace(micro_batch_size=32, gradient_accumulation_steps=4)
BEST = Best(metric="bits_per_byte", value=1.1987, step=11_250, checkpoint="runs/gpt-001/checkpoints/step-00011250")
OUT_OF_MEMORY = StepDown(
    step=4_210,
    resumed_step=4_000,
    cause="oom-device",
    detail="CUDA out of memory: tried to allocate 1.5 GiB",
    action="fewer-samples",
    sentence=(
        "the device ran out of memory at step 4,210: micro batch 64 -> 32, accumulation 2 -> 4 (the effective batch "
        "stays 128), from the checkpoint at step 4,000"
    ),
    config=SAFER,
)


def make_live_report(**changes: Any) -> Report:
    """Return a report from the middle of a training."""
    fields: dict[str, Any] = {
        "step": 12_340,
        "samples": 1_579_520,
        "epoch": 2,
        "epochs": 8,
        "total_steps": 30_000,
        "loss": 1.8342,
        "learning_rate": 2.75e-4,
        "samples_per_second": 12_480.0,
        "data_wait_fraction": 0.021,
        "mfu": 0.41,
        "memory_bytes": int(31.2 * GIB),
        "memory_limit_bytes": 80 * GIB,
        "skipped_steps": 0,
        "allocator_retries": 0,
        "elapsed_seconds": 2530.0,
        "remaining_seconds": 3780.0,
        "knows_evaluation": True,
        "metrics": {"bits_per_byte": 1.2034, "accuracy": 0.4127},
        "best": BEST,
        "step_downs": (),
        "guard": "123 gradients checked, all as under your own numerics",
    }
    return Report(**(fields | changes))


def make_summary(**changes: Any) -> TrainingSummary:
    """Return the summary of a training that was finished."""
    fields: dict[str, Any] = {
        "folder": "runs/gpt-001",
        "checkpoint": "runs/gpt-001/checkpoints/step-00030000",
        "target": ProfileTarget(label="train.py:gpt", fingerprint="0123456789ab"),
        "config": PLANNED,
        "steps": 30_000,
        "epochs": 8,
        "samples": 3_840_000,
        "loss": 1.7321,
        "metrics": {"bits_per_byte": 1.1911, "accuracy": 0.4301},
        "best": BEST.replace(value=1.1911, step=30_000),
        "samples_per_second": 12_480.0,
        "promised_samples_per_second": 12_200.0,
        "data_wait_fraction": 0.021,
        "mfu": 0.41,
        "peak_memory_bytes": int(33.4 * GIB),
        "evaluation_seconds": 41.0,
        "checkpoint_seconds": 12.0,
        "training_seconds": 307.7,
        "elapsed_seconds": 372.0,
        "guard": GuardSummary(
            is_on=True, gradient_checks=150, largest_error=3.1e-5, last_clean_step=30_000, cost_fraction=0.0041
        ),
    }
    return TrainingSummary(**(fields | changes))
