"""Knobs `host_allocator` and `device_allocator`: both must be in the environment before the process starts.

glibc returns large blocks to the kernel when they are freed and gets them back page by page at the next step.
Thresholds above the size of an activation keep them; the numbers computed are the same.

What the user preloads stays preloaded. A malloc library among it is the baseline's malloc, and gives way to the one a
config names: with two of them loaded, which one serves a call is the linker's choice.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import PurePath

from autotune.records.config import TrainConfig

PRELOAD = "LD_PRELOAD"
"""Libraries that the dynamic linker loads before all others, separated by colons or spaces (ld.so(8))."""

DEVICE_SETTINGS, NEWER_DEVICE_SETTINGS = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
"""Settings of PyTorch's device allocator, under both of their names."""

GLIBC_TUNED = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(2**30))
"""Thresholds of glibc's malloc (mallopt(3)), above any activation."""

_MALLOC_LIBRARY = re.compile(r"lib(jemalloc|tcmalloc|mimalloc|snmalloc|tbbmalloc|hoard)[^/]*\.so")


def launch_environment(
    config: TrainConfig, host_allocators: Mapping[str, str], own: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment variables a process with this config must be started with.

    Args:
        config: the settings.
        host_allocators: paths of preloadable malloc libraries by knob value, as the machine has them.
        own: the environment they are added to; None for that of this process.

    Raises:
        ValueError: the config wants a library the machine does not have.
    """
    environment: dict[str, str] = {}
    own = os.environ if own is None else own
    before = own.get(PRELOAD, "")
    if config.host_allocator == "glibc-tuned":
        environment |= GLIBC_TUNED
        if find_malloc_libraries(before):  # the thresholds are of a malloc that would not be used
            environment[PRELOAD] = exchange_malloc(before)
    elif config.host_allocator != "default":
        if config.host_allocator not in host_allocators:
            raise ValueError(f"host_allocator {config.host_allocator!r} is not installed on this machine")
        environment[PRELOAD] = exchange_malloc(before, host_allocators[config.host_allocator])
    if config.device_allocator == "expandable-segments":
        environment |= _let_segments_expand(own)
    return environment


def _let_segments_expand(own: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of PyTorch's device allocator with expandable segments; what the user has set stays.

    The older name is read for this by every supported release, where the newer one (2.9) is not set: some releases then
    read that alone, and 2.9.1 does not (pytorch/pytorch#183387). So where it is set, both are.
    """
    value = own.get(DEVICE_SETTINGS) or own.get(NEWER_DEVICE_SETTINGS, "")
    kept = [part for part in value.split(",") if part.strip() and not part.strip().startswith("expandable_segments")]
    names = [DEVICE_SETTINGS, *([NEWER_DEVICE_SETTINGS] if NEWER_DEVICE_SETTINGS in own else [])]
    return dict.fromkeys(names, ",".join([*kept, "expandable_segments:True"]))


def find_malloc_libraries(preload: str, known: Collection[str] = ()) -> list[str]:
    """Return the malloc libraries that a value of LD_PRELOAD names.

    Args:
        preload: the value.
        known: paths that are malloc libraries whatever their name.
    """
    return [path for path in _split(preload) if path in known or _MALLOC_LIBRARY.match(PurePath(path).name)]


def exchange_malloc(preload: str, library: str | None = None) -> str:
    """Return a value of LD_PRELOAD with one malloc library instead of those it names; the others stay in order.

    Args:
        preload: the value.
        library: path of the malloc library; None for none, which leaves the C library's own.
    """
    new = [] if library is None else [library]
    named, replaced = _split(preload), find_malloc_libraries(preload, known=new)
    place = named.index(replaced[0]) if replaced else len(named)
    return ":".join([*named[:place], *new, *(path for path in named[place:] if path not in replaced)])


def describe_exchange(environment: Mapping[str, str], own: Mapping[str, str] | None = None) -> str | None:
    """Return a sentence on the user's own malloc library that gives way to a config's; None where none does.

    Args:
        environment: of a config, as `launch_environment` returns it.
        own: the environment it is added to; None for that of this process.
    """
    before = (os.environ if own is None else own).get(PRELOAD, "")
    after = _split(environment.get(PRELOAD, before))
    gone = [PurePath(path).name for path in find_malloc_libraries(before) if path not in after]
    if not gone:
        return None
    new = [PurePath(path).name for path in after if path not in _split(before)]
    return f"your own {PRELOAD} names {', '.join(gone)}: {new[0] if new else 'the C library'} serves malloc instead"


def _split(preload: str) -> list[str]:
    return [path for path in re.split("[: ]+", preload) if path]
