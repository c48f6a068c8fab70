"""The device of a training: found, refused where it is not supported, and asked by one name whatever its kind.

Only here is `torch.accelerator` (since PyTorch 2.6) or a device's own module (`torch.get_device_module`) asked what any
accelerator has. The memory functions of `torch.accelerator` are newer (2.9); a device's own module has them in every
release supported. What only NVIDIA's GPUs have is asked of `torch.cuda` where it is needed.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from autotune.errors import MachineError, UsageError
from autotune.records.trial import DEVICE_VARIABLE

SUPPORTED = ("cpu", "cuda")
"""Types of devices; AMD's GPUs are `cuda` to PyTorch too."""

_NAMES = {"mps": "Apple's GPU (mps)", "xpu": "an Intel GPU (xpu)"}


def choose_device(name: str) -> torch.device:
    """Return the device for `auto`, `cpu` or `cuda`.

    `auto` is the machine's accelerator, else the CPU, unless the environment asks for the CPU.

    Raises:
        MachineError: the accelerator is of a type that is not supported.
        UsageError: the environment asks for something else than a device's name.
    """
    if name != "auto":
        return torch.device(name)
    asked = os.environ.get(DEVICE_VARIABLE) or "auto"
    if asked not in ("auto", "cpu"):
        raise UsageError(f"{DEVICE_VARIABLE}={asked}: no device to choose", hint="auto or cpu")
    available = asked != "cpu" and torch.accelerator.is_available()
    found = torch.accelerator.current_accelerator() if available else None  # of none, PyTorch 2.6 raises an error
    if found is None:
        return torch.device("cpu")
    require_supported(found)
    return found


def require_supported(device: torch.device, *, of_script: bool = False) -> None:
    """Refuse a device that nothing here has been written for: its times and its memory would be read wrongly.

    Args:
        device: where a training is, or would be.
        of_script: a script's model is there, not what this machine offers to a workload.

    Raises:
        MachineError: it is neither a CPU nor a GPU of the `cuda` type.
    """
    if device.type not in SUPPORTED:
        where = "the script's model is on" if of_script else "this machine has"
        raise MachineError(
            f"{where} {_NAMES.get(device.type, f'an accelerator of type {device.type}')}, which is not supported: "
            "autotune measures on NVIDIA GPUs, on AMD GPUs by ROCm, and on CPUs",
            hint="have the script train on the CPU" if of_script else "to tune and to train on the CPU: --device cpu",
        )


def on_accelerator(device: torch.device) -> bool:
    """Return whether a device works by itself, has memory of its own, and must be waited for."""
    return device.type != "cpu"


def count_accelerators() -> int:
    """Return how many a training may use; 0 where it is for the CPU.

    Raises:
        MachineError: as of `choose_device`, and `UsageError`.
    """
    return torch.accelerator.device_count() if on_accelerator(choose_device("auto")) else 0


def synchronize(device: torch.device | None) -> None:
    """Wait until a device has done everything it was given; nothing on a CPU.

    Args:
        device: None for the current accelerator.
    """
    if device is None or on_accelerator(device):
        torch.accelerator.synchronize(device)


def limit_device_memory(limit_bytes: int | None, device: torch.device) -> None:
    """Let PyTorch's allocator take no more of a GPU than this; None, or a CPU, is left alone."""
    if on_accelerator(device) and limit_bytes is not None:
        module = _module(device)
        index = module.current_device() if device.index is None else device.index  # it takes no device without one
        module.set_per_process_memory_fraction(min(1.0, limit_bytes / read_device_memory(device)[1]), index)


def read_device_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of an accelerator that nobody uses, and all of its bytes."""
    free, total = _module(device).mem_get_info(device)
    return int(free), int(total)


def usable_bytes(device: torch.device) -> int | None:
    """Return what a process alone on a device could hold there: free now, and what this one holds; None on a CPU."""
    return read_device_memory(device)[0] + reserved_bytes(device) if on_accelerator(device) else None


def reserved_bytes(device: torch.device) -> int:
    """Return what PyTorch's allocator holds of a device now, cached blocks included; 0 on a CPU."""
    return int(_module(device).memory_reserved(device)) if on_accelerator(device) else 0


def peak_reserved_bytes(device: torch.device) -> int | None:
    """Return the most it held since `reset_peak`; None on a CPU."""
    return int(_module(device).max_memory_reserved(device)) if on_accelerator(device) else None


def reset_peak(device: torch.device) -> None:
    """Forget the most it held so far; nothing on a CPU."""
    if on_accelerator(device):
        _module(device).reset_peak_memory_stats(device)


def release_cached(device: torch.device) -> None:
    """Hand back what the allocator keeps for later; nothing on a CPU."""
    if on_accelerator(device):
        _module(device).empty_cache()


def count_allocation_retries(device: torch.device) -> int:
    """Return how often the allocator has given all its cache back to serve a request; 0 on a CPU."""
    return int(_module(device).memory_stats(device).get("num_alloc_retries", 0)) if on_accelerator(device) else 0


def read_device_generator(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's random generator, a tensor of the host's; None on a CPU."""
    return _module(device).get_rng_state(device) if on_accelerator(device) else None


def read_generator(device: torch.device) -> Tensor:
    """Return the state of the generator that a model on a device draws from, a tensor of the host's."""
    own = read_device_generator(device)
    return torch.get_rng_state() if own is None else own


def restore_device_generator(state: Tensor | None, device: torch.device) -> None:
    """Put an accelerator's random generator back to what `read_device_generator` returned."""
    if state is not None:
        _module(device).set_rng_state(state, device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
