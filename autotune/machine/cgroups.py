"""Limits of the control groups this process runs in: files under /proc and /sys in, numbers out.

    /proc/self/cgroup     which group, per hierarchy      /proc/self/mountinfo  where that hierarchy is mounted

A group is bound by its own limits and by those of every group above it, so each answer is the tightest one on the
way from the group up to the mount point. Version 1 mounts one tree per controller, version 2 one for all of them; a
hybrid host has both, and either may bind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from autotune.machine.procfs import read_text

# Version 1 writes "no limit" as the largest page-aligned signed 64-bit number; no machine has an exbibyte.
_NO_LIMIT_BYTES = 2**60
_DEFAULT_PERIOD_MICROSECONDS = 100_000


@dataclass(frozen=True)
class _Mount:
    version: int
    controllers: frozenset[str]
    top: PurePosixPath
    folder: Path


def read_cpu_quota(root: Path) -> float | None:
    """Return the CPU time granted per period, in CPUs (1.5 is one and a half); None without a quota.

    Source: Linux `Documentation/admin-guide/cgroup-v2.rst` (`cpu.max`) and `scheduler/sched-bwc.rst` (version 1).

    Args:
        root: where /proc and /sys are.
    """
    return min((quota for quota, _, _ in _list_quotas(root)), default=None)


def find_usage_reader(root: Path) -> Callable[[], float | None]:
    """Return what reads the CPU seconds used by all that share this process's tightest quota.

    None without a quota, and where the kernel does not say: version 1 counts them elsewhere.

    Args:
        root: where /proc and /sys are.
    """
    _, version, folder = min(_list_quotas(root), default=(0.0, 1, root))
    return partial(_read_seconds, folder / "cpu.stat", "usage_usec", 1e6) if version == 2 else lambda: None


def _list_quotas(root: Path) -> Iterator[tuple[float, int, Path]]:
    """Yield quota, version and folder of each group that has one."""
    for version, folder in _walk_groups(root, "cpu"):
        if version == 2:
            words = _read_words(folder / "cpu.max")
        else:
            words = _read_words(folder / "cpu.cfs_quota_us") + _read_words(folder / "cpu.cfs_period_us")
        quota = _to_count(words[0]) if words else None
        period = (_to_count(words[1]) if len(words) > 1 else None) or _DEFAULT_PERIOD_MICROSECONDS
        if quota:
            yield quota / period, version, folder


def read_memory_limit(root: Path) -> int | None:
    """Return the most memory the groups may hold, in bytes; None without a limit.

    Args:
        root: where /proc and /sys are.
    """
    return min((limit for limit, _, _ in _limited_groups(root)), default=None)


def read_memory_headroom(root: Path) -> int | None:
    """Return the bytes that can still be allocated before a group's limit is reached; None without a limit.

    Page cache that is not in active use counts as free: the kernel drops it before it kills.

    Args:
        root: where /proc and /sys are.
    """
    headrooms = []
    for limit, version, folder in _limited_groups(root):
        used = _read_count(folder / ("memory.current" if version == 2 else "memory.usage_in_bytes")) or 0
        cache = _read_inactive_file_bytes(folder, version)
        headrooms.append(max(0, limit - max(0, used - cache)))
    return min(headrooms, default=None)


def read_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how often the kernel killed in this process's group for want of memory; None where it does not say.

    Source: Linux `Documentation/admin-guide/cgroup-v2.rst` (`memory.events`) and `cgroup-v1/memory.rst`
    (`memory.oom_control`); both have a line `oom_kill N`.

    Args:
        root: where /proc and /sys are.
    """
    counts: dict[int, int] = {}
    for version, folder in _walk_groups(root, "memory"):
        file = folder / ("memory.events" if version == 2 else "memory.oom_control")
        count = _to_count(_read_pairs(file).get("oom_kill", ""))
        if count is not None:
            counts.setdefault(version, count)  # the nearest group's: those above count other jobs' kills too
    return sum(counts.values()) if counts else None


