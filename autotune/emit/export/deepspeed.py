"""Exporter `deepspeed`: the JSON handed to `deepspeed.initialize` (DeepSpeed 0.19).

Mixed precision is `torch_autocast`, which keeps fp32 weights as the measured run did; the sections `bf16` and
`fp16` would cast the whole model. `train_batch_size` is left out: DeepSpeed derives it. Keys at the top that it does
not know are ignored, so the comments are one.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from autotune.emit.export.by_hand import Places, comment, list_by_hand
from autotune.emit.export.exported import BATCH, Export, Request, build_export
from autotune.emit.export.values import compile_arguments
from autotune.records import TrainConfig

_FIELDS = BATCH | {"precision"}
_AUTOCAST = {
    "fp32": {"enabled": False},
    "bf16": {"enabled": True, "dtype": "bfloat16"},
    "fp16": {"enabled": True, "dtype": "float16"},
}


def export_deepspeed(request: Request) -> Export:
    """Return the settings as a DeepSpeed configuration file, which has to name a batch size."""
    instead: Places = {("compile_mode",): _compilation}
    unmapped = list_by_hand(request, TrainConfig.model_fields.keys() - _FIELDS, instead=instead)
    fields: dict[str, Any] = {
        "_comment": [line.removeprefix("# ") for line in comment(request.header, unmapped)],
        "train_micro_batch_size_per_gpu": request.config.micro_batch_size,
        "gradient_accumulation_steps": request.config.gradient_accumulation_steps,
    }
    if "precision" in request.changed:
        fields["torch_autocast"] = _AUTOCAST[request.config.precision]
    return build_export("deepspeed.json", json.dumps(fields, indent=2) + "\n", request, unmapped)


def _compilation(request: Request, _fields: Collection[str]) -> str:
    if request.config.compile_mode == "off":
        return "# do not compile the engine"
    return f"engine.compile(compile_kwargs={compile_arguments(request.config)!r})"
