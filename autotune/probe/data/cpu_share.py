"""How much of a stretch of time was work, and how much waiting: clocks of the process in, a share out.

|  work  |  ready, but no CPU is free  |  asleep: disk, network  |
|<-------- counts as work ------------>|                            a busy machine makes no dataset one that waits
"""

from __future__ import annotations

import time
from pathlib import Path

_NANOSECONDS = 1e9


class CpuShare:
    """Tells what part of the time since it was made this process worked, or would have with a CPU to itself."""

    def __init__(self, *, schedule: Path = Path("/proc/thread-self/schedstat")) -> None:
        """Begin now.

        Args:
            schedule: counters of the thread: nanoseconds on a CPU, nanoseconds ready to run, stretches.
        """
        self._schedule = schedule
        self._began, self._busy = time.perf_counter(), self._read_busy()

    def read(self) -> tuple[float, float]:
        """Return the seconds since, and the share of them."""
        seconds = time.perf_counter() - self._began
        busy = self._read_busy() - self._busy
        return seconds, min(1.0, max(0.0, busy / seconds)) if seconds > 0 else 1.0

    def _read_busy(self) -> float:
        return time.process_time() + self._read_ready()

    def _read_ready(self) -> float:
        """Return the seconds this thread was ready and had no CPU; 0 where the kernel does not tell."""
        try:
            fields = self._schedule.read_text(encoding="ascii").split()
        except OSError:
            return 0.0
        return int(fields[1]) / _NANOSECONDS if len(fields) > 1 and fields[1].isdigit() else 0.0
