"""Knob `compile_mode`: torch.compile, in place, so that parameter names and the object stay the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch import nn

from autotune.engine.device import on_accelerator
from autotune.records.config import TrainConfig

_GRAPH_MODES = ("reduce-overhead", "max-autotune")

_MISSING_IN_CACHE_KEY = ("attention_backend", "precision", "matmul_precision", "num_threads")
"""Knobs that decide which code is compiled, and that the keys of PyTorch's caches of such code leave out.

The attention kernel in every version with an AOTAutograd cache (github.com/pytorch/pytorch/issues/185449), bf16 against
fp16 and the number of threads before 2.13, and how a CPU computes float32 products, by which autotuning takes PyTorch's
own or its library's. What a user's own knob switches in the process is no more part of them.
"""


def captures_graphs(config: TrainConfig, device: torch.device) -> bool:
    """Return whether compiled calls are CUDA graphs: what one returns lies in memory that the next one overwrites.

    Source: `torch._inductor.cudagraph_trees`. So an output that is kept has to be copied, and gradients that are
    accumulated fail: those of the first micro batch are such outputs.
    """
    return config.compile_mode in _GRAPH_MODES and on_accelerator(device)


def apply_compilation(model: nn.Module, config: TrainConfig) -> None:
    """Compile calls of the model in place; the work happens in its first calls."""
    if config.compile_mode == "off":
        return
    _see_late_hooks()
    mode = None if config.compile_mode == "default" else config.compile_mode
    if not type(model).__module__.startswith("torch.nn."):
        nn.Module.compile(model, mode=mode)  # a class of its own may have another `compile`, as Keras' models do
        return

    def call(*arguments: Any, **named: Any) -> Any:
        # Dynamo skips frames of torch.nn itself: a bare Sequential is compiled only from within a function of another.
        return model._call_impl(*arguments, **named)  # type: ignore[no-untyped-call]

    model._compiled_call_impl = torch.compile(call, mode=mode)


@contextmanager
def distinct_compile_cache(config: TrainConfig) -> Iterator[None]:
    """Keep code compiled with other settings from being taken for these out of a cache that processes share."""
    before = compiler_config.cache_key_tag
    settings = {name: getattr(config, name) for name in _MISSING_IN_CACHE_KEY} | dict(sorted(config.user_knobs.items()))
    told = [f"{name}={value}" for name, value in settings.items()]
    compiler_config.cache_key_tag = " ".join(filter(None, (before, *told)))
    try:
        yield
    finally:
        compiler_config.cache_key_tag = before


def compile_blocks(blocks: Sequence[nn.Module], config: TrainConfig) -> None:
    """Compile what each block computes, in place; what gathers its parameters around that stays eager."""
    if config.compile_mode == "off":
        return
    _see_late_hooks()
    mode = None if config.compile_mode == "default" else config.compile_mode
    for block in blocks:
        block.forward = torch.compile(partial(_call, block.forward), mode=mode)


def _see_late_hooks() -> None:
    """Have a hook that is hung on a part of a model later called as it is without compiling; PyTorch's default is not.

    A script may begin with one after its warm-up, long after a search has looked at it.
    """
    import torch._dynamo.config as dynamo_config  # a second, for those that compile

    if hasattr(dynamo_config, "skip_nnmodule_hook_guards"):
        dynamo_config.skip_nnmodule_hook_guards = False  # half a microsecond for each module and call


def _call(plain: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    return plain(*arguments, **named)


def compiled_graph_count() -> int:
    """Return how many graphs Dynamo has compiled in this process; it stands still in a steady state."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compile_seconds() -> float:
    """Return what Dynamo has spent on compiling in this process, forward and backward, in seconds of wall time."""
    # Private: where it is missing, nothing is known to be taken.
    read: Callable[[], dict[str, float]] = getattr(torch._dynamo.utils, "calculate_time_spent", dict)
    return float(read().get("total_wall_time", 0.0))
