"""Allocators as environment variables: they must stand there before the process starts."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.emit.export.exported import Request
from autotune.engine.allocator import DEVICE_SETTINGS, GLIBC_TUNED
from autotune.records import TrainConfig

_PACKAGED_LIBRARIES = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc2"),
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
}
"""Names the dynamic linker finds by itself, and the packages of Debian and Ubuntu that have them."""
# A profile is data from anywhere, and this goes into a command line: a path with any other sign is not repeated.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+@~=-]+")


def allocator_environment(request: Request) -> dict[str, str]:
    """Return the environment variables of both allocators, as a shell takes them, that are not the user's own."""
    before, after = (read_allocators(config, request.libraries) for config in (request.baseline, request.config))
    return {name: value for name, value in after.items() if before.get(name) != value}


def describe_library(request: Request) -> str:
    """Return where to find the library that is named without a path; empty where there is nothing to explain."""
    allocator = request.config.host_allocator
    if allocator not in _PACKAGED_LIBRARIES or _find_path(allocator, request.libraries):
        return ""
    library, package = _PACKAGED_LIBRARIES[allocator]
    return f"{library}: package {package} of Debian and Ubuntu; its path is told by ldconfig -p | grep {allocator}"


def read_allocators(config: TrainConfig, libraries: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment variables of a config's two allocators, as a shell takes them."""
    expands = config.device_allocator == "expandable-segments"
    device = {DEVICE_SETTINGS: let_segments_expand(DEVICE_SETTINGS)} if expands else {}
    return _host_environment(config.host_allocator, libraries) | device


def let_segments_expand(name: str) -> str:
    """Return the value of a variable of PyTorch's allocator, as a shell takes it: after what the user has set there."""
    return f"${{{name}:+${name},}}expandable_segments:True"


def _host_environment(allocator: str, libraries: Mapping[str, str] | None) -> dict[str, str]:
    if allocator == "default":
        return {}
    if allocator == "glibc-tuned":
        return dict(GLIBC_TUNED)
    library = _find_path(allocator, libraries) or _PACKAGED_LIBRARIES[allocator][0]
    # In front of what the user preloads already, so that it serves malloc whatever that is.
    return {"LD_PRELOAD": f"{library}${{LD_PRELOAD:+:$LD_PRELOAD}}"}


def _find_path(allocator: str, libraries: Mapping[str, str] | None) -> str | None:
    path = (libraries or {}).get(allocator, "")
    return path if _PLAIN_PATH.fullmatch(path) else None
