"""A power cut, imitated: what a disk may hold when everything that was not synced is lost, or is there by halves.

    recording: every fsync, rename, mkdir, unlink of a piece of code ── the tree before and after each
    crashes:   at each of these moments, what may be on the disk   ── written out, to be read like after a reboot

A file holds what it held when it was last synced, or nothing, or half of what was written since. A folder's names are
those it had when it was last synced, or those of any later moment: a file system may write them earlier, in order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_CHANGES = ("rename", "replace", "mkdir", "unlink", "remove", "rmdir", "link", "symlink")

Tree = dict[str, "Tree | bytes"]
"""A folder by the names in it: folders and the contents of files."""


@dataclass(frozen=True)
class Moment:
    """A tree as running processes see it.

    Attributes:
        folders: by inode, the inodes of their names.
        files: by inode, their contents.
        synced: the inode that was synced just now; None for none.
    """

    folders: dict[int, dict[str, int]]
    files: dict[int, bytes]
    synced: int | None


@dataclass
class Recorder:
    """Records what a piece of code does below a folder. What is there at the start is on the disk.

    Attributes:
        root: the folder.
        moments: seen so far.
    """

    root: Path
    moments: list[Moment] = field(default_factory=list)
    _root: int = 0
    _held: dict[int, int] = field(default_factory=dict)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Look at the tree around each call that a power cut may come before or after."""
        try:
            self._root = self._hold(self.root)
            self._look()
            with pytest.MonkeyPatch.context() as patch:
                for name in _CHANGES:
                    patch.setattr(os, name, self._watch(getattr(os, name)))
                patch.setattr(os, "fsync", self._watch_sync(os.fsync))
                yield
            self._look()
        finally:
            for descriptor in self._held.values():
                os.close(descriptor)

    def crashes(self, *, only_end: bool = False) -> Iterator[Tree]:
        """Yield what may be on the disk after a power cut, each state once.

        Args:
            only_end: the power is cut after the last moment, not at any.
        """
        seen, root = set(), self._root
        for last in range(len(self.moments) - 1 if only_end else 0, len(self.moments)):
            for written in range(last + 1):
                for is_torn in (False, True):
                    tree = self._build(root, last, written, is_torn)
                    if repr(tree) not in seen:
                        seen.add(repr(tree))
                        yield tree

    def _build(self, folder: int, last: int, written: int, is_torn: bool) -> Tree:
        names = self.moments[max(written, self._last_sync(folder, last))].folders.get(folder, {})
        return {
            name: self._build(inode, last, written, is_torn)
            if any(inode in moment.folders for moment in self.moments)
            else self._read(inode, last, is_torn)
            for name, inode in sorted(names.items())
        }

    def _read(self, file: int, last: int, is_torn: bool) -> bytes:
        sync = self._last_sync(file, last)
        kept = self.moments[sync].files.get(file, b"")
        live = next((m.files[file] for m in reversed(self.moments[sync : last + 1]) if file in m.files), b"")
        # What was synced stays where it was added to; what was written over it may be there by halves.
        safe = len(kept) if live.startswith(kept) else 0
        return live[: (safe + len(live)) // 2] if is_torn and live != kept else kept

    def _last_sync(self, inode: int, last: int) -> int:
        return next((n for n in range(last, 0, -1) if self.moments[n].synced == inode), 0)

    def _watch(self, function: Any) -> Any:
        def watched(*arguments: Any, **named: Any) -> Any:
            self._look()
            try:
                return function(*arguments, **named)
            finally:
                self._look()

        return watched

    def _watch_sync(self, function: Any) -> Any:
        def watched(descriptor: int) -> None:
            self._look()
            function(descriptor)
            self._look(synced=os.fstat(descriptor).st_ino)

        return watched

    def _look(self, synced: int | None = None) -> None:
        folders: dict[int, dict[str, int]] = {}
        files: dict[int, bytes] = {}
        waiting = [self.root]
        while waiting:
            folder = waiting.pop()
            names = folders[self._hold(folder)] = {}
            for path in folder.iterdir():
                if path.is_dir():
                    waiting.append(path)
                    names[path.name] = self._hold(path)
                else:
                    names[path.name] = inode = self._hold(path)
                    files[inode] = path.read_bytes()
        moment = Moment(folders, files, synced)
        if not self.moments or moment != self.moments[-1]:
            self.moments.append(moment)

    def _hold(self, path: Path) -> int:
        """Return an inode, and keep it from being used again for another file."""
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode


def write_tree(tree: Tree, folder: Path) -> None:
    """Write a tree into a new folder."""
    folder.mkdir()
    for name, content in tree.items():
        if isinstance(content, dict):
            write_tree(content, folder / name)
        else:
            (folder / name).write_bytes(content)
