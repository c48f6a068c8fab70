"""What a script does by itself, and which knobs must stay as it has them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from autotune.engine.activation_checkpointing import checkpoints_itself
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.dataloader import read_batch_size
from autotune.engine.hooks.script import ScriptHooks
from autotune.engine.precision import read_matmul_precision
from autotune.probe.model import read_implementation
from autotune.probe.sources.script_sharing import read_sharing
from autotune.records.config import Precision, TrainConfig
from autotune.records.script import Script
from autotune.targets.script import own_values, placeholder_names

_MOST_ROOTS = 8


def read_baseline(hooks: ScriptHooks, script: Script, *, micro_batches: int, samples: int) -> TrainConfig:
    """Return what a script does by itself.

    Args:
        hooks: that have seen it.
        script: its command.
        micro_batches: of a step.
        samples: of a step.
    """
    own, loader = own_values(script), hooks.loaders.training_loader
    on_gpu = hooks.device.type == "cuda"
    seen: dict[str, Any] = {
        "gradient_accumulation_steps": micro_batches,
        "micro_batch_size": max(1, samples // micro_batches),
        "precision": _name_precision(hooks.autocast_dtypes),
        "compile_mode": "default" if hooks.models.compiles_itself or compiled_graph_count() > 0 else "off",
        "memory_format": "channels_last" if _is_channels_last(hooks.models.roots) else "contiguous",
        "activation_checkpointing": "full" if any(map(checkpoints_itself, hooks.models.roots)) else "off",
        "optimizer_implementation": read_implementation(hooks.optimizers.optimizers, hooks.device),
        "num_threads": None if on_gpu else torch.get_num_threads(),
        "matmul_precision": read_matmul_precision(hooks.device),
        "cudnn_benchmark": on_gpu and torch.backends.cudnn.benchmark,
    }
    if loader is not None:
        size = read_batch_size(loader) if len(hooks.loaders.training_loaders) == 1 else None
        seen |= {
            "micro_batch_size": size or seen["micro_batch_size"],  # of several loaders it is what they give together
            # PyTorch takes any number for a number, and whatever is not empty for True.
            "num_workers": int(loader.num_workers),
            "prefetch_factor": int(loader.prefetch_factor or 2),
            "pin_memory": bool(loader.pin_memory),
            "persistent_workers": bool(loader.persistent_workers),
        }
    seen |= read_sharing(hooks.sharing, micro_batches)
    fields = {name: value for name, value in own.items() if name in TrainConfig.model_fields}
    return TrainConfig(**(seen | fields), user_knobs={n: v for n, v in own.items() if n not in fields})


def find_fixed(hooks: ScriptHooks, script: Script, baseline: TrainConfig) -> dict[str, str]:
    """Return the model's and the optimizer's knobs that must stay as the script has them, with reasons."""
    roots, names = hooks.models.roots, placeholder_names(script)
    fixed: dict[str, str] = {}
    if not {"micro_batch_size", "gradient_accumulation_steps"} <= names:
        fixed["micro_batch_size"] = (
            "only the script can change it and keep the effective batch: put {micro_batch_size} and "
            "{gradient_accumulation_steps} where its command has flags for them"
        )
    if not roots:
        reason = "the script trains no torch.nn.Module that is called"
        fixed |= dict.fromkeys(
            ("precision", "compile_mode", "memory_format", "activation_checkpointing", "attention_backend"), reason
        )
    if hooks.autocast_dtypes:
        fixed["precision"] = f"the script casts by itself ({baseline.precision})"
    dtypes = {str(p.dtype).removeprefix("torch.") for root in roots for p in root.parameters() if p.requires_grad}
    if dtypes - {"float32"}:
        fixed["precision"] = f"its parameters are {' and '.join(sorted(dtypes))}"
    if baseline.compile_mode != "off":
        fixed["compile_mode"] = "the script compiles its model by itself"
    elif len(roots) > _MOST_ROOTS:
        fixed["compile_mode"] = f"the script calls {len(roots)} modules one by one, not one model"
    if baseline.memory_format == "channels_last":
        fixed["memory_format"] = "the script lays its model out itself"
    elif any(isinstance(root, DistributedDataParallel) for root in roots):
        fixed["memory_format"] = "DistributedDataParallel has laid its buckets out already"
    return {name: reason for name, reason in fixed.items() if name not in names or name == "micro_batch_size"}


def _name_precision(dtypes: set[torch.dtype]) -> Precision:
    return "fp16" if torch.float16 in dtypes else "bf16" if torch.bfloat16 in dtypes else "fp32"


def _is_channels_last(roots: list[nn.Module]) -> bool:
    weights = [
        p for root in roots for p in root.parameters() if p.ndim == 4 and p.shape[1] > 1 and math.prod(p.shape[2:]) > 1
    ]
    return bool(weights) and all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
