"""Exporters `hf` and `hf-flags`: transformers' `TrainingArguments`, as JSON for `HfArgumentParser`, or as flags.

Names follow the newest release this table was checked against. One name changed on the way there, so where
transformers is installed its source is read (not imported) to see which name it takes.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

from autotune.emit.export.by_hand import comment, list_by_hand
from autotune.emit.export.exported import BATCH, Export, Request, build_export
from autotune.emit.export.values import LOADER, changed_loader_arguments
from autotune.records.config import SHARED_KNOBS

_NO_FIELD = frozenset(
    {
        *("memory_format", "attention_backend", "cudnn_benchmark", "num_threads"),
        *("host_allocator", "device_allocator", "user_knobs", "learning_rate_scale"),
        *(name for name in SHARED_KNOBS if name != "bucket_cap_mb"),
    }
)
_NEW_NAME, _OLD_NAME = "activation_checkpointing", "gradient_checkpointing"


def export_hf_json(request: Request) -> Export:
    """Return the changed settings as a JSON file; it has no comments, and the parser refuses a key of ours."""
    unmapped = list_by_hand(request, _NO_FIELD | _find_unmapped(request))
    arguments = _training_arguments(request, unmapped.keys())
    if "non_blocking" in request.changed:
        arguments["accelerator_config"] = {"non_blocking": request.config.non_blocking}
    aside = comment(request.header, unmapped) + _name_optimizer(arguments)
    return build_export("training_args.json", json.dumps(arguments, indent=2) + "\n", request, unmapped, aside=aside)


def export_hf_flags(request: Request) -> Export:
    """Return the changed settings as flags, without a word that a shell would read in another way."""
    # Its flag takes JSON in quotes, which are lost in `$(cat FILE)` and kept in a file of flags.
    unmapped = list_by_hand(request, _NO_FIELD | {"non_blocking"} | _find_unmapped(request))
    arguments = _training_arguments(request, unmapped.keys())
    gone = [name for name, value in arguments.items() if value is None]
    flags = [f"--{name} {value}" for name, value in arguments.items() if value is not None]
    aside = comment(request.header, unmapped) + [f"# leave out --{name}" for name in gone] + _name_optimizer(arguments)
    return build_export("training_args.txt", " ".join(flags) + "\n", request, unmapped, aside=aside)


def _name_optimizer(arguments: dict[str, Any]) -> list[str]:
    return ["# optim is AdamW's: leave it out where the Trainer has another optimizer"] if "optim" in arguments else []


def _find_unmapped(request: Request) -> set[str]:
    """Return the fields whose value no argument asks for."""
    unmapped = set()
    if request.config.activation_checkpointing == "selective":
        unmapped.add("activation_checkpointing")  # whole layers only
    if "medium" in (request.config.matmul_precision, request.baseline.matmul_precision):
        unmapped.add("matmul_precision")  # TF32 alone
    # `adamw_torch` leaves the choice to PyTorch: foreach on a GPU, the for-loop on a CPU.
    if request.config.optimizer_implementation not in ("fused", "foreach" if request.on_gpu else "for-loop"):
        unmapped.add("optimizer_implementation")
    return unmapped


def _training_arguments(request: Request, unmapped: Any) -> dict[str, Any]:
    config, written = request.config, request.written - {*unmapped}
    arguments: dict[str, Any] = {}
    if written & BATCH:
        arguments["per_device_train_batch_size"] = config.micro_batch_size
        arguments["gradient_accumulation_steps"] = config.gradient_accumulation_steps
    if "precision" in written:
        arguments |= {"bf16": config.precision == "bf16", "fp16": config.precision == "fp16"}
        # Without a GPU it is refused where the CPU is not asked for by name.
        arguments |= {} if request.on_gpu or config.precision == "fp32" else {"use_cpu": True}
    # With torch_compile on, leaving it out turns TF32 on.
    if "matmul_precision" in written or ("compile_mode" in written and config.compile_mode != "off"):
        arguments["tf32"] = config.matmul_precision == "high"
    if "activation_checkpointing" in written:
        arguments[_find_checkpointing_name()] = config.activation_checkpointing == "full"
    if "compile_mode" in written:
        arguments |= _compilation(config.compile_mode)
    if "optimizer_implementation" in written:
        is_fused = config.optimizer_implementation == "fused"
        arguments["optim"] = "adamw_torch_fused" if is_fused else "adamw_torch"
    if "bucket_cap_mb" in written:
        arguments["ddp_bucket_cap_mb"] = config.bucket_cap_mb
    if written & {*LOADER}:
        changed = changed_loader_arguments(config, request.baseline)
        arguments |= {f"dataloader_{name}": value for name, value in changed.items()}
    return arguments


def _compilation(mode: str) -> dict[str, Any]:
    # Naming a backend or a mode switches compilation on, so neither is written when it is off.
    if mode == "off":
        return {"torch_compile": False}
    return {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": mode}


def _find_checkpointing_name() -> str:
    fields = _read_field_names()
    return _NEW_NAME if fields is None or _NEW_NAME in fields else _OLD_NAME


def _read_field_names() -> frozenset[str] | None:
    # Importing transformers takes seconds and may start threads; its source says the same.
    spec = importlib.util.find_spec("transformers")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        try:
            tree = ast.parse((Path(folder) / "training_args.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        return _class_fields(tree, "TrainingArguments")
    return None


def _class_fields(tree: ast.Module, name: str) -> frozenset[str] | None:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            targets = (item.target for item in node.body if isinstance(item, ast.AnnAssign))
            return frozenset(target.id for target in targets if isinstance(target, ast.Name))
    return None
