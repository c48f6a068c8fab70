"""What launchers look up on a machine before they start anything; no driver is asked."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_CORES = ("core_cpus_list", "thread_siblings_list")


def count_gpus(environment: Mapping[str, str], *, root: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs a process may see.

    Args:
        environment: of the process.
        root: where the file system starts.
    """
    found = [file for file in (root / "dev").glob("nvidia*") if re.fullmatch("nvidia[0-9]+", file.name)]
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(found)
    return min(len(found), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def count_physical_cores(*, root: Path = Path("/")) -> int:
    """Return how many cores the machine has, 1 where that cannot be told.

    Args:
        root: where the file system starts.
    """
    for name in _CORES:
        files = (root / "sys/devices/system/cpu").glob(f"cpu[0-9]*/topology/{name}")
        try:
            found = {file.read_text().strip() for file in files}
        except OSError:
            continue
        if found:
            return len(found)
    return 1
