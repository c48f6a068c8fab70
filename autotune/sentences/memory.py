"""A training's memory in words: its modes and the batch that fits. Pure."""

from __future__ import annotations

from autotune.records.facts import MemoryMode


def name_mode(mode: MemoryMode) -> str:
    """Return what sets a mode apart, e.g. `bf16, full checkpointing`."""
    saving = mode.activation_checkpointing
    return mode.precision if saving == "off" else f"{mode.precision}, {saving} checkpointing"


def describe_largest_batch(size: int | None) -> str:
    """Return the largest micro batch that fits, in samples, e.g. `7,168`; 0 is `none fits`."""
    return "not known" if size is None else f"{size:,}" if size else "none fits"
