"""Exporter `lightning`: arguments for Trainer, DataLoader and the optimizer, as a Python fragment (Lightning 2.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.emit.export.by_hand import OPTIMIZER_ARGUMENTS, comment_lines, explain_unmapped, own_knobs
from autotune.emit.export.exported import Export, build_export
from autotune.emit.export.fragment import assign_dict, compile_arguments, literal, loader_arguments, matmul_precision
from autotune.emit.export.launch import launch_line
from autotune.records import TrainConfig

_LACK = "Trainer has no argument for it"
_NO_ARGUMENT = ("activation_checkpointing", "memory_format", "attention_backend")
_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def export_lightning(config: TrainConfig, libraries: Mapping[str, str]) -> Export:
    """Return the config as a Python fragment to paste beside a LightningModule."""
    unmapped = explain_unmapped(config, _NO_ARGUMENT, lack=_LACK) | own_knobs(config, lack=_LACK)
    if not config.non_blocking:
        unmapped["non_blocking"] = "Lightning always copies to a GPU with non_blocking=True; the numbers are the same."
    lines = [
        "# Measured by autotune, for Lightning 2.6",
        launch_line(config, libraries, "python train.py"),
        *comment_lines(unmapped),
        "import torch",
        "",
        f"torch.set_float32_matmul_precision({literal(matmul_precision(config))})",
        *([] if config.num_threads is None else [f"torch.set_num_threads({config.num_threads})"]),
        "",
        "# trainer = lightning.Trainer(**trainer_arguments)",
        *assign_dict("trainer_arguments", _trainer_arguments(config)),
        "",
        "# DataLoader(dataset, **loader_arguments)",
        *assign_dict("loader_arguments", {"batch_size": config.micro_batch_size} | loader_arguments(config)),
        "",
        "# in configure_optimizers: torch.optim.AdamW(self.parameters(), **optimizer_arguments)",
        *assign_dict("optimizer_arguments", OPTIMIZER_ARGUMENTS[config.optimizer_implementation]),
        "",
        "",
        *_prepare_lines(config),
    ]
    return build_export("lightning_settings.py", "\n".join(lines) + "\n", unmapped)


def _trainer_arguments(config: TrainConfig) -> dict[str, Any]:
    return {
        "accumulate_grad_batches": config.gradient_accumulation_steps,
        "precision": _PRECISION[config.precision],
        "benchmark": config.cudnn_benchmark,
    }


def _prepare_lines(config: TrainConfig) -> list[str]:
    compiled = config.compile_mode != "off"
    arguments = "".join(f", {name}={literal(value)}" for name, value in compile_arguments(config).items())
    return [
        "def prepare_model(model):",
        '    """Return the LightningModule to hand to trainer.fit."""',
        # The Trainer calls training_step, not the module: it takes a wrapped module apart and compiles its steps.
        f"    return torch.compile(model{arguments})" if compiled else "    return model  # not compiled",
    ]
