"""Temporary folders of ours, and the removal of those that dead processes have left.

    make ── lock, which the kernel releases when its holder dies ── remove
    sweep ── our name? our user? a real folder? the lock free? ── remove

The lock is on the folder itself: a script that empties it takes no lock away.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

_NAME = re.compile(r"autotune-(scratch|view)-[0-9a-f]{16}")
"""Nobody names a folder of theirs like that."""
_SWEEP_SECONDS = 10.0
"""After so long the rest is left to the next sweep: it is the user who waits."""

_held: dict[Path, int] = {}
"""The folders of this process, and the descriptors that their locks hang on."""


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a temporary folder, ours alone, and remove it in the end.

    Raises:
        OSError: no temporary folder can be made.
    """
    folder = make_scratch()
    try:
        yield folder
    finally:
        with suppress(OSError):  # a sweep comes by
            remove_scratch(folder)


def make_scratch(kind: Literal["scratch", "view"] = "scratch", parent: Path | None = None) -> Path:
    """Return a new folder that no sweep touches while this process lives; give it to `remove_scratch` in the end.

    Args:
        kind: a part of its name.
        parent: gets it; None for the temporary folder.

    Raises:
        OSError: it cannot be made.
    """
    parent = Path(parent or tempfile.gettempdir()).resolve()
    while True:
        folder = parent / f"autotune-{kind}-{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # a sweep was faster than the lock
        if claim(descriptor, folder):
            _held[folder] = descriptor
            return folder
        os.close(descriptor)


def remove_scratch(folder: Path) -> None:
    """Remove a folder whatever the permissions and the depth of what is in it; links are not followed.

    Raises:
        OSError: something in it cannot be removed.
    """
    try:
        with suppress(FileNotFoundError), _opened(folder) as top:
            _empty(top)
            os.rmdir(folder)
    finally:
        descriptor = _held.pop(folder, None)
        if descriptor is not None:
            os.close(descriptor)


def sweep_scratch() -> None:
    """Remove what dead processes of this user have left in the temporary folder, as far as that is possible.

    For commands, when they begin. Not for trials: in a view, folders of the user's are mounted below its scratch.
    """
    parent = Path(tempfile.gettempdir())
    deadline = time.monotonic() + _SWEEP_SECONDS
    with suppress(OSError):
        for name in filter(_NAME.fullmatch, os.listdir(parent)):
            if time.monotonic() > deadline:
                return
            with suppress(OSError):
                _sweep(parent / name)


def claim(descriptor: int, path: Path) -> bool:
    """Lock a file or folder that was just made, for as long as the descriptor is open.

    Returns:
        False if a sweep has taken it for a dead process's; make another one then.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks, where nothing is ever seized
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def seize(descriptor: int) -> bool:
    """Return whether whoever made a file or folder is gone; it is locked then, and may be removed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return os.fstat(descriptor).st_uid == os.geteuid()


def _sweep(folder: Path) -> None:
    if os.lstat(folder).st_uid != os.geteuid():
        return
    with _opened(folder) as top:
        if seize(top):
            _empty(top)
            os.rmdir(folder)


def _empty(top: int) -> None:
    """Empty a folder. Each one in it is moved to the top first: below, paths can be too deep to walk or to name."""
    doomed, number = secrets.token_hex(4), 0
    waiting = ["."]
    while waiting:
        name = waiting.pop()
        with _opened(name, within=top) as folder:
            for entry in _list(folder):
                number += 1
                with suppress(FileNotFoundError):
                    if not entry.is_dir(follow_symlinks=False):
                        os.unlink(entry.name, dir_fd=folder)
                        continue
                    with _opened(entry.name, within=folder):  # one that is moved is written to
                        os.rename(entry.name, f"{doomed}-{number}", src_dir_fd=folder, dst_dir_fd=top)
                    waiting.append(f"{doomed}-{number}")
        if name != ".":
            os.rmdir(name, dir_fd=top)


@contextmanager
def _opened(path: str | Path, *, within: int | None = None) -> Iterator[int]:
    """Open a folder, made readable and writable, by names of which none can be swapped for a link meanwhile."""
    handle = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        if os.fstat(handle).st_mode & 0o700 != 0o700:
            os.chmod(f"/proc/self/fd/{handle}", 0o700)
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=handle)
    finally:
        os.close(handle)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _list(folder: int) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)
