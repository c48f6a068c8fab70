"""`TrainConfig`: one value per knob. A config checks only its own fields and never asks a device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from autotune.errors import UsageError
from autotune.records.given import GivenRecord

Precision = Literal["fp32", "bf16", "fp16"]
ActivationCheckpointing = Literal["off", "selective", "full"]
CompileMode = Literal["off", "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
OptimizerImplementation = Literal["for-loop", "foreach", "fused"]
MatmulPrecision = Literal["highest", "high", "medium"]
MemoryFormat = Literal["contiguous", "channels_last"]
AttentionBackend = Literal["auto", "math", "flash", "efficient", "cudnn"]
HostAllocator = Literal["default", "glibc-tuned", "jemalloc", "tcmalloc"]
DeviceAllocator = Literal["default", "expandable-segments"]
DistributedStrategy = Literal["ddp", "fsdp"]
ReduceDtype = Literal["fp32", "bf16"]
KnobValue = str | int | float | bool

Allowed = Literal["batch"]
"""Changes of what is learned that a user may allow: another effective batch, or another split where it matters."""

LearningRateRule = Literal["none", "sqrt", "linear"]
"""What a larger effective batch does to the learning rate."""

PositiveCount = Annotated[int, Field(ge=1, le=2**24)]

SHORT_NAMES = {
    "micro_batch_size": "micro_batch",
    "gradient_accumulation_steps": "accumulation",
    "learning_rate_scale": "lr_scale",
    "matmul_precision": "matmul",
    "activation_checkpointing": "checkpointing",
    "compile_mode": "compile",
    "optimizer_implementation": "optimizer",
    "memory_format": "layout",
    "attention_backend": "attention",
    "num_threads": "threads",
    "host_allocator": "malloc",
    "device_allocator": "cuda_allocator",
    "num_workers": "workers",
    "prefetch_factor": "prefetch",
    "distributed_strategy": "strategy",
    "sync_each_micro_batch": "sync_each",
}
"""What people call a knob, where that is not its field's name; records and exports have the field's."""

SHARED_KNOBS = (
    *("distributed_strategy", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph"),
    *("reshard_after_forward", "sync_each_micro_batch", "reduce_dtype"),
)
"""Knobs of several processes that train together: without effect on one."""

_MOST_COMPARED = 2**11
"""Pairs of configs whose differences are kept: a search asks for the same ones after each of its launches."""


class TrainConfig(GivenRecord):
    """How a training is run: one value per knob. The defaults are PyTorch's own."""

    micro_batch_size: PositiveCount = 32
    """Samples per device in one forward pass."""
    gradient_accumulation_steps: PositiveCount = 1
    """Forward and backward passes per optimizer step."""
    learning_rate_scale: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Factor on every learning rate: 1 unless the effective batch differs and the user names a rule for it."""
    precision: Precision = "fp32"
    """Arithmetic of the forward pass: fp32, or autocast to bf16 or to fp16 (the latter with loss scaling)."""
    matmul_precision: MatmulPrecision = "highest"
    """Float32 matrix products, by `torch.set_float32_matmul_precision`: high is TF32 on an NVIDIA GPU (cuDNN's
    convolutions keep PyTorch's default), medium are oneDNN's on a CPU, in bf16 where it has units for that (AMX)."""
    activation_checkpointing: ActivationCheckpointing = "off"
    """Recompute activations of repeated blocks in the backward pass: none, all but matrix products, or all."""
    compile_mode: CompileMode = "off"
    """`torch.compile` of the model: off, or the mode handed to it."""
    optimizer_implementation: OptimizerImplementation | None = None
    """How the optimizer walks its parameters; None leaves it as the workload built it."""
    memory_format: MemoryFormat = "contiguous"
    """Layout of 4-d weights and inputs."""
    attention_backend: AttentionBackend = "auto"
    """Kernel of scaled_dot_product_attention; auto leaves the choice to PyTorch."""
    cudnn_benchmark: bool = False
    """Let cuDNN time its convolution algorithms for each new shape."""
    num_threads: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Intra-op CPU threads; None leaves PyTorch's default."""
    host_allocator: HostAllocator = "default"
    """malloc of the process: as found, glibc with raised mmap and trim thresholds, or a preloaded library."""
    device_allocator: DeviceAllocator = "default"
    """CUDA caching allocator: as found, or with expandable segments."""
    num_workers: Annotated[int, Field(ge=0, le=4096)] = 0
    """Loader worker processes; 0 loads in the training process."""
    prefetch_factor: Annotated[int, Field(ge=1, le=1024)] = 2
    """Batches each worker keeps ready; without effect at 0 workers."""
    pin_memory: bool = False
    """Collect batches in page-locked memory."""
    persistent_workers: bool = False
    """Keep the workers from one epoch to the next; without effect at 0 workers."""
    non_blocking: bool = False
    """Copy batches to the device asynchronously; needs pinned memory to matter."""
    distributed_strategy: DistributedStrategy = "ddp"
    """How several processes share a model: a replica each (DistributedDataParallel), or a shard each (FSDP2)."""
    bucket_cap_mb: Annotated[int, Field(ge=1, le=2**16)] = 25
    """MiB of gradients that DistributedDataParallel sums at once; at 25, PyTorch's default, the first one has 1 MiB."""
    gradient_as_bucket_view: bool = False
    """Gradients are views of DistributedDataParallel's buckets, not copies."""
    static_graph: bool = False
    """Promise DistributedDataParallel that all steps use the same parameters; only where every micro batch's gradients
    meet."""
    reshard_after_forward: bool = True
    """Free a block's gathered parameters between forward and backward pass; FSDP2 alone."""
    sync_each_micro_batch: bool = False
    """Reduce gradients after each micro batch instead of the last one of a step; FSDP2 then keeps no whole gradient."""
    reduce_dtype: ReduceDtype = "fp32"
    """Width in which gradients are summed over processes; bf16 only beside precision bf16."""
    user_knobs: dict[str, KnobValue] = Field(default_factory=dict)
    """Values of the workload's own knobs, by name."""

    @model_validator(mode="before")
    @classmethod
    def _read_older(cls, given: Any) -> Any:
        """Read what was written while TF32 was a switch of its own."""
        if not isinstance(given, Mapping) or "allow_tf32" not in given:
            return given
        others = {name: value for name, value in given.items() if name != "allow_tf32"}
        return {"matmul_precision": "high" if given["allow_tf32"] else "highest"} | others

    def __eq__(self, other: object) -> bool:
        """Return whether the settings as text are the same."""
        return isinstance(other, TrainConfig) and self.key == other.key

    def __hash__(self) -> int:
        """Return a hash by the settings as text."""
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """The settings as text, to look them up by."""
        return json.dumps(self.model_dump(), sort_keys=True)

    @property
    def effective_batch_size(self) -> int:
        """Samples per optimizer step on one device: micro batch size x accumulation steps."""
        return self.micro_batch_size * self.gradient_accumulation_steps


@lru_cache(maxsize=_MOST_COMPARED)
def changed_fields(config: TrainConfig, reference: TrainConfig) -> tuple[str, ...]:
    """Return the names of the knobs in which two configs differ, the workload's own as `user_knobs.NAME`."""
    plain = [
        name
        for name in TrainConfig.model_fields
        if name != "user_knobs" and getattr(config, name) != getattr(reference, name)
    ]
    own = sorted(config.user_knobs.keys() | reference.user_knobs.keys())
    return (
        *plain,
        *(f"user_knobs.{name}" for name in own if config.user_knobs.get(name) != reference.user_knobs.get(name)),
    )


def is_user_knob(name: str) -> bool:
    """Return whether a knob is the workload's own."""
    return name.startswith("user_knobs.")


def get_knob(config: TrainConfig, name: str) -> KnobValue | None:
    """Return the value of a knob by its name, `user_knobs.NAME` for the workload's own."""
    if is_user_knob(name):
        return config.user_knobs.get(name.removeprefix("user_knobs."))
    value: KnobValue | None = getattr(config, name)
    return value


def list_settings(config: TrainConfig) -> list[tuple[str, KnobValue | None]]:
    """Return each knob and its value, the workload's own as `user_knobs.NAME`."""
    plain = [name for name in TrainConfig.model_fields if name != "user_knobs"]
    return [(name, get_knob(config, name)) for name in (*plain, *(f"user_knobs.{one}" for one in config.user_knobs))]


def with_knobs(config: TrainConfig, values: Mapping[str, KnobValue | None]) -> TrainConfig:
    """Return a copy with some knobs changed, `user_knobs.NAME` for the workload's own (None removes that one)."""
    plain = {name: value for name, value in values.items() if not is_user_knob(name)}
    own = {name.removeprefix("user_knobs."): value for name, value in values.items() if is_user_knob(name)}
    kept = {name: value for name, value in {**config.user_knobs, **own}.items() if value is not None}
    return config.replace(**plain, user_knobs=kept)


def spread_config(config: TrainConfig, world_size: int, *, before: int = 1) -> TrainConfig:
    """Return the settings of each process, with the same effective batch over all of them.

    The micro batch stays, or becomes the largest smaller one that divides.

    Args:
        config: settings of each of `before` processes.
        world_size: processes to spread over.
        before: processes that the config is of.

    Raises:
        UsageError: the effective batch cannot be divided by the processes.
    """
    if world_size == before:
        return config
    effective = config.effective_batch_size * before
    share, rest = divmod(effective, world_size)
    if rest or not share:
        fitting = [number for number in range(min(effective, world_size), 0, -1) if effective % number == 0]
        sizes = " or ".join(str(size) for size in (effective - rest, effective - rest + world_size) if size)
        raise UsageError(
            f"an effective batch of {effective} samples cannot be shared out evenly over {world_size} processes",
            hint=f"use --nproc-per-node {fitting[0]}, or a baseline with an effective batch of {sizes}",
        )
    micro = next(size for size in range(min(share, config.micro_batch_size), 0, -1) if share % size == 0)
    return config.replace(micro_batch_size=micro, gradient_accumulation_steps=share // micro)
