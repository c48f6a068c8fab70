"""`accelerate launch` taken apart: environment variables, and torchrun or plain python, as accelerate itself starts it.

    one process                      ->  python train.py, its variables set
    several, on this machine's GPUs  ->  torchrun --standalone --nproc-per-node N train.py, its variables set

Followed is accelerate 1.15; a test compares the variables with those of the installed one. What it adds for one kind of
card (NCCL_P2P_DISABLE on RTX 4000) is left to the user. Nothing is imported from it: it would import torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.targets.launch.machine import count_gpus, count_physical_cores
from autotune.targets.launch.options import Options, Split, read_count, split_options
from autotune.targets.launch.torchrun import Torchrun

_TOOL = "accelerate launch"
_HINT = "write torchrun --nproc-per-node N train.py ..., and have the script set it up"
_PRECISIONS = ("no", "fp16", "bf16")
_DYNAMO = {
    "dynamo_mode": "default",
    "dynamo_use_fullgraph": False,
    "dynamo_use_dynamic": False,
    "dynamo_use_regional_compilation": False,
}
_FSDP: dict[str, Any] = {
    "fsdp_version": 1,
    "fsdp_sharding_strategy": "FULL_SHARD",
    "fsdp_reshard_after_forward": "true",
    "fsdp_offload_params": "false",
    "fsdp_min_num_params": 100_000_000,
    "fsdp_forward_prefetch": "false",
    "fsdp_use_orig_params": "true",
    "fsdp_cpu_ram_efficient_loading": "true",
    "fsdp_sync_module_states": "true",
    "fsdp_activation_checkpointing": "false",
    "fsdp_activation_checkpointing_offload": "false",
}
_FSDP_IF_GIVEN = {
    "fsdp_auto_wrap_policy": "FSDP_AUTO_WRAP_POLICY",
    "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
    "fsdp_backward_prefetch": "FSDP_BACKWARD_PREFETCH",
    "fsdp_state_dict_type": "FSDP_STATE_DICT_TYPE",
}
_AS_GIVEN = ("fsdp_sharding_strategy",)
"""Of these, the one that is not put in small letters."""

_TO_TORCHRUN = ("max_restarts", "monitor_interval", "tee", "log_dir", "role")
_OPTIONS = Options(
    tool=_TOOL,
    with_value=(
        *("config_file", "mixed_precision", "num_processes", "num_machines", "num_cpu_threads_per_process"),
        *("dynamo_backend", "dynamo_mode", "gpu_ids", "machine_rank", "main_process_ip", "main_process_port"),
        *("rdzv_backend", *_TO_TORCHRUN, *_FSDP, *_FSDP_IF_GIVEN),
    ),
    alone=(
        *("cpu", "multi_gpu", "use_fsdp", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic"),
        *("dynamo_use_regional_compilation", "same_network", "module", "debug", "quiet"),
    ),
    short={"-m": "module", "-q": "quiet", "-t": "tee"},
    refused={
        "tpu": "a TPU",
        "use_deepspeed": "its DeepSpeed plugin trains by itself",
        "use_megatron_lm": "its Megatron-LM plugin trains by itself",
        "use_parallelism_config": "parts of the model on several devices",
        "no_python": "autotune runs the script with python",
        "mpirun": "MPI starts other programs",
        "rdzv_conf": "the processes meet on this machine",
        **dict.fromkeys(("deepspeed_", "zero", "offload_", "gradient_", "megatron_lm_"), "of such a plugin"),
        **dict.fromkeys(
            ("parallelism_config_", "fp8_", "aws_", "vm", "env", "downcast_", "main_training"), "of another way"
        ),
    },
    hint=_HINT,
)
_PLUGINS = {
    "DEEPSPEED": "its DeepSpeed plugin",
    "MEGATRON_LM": "its Megatron-LM plugin",
    "XLA": "a TPU",
    "TPU": "a TPU",
}


@dataclass(frozen=True)
class Start:
    """What `accelerate launch` comes to.

    Attributes:
        environment: variables that it sets.
        script: how the script is named, and torchrun's options.
        processes: how many it starts; 1 without torchrun.
    """

    environment: Mapping[str, str]
    script: Torchrun
    processes: int


@dataclass(frozen=True)
class _Given:
    """What was typed, over the configuration file, over accelerate's defaults."""

    typed: Mapping[str, str]
    config: Mapping[str, Any] = field(default_factory=dict)
    has_config: bool = False

    def find(self, name: str, default: Any = None) -> Any:
        if name in self.typed:
            return self.typed[name]
        kept = self.config.get(name)
        return default if kept is None else kept

    def is_set(self, name: str) -> bool:
        return name in self.typed

    def count(self, name: str) -> int | None:
        number = read_count(self.typed, name, _TOOL)
        kept = self.config.get(name)
        return number if number is not None or not isinstance(kept, int) else kept


