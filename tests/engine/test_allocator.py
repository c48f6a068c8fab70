"""The environment a process needs for the two allocator knobs."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from typing import Any

import pytest

from autotune.engine.allocator import launch_environment
from autotune.records import TrainConfig

LIBRARIES = {"jemalloc": "/usr/lib/libjemalloc.so.2", "tcmalloc": "/usr/lib/libtcmalloc.so.4"}
HOST: dict[str, dict[str, str]] = {
    "default": {},
    "glibc-tuned": {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"},
    "jemalloc": {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
    "tcmalloc": {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"},
}
DEVICE = {"default": {}, "expandable-segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


@pytest.mark.parametrize(("host", "device"), list(itertools.product(HOST, DEVICE)))
def test_the_environment_of_each_pair(host: Any, device: Any) -> None:
    config = TrainConfig(host_allocator=host, device_allocator=device)
    assert launch_environment(config, LIBRARIES) == {**HOST[host], **DEVICE[device]}


@pytest.mark.parametrize("missing", ["jemalloc", "tcmalloc"])
def test_a_library_that_is_not_there_is_named(missing: Any) -> None:
    others = {name: path for name, path in LIBRARIES.items() if name != missing}
    with pytest.raises(ValueError, match=f"host_allocator '{missing}' is not installed"):
        launch_environment(TrainConfig(host_allocator=missing), others)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
@pytest.mark.parametrize(("host", "kept"), [("default", False), ("glibc-tuned", True)])
def test_glibc_keeps_a_freed_block_when_tuned(host: Any, kept: bool) -> None:
    # A block above glibc's largest dynamic threshold (32 MiB): mapped and unmapped by default, kept when tuned.
    program = (
        "import ctypes, pathlib\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "resident = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
        "block = libc.malloc(64 * 2**20); ctypes.memset(ctypes.c_void_p(block), 1, 64 * 2**20)\n"
        "full = resident(); libc.free(block)\n"
        "print(resident() > full - 8192)\n"
    )
    environment = launch_environment(TrainConfig(host_allocator=host), {})
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == str(kept)
