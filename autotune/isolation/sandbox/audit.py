"""What the script writes outside of its view, and no writing to originals that a copy only links to.

A hook on the interpreter's audit events sees what Python code opens, makes, moves and removes; processes forked from
this one, such as loader workers, have it too. It sees nothing that C++ code or other programs do.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from autotune.isolation.sandbox.copy_view import find_tree
from autotune.isolation.sandbox.overlay import find_roots
from autotune.isolation.sandbox.view import View, find_caches, is_cache

_MOST_PATHS = 200
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PASSING = ("/dev", "/proc", "/sys")
"""Nothing that is written here lasts."""


class _Operand(NamedTuple):
    """A path among the arguments of an audit event.

    Attributes:
        path: its position.
        folder: position of the descriptor that it is relative to, if there is one.
        follows: the event is about what a link leads to, not the link.
        is_changed: the file or its folder is changed; else it gets a second name.
    """

    path: int
    folder: int | None = None
    follows: bool = False
    is_changed: bool = True


_FOLLOWED = (_Operand(0, follows=True),)
_OPERANDS = {
    "open": _FOLLOWED,
    "os.truncate": _FOLLOWED,
    "os.setxattr": _FOLLOWED,
    "os.removexattr": _FOLLOWED,
    "sqlite3.connect": _FOLLOWED,
    "os.chmod": (_Operand(0, 2, follows=True),),
    "os.chown": (_Operand(0, 3, follows=True),),
    "os.utime": (_Operand(0, 3, follows=True),),
    "os.mkdir": (_Operand(0, 2),),
    "os.rmdir": (_Operand(0, 1),),
    "os.remove": (_Operand(0, 1),),
    "os.symlink": (_Operand(1, 2),),
    "os.rename": (_Operand(0, 2), _Operand(1, 3)),
    "os.link": (_Operand(0, 2, is_changed=False), _Operand(1, 3)),
}


class WriteWatch:
    """Notes the real paths outside of a view that Python code writes; of a copy it guards the originals.

    Args:
        view: entered by this process.
        own: the trial's own folder.
    """

    def __init__(self, view: View, *, own: Path) -> None:
        self._view = view
        self._record = str(view.scratch / "outside")
        # Of a kept folder only what is in it: without the folder itself the trial would have nowhere to write to.
        kept = [os.path.join(os.path.realpath(folder), "") for folder in (own, *view.kept)]
        self._inside = (os.path.realpath(view.scratch), *kept)
        self._roots = tuple(str(root) for root, _, _ in find_roots(view.scratch)) if view.kind == "overlay" else ()
        self._tree = str(find_tree(view.scratch))
        parent = str(view.folder.parent)
        self._caches = find_caches(view)
        self._passing = (os.path.realpath(tempfile.gettempdir()), *_PASSING)
        self._originals = str(view.folder) if parent in ("/", *self._passing) else parent
        self._noted: set[str] = set()
        self._thread = threading.local()
        self._is_stopped = False

    def paths(self) -> tuple[str, ...]:
        """Return what was written so far, by forked processes too: real paths, sorted, at most 200."""
        return list_outside(self._view)

    def stop(self) -> None:
        """Notice nothing more; a hook cannot be taken away."""
        self._is_stopped = True

    def judge(self, event: str, arguments: tuple[Any, ...]) -> PermissionError | None:
        """Note what an event writes, and return why it must not."""
        if self._is_stopped or getattr(self._thread, "is_busy", False):
            return None
        self._thread.is_busy = True
        try:
            if event == "open" and not arguments[2] & _WRITING:
                return None
            for operand in _OPERANDS[event]:
                given, path = _read_path(operand, arguments)
                if not path or (event == "sqlite3.connect" and given.startswith((":", "file:"))):
                    continue
                real = _resolve(path, follows=operand.follows)
                if _is_below_any(real, self._inside) or (event == "os.mkdir" and os.path.lexists(real)):
                    continue
                if self._view.kind == "copy" and self._is_original(given, path, real):
                    text = f"{given} is shared with the original: autotune lets no trial write to it"
                    return PermissionError(errno.EROFS, text)
                if operand.is_changed:
                    self._note(real)
            return None
        finally:
            self._thread.is_busy = False

    def _is_original(self, given: str, path: str, real: str) -> bool:
        if _is_below(real, str(self._view.folder)):
            return True
        if _is_below_any(real, self._caches):
            return False
        # By way of the copy, or after the script has changed its working folder to what a link leads to.
        is_through = _is_below(os.path.normpath(path), self._tree)
        if (is_through or not os.path.isabs(given)) and _is_below(real, self._originals):
            return True
        return is_through and not _is_below_any(real, self._passing)

    def _note(self, real: str) -> None:
        if real in self._noted or len(self._noted) >= _MOST_PATHS:
            return
        if _is_below_any(real, (*self._roots, *self._passing)) or is_cache(real, self._caches):
            return
        if not os.access(real if os.path.exists(real) else os.path.dirname(real), os.W_OK):
            return  # it will fail
        self._noted.add(real)
        record = os.open(self._record, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(record, os.fsencode(real) + b"\0")
        finally:
            os.close(record)


def watch_writes(view: View, *, own: Path) -> WriteWatch:
    """Watch what this process and those forked from it write outside of the view it has entered.

    Args:
        view: guarded too, if it is a copy: what is shared with the original cannot be opened for writing.
        own: the trial's own folder.
    """
    watch = WriteWatch(view, own=own)
    sys.addaudithook(_make_hook(watch))
    return watch


def list_outside(view: View) -> tuple[str, ...]:
    """Return what the trials of a view were seen to write outside of it, also after the death of their processes."""
    try:
        record = (view.scratch / "outside").read_bytes()
    except OSError:
        return ()
    paths = {name.decode("utf-8", "replace") for name in record.split(b"\0") if name}
    return tuple(sorted(paths)[:_MOST_PATHS])


def _make_hook(watch: WriteWatch) -> Callable[[str, tuple[Any, ...]], None]:
    # The hook outlives this module's globals at the interpreter's end, so it holds what it needs.
    events, is_finalizing, judge = frozenset(_OPERANDS), sys.is_finalizing, watch.judge

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in events or is_finalizing():
            return
        try:
            refusal = judge(event, arguments)
        except Exception:
            # Arguments that make no sense are for the call itself to refuse.
            return
        if refusal is not None:
            raise refusal

    return hear


def _read_path(operand: _Operand, arguments: tuple[Any, ...]) -> tuple[str, str]:
    """Return a path as given and in full; empty for a descriptor, whose opening was heard."""
    given = arguments[operand.path]
    if given is None or isinstance(given, int):
        return "", ""
    given = os.fsdecode(given)
    if os.path.isabs(given):
        return given, given  # the current folder may be gone
    folder = -1 if operand.folder is None else arguments[operand.folder]
    base = os.getcwd() if folder < 0 else os.readlink(f"/proc/self/fd/{folder}")
    return given, os.path.join(base, given)


def _resolve(path: str, *, follows: bool) -> str:
    if follows:
        return os.path.realpath(path)
    folder, name = os.path.split(path.rstrip("/"))
    return os.path.join(os.path.realpath(folder), name)


def _is_below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _is_below_any(path: str, folders: tuple[str, ...]) -> bool:
    return any(_is_below(path, folder) for folder in folders)
