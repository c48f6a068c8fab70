"""Exporter `hf`: keyword arguments of transformers' `TrainingArguments`, as a Python fragment.

Names follow the newest release this table was checked against. One name changed on the way there, so where
transformers is installed its source is read (not imported) to see which name it takes.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autotune.emit.export.by_hand import comment_lines, explain_unmapped, own_knobs
from autotune.emit.export.exported import Export, build_export
from autotune.emit.export.fragment import assign_dict, loader_arguments
from autotune.emit.export.launch import launch_line
from autotune.records import TrainConfig

_CHECKED_VERSION = "5.23"
_LACK = "TrainingArguments has no field for it"
_NEW_NAME, _OLD_NAME = "activation_checkpointing", "gradient_checkpointing"


def export_hf_trainer(config: TrainConfig, libraries: Mapping[str, str]) -> Export:
    """Return the config as keyword arguments for `transformers.TrainingArguments`."""
    version, checkpointing_name = _find_installed()
    unmapped = _explain(config)
    lines = [
        f"# Measured by autotune, for transformers {version}",
        launch_line(config, libraries, "python train.py"),
        *comment_lines(unmapped),
        "import torch",
        "",
        *([] if config.num_threads is None else [f"torch.set_num_threads({config.num_threads})"]),
        f"torch.backends.cudnn.benchmark = {config.cudnn_benchmark}",
        "",
        '# TrainingArguments(output_dir="out", **training_arguments)',
        *assign_dict("training_arguments", _training_arguments(config, checkpointing_name)),
    ]
    return build_export("hf_training_arguments.py", "\n".join(lines) + "\n", unmapped)


def _explain(config: TrainConfig) -> dict[str, str]:
    unmapped = explain_unmapped(config, ["memory_format", "attention_backend"], lack=_LACK)
    if config.activation_checkpointing == "selective":
        unmapped["activation_checkpointing"] = (
            "TrainingArguments recomputes whole layers only: this file leaves it off, "
            "call model.gradient_checkpointing_enable with a selective context_fn yourself."
        )
    match config.optimizer_implementation:
        case None:
            unmapped["optimizer_implementation"] = (
                "optim is left out to keep the optimizer you train with: its default is fused AdamW."
            )
        case "for-loop" | "foreach" as wanted:
            unmapped["optimizer_implementation"] = (
                f"optim cannot ask for {wanted}: adamw_torch is foreach on a GPU and the for-loop on a CPU."
            )
    return unmapped | own_knobs(config, lack=_LACK)


def _training_arguments(config: TrainConfig, checkpointing_name: str) -> dict[str, Any]:
    loader = {f"dataloader_{name}": value for name, value in loader_arguments(config).items()}
    recomputes = config.activation_checkpointing == "full"
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "bf16": config.precision == "bf16",
        "fp16": config.precision == "fp16",
        # Always written: with torch_compile on, leaving it out turns TF32 on.
        "tf32": config.allow_tf32,
        checkpointing_name: recomputes,
    }
    if recomputes:
        arguments[f"{checkpointing_name}_kwargs"] = {"use_reentrant": False}
    arguments |= _compilation(config)
    if config.optimizer_implementation is not None:
        arguments["optim"] = "adamw_torch_fused" if config.optimizer_implementation == "fused" else "adamw_torch"
    return arguments | loader | {"accelerator_config": {"non_blocking": config.non_blocking}}


def _compilation(config: TrainConfig) -> dict[str, Any]:
    # Naming a backend or a mode switches compilation on, so neither is written when it is off.
    if config.compile_mode == "off":
        return {"torch_compile": False}
    return {
        "torch_compile": True,
        "torch_compile_backend": "inductor",
        "torch_compile_mode": config.compile_mode,
    }


def _find_installed() -> tuple[str, str]:
    """Return the version to name in the header and the name of the checkpointing field."""
    fields = _read_field_names()
    if fields is None:
        return f"{_CHECKED_VERSION} (up to 5.10, {_NEW_NAME} is {_OLD_NAME})", _NEW_NAME
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        version = "as installed"
    return version, _NEW_NAME if _NEW_NAME in fields else _OLD_NAME


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
