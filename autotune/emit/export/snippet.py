"""Exporter `torch`: a training loop in plain PyTorch with every knob written out; it needs no autotune.

It trains the same object that autotune was given: one with `build_model`, `build_optimizer`, `train_dataset` and
`compute_loss`.
"""

from __future__ import annotations

from collections.abc import Collection

from jinja2 import Environment, PackageLoader, StrictUndefined

from autotune.emit.export.by_hand import AUTOCAST_TYPES, SDPA_BACKENDS, comment, list_by_hand, write_start
from autotune.emit.export.exported import Export, Request, build_export
from autotune.emit.export.values import compile_arguments, keywords, literal, loader_arguments
from autotune.records import TrainConfig
from autotune.records.config import SHARED_KNOBS, spread_config

_FILENAME = "train_tuned.py"
_FIELDS = frozenset({"host_allocator", "device_allocator", *SHARED_KNOBS})


def export_snippet(request: Request) -> Export:
    """Return a runnable Python file with every knob applied, also those that stay as they are."""
    config = spread_config(request.config, 1, before=request.processes)
    alone = [f"This loop is one process, with the effective batch of all {request.processes}."]
    header = [*request.header, *(alone if request.processes > 1 else [])]
    unmapped = list_by_hand(request, _FIELDS, instead={("host_allocator", "device_allocator"): _start})
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
        header="\n".join(comment(header, unmapped)),
        loader=loader_arguments(config),
        autocast="enabled=False" if config.precision == "fp32" else f"dtype={AUTOCAST_TYPES[config.precision]}",
        device=literal("cuda" if request.on_gpu else "cpu"),
        matmul_precision=literal(config.matmul_precision),
        compile_arguments=keywords(compile_arguments(config)),
        sdpa_backend=SDPA_BACKENDS.get(config.attention_backend),
        user_knobs="\n".join(_assign_user_knobs(config)),
    )
    return build_export(_FILENAME, text, request, unmapped)


def _start(request: Request, _fields: Collection[str]) -> str:
    return write_start(request, command=f"python {_FILENAME}")


def _assign_user_knobs(config: TrainConfig) -> list[str]:
    # Names are data here: they are quoted like the values.
    if not config.user_knobs:
        return ["USER_KNOBS = {}"]
    return ["USER_KNOBS = {", *(f"    {literal(k)}: {literal(v)}," for k, v in config.user_knobs.items()), "}"]
