"""Exporter `accelerate`: the YAML `accelerate launch --config_file` reads (keys known since Accelerate 1.0).

Accelerate refuses keys it does not know, so accumulation and everything about the loader stay in the user's code.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.emit.export.by_hand import comment_lines, explain_unmapped, own_knobs
from autotune.emit.export.exported import Export, build_export
from autotune.emit.export.launch import launch_line
from autotune.records import TrainConfig

_FILENAME = "accelerate.yaml"
_LACK = "Accelerate's YAML has no key for it"
_NO_KEY = (
    "micro_batch_size",
    "gradient_accumulation_steps",
    "allow_tf32",
    "activation_checkpointing",
    "optimizer_implementation",
    "memory_format",
    "attention_backend",
    "cudnn_benchmark",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
)
_MIXED_PRECISION = {"fp32": "'no'", "bf16": "bf16", "fp16": "fp16"}


def export_accelerate(config: TrainConfig, libraries: Mapping[str, str]) -> Export:
    """Return the config as an Accelerate configuration file."""
    unmapped = explain_unmapped(config, _NO_KEY, lack=_LACK) | own_knobs(config, lack=_LACK)
    # The other flags of the loader go to the DataLoader; this one goes to Accelerate, which moves the batches.
    unmapped["non_blocking"] = (
        f"{_LACK}: pass dataloader_config=DataLoaderConfiguration(non_blocking={config.non_blocking}) to Accelerator."
    )
    if config.num_threads is None:
        unmapped["num_threads"] = (
            "accelerate launch sets OMP_NUM_THREADS to 1 unless it is set: set it to the number of cores."
        )
    lines = [
        "# Measured by autotune, for Accelerate 1.0 and later",
        _launch_line(config, libraries),
        *comment_lines(unmapped),
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: 'NO'",
        "num_machines: 1",
        "num_processes: 1",
        f"mixed_precision: {_MIXED_PRECISION[config.precision]}",
        *_dynamo_lines(config),
    ]
    return build_export(_FILENAME, "\n".join(lines) + "\n", unmapped)


def _launch_line(config: TrainConfig, libraries: Mapping[str, str]) -> str:
    threads = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    return launch_line(config, libraries, f"accelerate launch --config_file {_FILENAME} train.py", **threads)


def _dynamo_lines(config: TrainConfig) -> list[str]:
    if config.compile_mode == "off":
        return ["dynamo_config:", "  dynamo_backend: 'NO'"]
    return [
        "dynamo_config:",
        "  dynamo_backend: INDUCTOR",
        f"  dynamo_mode: {config.compile_mode}",
        "  dynamo_use_fullgraph: false",
        "  dynamo_use_dynamic: false",
    ]
