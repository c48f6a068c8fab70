"""Exporter `env`: what must stand in the environment before the process starts, as a file to `source`."""

from __future__ import annotations

from autotune.emit.export.allocators import describe_library, let_segments_expand, read_allocators
from autotune.emit.export.by_hand import comment, list_by_hand
from autotune.emit.export.exported import Export, Request, build_export
from autotune.engine.allocator import DEVICE_SETTINGS, NEWER_DEVICE_SETTINGS
from autotune.records import TrainConfig

_FIELDS = frozenset({"num_threads", "host_allocator", "device_allocator"})


def export_environment(request: Request) -> Export:
    """Return the file; what is no matter of the environment is in its comments."""
    unmapped = list_by_hand(request, request.changed - _FIELDS)
    lines = comment(request.header, unmapped)
    before, after = _environment(request, request.baseline), _environment(request, request.config)
    gone = [name for name in before if name not in after]
    new = {name: value for name, value in after.items() if before.get(name) != value}
    how = describe_library(request) if "host_allocator" in request.changed else ""
    lines += [f"# {how}"] if how else []
    # An assignment after `export` is an argument: without quotes some shells would split a value at its spaces.
    lines += [f"unset {name}" for name in gone]
    lines += [f'export {name}="{value}"' for name, value in new.items()]
    if DEVICE_SETTINGS in new:  # some releases read the newer name alone where it is set (pytorch/pytorch#183387)
        value = let_segments_expand(NEWER_DEVICE_SETTINGS)
        lines.append(f'[ -z "${{{NEWER_DEVICE_SETTINGS}+x}}" ] || export {NEWER_DEVICE_SETTINGS}="{value}"')
    lines += [] if gone or new else ["# Nothing of this answer is a matter of the environment."]
    return build_export("tuned.env", "\n".join(lines) + "\n", request, unmapped)


def _environment(request: Request, config: TrainConfig) -> dict[str, str]:
    threads = {} if config.num_threads is None else {"OMP_NUM_THREADS": str(config.num_threads)}
    return threads | read_allocators(config, request.libraries)
