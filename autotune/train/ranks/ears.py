"""What the launcher of a training's processes hears, and what it says."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from autotune.distributed.place import read_leader
from autotune.errors import AutotuneError
from autotune.train.recovery.attempts import FORWARDED


class Ears:
    """Hears signals, for the leader.

    Attributes:
        heard: the signals, in order.
    """

    def __init__(self) -> None:
        self.heard: list[int] = []
        self._handed_on = 0
        for number in FORWARDED:
            if signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._hear)

    def _hear(self, number: int, _frame: object) -> None:
        self.heard.append(number)

    def forward(self, folder: Path) -> bool:
        """Hand on what was heard, once there is a leader to hear it; return False: the training goes on.

        Args:
            folder: that the processes share.
        """
        leader = read_leader(folder) if self._handed_on < len(self.heard) else None
        while leader is not None and self._handed_on < len(self.heard):
            with suppress(ProcessLookupError):
                os.kill(leader, self.heard[self._handed_on])
            self._handed_on += 1
        return False


def say_error(error: AutotuneError) -> None:
    """Tell the user."""
    sys.stderr.write(f"error: {error.message}\n" + (f"  {error.hint}\n" if error.hint else ""))