def count_between(before: int | None, after: int | None) -> int | None:
    """Return by how much a counter has grown, such as `read_oom_kills`; None where it was not told."""
    return None if before is None or after is None else max(0, after - before)


def find_throttle_readers(root: Path) -> tuple[Callable[[], float | None], ...]:
    """Return one cheap reader for each group that counts how long its CPU quota has held it.

    A reader returns the seconds since the group was made, None when they cannot be read any more. The kernel adds up
    every CPU on which the group's tasks were held, so seconds can pass faster than on the clock.

    Source: Linux `Documentation/admin-guide/cgroup-v2.rst` (`cpu.stat`), `scheduler/sched-bwc.rst` (version 1) and
    `kernel/sched/fair.c` (the sum over CPUs).

    Args:
        root: where /proc and /sys are.
    """
    readers = []
    for version, folder in _walk_groups(root, "cpu"):
        key, per_second = ("throttled_usec", 1e6) if version == 2 else ("throttled_time", 1e9)
        read = partial(_read_seconds, folder / "cpu.stat", key, per_second)
        if read() is not None:
            readers.append(read)
    return tuple(readers)


def _read_seconds(file: Path, key: str, per_second: float) -> float | None:
    count = _to_count(_read_pairs(file).get(key, ""))
    return None if count is None else count / per_second


def _limited_groups(root: Path) -> Iterator[tuple[int, int, Path]]:
    for version, folder in _walk_groups(root, "memory"):
        limit = _read_count(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if limit is not None and limit < _NO_LIMIT_BYTES:
            yield limit, version, folder


def _read_inactive_file_bytes(folder: Path, version: int) -> int:
    key = "inactive_file" if version == 2 else "total_inactive_file"
    return _to_count(_read_pairs(folder / "memory.stat").get(key, "")) or 0


def _walk_groups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """Yield version and folder of this process's group and of each one above it, in every hierarchy."""
    mounts = list(_read_mounts(root))
    for line in _read_lines(root / "proc/self/cgroup"):
        identifier, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        version = 2 if identifier == "0" and not names else 1
        if version == 1 and controller not in names.split(","):
            continue
        fitting = (m for m in mounts if m.version == version and (version == 2 or controller in m.controllers))
        mount = next(fitting, None)
        if mount is None:
            continue
        inner = _path_below(PurePosixPath(path), mount.top)
        for part in (inner, *inner.parents):
            yield version, mount.folder / part


def _read_mounts(root: Path) -> Iterator[_Mount]:
    """Yield the mounted hierarchies; the fields are those of proc_pid_mountinfo(5)."""
    for line in _read_lines(root / "proc/self/mountinfo"):
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        folder = root / _unescape(fields[4]).lstrip("/")
        version = 2 if kinds[0] == "cgroup2" else 1
        yield _Mount(version, frozenset(kinds[2].split(",")), PurePosixPath(_unescape(fields[3])), folder)


def _path_below(path: PurePosixPath, top: PurePosixPath) -> PurePosixPath:
    """Return the group's path inside the mounted part of the hierarchy, the mount point itself when it is outside."""
    # A container without a private namespace sees the host's path, while only its own group is mounted.
    if ".." in path.parts or not path.is_relative_to(top):
        return PurePosixPath()
    return path.relative_to(top)


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def _read_lines(path: Path) -> list[str]:
    return (read_text(path) or "").splitlines()


def _read_words(path: Path) -> list[str]:
    return (read_text(path) or "").split()


def _read_pairs(path: Path) -> dict[str, str]:
    words = _read_words(path)
    return dict(zip(words[::2], words[1::2], strict=False))


def _read_count(path: Path) -> int | None:
    words = _read_words(path)
    return _to_count(words[0]) if words else None


def _to_count(text: str) -> int | None:
    """Return a non-negative number; None for `max`, for version 1's -1 and for what is no number."""
    return int(text) if text.isascii() and text.isdigit() else None
