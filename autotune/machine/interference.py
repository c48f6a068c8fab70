"""What else went on on the machine while something was timed. Counters of the kernel in, `Interference` out.

    start()            read()              read()
      counters ─────────▶ counters ─────────▶ counters       each arrow is one `Interference`: what the counters grew by

    busy CPU time = user + nice + system + irq + softirq  ──▶ foreign = busy - own, as a share of all CPU time
    own CPU time  = this process + its live loader workers + its children that have ended

A reading opens a handful of small files under /proc and /sys. What cannot be read is None, never an exception.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.machine.cgroups import find_throttle_readers, find_usage_reader, read_cpu_quota
from autotune.machine.gpu_state import GpuWatch
from autotune.records.measurement import GpuState, Interference

if TYPE_CHECKING:
    import torch

# Columns of a `cpuN` line: user nice system idle iowait irq softirq steal. The two that follow are guests' time, which
# user and nice contain already. Source: proc_stat(5).
_COLUMN_COUNT = 8
_IDLE, _IOWAIT, _STEAL = 3, 4, 7
_NOT_BUSY = (_IDLE, _IOWAIT, _STEAL)
_LONGEST_COUNT = 20  # digits of the largest unsigned 64-bit number; the kernel prints no larger one
# utime and stime of /proc/PID/stat, counted from the state, which is the first field after the name.
_USER_TIME, _SYSTEM_TIME = 11, 12


@dataclass(frozen=True)
class _CpuTicks:
    """CPU time of the usable CPUs by column, in clock ticks."""

    by_cpu: dict[str, tuple[int, ...]]

    def since(self, earlier: _CpuTicks) -> tuple[int, ...] | None:
        """Return the growth of each column, over all CPUs; None when the CPUs are not the same."""
        if self.by_cpu.keys() != earlier.by_cpu.keys():
            return None
        # The kernel lets idle and iowait step back now and then.
        grown = [
            [max(0, late - early) for late, early in zip(columns, earlier.by_cpu[cpu], strict=True)]
            for cpu, columns in self.by_cpu.items()
        ]
        return tuple(map(sum, zip(*grown, strict=True)))


@dataclass(frozen=True)
class _Counters:
    """Everything that only grows, at one moment; None for what cannot be read."""

    now_seconds: float
    cpu: _CpuTicks | None
    own_cpu_seconds: float | None
    quota_cpu_seconds: float | None
    throttled_seconds: tuple[float | None, ...]
    cpu_pressure_seconds: float | None
    io_pressure_seconds: float | None
    memory_pressure_seconds: float | None
    major_faults: int


class InterferenceMeter:
    """Tells what else went on between two readings; the first interval begins when the meter is made."""

    def __init__(
        self,
        *,
        root: Path = Path("/"),
        read_gpu: Callable[[], GpuState | None] = lambda: None,
        now: Callable[[], float] = time.perf_counter,
        own_cpu_seconds: Callable[[], float] | None = None,
    ) -> None:
        """Find the files to read and begin an interval.

        Args:
            root: where /proc and /sys are.
            read_gpu: returns the GPU's state of the moment.
            now: wall clock, in seconds.
            own_cpu_seconds: CPU seconds used so far that are not foreign; None for this process and its children.
        """
        self._root = root
        self._read_gpu = read_gpu
        self._now = now
        self._own_cpu_seconds = own_cpu_seconds or partial(_read_own_cpu_seconds, root)
        # Found once: a thread pool that pins its threads later would shrink the answer to one CPU.
        self._cpus = _name_usable_cpus()
        self._throttle_readers, self._quota = find_throttle_readers(root), read_cpu_quota(root)
        self._read_usage = find_usage_reader(root)
        self._before = self._count()

    def start(self) -> None:
        """Begin an interval now."""
        self._before = self._count()

    def read(self) -> Interference:
        """Return what happened since `start` or the last `read`, and begin the next interval.

        Shares are of all CPU time, or of a quota's, or of the wall time, 0 to 1. None stands for what cannot be read
        and for every share of an interval without length. The kernel counts CPU time in ticks (1/100 s), so that an
        interval far below a second tells little. `throttled_fraction` is an upper bound: the kernel adds up the CPUs
        held at once.
        """
        before, after = self._before, self._count()
        self._before = after
        wall_seconds = after.now_seconds - before.now_seconds
        foreign, steal = self._take_from_quota(*_compare_cpu(before, after))
        if foreign is not None and self._quota is not None:
            others = _subtract_own(before, after)  # beside us under the same quota, however many CPUs idle
            foreign = max(foreign, _share(others, 0.0, self._quota * wall_seconds) or 0.0)
        held = [
            _share(late, early, wall_seconds)
            for late, early in zip(after.throttled_seconds, before.throttled_seconds, strict=True)
        ]
        return Interference(
            foreign_cpu_fraction=None if _shares_the_machine_with_ranks() else foreign,
            steal_fraction=steal,
            throttled_fraction=max((share for share in held if share is not None), default=None),
            cpu_pressure_fraction=_share(after.cpu_pressure_seconds, before.cpu_pressure_seconds, wall_seconds),
            io_pressure_fraction=_share(after.io_pressure_seconds, before.io_pressure_seconds, wall_seconds),
            memory_pressure_fraction=_share(
                after.memory_pressure_seconds, before.memory_pressure_seconds, wall_seconds
            ),
            major_faults=max(0, after.major_faults - before.major_faults),
            gpu=self._read_gpu(),
        )

    def _take_from_quota(self, foreign: float | None, steal: float | None) -> tuple[float | None, float | None]:
        """Return shares of all CPUs in sight as shares of what a quota allows: nothing is taken while as many idle."""
        taken = (foreign or 0.0) + (steal or 0.0)
        visible = (os.cpu_count() or 1) if self._cpus is None else len(self._cpus)
        if self._quota is None or self._quota >= visible or taken == 0.0:
            return foreign, steal
        lost = max(0.0, self._quota - visible * (1.0 - taken)) / self._quota
        return (None if foreign is None else lost * foreign / taken), (None if steal is None else lost * steal / taken)

    def _count(self) -> _Counters:
        pressure = self._root / "proc/pressure"
        return _Counters(
            now_seconds=self._now(),
            cpu=_read_cpu_ticks(self._root / "proc/stat", self._cpus),
            own_cpu_seconds=self._own_cpu_seconds(),
            quota_cpu_seconds=self._read_usage(),
            throttled_seconds=tuple(read() for read in self._throttle_readers),
            cpu_pressure_seconds=_read_pressure_seconds(pressure / "cpu"),
            io_pressure_seconds=_read_pressure_seconds(pressure / "io"),
            memory_pressure_seconds=_read_pressure_seconds(pressure / "memory"),
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
        )


def watch_interference(device: torch.device) -> InterferenceMeter:
    """Return the meter for a training on a device, its GPU watched where it is one."""
    if device.type != "cuda":
        return InterferenceMeter()
    return InterferenceMeter(read_gpu=GpuWatch(device.index or 0).read)


def _compare_cpu(before: _Counters, after: _Counters) -> tuple[float | None, float | None]:
    """Return the shares of all CPU time that other processes used and that the hypervisor gave away."""
    if before.cpu is None or after.cpu is None:
        return None, None
    columns = after.cpu.since(before.cpu)
    total = sum(columns) if columns is not None else 0
    if columns is None or total == 0:
        return None, None
    steal = columns[_STEAL] / total
    if before.own_cpu_seconds is None or after.own_cpu_seconds is None:
        return None, steal
    own_seconds = after.own_cpu_seconds - before.own_cpu_seconds
    if own_seconds < 0:
        # A child that ended without being waited for takes its past along: there is no telling what was ours.
        return None, steal
    busy = total - sum(columns[column] for column in _NOT_BUSY)
    return _clamp((busy - own_seconds * _ticks_per_second()) / total), steal


def _subtract_own(before: _Counters, after: _Counters) -> float | None:
    """Return the CPU seconds that others under the same quota have used; None where that is not told."""
    seconds = (after.quota_cpu_seconds, before.quota_cpu_seconds, after.own_cpu_seconds, before.own_cpu_seconds)
    known = [one for one in seconds if one is not None]
    return known[0] - known[1] - (known[2] - known[3]) if len(known) == len(seconds) else None


def _share(late: float | None, early: float | None, wall_seconds: float) -> float | None:
    if late is None or early is None or wall_seconds <= 0:
        return None
    return _clamp((late - early) / wall_seconds)


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))


def _shares_the_machine_with_ranks() -> bool:
    """Return whether a launcher runs several of us here: the others' work is neither ours nor foreign."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return ranks.isdecimal() and int(ranks) > 1