def split_accelerate(words: Sequence[str], *, folder: Path, environment: Mapping[str, str] = os.environ) -> Start:
    """Return what `accelerate launch` starts.

    Args:
        words: that follow it.
        folder: the working folder.
        environment: that it would run in.

    Raises:
        UsageError: it starts something else than one script on this machine, or the configuration file cannot be used.
    """
    split = split_options(words, _OPTIONS)
    given = _read_config(split, folder, environment)
    _require_plain(given)
    processes, is_spread = _count_processes(given, environment)
    values = _list_variables(given, processes, environment, is_spread=is_spread)
    options: tuple[str, ...] = ()
    if is_spread:
        more = [f"--{name.replace('_', '-')}={split.values[name]}" for name in _TO_TORCHRUN if name in split.values]
        options = ("--standalone", f"--nproc-per-node={processes}", *more)
    kind = "module" if given.is_set("module") else "file"
    script = Torchrun(options, kind, split.name, split.arguments)  # type: ignore[arg-type]
    return Start(values, script, processes if is_spread else 1)


def find_config(environment: Mapping[str, str]) -> Path:
    """Return where accelerate keeps its own configuration file."""
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environment.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    return home / "accelerate" / "default_config.yaml"


def _read_config(split: Split, folder: Path, environment: Mapping[str, str]) -> _Given:
    named, default = split.values.get("config_file"), find_config(environment)
    if named is None and (not default.is_file() or "cpu" in split.values):
        return _Given(split.values)
    file = default if named is None else folder / Path(named).expanduser()
    content = _parse(file)
    for name in ("dynamo_config", "fp8_config", "fsdp_config"):
        part = content.pop(name, None) or {}
        content |= {key if key.startswith(name[:-6]) else f"{name[:-6]}{key}": value for key, value in part.items()}
    return _Given(split.values, content, has_config=True)


