"""The KNOBS table: what may be varied, what it does to the numbers, and why a value is ruled out on this machine.

A row turns the probe's facts into the values worth trying and the reason for each value that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autotune.records.config import KnobValue
from autotune.records.hardware import HardwareInfo
from autotune.records.probe import TargetFacts
from autotune.records.script import Numerics

Cost = Literal["restart", "environment", "compile"]

_MOST_MICRO_BATCH_SIZES = 6
_MOST_WORKERS = 16


@dataclass(frozen=True)
class Facts:
    """What the table may ask.

    Attributes:
        target: what the probe found about the target.
        hardware: the machine.
    """

    target: TargetFacts
    hardware: HardwareInfo

    @property
    def on_gpu(self) -> bool:
        """The target runs on a CUDA device."""
        return self.target.device == "cuda"


Choices = tuple[tuple[KnobValue, ...], dict[KnobValue, str]]
"""Values worth trying, and the reason for each value that is not."""


@dataclass(frozen=True)
class Knob:
    """One row of the table.

    Attributes:
        field: field of TrainConfig.
        numerics: exact (bit for bit), rounding (other order or width of arithmetic), semantic (another training).
        cost: what a change needs: a fresh process, one with another environment, or a compilation as well.
        choices: values worth trying for these facts, and why the others are not.
    """

    field: str
    numerics: Numerics
    cost: Cost
    choices: Callable[[Facts], Choices]


def _only(reason: str, *values: KnobValue) -> Choices:
    return (), dict.fromkeys(values, reason)


def _micro_batch_sizes(facts: Facts) -> Choices:
    baseline, model = facts.target.baseline, facts.target.model
    effective = baseline.effective_batch_size
    if facts.target.data.iterable:
        return _only("an iterable dataset may end inside a batch, and the effective batch must be held", effective // 2)
    divisors = [size for size in range(effective, 0, -1) if effective % size == 0]
    if model.has_batch_norm:
        reason = "BatchNorm normalises over the micro batch: another size is another model"
        return _only(
            reason, *(size for size in divisors[:_MOST_MICRO_BATCH_SIZES] if size != baseline.micro_batch_size)
        )
    return tuple(divisors[:_MOST_MICRO_BATCH_SIZES]), {}


def _accumulation_steps(facts: Facts) -> Choices:
    return (), {}  # follows from the micro batch size: the effective batch is held


def _precisions(facts: Facts) -> Choices:
    rates, target = facts.target.ceilings, facts.target
    allowed: list[KnobValue] = ["fp32"]
    reasons: dict[KnobValue, str] = {}
    if target.supports_bf16:
        allowed.append("bf16")
    else:
        reasons["bf16"] = f"bf16 autocast does not run on this {target.device}"
    bf16, fp16 = rates.flops_per_second("bf16"), rates.flops_per_second("fp16")
    if not target.scales_loss:
        reasons["fp16"] = "the script does not scale its loss, and fp16 gradients underflow without"
    elif facts.on_gpu:
        allowed.append("fp16")
    elif fp16 is None or not {"avx512_fp16", "amx_fp16", "asimdhp"} & set(facts.hardware.cpu_features):
        reasons["fp16"] = "this CPU has no fp16 arithmetic"
    elif target.supports_bf16 and bf16 is not None and bf16 >= fp16:
        rate = f"{bf16 / 1e9:.0f} GFLOP/s, fp16 at {fp16 / 1e9:.0f}"
        reasons["fp16"] = f"measured: bf16 products run at {rate}, and bf16 needs no loss scaling"
    else:
        allowed.append("fp16")
    return tuple(allowed), reasons


def _tf32(facts: Facts) -> Choices:
    if not facts.on_gpu:
        return _only("TF32 is arithmetic of NVIDIA GPUs", True)
    if facts.target.ceilings.flops_per_second("tf32") is None:
        return _only("this GPU has no TF32", True)
    return (False, True), {}


def _compile_modes(facts: Facts) -> Choices:
    modes: tuple[KnobValue, ...] = ("default", "max-autotune-no-cudagraphs")
    graphs: tuple[KnobValue, ...] = ("reduce-overhead", "max-autotune")
    if facts.on_gpu:
        return ("off", *modes, *graphs), {}
    without_graphs: dict[KnobValue, str] = dict.fromkeys(graphs, "it records CUDA graphs, and there is no CUDA device")
    if not facts.hardware.has_cpp_compiler:
        return ("off",), without_graphs | dict.fromkeys(modes, "torch.compile on a CPU needs a C++ compiler on PATH")
    return ("off", *modes), without_graphs


def _checkpointing(facts: Facts) -> Choices:
    if facts.target.model.checkpointable_blocks == 0:
        return _only("the model has no repeated blocks", "selective", "full")
    if facts.target.model.has_batch_norm:
        reason = "a recomputed block would update BatchNorm's running statistics twice a step"
        return _only(reason, "selective", "full")
    return ("off", "selective", "full"), {}


def _memory_formats(facts: Facts) -> Choices:
    if not facts.target.model.has_4d_convolution:
        return _only("the model has no 2-d convolution", "channels_last")
    return ("contiguous", "channels_last"), {}


def _optimizer_implementations(facts: Facts) -> Choices:
    optimizer = facts.target.optimizer
    works: tuple[KnobValue, ...] = optimizer.implementations
    others: list[KnobValue] = [name for name in ("for-loop", "foreach", "fused") if name not in works]
    reason = optimizer.reason or f"{optimizer.name} does not run it on this {facts.target.device}"
    return works, dict.fromkeys(others, reason)


def _cudnn_benchmark(facts: Facts) -> Choices:
    if not facts.on_gpu:
        return _only("cuDNN runs on NVIDIA GPUs", True)
    if not facts.target.model.has_4d_convolution:
        return _only("the model has no 2-d convolution", True)
    return (False, True), {}


def _attention_backends(facts: Facts) -> Choices:
    gpu_only: tuple[KnobValue, ...] = ("efficient", "cudnn")
    if not facts.target.model.calls_attention:
        return _only("the model never calls scaled_dot_product_attention", "math", "flash", *gpu_only)
    if facts.on_gpu:
        return ("auto", "math", "flash", *gpu_only), {}
    return ("auto", "math"), {
        **dict.fromkeys(gpu_only, "it is a CUDA kernel"),
        "flash": "PyTorch already picks it on a CPU",
    }


def _thread_counts(facts: Facts) -> Choices:
    if facts.on_gpu:
        return _only("the GPU does the arithmetic", 1)
    usable = facts.hardware.usable_cpu_count
    return tuple(sorted({usable, max(1, usable - 1), max(1, usable // 2), 1})), {}


def _host_allocators(facts: Facts) -> Choices:
    libraries: tuple[KnobValue, ...] = ("jemalloc", "tcmalloc")
    missing: dict[KnobValue, str] = {
        name: "the library is not installed" for name in libraries if name not in facts.hardware.host_allocators
    }
    if facts.on_gpu:
        return (), dict.fromkeys(("glibc-tuned", *libraries), "activations are in GPU memory, not in malloc's")
    return ("default", "glibc-tuned", *(name for name in libraries if name not in missing)), missing


def _device_allocators(facts: Facts) -> Choices:
    if not facts.on_gpu:
        return _only("there is no CUDA device", "expandable-segments")
    return ("default", "expandable-segments"), {}


def _worker_counts(facts: Facts) -> Choices:
    if facts.target.data.iterable:
        return _only("workers would each repeat an iterable dataset", 1, 2)
    most = min(facts.hardware.usable_cpu_count, _MOST_WORKERS)
    counts = sorted({0, 1, 2, most // 2, most} | {2**n for n in range(5)})
    return tuple(count for count in counts if count <= most), {}


def _prefetch_factors(facts: Facts) -> Choices:
    if facts.target.data.iterable:
        return _only("there is nothing to prefetch without workers", 4)
    return (2, 4), {}


def _persistent_workers(facts: Facts) -> Choices:
    if facts.target.data.iterable:
        return _only("there are no workers to keep", True)
    return (False, True), {}


def _pin_memory(facts: Facts) -> Choices:
    return ((False, True), {}) if facts.on_gpu else _only("pinned memory only speeds copies to a GPU", True)


def _non_blocking(facts: Facts) -> Choices:
    return ((False, True), {}) if facts.on_gpu else _only("there is no copy to a device", True)


KNOBS: tuple[Knob, ...] = (
    Knob("num_workers", "exact", "restart", _worker_counts),
    Knob("prefetch_factor", "exact", "restart", _prefetch_factors),
    Knob("persistent_workers", "exact", "restart", _persistent_workers),
    Knob("pin_memory", "exact", "restart", _pin_memory),
    Knob("non_blocking", "exact", "restart", _non_blocking),
    Knob("host_allocator", "exact", "environment", _host_allocators),
    Knob("device_allocator", "exact", "environment", _device_allocators),
    Knob("precision", "rounding", "restart", _precisions),
    Knob("allow_tf32", "rounding", "restart", _tf32),
    Knob("attention_backend", "rounding", "restart", _attention_backends),
    Knob("optimizer_implementation", "rounding", "restart", _optimizer_implementations),
    Knob("memory_format", "rounding", "restart", _memory_formats),
    Knob("cudnn_benchmark", "rounding", "restart", _cudnn_benchmark),
    Knob("num_threads", "rounding", "restart", _thread_counts),
    Knob("micro_batch_size", "rounding", "restart", _micro_batch_sizes),
    Knob("gradient_accumulation_steps", "rounding", "restart", _accumulation_steps),
    Knob("activation_checkpointing", "rounding", "restart", _checkpointing),
    Knob("compile_mode", "rounding", "compile", _compile_modes),
)
