"""Knobs `precision` and `allow_tf32`: autocast, loss scaling, TF32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from autotune.records.config import TrainConfig

_AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(config: TrainConfig, device: torch.device) -> torch.autocast:
    """Return the context of the forward pass: autocast to the config's precision, or nothing for fp32."""
    dtype = _AUTOCAST_DTYPES.get(config.precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def build_scaler(config: TrainConfig, device: torch.device) -> torch.amp.GradScaler | None:
    """Return a loss scaler for fp16, whose gradients underflow without one; None for every other precision."""
    return torch.amp.GradScaler(device.type) if config.precision == "fp16" else None


def allows_tf32() -> bool:
    """Return whether float32 matrix products on a GPU may use TF32 now, by whichever of PyTorch's two switches."""
    # The older switch cannot be read once the newer one (2.9) was set, as PyTorch's own documentation now advises.
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", "none")
    if precision != "none":
        return bool(precision == "tf32")
    return torch.get_float32_matmul_precision() != "highest"


@contextmanager
def tf32(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Allow or forbid TF32 in float32 matrix products on a GPU; nothing is touched on a CPU."""
    if device.type != "cuda":
        yield
        return
    matmul = torch.backends.cuda.matmul
    newer = getattr(matmul, "fp32_precision", None)
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # only the newer switch was set
        before = "highest"
    torch.set_float32_matmul_precision("high" if config.allow_tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
        if newer is not None:
            matmul.fp32_precision = newer
