"""The measured limits of a device."""

from __future__ import annotations

from typing import Literal

from autotune.records.codec import Record


class MatmulRate(Record):
    """Measured rate of a square matrix product."""

    dtype: Literal["fp32", "tf32", "fp32-medium", "bf16", "fp16"]
    """Arithmetic; fp32-medium is what a CPU makes of float32 at `matmul_precision` medium."""
    flops_per_second: float
    """Floating-point operations per second of the best few products, multiply and add counted apart."""
    sustained_flops_per_second: float | None = None
    """The same over the last half of a longer run, when clocks have come down; None when not measured."""
    convolution_flops_per_second: float | None = None
    """The same of 3 x 3 convolutions of images, which have kernels of their own; None when not measured."""
    emulated: bool = False
    """The device does not have this arithmetic: far slower than fp32, kept to say so and no limit of anything."""

    def of_convolutions(self) -> MatmulRate:
        """Return the rates of convolutions where they are the faster products, what is kept up in proportion."""
        convolutions, kept_up = self.convolution_flops_per_second, self.sustained_flops_per_second
        if convolutions is None or self.emulated or not convolutions > self.flops_per_second > 0:
            return self
        return self.replace(
            flops_per_second=convolutions,
            sustained_flops_per_second=None if kept_up is None else convolutions * kept_up / self.flops_per_second,
        )


class Ceilings(Record):
    """Measured limits of the device."""

    device: Literal["cpu", "cuda"] | None = None
    """What they are the limits of; None when not said."""
    matmul: tuple[MatmulRate, ...] = ()
    """Rates for each arithmetic the device ran, emulated ones too."""
    memory_bytes_per_second: float | None = None
    """Large copy, read plus write traffic; None when not measured, as below."""
    triad_bytes_per_second: float | None = None
    """a + s*b into c on arrays of the same size: two reads and a write."""
    copy_to_device_bytes_per_second: float | None = None
    """Page-locked host memory to the device; None without a device, as the next three."""
    copy_from_device_bytes_per_second: float | None = None
    """Device to page-locked host memory."""
    pageable_to_device_bytes_per_second: float | None = None
    """Ordinary host memory to the device."""
    pageable_from_device_bytes_per_second: float | None = None
    """Device to ordinary host memory."""
    launch_seconds: float | None = None
    """One operation on a tiny tensor, called from Python, one after the other without waiting."""
    synchronize_seconds: float | None = None
    """Waiting for a device that has nothing to do; None on a CPU."""
    all_reduce_bytes_per_second: float | None = None
    """Bus bandwidth of an all-reduce over the ranks of this training; None with one rank."""
    ranks: int = 1
    """Processes it was measured between."""

    def find_rate(self, dtype: str) -> MatmulRate | None:
        """Return what was measured of one arithmetic, emulated or not; None when it was not measured."""
        return next((rate for rate in self.matmul if rate.dtype == dtype), None)

    def flops_per_second(self, dtype: str) -> float | None:
        """Return the best measured rate for one arithmetic; None when it was not measured or is emulated."""
        rate = self.find_rate(dtype)
        return None if rate is None or rate.emulated else rate.flops_per_second

    def sustained_flops_per_second(self, dtype: str) -> float | None:
        """Return the rate one arithmetic keeps up, else its best one; None as for `flops_per_second`."""
        rate = self.find_rate(dtype)
        return None if rate is None or rate.emulated else rate.sustained_flops_per_second or rate.flops_per_second

    def of_convolutions(self) -> Ceilings:
        """Return the limits of a model of convolutions: a rate is theirs where they are the faster products."""
        return self.replace(matmul=tuple(rate.of_convolutions() for rate in self.matmul))
