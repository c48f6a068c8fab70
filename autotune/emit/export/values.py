"""Parts that exporters share: values as Python source, and arguments of PyTorch's own classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.records import TrainConfig

LOADER = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
"""Knobs that are arguments of the DataLoader by the same name."""

OPTIMIZER_ARGUMENTS: dict[str | None, dict[str, bool]] = {
    None: {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""Arguments of torch's optimizers by knob value."""


def literal(value: Any) -> str:
    """Return a value as Python source in plain ASCII, strings in double quotes where that needs no escape."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    text = ascii(value)
    return f'"{value}"' if isinstance(value, str) and text == f"'{value}'" and '"' not in value else text


def keywords(values: Mapping[str, Any]) -> str:
    """Return arguments as they stand in a call, `a=1, b="x"`."""
    return ", ".join(f"{name}={literal(value)}" for name, value in values.items())


def loader_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the DataLoader's arguments but its batch size; without workers PyTorch refuses two of the settings."""
    has_workers = config.num_workers > 0
    return {
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor if has_workers else None,
        "pin_memory": config.pin_memory,
        "persistent_workers": has_workers and config.persistent_workers,
    }


def changed_loader_arguments(config: TrainConfig, baseline: TrainConfig) -> dict[str, Any]:
    """Return those of the DataLoader's arguments, but its batch size, that are others than the baseline's."""
    before = loader_arguments(baseline)
    return {name: value for name, value in loader_arguments(config).items() if value != before[name]}


def compile_arguments(config: TrainConfig) -> dict[str, str]:
    """Return the arguments of torch.compile; none for its default mode, and none when it is off."""
    return {} if config.compile_mode in ("off", "default") else {"mode": config.compile_mode}
