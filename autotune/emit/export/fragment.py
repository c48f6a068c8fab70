"""Parts shared by the exporters that write Python: arguments and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.records import TrainConfig


def assign_dict(name: str, values: Mapping[str, Any]) -> list[str]:
    """Return the lines of `name = {...}`, an entry a line."""
    if not values:
        return [f"{name} = {{}}"]
    entries = (f'    "{key}": {literal(value)},' for key, value in values.items())
    return [f"{name} = {{", *entries, "}"]


def literal(value: Any) -> str:
    """Return a value as Python source in plain ASCII, strings in double quotes where that needs no escape."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
    text = ascii(value)
    return f'"{value}"' if isinstance(value, str) and text == f"'{value}'" and '"' not in value else text


def loader_arguments(config: TrainConfig) -> dict[str, Any]:
    """Return the DataLoader's arguments but its batch size; without workers PyTorch refuses two of the settings."""
    has_workers = config.num_workers > 0
    return {
        "num_workers": config.num_workers,
        "prefetch_factor": config.prefetch_factor if has_workers else None,
        "pin_memory": config.pin_memory,
        "persistent_workers": has_workers and config.persistent_workers,
    }


def compile_arguments(config: TrainConfig) -> dict[str, str]:
    """Return the arguments of torch.compile; none for its default mode, and none when it is off."""
    return {} if config.compile_mode in ("off", "default") else {"mode": config.compile_mode}


def matmul_precision(config: TrainConfig) -> str:
    """Return the argument of `torch.set_float32_matmul_precision` for the knob `allow_tf32`."""
    return "high" if config.allow_tf32 else "highest"
