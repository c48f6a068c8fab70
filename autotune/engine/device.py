"""Where a training runs, and how much of a GPU its allocator may take."""

from __future__ import annotations

import torch


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def limit_device_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Let PyTorch's allocator take no more of a GPU than this; None, or a CPU, is left alone."""
    if device.type != "cuda" or limit_bytes is None:
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total))
