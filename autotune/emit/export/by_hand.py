"""What a format has no place for, as lines of Python to write in one's own code, or as comments.

`DataLoader(..., num_workers=2)` stands for what is there already, with one more argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from autotune.emit.export.allocators import allocator_environment, describe_library
from autotune.emit.export.exported import Request
from autotune.emit.export.values import (
    LOADER,
    OPTIMIZER_ARGUMENTS,
    changed_loader_arguments,
    compile_arguments,
    keywords,
    literal,
)
from autotune.records import TrainConfig

SDPA_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""Members of `torch.nn.attention.SDPBackend` by knob value."""

AUTOCAST_TYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}

Write = Callable[[Request, Collection[str]], str]
"""Returns the line for some fields of one place."""

Places = Mapping[tuple[str, ...], Write]
"""Fields that are set at one place, and how its line is written."""


def list_by_hand(request: Request, fields: Iterable[str], *, instead: Places | None = None) -> dict[str, str]:
    """Return the line that sets each field; fields of one place, as the DataLoader, share one.

    Args:
        request: the answer.
        fields: those to write by hand; only what is to be written of them counts.
        instead: places that are others with this tool, before the usual ones.
    """
    left = set(fields) & request.changed
    lines: dict[str, str] = {}
    for place, write in (*(instead or {}).items(), *_PLACES.items()):
        here = [name for name in place if name in left]
        if here:
            left -= {*here}
            lines |= dict.fromkeys(here, write(request, here))
    assert not left
    return lines


def list_lines(unmapped: Mapping[str, str]) -> list[str]:
    """Return the lines to write by hand, each once, in the order of a script."""
    order = {name: position for position, name in enumerate(name for place in _PLACES for name in place)}
    return list(dict.fromkeys(unmapped[name] for name in sorted(unmapped, key=order.__getitem__)))


def comment(header: Iterable[str], unmapped: Mapping[str, str] | None = None) -> list[str]:
    """Return the head of a file as comment lines: where it comes from, and what is to be written by hand."""
    lines = [f"# {line}" for line in header]
    if unmapped:
        lines += [
            "# Not in this file, to be written by hand:",
            *(f"#   {line.removeprefix('# ')}" for line in list_lines(unmapped)),
        ]
    return lines


def write_start(request: Request, _fields: Collection[str] = (), *, command: str = "python train.py") -> str:
    """Return a comment with the command that starts the training, its environment first."""
    environment = allocator_environment(request)
    if not environment:
        return "# start it with the usual allocators of the C library and of PyTorch"
    how = describe_library(request)
    assignments = (f"{name}={value}" for name, value in environment.items())
    line = " ".join(["# run as:", *assignments, command])
    return f"{line}  # {how}" if how else line


def _threads(request: Request, _fields: Collection[str]) -> str:
    if request.config.num_threads is None:
        return "# leave the number of threads to PyTorch"
    return f"torch.set_num_threads({request.config.num_threads})"


def _loader(request: Request, fields: Collection[str]) -> str:
    batch = {"batch_size": request.config.micro_batch_size} if "micro_batch_size" in fields else {}
    changed = changed_loader_arguments(request.config, request.baseline) if {*fields} & {*LOADER} else {}
    arguments = batch | changed
    if not arguments:
        return "# without workers this makes no difference"
    return f"DataLoader(..., {keywords(arguments)})"


def _memory_format(request: Request, _fields: Collection[str]) -> str:
    if request.config.memory_format == "contiguous":
        return "# leave the model and its inputs contiguous"
    return "model.to(memory_format=torch.channels_last)  # and so the 4-d inputs"


def _checkpointing(request: Request, _fields: Collection[str]) -> str:
    match request.config.activation_checkpointing:
        case "off":
            return "# no activation checkpointing: leave out what turns it on, as gradient_checkpointing=True"
        case "full":
            return "torch.utils.checkpoint.checkpoint(block, ..., use_reentrant=False)  # each repeated block"
    return "# torch.utils.checkpoint for each repeated block, with a context_fn that keeps matrix products"


def _compilation(request: Request, _fields: Collection[str]) -> str:
    if request.config.compile_mode == "off":
        return "# do not compile the model"
    return f"model.compile({keywords(compile_arguments(request.config))})"


def write_optimizer(request: Request, _fields: Collection[str] = ()) -> str:
    """Return the line for the knob `optimizer_implementation`."""
    arguments = OPTIMIZER_ARGUMENTS[request.config.optimizer_implementation]
    if not arguments:
        return "# leave foreach and fused of the optimizer to PyTorch"
    return f"torch.optim.AdamW(..., {keywords(arguments)})  # or the optimizer that you use"


def _attention(request: Request, _fields: Collection[str]) -> str:
    if request.config.attention_backend == "auto":
        return "# leave the choice of the attention kernel to PyTorch"
    backend = f"torch.nn.attention.SDPBackend.{SDPA_BACKENDS[request.config.attention_backend]}"
    around = f"with torch.nn.attention.sdpa_kernel({backend}): ...  # around the training"
    if request.config.compile_mode == "off":
        return around
    return f"{around}, in a TORCHINDUCTOR_CACHE_DIR of its own: the cache mixes up attention kernels"


