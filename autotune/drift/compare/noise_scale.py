"""The gradient noise scale: how many samples it takes until a gradient is as much signal as noise.

    |G|² = (B |g_B|² - b |g_b|²) / (B - b)        S = (|g_b|² - |g_B|²) / (1/b - 1/B)        B_noise = S / |G|²

g_b is the gradient of a window of b samples, |g_b|² its mean over M windows, g_B their mean with B = M b samples. Both
estimates are unbiased, their ratio is not (McCandlish et al. 2018, arXiv 1812.06162, appendix A.1).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autotune.drift.compare.gradient_rows import RowLayout
from autotune.drift.compare.moments import measure_spread

_FEWEST_WINDOWS = 4


def gradient_noise_scale(rows: NDArray[np.floating], layers: RowLayout, *, batch_size: int) -> float | None:
    """Return B_noise in samples, from the gradients of windows at the same weights.

    Args:
        rows: gradient of each window, `[windows, columns]`.
        layers: what the columns are.
        batch_size: samples per window, b.

    Returns:
        S / |G|² = b · variance / (|mean|² - variance / M), with the unbiased total variance over the windows: the
        formula above for B = M b. None for fewer than 4 windows, when |G|² is not positive because the gradient is
        drowned in noise, and when a value is not finite.

    Raises:
        ValueError: the batch size is not positive, or the rows do not have the layers' columns.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
    if rows.ndim != 2 or rows.shape[1] != int(layers.widths.sum()):
        raise ValueError(f"rows of shape {rows.shape} do not have the layers' {int(layers.widths.sum())} columns")
    if len(rows) < _FEWEST_WINDOWS or not np.isfinite(rows).all():
        return None
    spread = measure_spread(rows, layers).sum()
    squared_gradient = float(spread.true_mean_square[0])
    if not squared_gradient > 0.0:
        return None
    noise_scale = batch_size * float(spread.variance[0]) / squared_gradient
    return noise_scale if math.isfinite(noise_scale) else None


def predicted_samples_ratio(noise_scale: float, *, batch_size: int, factor: float) -> float:
    """Return how many times the samples a batch `factor` times as large needs for the same progress.

    (phi + factor · B) / (phi + B), with the gradient noise scale phi and the batch size B, both in samples: the inverse
    ratio of statistical efficiencies in Pollux (Qiao et al., OSDI 2021). It is a prediction, and no evidence.

    Raises:
        ValueError: a negative or infinite noise scale, or a batch size or factor that is not positive.
    """
    if not 0.0 <= noise_scale < math.inf:
        raise ValueError(f"noise_scale is {noise_scale}: it must be finite and not negative")
    if batch_size < 1 or not 0.0 < factor < math.inf:
        raise ValueError(f"batch_size is {batch_size} and factor {factor}: both must be positive")
    return (noise_scale + factor * batch_size) / (noise_scale + batch_size)
