"""Exporter `lightning`: the `trainer` section of a LightningCLI configuration (Lightning 2.6).

The Trainer has no say over the DataLoader, the optimizer and the module: lines for those are in the comments.
"""

from __future__ import annotations

from typing import Any

from autotune.emit.export.by_hand import Places, comment, list_by_hand, write_optimizer
from autotune.emit.export.exported import Export, Request, build_export
from autotune.emit.export.values import compile_arguments, keywords, literal
from autotune.records import TrainConfig

_FIELDS = frozenset({"gradient_accumulation_steps", "precision", "cudnn_benchmark"})
_PRECISION = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def export_lightning(request: Request) -> Export:
    """Return the changed settings as YAML to hand to LightningCLI as one more `--config`."""
    instead: Places = {
        ("non_blocking",): lambda _request, _fields: "# Lightning copies with non_blocking=True whenever it can",
        ("optimizer_implementation",): lambda request, _: f"{write_optimizer(request)}, in configure_optimizers",
        ("compile_mode",): _compilation,
    }
    unmapped = list_by_hand(request, TrainConfig.model_fields.keys() - _FIELDS, instead=instead)
    lines = comment(request.header, unmapped)
    arguments = [f"  {name}: {literal(value)}".lower() for name, value in _trainer_arguments(request).items()]
    lines += ["trainer:", *arguments] if arguments else ["trainer: {}"]
    return build_export("tuned.yaml", "\n".join(lines) + "\n", request, unmapped)


def _trainer_arguments(request: Request) -> dict[str, Any]:
    config = request.config
    arguments = {
        "gradient_accumulation_steps": ("accumulate_grad_batches", config.gradient_accumulation_steps),
        "precision": ("precision", _PRECISION[config.precision]),
        "cudnn_benchmark": ("benchmark", config.cudnn_benchmark),
    }
    return dict(pair for name, pair in arguments.items() if name in request.written)


def _compilation(request: Request, _fields: object) -> str:
    if request.config.compile_mode == "off":
        return "# do not compile the module"
    # The Trainer calls training_step, not the module: it takes a wrapped module apart and compiles its steps.
    arguments = ["module", keywords(compile_arguments(request.config))]
    return f"module = torch.compile({', '.join(filter(None, arguments))})  # before trainer.fit(module)"
