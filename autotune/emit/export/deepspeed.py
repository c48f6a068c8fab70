"""Exporter `deepspeed`: the JSON handed to `deepspeed.initialize` (DeepSpeed 0.19).

Mixed precision is `torch_autocast`, which keeps fp32 weights as the measured run did; the sections `bf16` and
`fp16` would cast the whole model. `train_batch_size` is left out: DeepSpeed derives it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from autotune.emit.export.by_hand import explain_unmapped, own_knobs, start_with_malloc
from autotune.emit.export.exported import Export, build_export
from autotune.records import TrainConfig

_LACK = "the DeepSpeed JSON has no key for it"
_NO_KEY = (
    "allow_tf32",
    "activation_checkpointing",
    "compile_mode",
    "optimizer_implementation",
    "memory_format",
    "attention_backend",
    "cudnn_benchmark",
    "num_threads",
    "device_allocator",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "persistent_workers",
    "non_blocking",
)
_AUTOCAST = {
    "fp32": {"enabled": False},
    "bf16": {"enabled": True, "dtype": "bfloat16"},
    "fp16": {"enabled": True, "dtype": "float16"},
}


def export_deepspeed(config: TrainConfig, libraries: Mapping[str, str]) -> Export:
    """Return the config as a DeepSpeed configuration file."""
    unmapped = explain_unmapped(config, _NO_KEY, lack=_LACK) | own_knobs(config, lack=_LACK)
    unmapped["host_allocator"] = f"{_LACK}: {start_with_malloc(config, libraries)}."
    if config.compile_mode != "off":
        arguments = {} if config.compile_mode == "default" else {"mode": config.compile_mode}
        unmapped["compile_mode"] = f"{_LACK}: call engine.compile(compile_kwargs={arguments!r})."
    fields: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "torch_autocast": _AUTOCAST[config.precision],
        "zero_optimization": {"stage": 0},
    }
    return build_export("deepspeed.json", json.dumps(fields, indent=2) + "\n", unmapped)
