"""What the driver says of one GPU at one moment. An index in, `GpuState` out.

NVML stays open between two readings: opening it takes longer than many a training step.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from autotune.machine.nvml import (
    NvmlFailure,
    list_devices,
    open_nvml,
    read_optional,
    read_visible_devices,
    walk_visible,
)
from autotune.records.measurement import GpuState

# Numbers of nvml.h, because bindings differ in the names they have.
CLOCK_SM = 1
_TEMPERATURE_GPU = 0
_SLOWDOWNS = {
    "power-cap": 0x04,  # SwPowerCap
    "hardware": 0x08 | 0x80,  # HwSlowdown, HwPowerBrakeSlowdown
    "thermal": 0x20 | 0x40,  # SwThermalSlowdown, HwThermalSlowdown
}
"""Reasons for a lower clock; the other bits (idle, clocks set by the user, sync boost, display) are no slowdown."""


class GpuWatch:
    """Keeps NVML open and reads the state of one GPU; every method answers None once the driver fails."""

    def __init__(self, index: int = 0) -> None:
        """Open NVML and find the GPU; without one, or without a working driver, there is nothing to read.

        Args:
            index: number of the GPU among those CUDA shows. Unlike GPUs are counted as CUDA counts them only under
                CUDA_DEVICE_ORDER=PCI_BUS_ID.
        """
        self._open = ExitStack()
        self._nvml: Any = None
        self._handle: Any = None
        visible = read_visible_devices()
        if visible == ():
            return
        try:
            with ExitStack() as opening:
                nvml = opening.enter_context(open_nvml())
                shown = [device for _, device in walk_visible(nvml, list_devices(nvml), visible)]
                device = shown[index] if 0 <= index < len(shown) else None
                if device is not None and device.error is None:
                    self._nvml, self._handle = nvml, device.chip
                    self._open = opening.pop_all()
        except NvmlFailure:
            pass  # The probe has said why; a training is timed all the same.

    def read(self) -> GpuState | None:
        """Return clock (MHz), power (watts), temperature (degrees Celsius) and slowdowns of this moment.

        Of a slice of a GPU (MIG) they are those of the whole chip, which its slices share.
        What the GPU does not tell is None; slowdowns that it does not tell are none. Without any answer the whole is
        None, and the driver is not asked again.
        """
        if self._nvml is None:
            return None
        try:
            state = read_state(self._nvml, self._handle)
        except self._nvml.NVMLError:
            state = None
        if state is None:
            self.close()
        return state

    def close(self) -> None:
        """Let go of NVML; nothing when that has happened already."""
        self._nvml = self._handle = None
        self._open.close()


def read_state(nvml: Any, handle: Any) -> GpuState | None:
    """Return the state, None when the GPU tells nothing.

    Args:
        nvml: the open bindings.
        handle: of the chip.

    Raises:
        pynvml.NVMLError: the GPU fell off the bus or needs a reset.
    """
    clock_mhz = read_optional(nvml, "nvmlDeviceGetClockInfo", handle, CLOCK_SM)
    power_milliwatts = read_optional(nvml, "nvmlDeviceGetPowerUsage", handle)
    temperature = read_optional(nvml, "nvmlDeviceGetTemperature", handle, _TEMPERATURE_GPU)
    reasons = _read_clock_reasons(nvml, handle)
    if clock_mhz is None and power_milliwatts is None and temperature is None and reasons is None:
        return None
    return GpuState(
        sm_clock_mhz=clock_mhz,
        power_watts=None if power_milliwatts is None else power_milliwatts / 1000,
        temperature_celsius=temperature,
        slowdowns=tuple(name for name, bits in _SLOWDOWNS.items() if (reasons or 0) & bits),
    )


def _read_clock_reasons(nvml: Any, handle: Any) -> int | None:
    """Return why the clock is what it is, as bits; None when neither the newer nor the older call answers."""
    # A new binding has the newer call even where the driver beneath does not, so the older one is tried after it.
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        reasons: int | None = read_optional(nvml, name, handle)
        if reasons is not None:
            return reasons
    return None
