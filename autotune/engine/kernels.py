"""Knobs `attention_backend` and `cudnn_benchmark`: which kernels PyTorch may pick."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from autotune.engine.device import choose_device, on_accelerator
from autotune.engine.precision import read_matmul_precision
from autotune.records.config import TrainConfig

_ATTENTION_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@contextmanager
def attention_backend(config: TrainConfig) -> Iterator[None]:
    """Restrict scaled_dot_product_attention to one kernel; auto leaves the choice to PyTorch.

    A kernel that cannot serve a call makes PyTorch raise RuntimeError in the forward pass.
    """
    backend = _ATTENTION_BACKENDS.get(config.attention_backend)
    with nullcontext() if backend is None else sdpa_kernel(backend):
        yield


def list_attention_kernels() -> list[SDPBackend]:
    """Return the kernels that scaled_dot_product_attention may choose from."""
    cuda = torch.backends.cuda
    switches: dict[SDPBackend, Callable[[], bool]] = {
        SDPBackend.MATH: cuda.math_sdp_enabled,
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled,
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled,
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled,
    }
    return [kernel for kernel, is_allowed in switches.items() if is_allowed()]


@contextmanager
def cudnn_benchmark(config: TrainConfig) -> Iterator[None]:
    """Let cuDNN time its convolution algorithms for each new input shape."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def keep_switches(baseline: TrainConfig) -> TrainConfig:
    """Return a workload's settings with what its module has switched on by itself: the engine would put that back."""
    return read_switches(baseline, choose_device("auto"))


def read_switches(baseline: TrainConfig, device: torch.device) -> TrainConfig:
    """Return settings with what is switched on in this process where they have PyTorch's defaults."""
    if baseline.matmul_precision == TrainConfig().matmul_precision:
        baseline = baseline.replace(matmul_precision=read_matmul_precision(device))
    if not on_accelerator(device):
        return baseline
    return baseline.replace(cudnn_benchmark=baseline.cudnn_benchmark or torch.backends.cudnn.benchmark)