def _parse(file: Path) -> dict[str, Any]:
    import yaml

    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(
            f"accelerate's configuration file {file}: {error.strerror}", hint="write it with accelerate config"
        ) from None
    except (ValueError, RecursionError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise UsageError(
            f"{file} is no configuration file of accelerate's", hint="write it anew with accelerate config"
        )
    return content


def _require_plain(given: _Given) -> None:
    config, kind = given.config, str(given.config.get("distributed_type", "NO"))
    reason = ""
    if str(config.get("compute_environment", "LOCAL_MACHINE")) != "LOCAL_MACHINE":
        reason = f"it trains elsewhere ({config['compute_environment']})"
    elif kind in _PLUGINS:
        reason = f"{_PLUGINS[kind]} is not supported (distributed_type {kind})"
    elif kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        reason = f"distributed_type {kind} is not supported"
    elif config.get("mpirun_config"):
        reason = "MPI starts other programs (mpirun_config)"
    elif config.get("parallelism_config"):
        reason = "parts of the model on several devices are not supported (parallelism_config)"
    if reason:
        raise UsageError(f"accelerate's configuration file: {reason}", hint=_HINT)
    machines = given.count("num_machines") or 1
    if machines > 1:
        raise UsageError(f"{_TOOL} on {machines} machines is more than this one", hint="autotune tunes one machine")
    precision = str(given.find("mixed_precision", "no")).lower()
    if precision not in _PRECISIONS:
        raise UsageError(f"{_TOOL}'s --mixed_precision {precision} is not supported", hint="give no, fp16 or bf16")


def _count_processes(given: _Given, environment: Mapping[str, str]) -> tuple[int, bool]:
    """Return how many processes it says it starts, and whether torchrun starts them."""
    processes, gpus = given.count("num_processes"), count_gpus(environment)
    is_sharded = _uses_fsdp(given)
    is_spread = is_sharded or given.is_set("multi_gpu") or given.config.get("distributed_type") == "MULTI_GPU"
    if processes is None and not given.has_config:
        processes = gpus
    if processes is None and given.config.get("distributed_type") == "NO":
        processes = 1
    if processes is None or processes < 0:
        raise UsageError(f"{_TOOL} does not say how many processes", hint="write --num_processes 1, or as many as GPUs")
    if given.is_set("cpu") and is_spread:
        raise UsageError(f"{_TOOL} takes --cpu or several processes", hint="leave --cpu out: Accelerator(cpu=True)")
    if is_spread and processes < (1 if given.has_config or is_sharded else 2):
        raise UsageError(f"{_TOOL} is told to start {processes} processes", hint="write --num_processes 2, say")
    if not given.has_config and not given.is_set("cpu") and processes > 1 and gpus > 1:
        is_spread = True
    if processes > 1 and not is_spread:
        raise UsageError(
            f"{_TOOL} starts one process here, and not the {processes} of --num_processes",
            hint=f"write --multi_gpu --num_processes {processes} (on CPUs too, with gloo), or --num_processes 1",
        )
    return processes, is_spread


def _list_variables(
    given: _Given, processes: int, environment: Mapping[str, str], *, is_spread: bool
) -> dict[str, str]:
    """Return what accelerate's `prepare_simple_launcher_cmd_env` or `prepare_multi_gpu_env` sets."""
    uses_cpu = bool(given.config.get("use_cpu")) if given.has_config else given.is_set("cpu")
    found: dict[str, str] = {}
    if not is_spread:
        found["ACCELERATE_USE_CPU"] = str(given.is_set("cpu") or uses_cpu)
        if found["ACCELERATE_USE_CPU"] == "True":
            found |= {"KMP_AFFINITY": "granularity=fine,compact,1,0", "KMP_BLOCKTIME": "1"}
    if given.is_set("debug") or given.config.get("debug"):
        found["ACCELERATE_DEBUG_MODE"] = "true"
    gpus = str(given.find("gpu_ids", "all"))
    if gpus != "all":
        found["CUDA_VISIBLE_DEVICES"] = gpus
    found["ACCELERATE_MIXED_PRECISION"] = str(given.find("mixed_precision", "no")).lower()
    found["ACCELERATE_DYNAMO_BACKEND"] = str(given.find("dynamo_backend", "no")).upper()
    for name, default in _DYNAMO.items():
        value = True if given.is_set(name) and default is False else given.find(name, default)
        found[f"ACCELERATE_{name.upper()}"] = str(value)
    if _uses_fsdp(given):
        found |= _list_fsdp_variables(given)
    threads = given.count("num_cpu_threads_per_process")
    if threads is None:
        threads = _count_threads(environment, processes if uses_cpu else 0)
    found["OMP_NUM_THREADS"] = str(threads)
    if given.is_set("enable_cpu_affinity"):
        found["ACCELERATE_CPU_AFFINITY"] = "1"
    return found


def _uses_fsdp(given: _Given) -> bool:
    return given.is_set("use_fsdp") or (
        given.config.get("distributed_type") == "FSDP" and not given.is_set("multi_gpu")
    )


def _list_fsdp_variables(given: _Given) -> dict[str, str]:
    found = {"ACCELERATE_USE_FSDP": "true"}
    for name, default in _FSDP.items():
        value = str(given.find(name, default))
        found[name.upper()] = value if name in _AS_GIVEN else value.lower()
    for name, variable in _FSDP_IF_GIVEN.items():
        if given.find(name) is not None:
            found[variable] = str(given.find(name))
    if given.config.get("fsdp_ignored_modules") is not None:
        found["FSDP_IGNORED_MODULES"] = str(given.config["fsdp_ignored_modules"])
    return found


def _count_threads(environment: Mapping[str, str], cpu_processes: int) -> int:
    own = environment.get("OMP_NUM_THREADS", "")
    if own.isdigit() and int(own):
        return int(own)
    return max(1, count_physical_cores() // cpu_processes) if cpu_processes else 1
