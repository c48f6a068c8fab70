"""A machine on paper: file trees for /proc and /sys, and an NVML with planted GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def mount(point: str, kind: str, options: str = "rw", top: str = "/") -> str:
    return f"31 23 0:28 {top} {point} rw,nosuid shared:9 - {kind} {kind} {options}\n"


V2 = mount("/sys/fs/cgroup", "cgroup2")
V1 = mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", "rw,cpu,cpuacct") + mount(
    "/sys/fs/cgroup/memory", "cgroup", "rw,memory"
)


LOST, UNKNOWN, NOT_SUPPORTED = pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_UNKNOWN, pynvml.NVML_ERROR_NOT_SUPPORTED


class Gpu(SimpleNamespace):
    """A GPU of the fake driver: an attribute that is an int error raises, one that is missing is not supported."""

    def __init__(self, name: str, uuid: str, **facts: Any) -> None:
        defaults = {
            "memory": SimpleNamespace(total=80 * GIB, free=79 * GIB),
            "capability": (9, 0),
            "power": 700_000,
            "compute": [],
            "graphics": [],
            "clock": 1_980,
            "drawn": 452_250,
            "temperature": 61,
            "reasons": 0,
            "old_reasons": 0,
            "handle_error": None,
        }
        super().__init__(name=name, uuid=uuid, **{**defaults, **facts})


class FakeNvml(ModuleType):
    """NVML with planted GPUs; call number `fail_on_call` and every later one raises `failure`."""

    NVMLError = pynvml.NVMLError

    def __init__(self, gpus: list[Gpu], *, fail_on_call: int = 0, failure: int = UNKNOWN) -> None:
        super().__init__("pynvml")
        self.gpus, self.fail_on_call, self.failure = gpus, fail_on_call, failure
        self.calls, self.is_open = 0, False

    def _call(self, value: Any = None) -> Any:
        self.calls += 1
        if self.fail_on_call and self.calls >= self.fail_on_call:
            raise pynvml.NVMLError(self.failure)
        if isinstance(value, pynvml.NVMLError):
            raise value
        return value

    def nvmlInit(self) -> None:
        self._call()
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self._call()
        self.is_open = False

    def nvmlSystemGetDriverVersion(self) -> Any:
        return self._call(b"580.95.05")

    def nvmlDeviceGetCount(self) -> Any:
        return self._call(len(self.gpus))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._call(self.gpus[index].handle_error or self.gpus[index])

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        found = [slice_ for gpu in self.gpus for slice_ in getattr(gpu, "slices", []) if slice_.uuid == uuid]
        return self._call(found[0] if found else pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND))

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> Any:
        return self._call(gpu.uuid)

    def nvmlDeviceGetName(self, gpu: Gpu) -> Any:
        return self._call(gpu.name)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return self._call(gpu.memory)

    def nvmlDeviceGetCudaComputeCapability(self, gpu: Gpu) -> Any:
        return self._call(gpu.capability)

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: Gpu) -> Any:
        return self._call(gpu.power)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> Any:
        return self._call(
            [SimpleNamespace(pid=pid) for pid in gpu.compute] if isinstance(gpu.compute, list) else gpu.compute
        )

    def nvmlDeviceGetGraphicsRunningProcesses(self, gpu: Gpu) -> Any:
        return self._call([SimpleNamespace(pid=pid) for pid in gpu.graphics])

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._call(gpu.clock)

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> Any:
        return self._call(gpu.drawn)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._call(gpu.temperature)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> Any:
        return self._call(gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> Any:
        return self._call(gpu.old_reasons)


def two_unlike_gpus() -> list[Gpu]:
    big = Gpu("NVIDIA H200", "GPU-aaaa-1111", compute=[101, 102, os.getpid()], graphics=[102, 103])
    small = Gpu(
        b"NVIDIA RTX A2000",
        b"GPU-aabb-2222",
        memory=SimpleNamespace(total=12 * GIB, free=GIB),
        capability=(8, 6),
        power=70_500,
    )
    return [big, small]
