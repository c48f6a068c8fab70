"""Exporter `accelerate`: the YAML `accelerate launch --config_file` reads (keys known since Accelerate 1.0).

Accelerate refuses keys it does not know, so accumulation and everything about the loader are lines in the comments.
"""

from __future__ import annotations

from collections.abc import Collection

from autotune.emit.export.by_hand import Places, comment, list_by_hand, write_start
from autotune.emit.export.exported import Export, Request, build_export
from autotune.records import TrainConfig

_FILENAME = "accelerate.yaml"
_COMMAND = f"accelerate launch --config_file {_FILENAME} train.py"
_FIELDS = frozenset({"precision", "compile_mode"})
_MIXED_PRECISION = {"fp32": "'no'", "bf16": "bf16", "fp16": "fp16"}


def export_accelerate(request: Request) -> Export:
    """Return the settings as an Accelerate configuration file; it is read as a whole, so that it names both anyway."""
    instead: Places = {
        ("host_allocator", "device_allocator"): lambda request, _: write_start(request, command=_COMMAND),
        ("gradient_accumulation_steps", "non_blocking"): _accelerator,
    }
    unmapped = list_by_hand(request, TrainConfig.model_fields.keys() - _FIELDS, instead=instead)
    lines = [
        *comment(request.header, unmapped),
        *_warn_of_threads(request),
        "compute_environment: LOCAL_MACHINE",
        "distributed_type: 'NO'",
        "num_machines: 1",
        "num_processes: 1",
        f"mixed_precision: {_MIXED_PRECISION[request.config.precision]}",
        *_dynamo_lines(request.config),
    ]
    return build_export(_FILENAME, "\n".join(lines) + "\n", request, unmapped)


def _accelerator(request: Request, fields: Collection[str]) -> str:
    config, arguments = request.config, []
    if "gradient_accumulation_steps" in fields:
        arguments.append(f"gradient_accumulation_steps={config.gradient_accumulation_steps}")
    if "non_blocking" in fields:
        loading = f"accelerate.utils.DataLoaderConfiguration(non_blocking={config.non_blocking})"
        arguments.append(f"dataloader_config={loading}")
    return f"accelerate.Accelerator(..., {', '.join(arguments)})"


def _warn_of_threads(request: Request) -> list[str]:
    if request.on_gpu or request.config.num_threads is not None:
        return []
    told = f"unless you set it: {request.cores} is what PyTorch takes by itself"
    return [f"# accelerate launch sets OMP_NUM_THREADS to 1 {told}."]


def _dynamo_lines(config: TrainConfig) -> list[str]:
    if config.compile_mode == "off":
        return []
    return [
        "dynamo_config:",
        "  dynamo_backend: INDUCTOR",
        f"  dynamo_mode: {config.compile_mode}",
        "  dynamo_use_fullgraph: false",
        "  dynamo_use_dynamic: false",
    ]