def _name_usable_cpus() -> frozenset[str] | None:
    """Return the CPUs this process may use as /proc/stat names them; None for all, where that is not told."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(f"cpu{number}" for number in os.sched_getaffinity(0))


def _read_cpu_ticks(file: Path, usable: frozenset[str] | None) -> _CpuTicks | None:
    """Return the time of the usable CPUs; None unless every one of them can be read, since a part tells nothing."""
    found: dict[str, tuple[int, ...]] = {}
    for line in _read_text(file).splitlines():
        name, *words = line.split()[: _COLUMN_COUNT + 1] or [""]
        if not name.startswith("cpu"):
            break  # The CPUs come first; the interrupts after them can be many thousands of words.
        if name == "cpu" or (usable is not None and name not in usable):
            continue
        if len(words) < _COLUMN_COUNT or not _are_counts(words):
            return None
        found[name] = tuple(map(int, words))
    if not found or (usable is not None and found.keys() != usable):
        return None
    return _CpuTicks(found)


def _read_own_cpu_seconds(root: Path) -> float | None:
    """Return the CPU time of this process and its children so far; None when a live worker cannot be read."""
    # Asking for the live ones also reaps the dead, whose time has then moved to RUSAGE_CHILDREN: none is lost, and
    # the sum grows whether a worker lives, dies or is replaced by one of the same number.
    workers = [_read_process_seconds(root, child.pid) for child in multiprocessing.active_children()]
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    known = [seconds for seconds in workers if seconds is not None]
    if len(known) < len(workers):
        return None
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(known)


def _read_process_seconds(root: Path, pid: int | None) -> float | None:
    # The name stands in parentheses and may hold anything, a closing one and spaces too.
    fields = _read_text(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    ticks = fields[_USER_TIME : _SYSTEM_TIME + 1]
    return sum(map(int, ticks)) / _ticks_per_second() if len(ticks) == 2 and _are_counts(ticks) else None


def _read_pressure_seconds(file: Path) -> float | None:
    """Return for how long some task has waited; the format is that of Linux `Documentation/accounting/psi.rst`."""
    for line in _read_text(file).splitlines():
        kind, *pairs = line.split() or [""]
        counts = [pair.removeprefix("total=") for pair in pairs if pair.startswith("total=")]
        if kind == "some" and counts and _are_counts(counts):
            return int(counts[0]) / 1e6
    return None


def _are_counts(words: Iterable[str]) -> bool:
    return all(word.isascii() and word.isdigit() and len(word) <= _LONGEST_COUNT for word in words)


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # Also what a kernel without pressure accounting answers with.
