"""What `torch._C` of a CUDA build has, for the fake device: `torch.cuda` itself, in Python, is torch's own.

Only what autotune and the parts of torch below it ask for is here; anything else is an AttributeError, as it should be.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

CUDA = 1
"""c10::DeviceType::CUDA."""
_STATISTICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)


@dataclass(frozen=True)
class DeviceProperties:
    """What `torch.cuda.get_device_properties` returns, of a card that is none."""

    total_memory: int
    name: str = "Fake GPU"
    major: int = field(default_factory=lambda: int(os.environ.get("FAKE_GPU_CAPABILITY", "8.0").split(".")[0]))
    minor: int = field(default_factory=lambda: int(os.environ.get("FAKE_GPU_CAPABILITY", "8.0").split(".")[1]))
    multi_processor_count: int = 16
    L2_cache_size: int = 4 * 2**20
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    max_threads_per_multi_processor: int = 2048
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    uuid: str = "00000000-0000-0000-0000-000000000000"
    gcnArchName: str = "Fake GPU"


def install(torch_c: ModuleType, backend: ModuleType) -> None:
    """Add the bindings, before `torch.cuda` is imported.

    Args:
        torch_c: `torch._C`, just loaded.
        backend: the extension.
    """
    for name, value in {
        **_devices(torch_c, backend),
        **_memory(torch_c, backend),
        **_streams(torch_c, backend),
        **_storages(torch_c),
    }.items():
        setattr(torch_c, name, value)


def _devices(torch_c: Any, backend: Any) -> dict[str, Any]:
    def initialize() -> None:
        cuda: Any = sys.modules["torch.cuda"]
        cuda.default_generators = tuple(backend.default_generator(i) for i in range(backend.device_count()))
        cuda._get_device_properties = lambda device: DeviceProperties(backend.total_bytes())

    def exchange(device: int) -> int:
        return int(torch_c._accelerator_exchangeDevice(device)) if device >= 0 else -1

    def maybe_exchange(device: int) -> int:  # another function: torch.compile tells them apart
        return exchange(device)

    def scatter(tensor: Any, devices: list[int], sizes: list[int] | None, dim: int, _streams: Any) -> tuple[Any, ...]:
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
        return tuple(part.to(f"cuda:{device}") for part, device in zip(parts, devices, strict=True))

    return {
        "_has_cuda": True,
        "_cudart": _make_runtime(torch_c),
        "_CudaDeviceProperties": DeviceProperties,
        "_cuda_init": initialize,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_getDeviceCount": backend.device_count,
        "_cuda_getDevice": lambda: torch_c._accelerator_getDeviceIndex(),
        "_cuda_setDevice": lambda device: torch_c._accelerator_setDeviceIndex(device),
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": maybe_exchange,
        "_scatter": scatter,
        "_cuda_getArchFlags": lambda: "sm_80",
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_synchronize": lambda: torch_c._accelerator_synchronizeDevice(torch_c._accelerator_getDeviceIndex()),
        "_cuda_set_sync_debug_mode": backend.set_sync_debug_mode,
        "_cuda_get_sync_debug_mode": backend.sync_debug_mode,
    }


def _make_runtime(torch_c: Any) -> SimpleNamespace:
    return SimpleNamespace(
        cudaError=SimpleNamespace(success=0),
        cudaGetErrorString=str,
        cudaMemGetInfo=lambda device: torch_c._accelerator_getMemoryInfo(device),
    )


def _memory(torch_c: Any, backend: Any) -> dict[str, Any]:
    def tell_statistics(device: int) -> dict[str, Any]:
        told: dict[str, Any] = torch_c._accelerator_getDeviceStats(device)
        assert set(_STATISTICS) <= set(told)
        return told

    return {
        "_cuda_memoryStats": tell_statistics,
        "_cuda_resetPeakMemoryStats": lambda device: torch_c._accelerator_resetPeakStats(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: torch_c._accelerator_resetAccumulatedStats(device),
        "_cuda_emptyCache": lambda: torch_c._accelerator_emptyCache(),
        "_cuda_setMemoryFraction": backend.set_memory_fraction,
        "_cuda_getMemoryFraction": backend.memory_fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
    }


class Graph:
    """CUDA graphs are a GPU's alone."""

    def __new__(cls, *_: object, **__: object) -> Any:
        raise NotImplementedError("the fake GPU has no CUDA graphs")


def _streams(torch_c: Any, backend: Any) -> dict[str, Any]:
    def choose(stream_id: int, device_index: int, device_type: int) -> None:
        torch_c._accelerator_setDeviceIndex(device_index)
        backend.set_current_stream(stream_id, device_index)

    return {
        "_CudaStreamBase": _make_stream_class(torch_c),
        "_CudaEventBase": _make_event_class(torch_c),
        "_cuda_getCurrentStream": lambda device: (backend.current_stream_id(device), device, CUDA),
        "_cuda_getCurrentRawStream": backend.current_stream_id,
        "_cuda_getDefaultStream": lambda device: (0, device, CUDA),
        "_cuda_setStream": choose,
        "_CUDAGraph": Graph,
        "_graph_pool_handle": Graph,
        "_cuda_isCurrentStreamCapturing": lambda: False,
    }


def _make_stream_class(torch_c: Any) -> type:
    class CudaStreamBase(torch_c.Stream):  # type: ignore[misc]
        def __new__(cls, priority: int = 0, **of: int) -> Any:
            if of:
                return super().__new__(cls, **of)
            device = sys.modules["torch"].device("cuda", torch_c._accelerator_getDeviceIndex())
            return super().__new__(cls, device=device, priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return 0

    return CudaStreamBase


def _make_event_class(torch_c: Any) -> type:
    class CudaEventBase(torch_c.Event):  # type: ignore[misc]
        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            made = super().__new__(cls, device="cuda", enable_timing=enable_timing, blocking=blocking)
            made._inner = torch_c.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)
            return made

        # `torch.Event` compares with its own class alone, not with one that is derived from it.
        def record(self, stream: Any) -> None:
            self._inner.record(stream)

        def wait(self, stream: Any) -> None:
            self._inner.wait(stream)

        def query(self) -> bool:
            return bool(self._inner.query())

        def synchronize(self) -> None:
            self._inner.synchronize()

        def elapsed_time(self, end_event: Any) -> float:
            return float(self._inner.elapsed_time(end_event._inner))

        @property
        def cuda_event(self) -> int:
            return int(self._inner.event_id)

    return CudaEventBase


def _storages(torch_c: Any) -> dict[str, Any]:
    class StorageBase(torch_c.StorageBase):  # type: ignore[misc]
        def __new__(cls, *given: Any, **named: Any) -> Any:
            device = named.get("device")
            if not str(device).startswith("cuda"):
                return super().__new__(cls, *given, **named)
            torch: Any = sys.modules["torch"]
            return torch.empty(given[0], dtype=torch.uint8, device=device).untyped_storage()

    return {"StorageBase": StorageBase}
