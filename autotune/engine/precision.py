"""Knobs `precision` and `matmul_precision`: autocast, loss scaling, how float32 matrix products are computed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from autotune.records.config import MatmulPrecision, TrainConfig

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_DEVICES = ("cpu", "cuda")
_NEWER = "fp32_precision"
"""Name of PyTorch's newer switch, of each device's products."""


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the context of the forward pass: autocast to the config's precision, or nothing for fp32."""
    dtype = _AUTOCAST_DTYPES.get(config.precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def build_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a loss scaler for fp16, whose gradients underflow without one; None for every other precision."""
    return torch.amp.GradScaler(device.type) if config.precision == "fp16" else None


def read_matmul_precision(device: torch.device) -> MatmulPrecision:
    """Return how a device computes float32 matrix products now, by whichever of PyTorch's two switches.

    A GPU has one arithmetic of fewer digits, TF32: there `medium` is `high`.
    """
    # The older switch cannot be read once the newer one (2.9) was set, as PyTorch's own documentation now advises.
    newer = {"tf32": "high", "bf16": "medium", "ieee": "highest"}.get(
        getattr(_find_switch(device.type), _NEWER, "none")
    )
    precision = newer or _read_older_switch()
    return "high" if device.type == "cuda" and precision == "medium" else cast(MatmulPrecision, precision)


@contextmanager
def matmul_precision(config: TrainConfig) -> Iterator[None]:
    """Compute float32 matrix products as a config has it, and leave both of PyTorch's switches as they were."""
    before = _read_older_switch()
    newer = [(switch, getattr(switch, _NEWER)) for switch in map(_find_switch, _DEVICES) if hasattr(switch, _NEWER)]
    torch.set_float32_matmul_precision(config.matmul_precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        for switch, precision in newer:
            setattr(switch, _NEWER, precision)


def _find_switch(device: str) -> Any:
    backend: Any = torch.backends.cuda if device == "cuda" else torch.backends.mkldnn
    return getattr(backend, "matmul", None)


def _read_older_switch() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer switch was set
        return "highest"
