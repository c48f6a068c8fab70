"""Knobs `host_allocator` and `device_allocator`: both must be in the environment before the process starts.

glibc returns large blocks to the kernel when they are freed and gets them back page by page at the next step.
Thresholds above the size of an activation keep them; the numbers computed are the same.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records.config import TrainConfig

_ONE_GIB = str(2**30)


def launch_environment(config: TrainConfig, host_allocators: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables a process with this config must be started with.

    Args:
        config: the settings.
        host_allocators: paths of preloadable malloc libraries by knob value, as the machine has them.

    Raises:
        ValueError: the config wants a library the machine does not have.
    """
    environment: dict[str, str] = {}
    if config.host_allocator == "glibc-tuned":
        environment |= {"MALLOC_MMAP_THRESHOLD_": _ONE_GIB, "MALLOC_TRIM_THRESHOLD_": _ONE_GIB}
    elif config.host_allocator != "default":
        if config.host_allocator not in host_allocators:
            raise ValueError(f"host_allocator {config.host_allocator!r} is not installed on this machine")
        environment["LD_PRELOAD"] = host_allocators[config.host_allocator]
    if config.device_allocator == "expandable-segments":
        # Read under this name by every supported release; newer ones add PYTORCH_ALLOC_CONF.
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    return environment
