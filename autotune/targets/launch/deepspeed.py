"""`deepspeed` taken apart: torchrun on this machine's GPUs, each process told its `--local_rank` as deepspeed does.

    deepspeed --num_gpus 2 train.py --x  ->  torchrun --standalone --nproc-per-node 2 train.py --local_rank=K --x

Followed is the source of deepspeed 0.19 (launcher/runner.py, launcher/launch.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import UsageError
from autotune.targets.launch.machine import count_gpus
from autotune.targets.launch.options import Options, read_count, split_options
from autotune.targets.launch.torchrun import Torchrun

_HOSTFILE = Path("/job/hostfile")
_HINT = "write torchrun --nproc-per-node N train.py ... instead"
_OPTIONS = Options(
    tool="deepspeed",
    with_value=("include", "num_nodes", "num_gpus", "num_accelerators", "master_port", "master_addr", "log_level"),
    alone=("module", "no_local_rank", "quiet"),
    short={"-i": "include", "-q": "quiet", "-e": "exclude", "-H": "hostfile"},
    refused={
        "hostfile": "other machines",
        "exclude": "name the GPUs with --include localhost:0,1",
        "node_rank": "other machines",
        "launcher": "other machines",
        "no_ssh": "other machines",
        "ssh_port": "other machines",
        "force_multi": "other machines",
        "venv_script": "other machines",
        "no_python": "autotune runs the script with python",
        "autotuning": "it would start trials of its own",
        "bind_core": "numactl starts the processes",
        "save_pid": "its file has no reader here",
        "enable_each_rank_log": "autotune keeps what is printed",
    },
    hint=_HINT,
)
_LOCAL = re.compile(r"localhost:(\d+(?:,\d+)*)")


@dataclass(frozen=True)
class DeepSpeed:
    """What `deepspeed` comes to.

    Attributes:
        environment: variables that it sets.
        script: how the script is named, and torchrun's options.
        passes_local_rank: each process is given `--local_rank=K` before its other arguments.
    """

    environment: Mapping[str, str]
    script: Torchrun
    passes_local_rank: bool


def split_deepspeed(
    words: Sequence[str], *, environment: Mapping[str, str] = os.environ, hostfile: Path = _HOSTFILE
) -> DeepSpeed:
    """Return what `deepspeed` starts.

    Args:
        words: that follow it.
        environment: that it would run in.
        hostfile: that it reads by itself.

    Raises:
        UsageError: it starts something else than one script on this machine's GPUs.
    """
    split = split_options(words, _OPTIONS)
    if hostfile.is_file():
        raise UsageError(f"deepspeed starts the script on the machines of {hostfile}", hint=_HINT)
    nodes = read_count(split.values, "num_nodes", "deepspeed")
    if nodes is not None and nodes > 1:
        raise UsageError(
            f"deepspeed's --num_nodes {nodes} is more than this machine", hint="autotune tunes one machine"
        )
    size = read_count(split.values, "num_gpus", "deepspeed") or read_count(
        split.values, "num_accelerators", "deepspeed"
    )
    found: dict[str, str] = {}
    if "include" in split.values:
        local = _LOCAL.fullmatch(split.values["include"])
        if local is None or size is not None:
            raise UsageError(
                f"deepspeed's --include {split.values['include']!r} is not supported",
                hint="write --include localhost:0,1, and no --num_gpus beside it",
            )
        devices = sorted({int(device) for device in local[1].split(",")})
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        size = len(devices)
    elif size is not None:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(size)))  # it ignores what was visible before
    size = size or count_gpus(environment)
    if size < 1:
        raise UsageError("deepspeed finds no GPU here", hint="write --num_gpus N, or torchrun ... for CPUs")
    kind = "module" if "module" in split.values else "file"
    options = ("--standalone", f"--nproc-per-node={size}")
    script = Torchrun(options, kind, split.name, split.arguments)  # type: ignore[arg-type]
    return DeepSpeed(found, script, passes_local_rank="no_local_rank" not in split.values)
