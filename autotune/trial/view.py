"""A disposable view of the user's working folder: a trial reads it and writes to it, and the folder stays as it is.

    parent: permits_overlay? ── prepare_view ──▶ trial: enter_view ── the script ──▶ parent: list_written, remove_view

Overlay: the folder's own path shows the view, in a mount namespace of the trial's (overlay.py).
Copy:    the trial works in a copy elsewhere, and the kernel (fence.py) and a hook (writes.py) guard the original.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from autotune.errors import UsageError
from autotune.trial.clone import clone_folder, list_changed, locate_clone
from autotune.trial.fence import fence_folder
from autotune.trial.overlay import enter_overlay, find_roots, list_upper

_TRY_SECONDS = 5.0
_MOST_WRITTEN = 1_000
_CACHES_OF_HOME = (".cache", ".triton", ".nv", ".keras")
_SETTINGS_OF_HOME = (".config", ".local", ".matplotlib", ".ipython")
_CACHE_VARIABLES = (
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_DATASETS_CACHE",
    "NUMBA_CACHE_DIR",
    "MPLCONFIGDIR",
)


@dataclass(frozen=True)
class View:
    """A view of a working folder.

    Attributes:
        folder: the user's working folder, resolved.
        scratch: ours; all that is written into the view lies below it.
        kind: `overlay` or `copy`.
        kept: real folders that the view shows and a trial may write to; the first is the folder's `.autotune`.
    """

    folder: Path
    scratch: Path
    kind: Literal["overlay", "copy"]
    kept: tuple[Path, ...] = ()

    def as_arguments(self) -> list[str]:
        """Return the view as words of a command line."""
        return [self.kind, str(self.folder), str(self.scratch), *map(str, self.kept)]

    @classmethod
    def from_arguments(cls, arguments: Sequence[str]) -> View:
        """Return the view that `as_arguments` gave the words of."""
        kind, folder, scratch, *kept = arguments
        return cls(Path(folder), Path(scratch), "overlay" if kind == "overlay" else "copy", tuple(map(Path, kept)))

    def locate(self, path: Path) -> Path:
        """Return where a trial finds an absolute path: in the view if it is below the working folder."""
        if self.kind == "copy" and path.is_relative_to(self.folder):
            return locate_clone(path, self.scratch)
        return path


def permits_overlay(folder: Path, scratch: Path) -> bool:
    """Return whether this system lets a trial overlay a working folder; tried for real in a short-lived process.

    Args:
        folder: the working folder.
        scratch: where views are to be made. Overlayfs cannot write to every file system, to itself for one.
    """
    try:
        view = prepare_view(folder, scratch, kind="overlay")
    except (OSError, UsageError):
        return False
    code = "import sys; from autotune.trial.view import try_overlay; try_overlay(sys.argv[1:])"
    command = [sys.executable, "-P", "-c", code, *view.as_arguments()]
    silent = subprocess.DEVNULL
    try:
        done = subprocess.run(command, stdin=silent, stdout=silent, stderr=silent, timeout=_TRY_SECONDS, check=False)
        return done.returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        remove_view(view)


def try_overlay(arguments: Sequence[str]) -> None:
    """End this process with status 0 if it can enter the view."""
    view = View.from_arguments(arguments)
    before = view.folder.stat().st_dev
    try:
        after = enter_view(view).stat().st_dev
    except OSError:
        sys.exit(1)
    sys.exit(before == after)


def prepare_view(
    folder: Path, scratch_parent: Path, *, kind: Literal["overlay", "copy"], kept: Sequence[Path] = ()
) -> View:
    """Make a view for a trial to enter; give it to `remove_view` in the end.

    Args:
        folder: the user's working folder.
        scratch_parent: gets a new folder, ours alone.
        kind: `overlay` only where `permits_overlay`.
        kept: real folders, beside `.autotune` in the working folder, that a trial may write to.

    Raises:
        OSError: the scratch folder or the copy cannot be written.
        UsageError: the working folder is the root of the file system.
    """
    folder = folder.resolve()
    if folder == folder.parent:
        raise UsageError(f"the working folder is {folder}", hint="start autotune in the folder of the training script")
    scratch = Path(tempfile.mkdtemp(prefix="autotune-view-", dir=scratch_parent)).resolve()
    view = View(folder, scratch, kind, (folder / ".autotune", *map(Path.resolve, kept)))
    if kind == "copy":
        try:
            clone_folder(folder, scratch, kept=view.kept)
        except BaseException:
            remove_view(view)
            raise
    return view


def enter_view(view: View) -> Path:
    """Make this process, before it has threads, and all that it starts see the view, and work in it.

    Returns:
        The working folder as the trial sees it.

    Raises:
        OSError: the system does not permit it.
    """
    if view.kind == "overlay":
        kept = [*map(os.path.realpath, view.kept), *find_caches(view, settings=False)]
        enter_overlay(view.folder, view.scratch, kept=[*map(Path, kept)])
    else:
        # A guest must not touch the originals: neither the byte code of modules nor what `git status` remembers.
        os.environ.update(PYTHONDONTWRITEBYTECODE="1", GIT_OPTIONAL_LOCKS="0")
        sys.dont_write_bytecode = True
        temporary = Path(tempfile.gettempdir()).resolve()
        # In the temporary folder a fence would keep everybody from making new files; projects live elsewhere.
        if not view.folder.is_relative_to(temporary):
            fence_folder(view.folder, kept=[*view.kept, view.scratch, temporary])
    inside = view.locate(view.folder)
    os.chdir(inside)
    os.environ["PWD"] = str(inside)
    return inside


def list_written(view: View) -> tuple[str, ...]:
    """Return what the script created, changed or deleted in the view; byte code and caches are not worth telling.

    Returns:
        Paths relative to the working folder (`../x` for its parent's), sorted, at most 1,000.
    """
    caches = find_caches(view)
    paths = (path for path in _find_written(view) if not is_beside_the_point(path, caches))
    relative = (os.path.relpath(path, view.folder) for path in paths)
    return tuple(sorted(path.encode("utf-8", "replace").decode() for path in islice(relative, _MOST_WRITTEN)))


def remove_view(view: View) -> None:
    """Remove the scratch folder whatever its permissions and depth; links are not followed.

    Each folder is moved to the top before it is emptied: below scratch, a path can be too long to name.

    Raises:
        OSError: something in it cannot be removed.
    """
    waiting = [view.scratch]
    number = 0
    while waiting:
        folder = waiting.pop()
        for entry in _open_folder(folder):
            number += 1
            try:
                if entry.is_dir(follow_symlinks=False):
                    doomed = view.scratch / f"doomed-{number}"
                    os.chmod(entry.path, 0o700)  # a folder that is moved is written to
                    os.rename(entry.path, doomed)
                    waiting.append(doomed)
                else:
                    os.unlink(entry.path)
            except FileNotFoundError:
                continue
        if folder != view.scratch:
            _remove_folder(folder)
    _remove_folder(view.scratch)


def find_caches(view: View, *, settings: bool = True) -> tuple[str, ...]:
    """Return the folders outside of the working folder, real paths, that programs keep their caches in.

    Args:
        view: of the working folder; a cache that holds it or lies in it is as protected as any other folder.
        settings: name the folders of programs' settings as well.
    """
    home = os.path.expanduser("~")
    names = _CACHES_OF_HOME + (_SETTINGS_OF_HOME if settings else ())
    paths = [os.path.join(home, name) for name in names] if os.path.isabs(home) else []
    paths += [os.environ[name] for name in _CACHE_VARIABLES if os.environ.get(name)]
    folder = str(view.folder)
    return tuple(
        path
        for path in map(os.path.realpath, paths)
        if not f"{folder}/".startswith(f"{path.rstrip('/')}/") and not path.startswith(f"{folder}/")
    )


def is_beside_the_point(path: str, caches: Sequence[str]) -> bool:
    """Return whether nobody minds that this path was written."""
    return (
        "/__pycache__/" in path
        or path.endswith((".pyc", "/__pycache__"))
        or any(path == cache or path.startswith(cache + "/") for cache in caches)
    )


def _find_written(view: View) -> Iterator[str]:
    if view.kind == "copy":
        yield from list_changed(view.folder, view.scratch)
        return
    for root, upper, name in find_roots(view.scratch):
        for path in list_upper(str(upper), str(root)):
            # Told by the link that leads there, as the script names it.
            yield os.path.join(view.folder, name, os.path.relpath(path, root)) if name else path


def _open_folder(folder: Path) -> list[os.DirEntry[str]]:
    try:
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _remove_folder(folder: Path) -> None:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        pass
