"""Exporter `torch`: a training loop in plain PyTorch with every knob written out; it needs no autotune.

It trains the same object that autotune was given: one with `build_model`, `build_optimizer`, `train_dataset` and
`compute_loss`.
"""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined

from autotune.emit.export.by_hand import SDPA_BACKENDS
from autotune.emit.export.exported import Export, build_export
from autotune.emit.export.fragment import compile_arguments, literal, loader_arguments, matmul_precision
from autotune.emit.export.launch import launch_line
from autotune.records import TrainConfig

_FILENAME = "train_tuned.py"
_AUTOCAST = {
    "fp32": "enabled=False",
    "bf16": "dtype=torch.bfloat16",
    "fp16": "dtype=torch.float16",
}


def export_snippet(config: TrainConfig, libraries: Mapping[str, str]) -> Export:
    """Return a runnable Python file with every knob applied."""
    # Source code, not a page: values go through `literal`, so autoescape would only break them.
    environment = Environment(
        loader=PackageLoader("autotune.emit.export", package_path="."),
        autoescape=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    text = environment.get_template("snippet.py.j2").render(
        config=config,
        launch_line=launch_line(config, libraries, f"python {_FILENAME}"),
        loader=loader_arguments(config),
        autocast=_AUTOCAST[config.precision],
        matmul_precision=literal(matmul_precision(config)),
        compile_arguments=", ".join(f"{name}={literal(value)}" for name, value in compile_arguments(config).items()),
        sdpa_backend=SDPA_BACKENDS.get(config.attention_backend),
        user_knobs="\n".join(_assign_user_knobs(config)),
    )
    return build_export(_FILENAME, text, {})


def _assign_user_knobs(config: TrainConfig) -> list[str]:
    # Names are data here: they are quoted like the values.
    if not config.user_knobs:
        return ["USER_KNOBS = {}"]
    return ["USER_KNOBS = {", *(f"    {literal(k)}: {literal(v)}," for k, v in config.user_knobs.items()), "}"]
