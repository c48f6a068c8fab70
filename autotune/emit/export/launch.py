"""Knobs that must stand in the environment before the process starts, as the line to start it with."""

from __future__ import annotations

from autotune.records import TrainConfig

_ONE_GIB = str(2**30)
_HOST_ALLOCATORS = {
    "default": {},
    "glibc-tuned": {"MALLOC_MMAP_THRESHOLD_": _ONE_GIB, "MALLOC_TRIM_THRESHOLD_": _ONE_GIB},
    # Names the dynamic linker finds by itself: a config does not know where a machine keeps its libraries.
    "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"},
    "tcmalloc": {"LD_PRELOAD": "libtcmalloc.so.4"},
}
_DEVICE_ALLOCATORS = {
    "default": {},
    "expandable-segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
}


def host_environment(config: TrainConfig) -> dict[str, str]:
    """Return the environment variables of the knob `host_allocator`."""
    return dict(_HOST_ALLOCATORS[config.host_allocator])


def device_environment(config: TrainConfig) -> dict[str, str]:
    """Return the environment variables of the knob `device_allocator`."""
    return dict(_DEVICE_ALLOCATORS[config.device_allocator])


def launch_line(config: TrainConfig, command: str, **extra: str) -> str:
    """Return a comment with the command line that starts a training, its environment first.

    Args:
        config: the settings.
        command: the program and its arguments.
        extra: more environment variables, set after the allocators'.
    """
    environment = host_environment(config) | device_environment(config) | extra
    return " ".join(["# run as:", *assignments(environment), command])


def assignments(environment: dict[str, str]) -> list[str]:
    """Return `NAME=value` for each variable, as a shell takes it before a command."""
    return [f"{name}={value}" for name, value in environment.items()]
