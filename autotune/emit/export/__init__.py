"""A config in another tool's format: one pure function a tool, each accounting for every knob."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autotune.emit.export.accelerate import export_accelerate
from autotune.emit.export.deepspeed import export_deepspeed
from autotune.emit.export.exported import Export
from autotune.emit.export.hf_trainer import export_hf_trainer
from autotune.emit.export.lightning import export_lightning
from autotune.emit.export.snippet import export_snippet
from autotune.errors import UsageError
from autotune.records import TrainConfig

EXPORTERS: dict[str, Callable[[TrainConfig, Mapping[str, str]], Export]] = {
    "torch": export_snippet,
    "hf": export_hf_trainer,
    "lightning": export_lightning,
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
}
"""Exporters by the name the user gives."""

__all__ = ["EXPORTERS", "Export", "export_config"]


def export_config(config: TrainConfig, to: str, *, host_allocators: Mapping[str, str] | None = None) -> Export:
    """Return a config in another tool's format.

    Args:
        config: the settings.
        to: a name in `EXPORTERS`.
        host_allocators: paths of malloc libraries by knob value, as they were measured; None where they are not known.

    Raises:
        UsageError: there is no exporter of that name.
    """
    exporter = EXPORTERS.get(to)
    if exporter is None:
        raise UsageError(f"there is no exporter {to!r}", hint=f"choose one of {', '.join(EXPORTERS)}")
    return exporter(config, host_allocators or {})
