"""How fast a CPU computes convolutions of images: by kernels of their own, which can be faster than its products.

    images (2 a thread, 128 channels, 28 x 28, channels last) ── 3 x 3, 128 channels ──▶ images as large

On AMD's CPUs oneDNN's convolutions use AVX-512 where MKL's products keep to AVX2. A GPU's products are its fastest, on
units that its convolutions use as well: there nothing is measured.
"""

from __future__ import annotations

import torch
from torch.nn.functional import conv2d

from autotune.machine.limits.products import DTYPES
from autotune.machine.limits.repetitions import best_seconds

_CHANNELS = 128
_EDGE = 28
_KERNEL = 3
_IMAGES_PER_THREAD = 2


def measure_convolution(name: str, share_seconds: float) -> float:
    """Return the best rate of one convolution on the CPU, in operations per second.

    Counted directly: 2 N C_out C_in K^2 H W operations.

    Args:
        name: of the arithmetic.
        share_seconds: wall time to spend, about; a few are made also when it is none.

    Raises:
        RuntimeError: there is no kernel for this arithmetic, or no memory left.
    """
    images = _IMAGES_PER_THREAD * torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    source, kernel = (
        torch.randn(shape, generator=generator).to(DTYPES[name], memory_format=torch.channels_last)
        for shape in ((images, _CHANNELS, _EDGE, _EDGE), (_CHANNELS, _CHANNELS, _KERNEL, _KERNEL))
    )
    with torch.no_grad():
        conv2d(source, kernel, padding=_KERNEL // 2)
        seconds = best_seconds(lambda: conv2d(source, kernel, padding=_KERNEL // 2), source.device, share_seconds)
    return 2.0 * images * _CHANNELS**2 * _KERNEL**2 * _EDGE**2 / seconds
