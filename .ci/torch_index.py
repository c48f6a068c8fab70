"""Print pip's option for the CPU build of torch where there is no NVIDIA GPU; nothing where there is one.

The build on PyPI brings some GB of CUDA libraries. Where the other index cannot be reached, nothing is printed either,
and pip installs what it finds: torch works with both.
"""

from __future__ import annotations

import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

INDEX = "https://download.pytorch.org/whl/cpu"
TIMEOUT_SECONDS = 3.0
NVIDIA_FILES = (Path("/dev/nvidia0"), Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Devices of the driver; the last is WSL's."""


def has_nvidia_gpu() -> bool:
    """Return whether the NVIDIA driver is here."""
    return any(path.exists() for path in NVIDIA_FILES) or shutil.which("nvidia-smi") is not None


def is_reachable(index: str) -> bool:
    """Return whether the index answers for torch within seconds."""
    try:
        with urllib.request.urlopen(f"{index}/torch/", timeout=TIMEOUT_SECONDS) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def choose_options(index: str = INDEX) -> str:
    """Return pip's options, empty for none."""
    # Other systems' torch on PyPI is the CPU build already.
    if not sys.platform.startswith("linux") or has_nvidia_gpu() or not is_reachable(index):
        return ""
    return f"--extra-index-url {index}"


if __name__ == "__main__":
    print(choose_options())
