"""For each knob, what to write in one's own code where a format has no place for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from autotune.emit.export.fragment import compile_arguments, loader_arguments, matmul_precision
from autotune.emit.export.launch import assignments, device_environment, explain_library, host_environment
from autotune.records import TrainConfig

SDPA_BACKENDS = {
    "math": "MATH",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
}
"""Members of `torch.nn.attention.SDPBackend` by knob value."""

OPTIMIZER_ARGUMENTS: dict[str | None, dict[str, bool]] = {
    None: {},
    "for-loop": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}
"""Arguments of torch's optimizers by knob value."""


def explain_unmapped(config: TrainConfig, fields: Iterable[str], *, lack: str) -> dict[str, str]:
    """Return one sentence for each field: what the format lacks, and what to write instead.

    Args:
        config: the settings.
        fields: knobs the format has no place for.
        lack: start of each sentence, e.g. `TrainingArguments has no field for it`.
    """
    return {field: f"{lack}: {_INSTRUCTIONS[field](config)}." for field in fields}


def own_knobs(config: TrainConfig, *, lack: str) -> dict[str, str]:
    """Return the sentences for the workload's own knobs and its learning rate; empty when they stay as they are."""
    changed = {"user_knobs": bool(config.user_knobs), "learning_rate_scale": config.learning_rate_scale != 1.0}
    return explain_unmapped(config, [name for name, is_changed in changed.items() if is_changed], lack=lack)


def start_with_malloc(config: TrainConfig, libraries: Mapping[str, str]) -> str:
    """Return what to write for the knob `host_allocator`, as part of a sentence.

    Args:
        config: the settings.
        libraries: paths of malloc libraries by knob value, where they are known.
    """
    start = _start_with(host_environment(config, libraries), "start the process with its usual malloc")
    how = explain_library(config, libraries)
    return f"{start} ({how})" if how else start


def comment_lines(unmapped: dict[str, str]) -> list[str]:
    """Return comment lines that list what the user has to set; none when there is nothing."""
    if not unmapped:
        return []
    listed = (f"#   {field}: {unmapped[field]}" for field in TrainConfig.model_fields if field in unmapped)
    return ["# Not set by this file:", *listed]


def _loader_argument(field: str) -> Callable[[TrainConfig], str]:
    return lambda config: f"pass {field}={loader_arguments(config)[field]!r} to the DataLoader"


def _checkpointing(config: TrainConfig) -> str:
    if config.activation_checkpointing == "off":
        return "leave activation checkpointing off"
    is_selective = config.activation_checkpointing == "selective"
    policy = ", context_fn=...) with a policy that saves matrix products" if is_selective else ")"
    return f"run the model's repeated blocks through torch.utils.checkpoint.checkpoint(use_reentrant=False{policy}"


def _compilation(config: TrainConfig) -> str:
    if config.compile_mode == "off":
        return "do not compile the model"
    arguments = ", ".join(f"{name}={value!r}" for name, value in compile_arguments(config).items())
    return f"call model.compile({arguments})"


def _optimizer(config: TrainConfig) -> str:
    arguments = OPTIMIZER_ARGUMENTS[config.optimizer_implementation]
    if not arguments:
        return "keep the optimizer as you build it now"
    return "build the optimizer with " + ", ".join(f"{name}={value}" for name, value in arguments.items())


def _memory_format(config: TrainConfig) -> str:
    if config.memory_format == "contiguous":
        return "leave the model and its inputs contiguous"
    return "lay the model and its 4-d inputs out with .to(memory_format=torch.channels_last)"


def _attention(config: TrainConfig) -> str:
    if config.attention_backend == "auto":
        return "leave the choice of the attention kernel to PyTorch"
    name = SDPA_BACKENDS[config.attention_backend]
    return f"train inside torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.{name})"


def _tf32(config: TrainConfig) -> str:
    return f"call torch.set_float32_matmul_precision({matmul_precision(config)!r})"


def _threads(config: TrainConfig) -> str:
    if config.num_threads is None:
        return "leave the number of threads to PyTorch"
    return f"call torch.set_num_threads({config.num_threads})"


def _start_with(environment: dict[str, str], otherwise: str) -> str:
    return f"start the process with {' '.join(assignments(environment))}" if environment else otherwise


def _user_knobs(config: TrainConfig) -> str:
    pairs = ", ".join(f"{name!a}: {value!a}" for name, value in config.user_knobs.items())
    return f"set them in your own code, {{{pairs}}}"


_INSTRUCTIONS: dict[str, Callable[[TrainConfig], str]] = {
    "micro_batch_size": lambda config: f"pass batch_size={config.micro_batch_size} to the DataLoader",
    "gradient_accumulation_steps": lambda config: (
        f"pass gradient_accumulation_steps={config.gradient_accumulation_steps} to Accelerator"
    ),
    "learning_rate_scale": lambda config: f"multiply your learning rate by {config.learning_rate_scale!r}",
    "allow_tf32": _tf32,
    "activation_checkpointing": _checkpointing,
    "compile_mode": _compilation,
    "optimizer_implementation": _optimizer,
    "memory_format": _memory_format,
    "attention_backend": _attention,
    "cudnn_benchmark": lambda config: f"set torch.backends.cudnn.benchmark = {config.cudnn_benchmark}",
    "num_threads": _threads,
    "device_allocator": lambda config: _start_with(
        device_environment(config), "start the process with PyTorch's usual allocator"
    ),
    "num_workers": _loader_argument("num_workers"),
    "prefetch_factor": _loader_argument("prefetch_factor"),
    "pin_memory": _loader_argument("pin_memory"),
    "persistent_workers": _loader_argument("persistent_workers"),
    "non_blocking": lambda config: f"copy batches with .to(device, non_blocking={config.non_blocking})",
    "user_knobs": _user_knobs,
}
