"""What is wrong with the GPUs: held clocks, somebody else's memory and work, unlike or divided ones; pure."""

from __future__ import annotations

from collections.abc import Iterator

from autotune.format import count, format_bytes, format_share
from autotune.probe.analysis.issues.policy import IssuePolicy
from autotune.records.hardware import GpuInfo, HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Issue

_SLOWDOWNS = {
    "hardware": (
        "by the hardware itself: too hot, or too little power",
        "check its cooling, power cables and power supply",
    ),
    "thermal": ("because it is too hot", "cool it better: air flow, fans, room temperature"),
    "power-cap": (
        "by its power limit",
        "raise the limit where that is allowed (nvidia-smi -pl); a full GPU at its limit is no fault",
    ),
}


def find_gpu_issues(hardware: HardwareInfo, measurement: Measurement | None, policy: IssuePolicy) -> Iterator[Issue]:
    """Yield what is wrong with the GPUs.

    Args:
        hardware: the machine.
        measurement: blocks in which the driver was watched; None without.
        policy: from where on something is an issue.
    """
    yield from _look_at_clocks(hardware, measurement)
    for index, gpu in enumerate(hardware.gpus):
        yield from _look_at_sharing(index, gpu, policy)
        yield from _look_at_partition(index, gpu)
    names = list(dict.fromkeys(gpu.name for gpu in hardware.gpus))
    if len(names) > 1:
        yield Issue(
            name="unlike-gpus",
            sentence=f"the GPUs are unlike ({', '.join(names)}): ranks that work in step wait for the slowest",
            remedy="set CUDA_VISIBLE_DEVICES to GPUs of one kind",
        )


def _look_at_clocks(hardware: HardwareInfo, measurement: Measurement | None) -> Iterator[Issue]:
    states = [block.interference.gpu for block in measurement.blocks if block.interference] if measurement else []
    for reason, (cause, remedy) in _SLOWDOWNS.items():
        where = []
        if gpus := [str(index) for index, gpu in enumerate(hardware.gpus) if reason in gpu.slowdowns]:
            where.append(f"on GPU {', '.join(gpus)} before the training")
        if held := sum(state is not None and reason in state.slowdowns for state in states):
            where.append(f"in {held} of {count(len(states), 'timed block')}")
        if where:
            yield Issue(
                name="hardware-slowdown" if reason == "hardware" else reason,
                sentence=f"the clock is held down {cause}: {' and '.join(where)}",
                remedy=remedy,
            )


def _look_at_sharing(index: int, gpu: GpuInfo, policy: IssuePolicy) -> Iterator[Issue]:
    taken = gpu.memory_total_bytes - gpu.memory_free_bytes
    busy = gpu.utilization_fraction or 0.0
    if gpu.other_processes > 0:
        memory = f" ({format_bytes(taken)} of its memory in use)" if taken > 0 else ""
        yield Issue(
            name="gpu-shared",
            sentence=f"{count(gpu.other_processes, 'other process', 'other processes')} on GPU {index}{memory}: "
            "timings depend on what they do",
            remedy="end them, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )
    elif taken > policy.gpu_taken_fraction * gpu.memory_total_bytes:
        yield Issue(
            name="gpu-memory",
            sentence=f"{format_bytes(taken)} of {format_bytes(gpu.memory_total_bytes)} on GPU {index} are in use "
            "before the training starts",
            remedy="look for processes of other users or containers (nvidia-smi), or choose another GPU",
        )
    if busy > policy.gpu_busy_fraction:
        yield Issue(
            name="gpu-busy",
            sentence=f"GPU {index} was busy {format_share(busy)} of the time before the training started",
            remedy="end what runs on it, or choose another GPU with CUDA_VISIBLE_DEVICES",
        )


def _look_at_partition(index: int, gpu: GpuInfo) -> Iterator[Issue]:
    if gpu.mig == "on":
        yield Issue(
            name="mig",
            sentence=f"GPU {index} is divided (MIG): a training gets one slice of it, never the whole",
            remedy="name a slice in CUDA_VISIBLE_DEVICES, or have MIG switched off",
        )
    elif gpu.mig == "slice":
        yield Issue(
            name="mig",
            sentence=f"GPU {index} is a slice of one (MIG): what is found here holds for slices of this size only",
            remedy="probe and search on the size you will train on",
        )
