"""Exporter `accelerate`: the YAML `accelerate launch --config_file` reads (keys known since Accelerate 1.0).

Accelerate refuses keys it does not know, so accumulation and everything about the loader are lines in the comments.
"""

from __future__ import annotations

from collections.abc import Collection

from autotune.emit.export.by_hand import Places, comment, list_by_hand, list_ddp_arguments, write_start
from autotune.emit.export.exported import Export, Request, build_export
from autotune.emit.export.values import keywords
from autotune.records import TrainConfig

_FILENAME = "accelerate.yaml"
_COMMAND = f"accelerate launch --config_file {_FILENAME} train.py"
_FIELDS = frozenset({"precision", "compile_mode", "distributed_strategy", "reshard_after_forward"})
_MIXED_PRECISION = {"fp32": "'no'", "bf16": "bf16", "fp16": "fp16"}


def export_accelerate(request: Request) -> Export:
    """Return the settings as an Accelerate configuration file; it is read as a whole, so that it names both anyway."""
    instead: Places = {
        ("host_allocator", "device_allocator"): lambda request, _: write_start(request, command=_COMMAND),
        ("gradient_accumulation_steps", "non_blocking", "sync_each_micro_batch"): _accelerator,
        ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "reduce_dtype"): _accelerator_handlers,
    }
    unmapped = list_by_hand(request, TrainConfig.model_fields.keys() - _FIELDS, instead=instead)
    lines = [
        *comment(request.header, unmapped),
        *_warn_of_threads(request),
        "compute_environment: LOCAL_MACHINE",
        f"distributed_type: {_name_type(request)}",
        "num_machines: 1",
        f"num_processes: {request.processes}",
        f"mixed_precision: {_MIXED_PRECISION[request.config.precision]}",
        *_dynamo_lines(request.config),
        *_fsdp_lines(request),
    ]
    return build_export(_FILENAME, "\n".join(lines) + "\n", request, unmapped)


def _accelerator(request: Request, fields: Collection[str]) -> str:
    config, arguments = request.config, []
    if "sync_each_micro_batch" in fields:
        plugin = f"num_steps={config.gradient_accumulation_steps}, sync_each_batch={config.sync_each_micro_batch}"
        arguments.append(f"gradient_accumulation_plugin=accelerate.utils.GradientAccumulationPlugin({plugin})")
    elif "gradient_accumulation_steps" in fields:
        arguments.append(f"gradient_accumulation_steps={config.gradient_accumulation_steps}")
    if "non_blocking" in fields:
        loading = f"accelerate.utils.DataLoaderConfiguration(non_blocking={config.non_blocking})"
        arguments.append(f"dataloader_config={loading}")
    return f"accelerate.Accelerator(..., {', '.join(arguments)})"


def _accelerator_handlers(request: Request, _fields: Collection[str]) -> str:
    """Return the line for what DistributedDataParallel is given."""
    config = request.config
    if config.distributed_strategy == "fsdp":
        return "# buckets and hooks are DistributedDataParallel's; FSDP sums gradients in the type of mixed_precision"
    hook = "BF16" if config.reduce_dtype == "bf16" else "NO"
    words = f"{keywords(list_ddp_arguments(config))}, comm_hook=accelerate.utils.DDPCommunicationHookType.{hook}"
    return f"accelerate.Accelerator(..., kwargs_handlers=[accelerate.DistributedDataParallelKwargs({words})])"


def _name_type(request: Request) -> str:
    if request.config.distributed_strategy == "fsdp":
        return "FSDP"
    # On CPUs too: MULTI_CPU starts a single process without an MPI launcher of one's own.
    return "'NO'" if request.processes == 1 else "MULTI_GPU"


def _fsdp_lines(request: Request) -> list[str]:
    if request.config.distributed_strategy == "ddp" and "reshard_after_forward" not in request.changed:
        return []
    return [
        "# The blocks are the model's own _no_split_modules, or name yours: fsdp_transformer_layer_cls_to_wrap.",
        "fsdp_config:",
        "  fsdp_version: 2",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_reshard_after_forward: {str(request.config.reshard_after_forward).lower()}",
    ]


def _warn_of_threads(request: Request) -> list[str]:
    if request.on_gpu or "num_threads" in request.changed:
        return []
    own = request.config.num_threads
    told = f"{request.cores} is what PyTorch takes by itself" if own is None else f"{own} is what you have"
    return [f"# accelerate launch sets OMP_NUM_THREADS to 1 unless you set it: {told}."]


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
