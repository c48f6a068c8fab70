"""Knobs that must stand in the environment before the process starts, as the line to start it with."""

from __future__ import annotations

import re
from collections.abc import Mapping

from autotune.records import TrainConfig

_ONE_GIB = str(2**30)
_GLIBC_TUNED = {"MALLOC_MMAP_THRESHOLD_": _ONE_GIB, "MALLOC_TRIM_THRESHOLD_": _ONE_GIB}
_PACKAGED_LIBRARIES = {
    "jemalloc": ("libjemalloc.so.2", "libjemalloc2"),
    "tcmalloc": ("libtcmalloc_minimal.so.4", "libtcmalloc-minimal4"),
}
"""Names the dynamic linker finds by itself, and the packages of Debian and Ubuntu that have them."""
_DEVICE_ALLOCATORS = {
    "default": {},
    "expandable-segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}
# A profile is data from anywhere, and this goes into a command line: a path with any other sign is not repeated.
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9_./+@~=-]+")


def host_environment(config: TrainConfig, libraries: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of the knob `host_allocator`, as a shell takes them.

    Args:
        config: the settings.
        libraries: paths of malloc libraries by knob value, where they are known.
    """
    if config.host_allocator == "default":
        return {}
    if config.host_allocator == "glibc-tuned":
        return dict(_GLIBC_TUNED)
    library = _find_path(config, libraries) or _PACKAGED_LIBRARIES[config.host_allocator][0]
    # In front of what the user preloads already, so that it serves malloc whatever that is.
    return {"LD_PRELOAD": f"{library}${{LD_PRELOAD:+:$LD_PRELOAD}}"}


def explain_library(config: TrainConfig, libraries: Mapping[str, str]) -> str:
    """Return where to find the library that is named without a path; empty where there is nothing to explain."""
    if config.host_allocator not in _PACKAGED_LIBRARIES or _find_path(config, libraries):
        return ""
    library, package = _PACKAGED_LIBRARIES[config.host_allocator]
    return (
        f"{library} is in the package {package} of Debian and Ubuntu; "
        f"ldconfig -p | grep {config.host_allocator} tells its name and path on this machine"
    )


def device_environment(config: TrainConfig) -> dict[str, str]:
    """Return the environment variables of the knob `device_allocator`."""
    return dict(_DEVICE_ALLOCATORS[config.device_allocator])


def launch_line(config: TrainConfig, libraries: Mapping[str, str], command: str, **extra: str) -> str:
    """Return a comment with the command line that starts a training, its environment first.

    Where a library has to be found first, a second line tells how.

    Args:
        config: the settings.
        libraries: paths of malloc libraries by knob value, where they are known.
        command: the program and its arguments.
        extra: more environment variables, set after the allocators'.
    """
    environment = host_environment(config, libraries) | device_environment(config) | extra
    line = " ".join(["# run as:", *assignments(environment), command])
    how = explain_library(config, libraries)
    return f"{line}\n# {how}" if how else line


def assignments(environment: dict[str, str]) -> list[str]:
    """Return `NAME=value` for each variable, as a shell takes it before a command."""
    return [f"{name}={value}" for name, value in environment.items()]


def _find_path(config: TrainConfig, libraries: Mapping[str, str]) -> str | None:
    path = libraries.get(config.host_allocator, "")
    return path if _PLAIN_PATH.fullmatch(path) else None
