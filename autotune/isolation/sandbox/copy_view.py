"""A copy of the working folder, as small as can be: what is large or only read is linked to the original.

scratch/clone/home/me/project/   the working folder: small files and checkpoints copied, the rest linked
scratch/clone/home/me/*          links to the folder's siblings, so that `../data/x` is found and a new `../x` caught
scratch/clone/home/*, clone/*    and so on up to the root
scratch/clone.json               what was there at first
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

_COPIED_FILE_BYTES = 4 * 2**20
_ROOM_BYTES = 2**30
_ROOM_ENTRIES = 20_000
_SIBLINGS_PER_LEVEL = 5_000

_LINKED_FOLDERS = frozenset({".hg", ".venv", "venv", "node_modules", ".autotune", ".mypy_cache", ".tox"})
_CHECKPOINTS = (".ckpt", ".pt", ".pth", ".pth.tar", ".safetensors")
"""Ends of names of what a training overwrites: copied at any size, because torch.save writes from C++, where no hook
in Python could keep it from following a link to the original."""

State = list[int]
"""Type, size, modification time in ns and number of the inode; of a folder the type alone, else nothing if closed."""


def clone_folder(folder: Path, scratch: Path, *, kept: Sequence[Path], hidden: Path) -> None:
    """Make the copy and note what is in it.

    Args:
        folder: the working folder, resolved.
        scratch: holds the copy.
        kept: folders that stay the real ones: linked.
        hidden: what the copy does without: by a link, others than Python could be led there to remove it.

    Raises:
        OSError: the copy cannot be written.
    """
    tree = find_tree(scratch)
    inside = locate_clone(folder, scratch)
    inside.mkdir(parents=True)
    for level in folder.parents:
        _link_siblings(level, locate_clone(level, scratch))
    _Copier(folder, scratch, linked=(*kept, scratch), hidden=hidden).run()
    states = {path: _read_state(os.path.join(tree, path)) for path in _walk(str(tree))}
    originals = {path: state for path in states if (state := _read_original(path, tree, folder))}
    # With nothing but ASCII in the file, names that are no text survive.
    text = json.dumps({"states": states, "originals": originals})
    (scratch / "clone.json").write_text(text, encoding="ascii")


def find_tree(scratch: Path) -> Path:
    """Return the root of the copy, which stands for the root of the file system."""
    return scratch / "clone"


def locate_clone(path: Path, scratch: Path) -> Path:
    """Return where an absolute path is in the copy."""
    return find_tree(scratch) / path.relative_to("/")


def list_changed(folder: Path, scratch: Path) -> Iterator[str]:
    """Yield the absolute paths, as they are outside the copy, of what is new, changed or gone in it."""
    before = json.loads((scratch / "clone.json").read_text(encoding="ascii"))
    tree = find_tree(scratch)
    states: dict[str, State] = before["states"]
    found = {"": [stat.S_IFDIR]}
    for path in _walk(str(tree)):
        found[path] = state = _read_state(os.path.join(tree, path))
        is_new_folder = path not in states and len(state) == 1
        if state != states.get(path) and not is_new_folder:
            yield "/" + path
        elif path in before["originals"] and _read_original(path, tree, folder) != before["originals"][path]:
            yield "/" + path  # nothing should have been able to write to it
    for path in states:
        # Of a folder that is gone, or no folder any more, it says enough.
        if path not in found and found.get(os.path.dirname(path)) == [stat.S_IFDIR]:
            yield "/" + path


class _Copier:
    def __init__(self, folder: Path, scratch: Path, *, linked: Sequence[Path], hidden: Path) -> None:
        self._folder = folder
        self._scratch = scratch
        self._hidden = hidden
        self._linked = {str(path) for path in linked}
        self._room_bytes = _ROOM_BYTES
        self._room_entries = _ROOM_ENTRIES

    def run(self) -> None:
        """Copy breadth first, so that what a cap leaves out lies deep."""
        folders = deque([self._folder])
        done = []
        while folders:
            source = folders.popleft()
            done.append(source)
            for entry in _scan(source):
                self._room_entries -= 1
                try:
                    self._take(entry, folders)
                except (PermissionError, FileNotFoundError):
                    continue  # unreadable, or gone meanwhile
        for source in reversed(done):
            shutil.copystat(source, self._locate(source))

    def _take(self, entry: os.DirEntry[str], folders: deque[Path]) -> None:
        source = Path(entry.path)
        if source == self._hidden:
            return
        target = self._locate(source)
        if entry.is_symlink():
            os.symlink(self._aim_link(source), target)
        elif entry.is_dir(follow_symlinks=False):
            if self._is_linked(source):
                os.symlink(source, target)
            else:
                target.mkdir()
                folders.append(source)
        elif entry.is_file(follow_symlinks=False):
            size = entry.stat(follow_symlinks=False).st_size
            is_wanted = size <= _COPIED_FILE_BYTES or entry.name.endswith(_CHECKPOINTS)
            if is_wanted and size <= self._room_bytes and self._room_entries > 0:
                self._room_bytes -= size
                self._copy(source, target)
            else:
                os.symlink(source, target)

    def _is_linked(self, source: Path) -> bool:
        return (
            source.name in _LINKED_FOLDERS
            # Reading commands of git rewrite files at the top of its folder.
            or source.parent.name == ".git"
            or str(source) in self._linked
            or self._room_entries <= 0
            or not os.access(source, os.R_OK | os.W_OK | os.X_OK)
        )

    def _aim_link(self, source: Path) -> str:
        """Return what the copy of a link says: the same place in the copy, or outside of it the original."""
        aim = os.readlink(source)
        whole = os.path.normpath(source.parent / aim)
        if Path(whole).is_relative_to(self._folder):
            return str(self._locate(Path(whole))) if os.path.isabs(aim) else aim
        return os.path.join(source.parent, aim)

    def _copy(self, source: Path, target: Path) -> None:
        try:
            shutil.copy2(source, target, follow_symlinks=False)
        except PermissionError:
            target.unlink(missing_ok=True)

    def _locate(self, source: Path) -> Path:
        return locate_clone(source, self._scratch)


def _link_siblings(folder: Path, target: Path) -> None:
    for entry in islice(_scan(folder), _SIBLINGS_PER_LEVEL):
        if not os.path.lexists(target / entry.name):
            os.symlink(entry.path, target / entry.name)


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except (PermissionError, FileNotFoundError):
        return []


def _walk(tree: str) -> Iterator[str]:
    """Yield the paths below a folder, relative to it; links are not followed."""
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        try:
            with os.scandir(os.path.join(tree, folder)) as entries:
                kinds = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue  # closed by the script, or too deep to name
        for name, is_folder in kinds.items():
            path = os.path.join(folder, name)
            yield path
            if is_folder:
                waiting.append(path)


def _read_state(path: str | Path) -> State:
    try:
        status = os.lstat(path)
    except OSError:
        return []  # in a folder that the script has closed
    kind = stat.S_IFMT(status.st_mode)
    return [kind] if stat.S_ISDIR(kind) else [kind, status.st_size, status.st_mtime_ns, status.st_ino]


def _read_original(path: str, tree: Path, folder: Path) -> State:
    """Return the state of the original that a link of the working folder stands for; empty for what is no such link."""
    if not ("/" + path).startswith(f"{folder}/") or not os.path.islink(tree / path):
        return []
    original = os.path.realpath(tree / path)
    return _read_state(original) if os.path.isfile(original) and not original.startswith(f"{tree}/") else []
