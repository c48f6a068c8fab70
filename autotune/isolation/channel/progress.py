"""A page that a trial's process and its supervisor share: what the trial is at, for how long, and its steps.

    supervisor, makes it ◀── reads ── [checksum, phase, steps, since, first, latest] ◀── writes ── trial

The trial maps the page before any of the user's code runs, so nothing that code does to the file or to descriptors
reaches the mapping; the supervisor reads by the descriptor it made the file with, so it is never led elsewhere.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import time
import zlib
from pathlib import Path
from types import TracebackType
from typing import Self

from autotune.isolation.channel.turns import Turns, open_turns
from autotune.measure.hopeless import Beat, Phase

PROGRESS_FILE = "progress"

_LAYOUT = struct.Struct("=IIddd")
_CHECKSUM = struct.Struct("=I")
_PAGE_BYTES = 64


class ProgressReader:
    """The supervisor's end: makes the page anew, reads it, and takes it away.

    Attributes:
        began: `time.monotonic()` when it was made, just before the trial's process.
    """

    def __init__(self, folder: Path) -> None:
        """Make the page in a trial's own folder.

        Raises:
            OSError: the file cannot be made, or the disk is full.
        """
        self._path = folder / PROGRESS_FILE
        self._path.unlink(missing_ok=True)
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self.began = time.monotonic()
        self._latest = Beat(Phase.STARTING, self.began)
        os.posix_fallocate(self._descriptor, 0, _PAGE_BYTES)  # a hole in a full disk would be a SIGBUS for the trial

    def read(self) -> Beat:
        """Return the last beat that was written in full."""
        page = os.pread(self._descriptor, _PAGE_BYTES, 0)
        body = page[_CHECKSUM.size : _CHECKSUM.size + _LAYOUT.size]
        if len(body) == _LAYOUT.size and page[: _CHECKSUM.size] == _CHECKSUM.pack(zlib.crc32(body)):
            phase, steps, since, first, latest = _LAYOUT.unpack(body)
            if phase <= max(Phase):
                self._latest = Beat(Phase(phase), since, steps, first, latest)
        return self._latest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        os.close(self._descriptor)
        try:
            self._path.unlink(missing_ok=True)
        except OSError:
            pass  # the trial's code made something else of it


class ProgressWriter:
    """The trial's end. A process that is forked off has it too, but takes no steps of the trial's."""

    def __init__(self, page: mmap.mmap, turns: Turns | None = None) -> None:
        self._page, self._turns = page, turns
        self._beat = Beat(Phase.STARTING, time.monotonic())

    def enter(self, phase: Phase) -> None:
        """Begin something else; nothing when it is at that already."""
        if phase is not self._beat.phase:
            beat = self._beat
            self._write(Beat(phase, time.monotonic(), beat.steps, beat.first_step_seconds, beat.latest_step_seconds))

    def end_step(self, seconds: float) -> None:
        """Note that an optimizer step is done, and wait for the next batch.

        Args:
            seconds: that it took, without the wait for data.
        """
        first = self._beat.first_step_seconds if self._beat.steps else seconds
        self._write(Beat(Phase.LOADING, time.monotonic(), self._beat.steps + 1, first, seconds))

    def halt(self) -> None:
        """Stop what this process has started, until it goes on; nothing for a trial that is alone."""
        if self._turns is not None:
            self._turns.halt()

    def go_on(self) -> None:
        """Let what was stopped go on."""
        if self._turns is not None:
            self._turns.go_on()

    def rest(self) -> float:
        """Let the other trial of a pair go on, and return after how many seconds; 0 for a trial that is alone."""
        return 0.0 if self._turns is None else self._turns.rest()

    def _write(self, beat: Beat) -> None:
        self._beat = beat
        first, latest = beat.first_step_seconds, beat.latest_step_seconds
        body = _LAYOUT.pack(beat.phase, beat.steps, beat.since, first, latest)
        self._page[: _CHECKSUM.size + len(body)] = _CHECKSUM.pack(zlib.crc32(body)) + body


def open_progress(folder: Path) -> ProgressWriter | None:
    """Return the trial's end of the page; None where there is none, e.g. in a process without a supervisor."""
    try:
        descriptor = os.open(folder / PROGRESS_FILE, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _PAGE_BYTES:
            return None
        return ProgressWriter(mmap.mmap(descriptor, _PAGE_BYTES), open_turns(folder))
    except (OSError, ValueError):
        return None
    finally:
        os.close(descriptor)
