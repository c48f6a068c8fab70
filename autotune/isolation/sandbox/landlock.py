"""Landlock: the kernel refuses this process and all its descendants to write below a folder.

It reaches what a hook in Python does not: files opened by C++ and Rust, and commands that the script starts. Landlock
knows grants only, so everything beside the folder is granted, at each level up to the root. What is made anew directly
in one of the folders above it is therefore refused too.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_CREATE_RULESET_VERSION = 1
_RULE_PATH_BENEATH = 1
_PR_SET_NO_NEW_PRIVS = 38

_WRITE_FILE = 1 << 1
_TRUNCATE = 1 << 14
_CHANGE_FOLDER = sum(1 << bit for bit in range(4, 14))
"""Remove, make anything, and link or rename between folders."""
_FIRST_ABI = 2
"""Before it, every rename from one folder to another is refused."""
_TRUNCATE_ABI = 3
_MOST_GRANTS = 5_000


def fence_folder(folder: Path, *, kept: Sequence[Path]) -> bool:
    """Keep this process and its descendants from writing below a folder, for good.

    Args:
        folder: resolved.
        kept: folders that may be written to wherever they are.

    Returns:
        Whether the kernel can do so. Permissions and times of files can be changed all the same.
    """
    abi = _call(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION)
    granted = [*_find_neighbours(folder), *(path for path in kept if path.is_dir())]
    if abi < _FIRST_ABI or len(granted) > _MOST_GRANTS:
        return False
    rights = _WRITE_FILE | _CHANGE_FOLDER | (_TRUNCATE if abi >= _TRUNCATE_ABI else 0)
    ruleset = _call(_CREATE_RULESET, struct.pack("=Q", rights), 8, 0)
    if ruleset < 0:
        return False
    try:
        for path in granted:
            _grant(ruleset, path, rights)
        # Asked of whoever restricts itself: no program it starts may gain privileges.
        ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        return _call(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


def _find_neighbours(folder: Path) -> Iterator[Path]:
    """Yield everything beside the folder and beside each folder above it."""
    child = folder
    for level in folder.parents:
        try:
            with os.scandir(level) as entries:
                yield from (Path(entry.path) for entry in entries if entry.name != child.name)
        except OSError:
            pass  # what cannot be listed can hardly be written to
        child = level


def _grant(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return
    try:
        mode = os.fstat(descriptor).st_mode
        allowed = rights if stat.S_ISDIR(mode) else rights & (_WRITE_FILE | _TRUNCATE)
        if not stat.S_ISLNK(mode):
            _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: int | bytes | None) -> int:
    """Return what a system call returns: negative when it is refused or unknown."""
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    return int(syscall(ctypes.c_long(number), *arguments))
