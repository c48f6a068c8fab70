"""Run folders as a training leaves them, planted for `autotune compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from record_factory import make_plan

from autotune.records.codec import write_record
from autotune.records.config import TrainConfig
from autotune.records.profile import ProfileTarget
from autotune.records.run import Best, GuardSummary, StepDown, TrainingSummary

PLAIN = TrainConfig(micro_batch_size=8)
FAST = TrainConfig(micro_batch_size=8, precision="bf16", num_workers=2)
TARGET = ProfileTarget(label="train.py:net", fingerprint="0123456789ab", data_fingerprint="ba9876543210")
DOWN = StepDown(
    step=40,
    resumed_step=30,
    cause="oom-device",
    detail="out of memory",
    action="fewer-samples",
    sentence="the device ran out of memory at step 40: micro batch 8 -> 4",
    config=FAST.replace(micro_batch_size=4, gradient_accumulation_steps=2),
)


def make_log(steps: int, *, every: int = 10, batch: int = 8, rate: float = 100.0, final: float = 0.5) -> list[Any]:
    """Return the lines of a run whose loss falls to a value on a straight line, and one evaluation at its end."""
    lines: list[Any] = [
        {
            "step": step,
            "epoch": step // 50,
            "samples": step * batch,
            "loss": final + (steps - step) / steps,
            "learning_rate": 0.1,
            "samples_per_second": rate,
        }
        for step in range(every, steps + 1, every)
    ]
    return [*lines, {"step": steps, "epoch": steps // 50, "error": final / 10}]


def plant_run(
    folder: Path,
    *,
    config: TrainConfig = PLAIN,
    log: list[Any] | None = None,
    plan: dict[str, Any] | None = None,
    summary: dict[str, Any] | None = None,
    is_killed: bool = False,
) -> Path:
    """Write a run folder and return it.

    Args:
        folder: to be made.
        config: it was started with.
        log: lines of metrics.jsonl; those of `make_log(100)` if not given.
        plan: fields of run.json that differ.
        summary: fields of summary.json that differ.
        is_killed: there is no summary.json.
    """
    folder.mkdir(parents=True)
    planned: dict[str, Any] = {
        "target": TARGET,
        "baseline_config": PLAIN,
        "origin": "profile",
        "promised_samples_per_second": 110.0,
        "steps": 100,
        "epochs": None,
    }
    write_record(folder / "run.json", make_plan(config, **(planned | (plan or {}))))
    lines = make_log(100) if log is None else log
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if not is_killed:
        write_record(folder / "summary.json", make_run_summary(folder, **{"config": config, **(summary or {})}))
    return folder


def make_run_summary(folder: Path, **changes: Any) -> TrainingSummary:
    """Return a summary that agrees with `make_log(100)`."""
    fields: dict[str, Any] = {
        "folder": str(folder),
        "checkpoint": str(folder / "checkpoints" / "step-00000100"),
        "target": TARGET,
        "steps": 100,
        "epochs": 2,
        "samples": 800,
        "loss": 0.5,
        "metrics": {"error": 0.05},
        "best": Best(metric="error", value=0.05, step=100, checkpoint="checkpoints/step-00000100"),
        "samples_per_second": 100.0,
        "promised_samples_per_second": 110.0,
        "data_wait_fraction": 0.25,
        "mfu": 0.125,
        "peak_memory_bytes": 2**30,
        "training_seconds": 8.0,
        "evaluation_seconds": 1.0,
        "checkpoint_seconds": 0.5,
        "elapsed_seconds": 12.0,
        "guard": GuardSummary(is_on=True, gradient_checks=10, last_clean_step=100, cost_fraction=0.004),
    }
    return TrainingSummary(**(fields | changes))