def _precision(request: Request, _fields: Collection[str]) -> str:
    dtype = AUTOCAST_TYPES.get(request.config.precision)
    if dtype is None:
        return "# no autocast"
    scaled = ", with a torch.amp.GradScaler" if request.config.precision == "fp16" else ""
    device = "cuda" if request.on_gpu else "cpu"
    return f'with torch.autocast("{device}", dtype={dtype}): ...  # around the forward pass and the loss{scaled}'


def _accumulation(request: Request, _fields: Collection[str]) -> str:
    steps = request.config.gradient_accumulation_steps
    if steps == 1:
        return "# an optimizer step after every backward pass"
    return f"loss = loss / {steps}  # and an optimizer step after every {steps} backward passes"


def list_ddp_arguments(config: TrainConfig) -> dict[str, int | bool]:
    """Return DistributedDataParallel's arguments; its own bucket size is left to it."""
    size = {} if config.bucket_cap_mb == TrainConfig().bucket_cap_mb else {"bucket_cap_mb": config.bucket_cap_mb}
    return size | {"gradient_as_bucket_view": config.gradient_as_bucket_view, "static_graph": config.static_graph}


def _buckets(request: Request, _fields: Collection[str]) -> str:
    if request.config.distributed_strategy == "fsdp":
        return "# buckets are a matter of DistributedDataParallel, and the model is sharded"
    return f"torch.nn.parallel.DistributedDataParallel(..., {keywords(list_ddp_arguments(request.config))})"


def _strategy(request: Request, _fields: Collection[str]) -> str:
    if request.config.distributed_strategy == "ddp":
        return "# a replica of the model in each process: torch.nn.parallel.DistributedDataParallel"
    reshard = request.config.reshard_after_forward
    call = f"torch.distributed.fsdp.fully_shard(block, reshard_after_forward={reshard})"
    return f"{call}  # each repeated block, then the model, before the optimizer is built"


def _synchronisation(request: Request, _fields: Collection[str]) -> str:
    if request.config.sync_each_micro_batch:
        return "# let gradients meet after every backward pass"
    if request.config.distributed_strategy == "fsdp":
        return "model.set_requires_gradient_sync(False)  # for all micro batches of a step but the last"
    return "with model.no_sync(): ...  # around all micro batches of a step but the last"


def _reduction(request: Request, _fields: Collection[str]) -> str:
    is_narrow = request.config.reduce_dtype == "bf16"
    if request.config.distributed_strategy == "fsdp":
        dtype = "torch.bfloat16" if is_narrow else "None"
        policy = f"torch.distributed.fsdp.MixedPrecisionPolicy(reduce_dtype={dtype})"
        return f"mp_policy = {policy}  # for each fully_shard"
    if not is_narrow:
        return "# no communication hook: gradients are summed as they are"
    hook = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.bf16_compress_hook"
    return f"model.register_comm_hook(None, {hook})  # of the DistributedDataParallel model"


def _user_knobs(request: Request, _fields: Collection[str]) -> str:
    own, before = request.config.user_knobs, request.baseline.user_knobs
    changed = {name: value for name, value in own.items() if before.get(name) != value}
    return f"own_settings = {literal(changed)}  # in your own code"


_PLACES: Places = {
    ("host_allocator", "device_allocator"): write_start,
    ("num_threads",): _threads,
    ("matmul_precision",): lambda request, _: (
        f'torch.set_float32_matmul_precision("{request.config.matmul_precision}")'
    ),
    ("cudnn_benchmark",): lambda request, _: f"torch.backends.cudnn.benchmark = {request.config.cudnn_benchmark}",
    ("user_knobs",): _user_knobs,
    ("micro_batch_size", *LOADER): _loader,
    ("non_blocking",): lambda request, _: f"batch = batch.to(device, non_blocking={request.config.non_blocking})",
    ("memory_format",): _memory_format,
    ("activation_checkpointing",): _checkpointing,
    ("compile_mode",): _compilation,
    ("learning_rate_scale",): lambda request, _: f"learning_rate *= {_relative_rate(request)!r}",
    ("optimizer_implementation",): write_optimizer,
    ("attention_backend",): _attention,
    ("precision",): _precision,
    ("gradient_accumulation_steps",): _accumulation,
    ("distributed_strategy", "reshard_after_forward"): _strategy,
    ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph"): _buckets,
    ("reduce_dtype",): _reduction,
    ("sync_each_micro_batch",): _synchronisation,
}
"""Places in a script, in its order, and how the line of each is written."""


def _relative_rate(request: Request) -> float:
    return request.config.learning_rate_scale / request.baseline.learning_rate_scale


assert sorted(name for place in _PLACES for name in place) == sorted(TrainConfig.model_fields)
