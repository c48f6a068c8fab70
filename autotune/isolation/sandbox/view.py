"""A disposable view of the user's working folder: a trial reads it and writes to it, and the folder stays as it is.

    parent: permits_overlay? ── prepare_view ──▶ trial: enter_view ── the script ──▶ parent: list_written, remove_view

Overlay: the folder's own path shows the view, in a mount namespace of the trial's (overlay.py).
Copy:    the trial works in a copy elsewhere, and the kernel (fence.py) and a hook (writes.py) guard the original.

Of our own `.autotune` a trial can change no more than what is kept for it: a script may clear its working folder.
A view is no sandbox: code that means to get out of it does, by `/proc` for one.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from autotune.errors import UsageError
from autotune.isolation.sandbox.copy_view import clone_folder, list_changed, locate_clone
from autotune.isolation.sandbox.landlock import fence_folder
from autotune.isolation.sandbox.overlay import enter_overlay, find_roots, list_upper
from autotune.records.layout import STATE_FOLDER
from autotune.scratch import make_scratch, remove_scratch

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
        kept: real folders that a trial may write to; it finds them by `locate_kept`.
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

    def locate_kept(self, path: Path) -> Path:
        """Return where a trial finds what is kept: an overlay has it out of the way of who clears the folder."""
        for folder, place in self.list_moved().items():
            if path.is_relative_to(folder):
                return place / path.relative_to(folder)
        return path

    def list_moved(self) -> dict[Path, Path]:
        """Return the kept folders that are found elsewhere, and where."""
        if self.kind == "copy":
            return {}
        return {folder: self.scratch / f"kept-{number}" for number, folder in enumerate(self.kept)}


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
    code = "import sys; from autotune.isolation.sandbox.view import try_overlay; try_overlay(sys.argv[1:])"
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
        kept: real folders that a trial may write to, the trial's own for one.

    Raises:
        OSError: the scratch folder or the copy cannot be written.
        UsageError: the working folder is the root of the file system.
    """
    folder = folder.resolve()
    if folder == folder.parent:
        raise UsageError(f"the working folder is {folder}", hint="start autotune in the folder of the training script")
    scratch = make_scratch("view", scratch_parent)
    view = View(folder, scratch, kind, tuple(map(Path.resolve, kept)))
    if kind == "copy":
        try:
            clone_folder(folder, scratch, kept=view.kept, hidden=folder / STATE_FOLDER)
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
        caches = [*map(Path, find_caches(view, settings=False))]
        hidden = view.folder / STATE_FOLDER
        enter_overlay(view.folder, view.scratch, kept=caches, moved=view.list_moved(), hidden=hidden)
        for name in _CACHE_VARIABLES:
            if (path := os.environ.get(name)) and (place := view.locate_kept(Path(path))) != Path(path):
                os.environ[name] = str(place)
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

    Raises:
        OSError: our notes of what was there are damaged: they lie where the script can write.
        ValueError: the same.
    """
    caches = (*find_caches(view), str(view.folder / STATE_FOLDER))
    paths = (path for path in _find_written(view) if not is_cache(path, caches))
    relative = (os.path.relpath(path, view.folder) for path in paths)
    return tuple(sorted(path.encode("utf-8", "replace").decode() for path in islice(relative, _MOST_WRITTEN)))


def remove_view(view: View) -> None:
    """Remove all that is left of a view; what cannot be removed is left to the sweep of a later command."""
    with suppress(OSError):
        remove_scratch(view.scratch)


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


def is_cache(path: str, caches: Sequence[str]) -> bool:
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
