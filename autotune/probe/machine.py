"""The machine as the probe's process finds it: its limits, its memory, its arithmetic, what slows every training."""

from __future__ import annotations

import os
import time
from typing import Literal

import torch
from torch import nn

from autotune.engine.device import count_accelerators, on_accelerator, read_device_memory
from autotune.engine.threads import intra_op_threads
from autotune.machine.hardware import read_hardware
from autotune.machine.limits.all_reduce import measure_all_reduce
from autotune.machine.limits.device import measure_ceilings, spot_check_ceilings
from autotune.measure.memory import resident_bytes
from autotune.probe.time_shares import ProbePolicy
from autotune.records.ceilings import Ceilings
from autotune.records.config import Precision, TrainConfig
from autotune.records.facts import Hazard, TargetFacts
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus


def probe_machine(spec: TrialSpec, device: torch.device, *, started: float) -> TrialResult:
    """Return the machine's limits."""
    return TrialResult(
        spec=spec,
        status=TrialStatus.COMPLETED,
        ceilings=find_ceilings(spec, device),
        elapsed_seconds=time.monotonic() - started,
    )


def find_ceilings(spec: TrialSpec, device: torch.device) -> Ceilings:
    """Return the machine's limits: those known already unless they are beaten, else measured in the time granted.

    On a CPU they are those of all its usable CPUs together, whatever the training uses of them.
    """
    kind: Literal["cpu", "cuda"] = "cuda" if device.type == "cuda" else "cpu"
    known, ranks = spec.ceilings, _count_ranks(spec, kind)
    with intra_op_threads(TrainConfig(num_threads=_count_threads())):
        if known is None or known.device != kind or not spot_check_ceilings(device, known):
            known = measure_ceilings(device, budget_seconds=spec.limits.ceilings_seconds).replace(device=kind)
    if ranks < 2 or spec.limits.ceilings_seconds < ProbePolicy.least_all_reduce_seconds:
        return known
    return known.replace(ranks=ranks, all_reduce_bytes_per_second=measure_all_reduce(ranks, device_type=kind))


def _count_threads() -> int:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdigit() and int(asked) > 0 else read_hardware().usable_cpu_count


def _count_ranks(spec: TrialSpec, device: str) -> int:
    """Return the processes that a training, or without one this machine's GPUs, would exchange gradients between."""
    if spec.target.script is not None:
        ranks, here = (os.environ.get(name, "") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        return (
            int(ranks) if ranks.isdigit() and here in ("", ranks) else 1
        )  # of several machines only this one is known
    return max(1, count_accelerators()) if spec.purpose == "machine" and device == "cuda" else 1


def used_bytes(device: torch.device) -> int:
    """Return the memory in use: of the whole device, or of this process on a CPU."""
    if on_accelerator(device):
        free, total = read_device_memory(device)
        return total - free
    return resident_bytes()


def memory_limit(device: torch.device) -> int:
    """Return what a training may use: of the device, or of the host on a CPU."""
    if on_accelerator(device):
        return read_device_memory(device)[1]
    return read_hardware().memory_limit_bytes


def room_for_trying(device: torch.device) -> int:
    """Return what a probe may use to try more than the user's own settings: half of what nobody uses, and its own."""
    if on_accelerator(device):
        free, total = read_device_memory(device)
        return total - free // 2
    hardware = read_hardware()
    return min(hardware.memory_limit_bytes, resident_bytes() + hardware.memory_available_bytes // 2)


def list_precisions(facts: TargetFacts) -> tuple[Precision, ...]:
    """Return the precisions whose memory is of interest on this device."""
    extra: tuple[Precision, ...] = ("bf16",) if facts.supports_bf16 else ("fp16",) if facts.device == "cuda" else ()
    return tuple(dict.fromkeys((facts.baseline.precision, "fp32", *extra)))


def supports_bf16(device: torch.device) -> bool:
    """Return whether bf16 autocast runs on a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ones = torch.ones(8, 8, requires_grad=True)
            nn.functional.linear(ones, ones).sum().backward()  # type: ignore[no-untyped-call]
    except RuntimeError:
        return False
    return True


def find_hazards() -> tuple[Hazard, ...]:
    """Return what makes every training of this process slow."""
    found: dict[Hazard, bool] = {
        "anomaly-detection": torch.is_anomaly_enabled(),
        "deterministic-algorithms": torch.are_deterministic_algorithms_enabled(),
        "launch-blocking": os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"),
    }
    return tuple(name for name, is_on in found.items() if is_on)
