"""The KNOBS table: what may be varied, what it does to the numbers, and why a value is ruled out on this machine.

A row turns the probe's facts into the values worth trying and the reason for each value that is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from autotune.arithmetics import refuse_bf16, refuse_fp16, refuse_medium_products
from autotune.records.config import Allowed, KnobValue, spread_config
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.script import Numerics

Cost = Literal["restart", "environment", "compile"]
DriftTest = Literal["tape", "additivity", "gradients"]
"""The cheap tests of the drift gate: the data, parts of a batch against the whole, gradients at the same weights."""

LARGER_BATCHES = (2, 4)
"""Effective batches that `--tune-batch-size` tries, over the user's own."""

_MOST_MICRO_BATCH_SIZES = 6
_MOST_WORKERS = 16
_SPARE = 1.2
"""Loading is to be this much faster than the computation."""
_WORKER_BYTES = 256 * 2**20
"""Of a worker that was not seen: an interpreter with torch and a part of a dataset."""
_FREE_FOR_WORKERS = 0.5
_MALLOC_PACKAGES: dict[KnobValue, str] = {"jemalloc": "libjemalloc2", "tcmalloc": "libtcmalloc-minimal4"}
"""Of Debian and Ubuntu."""


@dataclass(frozen=True)
class Facts:
    """What the table may ask.

    Attributes:
        target: what the probe found about the target.
        hardware: the machine.
        allowed: changes of what is learned that the user allows.
    """

    target: TargetFacts
    hardware: HardwareInfo
    allowed: frozenset[Allowed] = frozenset()

    @property
    def processes(self) -> int:
        """They train together: a workload's in the search, or those of a script's own launcher."""
        return max(self.target.world_size, self.target.launched_processes)

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
        numerics: exact (bit for bit), rounding (other order or width of arithmetic), semantic (another training); on a
            target it may be another class, which its facts then say.
        tests: what shows cheaply that it is no more than that; a semantic change is judged by trainings alone.
        cost: what a change needs: a fresh process, one with another environment, or a compilation as well.
        choices: values worth trying for these facts, and why the others are not.
    """

    field: str
    numerics: Numerics
    tests: tuple[DriftTest, ...]
    cost: Cost
    choices: Callable[[Facts], Choices]


def _only(reason: str, *values: KnobValue) -> Choices:
    return (), dict.fromkeys(values, reason)


def _micro_batch_sizes(facts: Facts) -> Choices:
    baseline, target = facts.target.baseline, facts.target
    effective, processes = baseline.effective_batch_size, target.world_size
    if target.data.iterable:
        return _only("an iterable dataset may end inside a batch, and the effective batch must be held", effective // 2)
    each = spread_config(baseline, processes)
    divisors = [size for size in range(effective // processes, 0, -1) if effective // processes % size == 0]
    # Of several processes each has its part: what the own settings come to there is not tried by another name.
    divisors = [baseline.micro_batch_size if size == each.micro_batch_size else size for size in divisors]
    divisors = divisors[:_MOST_MICRO_BATCH_SIZES]
    larger = [factor * effective for factor in LARGER_BATCHES]
    if "batch" in facts.allowed:
        return (*divisors, *larger), {}
    reasons: dict[KnobValue, str] = dict.fromkeys(
        larger, "another effective batch is another training: --tune-batch-size"
    )
    why_not = find_split_trouble(target)
    if why_not is None:
        return tuple(divisors), reasons
    return (), reasons | {size: why_not for size in divisors if size != baseline.micro_batch_size}


def find_split_trouble(target: TargetFacts) -> str | None:
    """Return why parts of a batch are not the whole; None where they are, as far as it was tested."""
    if target.model.has_batch_norm:
        return (
            "BatchNorm normalises over the micro batch, or another layer keeps statistics of it: another size is "
            "another model"
        )
    additivity = target.additivity
    if additivity is None or additivity.holds:
        return None
    error = f"{100 * additivity.error:.2g} % (limit {100 * additivity.limit:.2g} %)"
    return f"the gradient of a batch is not that of its parts: {error}; a mean over tokens needs (mean loss, count)"


def _accumulation_steps(facts: Facts) -> Choices:
    return (), {}  # follows from the micro batch size: the effective batch is held


def _learning_rate_scales(facts: Facts) -> Choices:
    return (), {}  # follows from the effective batch, by the rule that the user names


def _precisions(facts: Facts) -> Choices:
    refused: dict[KnobValue, str] = {
        "bf16": refuse_bf16(facts.target),
        "fp16": refuse_fp16(facts.target, facts.hardware),
    }
    reasons = {name: reason for name, reason in refused.items() if reason}
    return ("fp32", *(name for name in refused if name not in reasons)), reasons


def _matmul_precisions(facts: Facts) -> Choices:
    own, rates = facts.target.baseline.matmul_precision, facts.target.ceilings
    if not facts.on_gpu:
        reasons: dict[KnobValue, str] = {"high": "TF32 is arithmetic of NVIDIA GPUs"}
        slow = refuse_medium_products(facts.target)
        if slow:
            return (), reasons | {"medium": slow}
        return ("highest" if own == "medium" else own, "medium"), reasons
    if rates.matmul and rates.flops_per_second("tf32") is None:
        return _only("this GPU has no TF32", "high", "medium")
    as_high: dict[KnobValue, str] = {"medium": "on a GPU it is TF32, as high is"}
    if own != "highest":
        return (), as_high | {"highest": "no product is faster without TF32"}
    return ("highest", "high"), as_high


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
        reason = "a recomputed block would update BatchNorm's, or another, running statistics twice a step"
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
    usable = max(1, facts.hardware.usable_cpu_count // facts.processes)
    return tuple(sorted({usable, max(1, usable - 1), max(1, usable // 2), 1})), {}


def _host_allocators(facts: Facts) -> Choices:
    if facts.on_gpu:
        return (), dict.fromkeys(("glibc-tuned", *_MALLOC_PACKAGES), "activations are in GPU memory, not in malloc's")
    missing = {
        name: f"it is not installed; a search would try it (Debian, Ubuntu: apt install {package})"
        for name, package in _MALLOC_PACKAGES.items()
        if name not in facts.hardware.host_allocators
    }
    own = facts.hardware.preloaded_malloc
    missing |= {
        name: f"your own LD_PRELOAD has it ({own}): it is the malloc of your own settings"
        for name in _MALLOC_PACKAGES
        if own is not None and own.startswith(f"lib{name}")
    }
    return ("default", "glibc-tuned", *(name for name in _MALLOC_PACKAGES if name not in missing)), missing


def _device_allocators(facts: Facts) -> Choices:
    if not facts.on_gpu:
        return _only("there is no CUDA device", "expandable-segments")
    return ("default", "expandable-segments"), {}


def most_workers(target: TargetFacts, hardware: HardwareInfo) -> int:
    """Return the most loader workers of a process worth trying: one a CPU, and more where samples are waited for.

    What a disk or a network lets a worker wait for, others can wait for meanwhile: as many as match the computation, as
    the CPUs have time for and as memory has room for.
    """
    data, processes = target.data, max(target.world_size, target.launched_processes)
    usable = max(1, min(hardware.usable_cpu_count // processes, _MOST_WORKERS))
    if not data.waits or data.iterable:
        return usable
    load, compute = data.seconds_per_sample * target.baseline.effective_batch_size, target.compute_seconds_per_step
    matching = _MOST_WORKERS if compute <= 0 else min(_MOST_WORKERS, math.ceil(_SPARE * load / compute))
    wanted = 1 << math.ceil(math.log2(max(1, matching)))
    by_cpus = hardware.usable_cpu_count / processes / max(data.cpu_fraction or 0.0, 1 / _MOST_WORKERS / 2)
    by_memory = _FREE_FOR_WORKERS * hardware.memory_available_bytes / processes / (data.worker_bytes or _WORKER_BYTES)
    return max(usable, min(wanted, math.floor(by_cpus), math.floor(by_memory)))


def _worker_counts(facts: Facts) -> Choices:
    if facts.target.data.iterable:
        return _only("workers would each repeat an iterable dataset", 1, 2)
    most = most_workers(facts.target, facts.hardware)
    counts = sorted({0, 1, 2, most // 2, most} | {2**n for n in range(5)})
    counts, own = [count for count in counts if count <= most], facts.target.baseline.num_workers
    more = [count for count in counts if count > own] if facts.target.data.workers_draw_alike else []
    reason = f"each worker draws random numbers from a copy of the same generator: no more than your own {own}"
    return tuple(count for count in counts if count not in more), dict.fromkeys(more, reason)


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


_ALONE = "it is for several processes: --nproc-per-node, or torchrun for a script"
_MEBIBYTE = 2**20
_BUCKETS_MIB = (5, 25, 50, 100, 250)
"""Of DistributedDataParallel: what public training recipes use around its default of 25."""


def _bucket_sizes(facts: Facts) -> Choices:
    if facts.processes == 1:
        return _only(_ALONE, 100)
    gradients = facts.target.model.parameter_bytes / _MEBIBYTE
    # Of those that take all gradients at once, one: the others do the same.
    several = [size for size in _BUCKETS_MIB if size < gradients]
    sizes = {*several, *[size for size in _BUCKETS_MIB if size >= gradients][:1], 25}
    if gradients <= 1.0:
        return _only("all gradients fit into the first bucket", *(size for size in _BUCKETS_MIB if size != 25))
    return tuple(sorted(sizes)), {}


def _of_several(facts: Facts) -> Choices:
    return _only(_ALONE, True) if facts.processes == 1 else ((False, True), {})


def _strategies(facts: Facts) -> Choices:
    if facts.processes == 1:
        return _only(_ALONE, "fsdp")
    return ("ddp", "fsdp"), {}


def _reshardings(facts: Facts) -> Choices:
    if facts.processes == 1:
        return _only(_ALONE, False)
    if facts.target.model.checkpointable_blocks == 0:
        return _only("the model has no repeated blocks to gather one by one", False)
    return (True, False), {}


def _synchronisations(facts: Facts) -> Choices:
    target = facts.target
    if facts.processes == 1:
        return _only(_ALONE, True)
    splits = find_split_trouble(target) is None and not target.data.iterable and "micro_batch_size" not in target.fixed
    if not splits and spread_config(target.baseline, target.world_size).gradient_accumulation_steps == 1:
        return _only("a step has one micro batch here", True)
    return (False, True), {}


def _reduce_dtypes(facts: Facts) -> Choices:
    if facts.processes == 1:
        return _only(_ALONE, "bf16")
    why_not = refuse_bf16(facts.target) if facts.target.baseline.precision != "bf16" else ""
    return _only(why_not, "bf16") if why_not else (("fp32", "bf16"), {})


KNOBS: tuple[Knob, ...] = (
    Knob("num_workers", "exact", ("tape",), "restart", _worker_counts),
    Knob("prefetch_factor", "exact", ("tape",), "restart", _prefetch_factors),
    Knob("persistent_workers", "exact", ("tape",), "restart", _persistent_workers),
    Knob("pin_memory", "exact", ("tape",), "restart", _pin_memory),
    Knob("non_blocking", "exact", ("gradients",), "restart", _non_blocking),
    Knob("host_allocator", "exact", ("gradients",), "environment", _host_allocators),
    Knob("device_allocator", "exact", ("gradients",), "environment", _device_allocators),
    Knob("precision", "rounding", ("gradients",), "restart", _precisions),
    Knob("matmul_precision", "rounding", ("gradients",), "restart", _matmul_precisions),
    Knob("attention_backend", "rounding", ("gradients",), "restart", _attention_backends),
    Knob("optimizer_implementation", "rounding", ("gradients",), "restart", _optimizer_implementations),
    Knob("memory_format", "rounding", ("gradients",), "restart", _memory_formats),
    Knob("cudnn_benchmark", "rounding", ("gradients",), "restart", _cudnn_benchmark),
    Knob("num_threads", "rounding", ("gradients",), "restart", _thread_counts),
    Knob("micro_batch_size", "rounding", ("additivity", "gradients"), "restart", _micro_batch_sizes),
    Knob("gradient_accumulation_steps", "rounding", ("additivity", "gradients"), "restart", _accumulation_steps),
    Knob("learning_rate_scale", "semantic", (), "restart", _learning_rate_scales),
    Knob("activation_checkpointing", "rounding", ("gradients",), "restart", _checkpointing),
    Knob("compile_mode", "rounding", ("gradients",), "compile", _compile_modes),
    Knob("distributed_strategy", "rounding", ("gradients",), "restart", _strategies),
    Knob("bucket_cap_mb", "rounding", ("gradients",), "restart", _bucket_sizes),
    Knob("gradient_as_bucket_view", "exact", ("gradients",), "restart", _of_several),
    Knob("static_graph", "rounding", ("gradients",), "restart", _of_several),
    Knob("reshard_after_forward", "exact", ("gradients",), "restart", _reshardings),
    Knob("sync_each_micro_batch", "rounding", ("gradients",), "restart", _synchronisations),
    Knob("reduce_dtype", "rounding", ("gradients",), "restart", _reduce_dtypes),
)

DATA_KNOBS = tuple(knob.field for knob in KNOBS if knob.tests == ("tape",))
"""Knobs of the loader alone: every other test leaves them as they are."""
