"""What the tests of views share: a user's folders, programs run in a view of them, what became of the folders."""

from __future__ import annotations

import functools
import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import autotune

BIG = b"0123456789abcdef" * (5 * 2**16)
"""5 MiB, more than a copy takes."""
NOBODY = 65534
THIS_PYTHON = tuple(sys.version_info[:2])
WHERE_AUTOTUNE_IS = [str(Path(autotune.__file__).parents[1]), sysconfig.get_path("platlib")]
"""The package, and what it needs: the interpreter of another user may have none of that."""
ME = os.geteuid()
ODD = "o:d,d \\name\n%s"

CHILD = """
import os, sys
from autotune.lifeline import die_with_parent
die_with_parent(os.getppid())
from pathlib import Path
from autotune.isolation.sandbox.view import View, enter_view
from autotune.isolation.sandbox.audit import watch_writes
program, own, *words = sys.argv[1:]
view = View.from_arguments(words)
before = os.getcwd()
inside = enter_view(view)
own = view.locate_kept(Path(own))
watch = watch_writes(view, own=own)
seen = {"FOLDER": str(view.folder), "OWN": str(own), "inside": inside, "watch": watch, "view": view, "before": before}
exec(program, seen)
"""

_PARENT = """
import json, os, subprocess, sys
from pathlib import Path
from autotune.isolation.sandbox.view import list_written, prepare_view, remove_view
from autotune.isolation.sandbox.audit import list_outside
child, programs, folder, scratch, own, kind, *kept = sys.argv[1:]
outcomes = {}
for name, program in json.loads(programs).items():
    view = prepare_view(Path(folder), Path(scratch), kind=kind, kept=[Path(path) for path in (own, *kept)])
    try:
        command = [sys.executable, "-P", "-c", child, program, own, *view.as_arguments()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        found = {"written": list_written(view), "outside": list_outside(view)}
    finally:
        remove_view(view)
    left = os.listdir(scratch)
    outcomes[name] = {"status": done.returncode, "printed": done.stdout, "error": done.stderr, "left": left, **found}
print(json.dumps(outcomes))
"""


@dataclass(frozen=True)
class Outcome:
    """What a program in a view came to."""

    status: int
    printed: str
    error: str
    written: tuple[str, ...]
    outside: tuple[str, ...]
    left: tuple[str, ...]


@dataclass
class World:
    """A user's folders.

    Attributes:
        base: holds everything.
        kind: of the views.
        user: runs everything.
        environment: of the processes.
        state: the folder's `.autotune`, with a search from before in it.
        own: the trial's own folder below it.
    """

    base: Path
    kind: Any
    user: int
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.parent = self.base / "user's"
        self.folder = self.parent / "pro:je,ct \\x"
        self.elsewhere = self.base / "elsewhere"
        self.temporary = self.base / "temp"
        self.state = self.folder / ".autotune"
        self.own = self.state / "now" / "trials" / "0003"
        self.environment = {
            **{name: text for name, text in os.environ.items() if not name.endswith(("_HOME", "_DIR"))},
            "HOME": str(self.base / "home"),
            "TMPDIR": str(self.temporary),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(WHERE_AUTOTUNE_IS),
        }

    def run(self, program: str, *, kept: tuple[Path, ...] = (), is_fine: bool = True) -> Outcome:
        """Run a program in a new view, which is gone afterwards."""
        return self.run_all({"": program}, kept=kept, is_fine=is_fine)[""]

    def run_all(
        self, programs: dict[str, str], *, kept: tuple[Path, ...] = (), is_fine: bool = True
    ) -> dict[str, Outcome]:
        """Run programs, each in a view of its own, one after another."""
        words = [_PARENT, CHILD, json.dumps(programs), self.folder, self.temporary, self.own, self.kind, *kept]
        outcomes = {}
        for name, found in json.loads(self.python(*map(str, words)).stdout).items():
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in found.items()}
            outcomes[name] = Outcome(**fields)
            assert outcomes[name].left == (), f"{name} left something of its view"
            assert not is_fine or outcomes[name].status == 0, f"{name}: {outcomes[name].error}"
        return outcomes

    def python(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run Python code as the user."""
        command = [find_interpreter(self.user), "-P", "-c", *words]
        done = run_as(self.user, command, env=self.environment)
        assert done.returncode == 0, done.stderr
        return done

    def give(self, path: str, data: bytes | str = b"") -> Path:
        """Make a file of the user's, with a time in the past; the path is relative to the working folder."""
        file = Path(os.path.normpath(self.folder / path))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        os.utime(file, ns=(10**18, 10**18))
        return file

    def hand_over(self) -> None:
        """Make everything the user's."""
        for parent, folders, files in os.walk(self.base):
            for name in (".", *folders, *files):
                os.chown(os.path.join(parent, name), self.user, self.user or os.getegid(), follow_symlinks=False)


def run_as(user: int, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as a user without further groups."""
    identity = {} if user == ME else {"user": user, "group": user, "extra_groups": []}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd="/", **identity, **options
    )


@functools.cache
def find_interpreter(user: int) -> str:
    """Return a Python that a user may run, with what autotune needs: this one may lie in somebody else's home."""
    code = f"import sys; sys.path += {WHERE_AUTOTUNE_IS}; import pydantic; assert sys.version_info[:2] == {THIS_PYTHON}"
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        try:
            if candidate and run_as(user, [candidate, "-c", code]).returncode == 0:
                return candidate
        except OSError:
            continue
    raise AssertionError(f"there is no Python {'.'.join(map(str, THIS_PYTHON))} that this user may run")


def snapshot(folder: Path, *, but: tuple[Path, ...] = ()) -> dict[str, tuple[Any, ...]]:
    """Return everything there is to know about a tree: names, bytes, links, modes, owners, times."""
    found = {}
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if Path(parent, name) not in but]
        for name in (".", *folders, *files):
            path = os.path.join(parent, name)
            status = os.lstat(path)
            content: Any = None
            if stat.S_ISREG(status.st_mode):
                content = Path(path).read_bytes()
            elif stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            found[path] = (status.st_mode, status.st_uid, status.st_ino, status.st_mtime_ns, content)
    return found


@contextmanager
def keep_unchanged(world: World, *, but: tuple[Path, ...] = (), only: tuple[Path, ...] = ()) -> Iterator[None]:
    """Hand the folders to the user and fail if they are not the same in the end."""

    def look() -> dict[str, tuple[Any, ...]]:
        trees = [snapshot(folder, but=(world.temporary, *but)) for folder in only or (world.base,)]
        return {path: entry for tree in trees for path, entry in tree.items()}

    world.hand_over()
    before = look()
    yield
    after = look()
    for path in sorted(before.keys() | after.keys()):
        if before.get(path) != after.get(path):
            pytest.fail(f"{path} was {str(before.get(path))[:100]} and is {str(after.get(path))[:100]}")


@contextmanager
def open_world(kind: str, user: int) -> Iterator[World]:
    """Yield a world with an ordinary project in it."""
    base = Path(tempfile.mkdtemp(prefix="view-")).resolve()
    base.chmod(0o755)
    world = World(base, kind, user)
    try:
        for folder in (world.folder, world.elsewhere, world.temporary, base / "home", world.own):
            folder.mkdir(parents=True, exist_ok=True)
        for name in ("a.txt", "b.txt", "c.txt", "sub/d.txt", f"sub/{ODD}", "sub/deep/e.txt", "../data/x.txt"):
            world.give(name, f"this is {name}\n")
        for name in ("lock", "older/best.json", "older/trials/0000/result.json", "now/study.db"):
            world.give(f".autotune/{name}", "kept")
        world.give("big.bin", BIG)
        world.give("../top.txt", "beside\n")
        (world.folder / "link.txt").symlink_to("a.txt")
        (world.folder / "absolute").symlink_to(world.folder / "sub")
        (world.folder / "beside").symlink_to("../data")
        (world.folder / "broken").symlink_to("nowhere")
        yield world
    finally:
        for parent, folders, _ in os.walk(base):
            os.chmod(parent, 0o755)
            for name in folders:
                if not os.path.islink(os.path.join(parent, name)):
                    os.chmod(os.path.join(parent, name), 0o755)
        shutil.rmtree(base)


@functools.cache
def explain_refusal(kind: str, user: int) -> str:
    """Return why this machine cannot run such a world; empty if it can."""
    with open_world(kind, user) as world:
        world.hand_over()
        code = (
            "import sys; from pathlib import Path; from autotune.isolation.sandbox.view import permits_overlay;"
            "sys.exit(0 if sys.argv[1] == 'copy' else not permits_overlay(*map(Path, sys.argv[2:])))"
        )
        try:
            world.python(code, kind, str(world.folder), str(world.temporary))
        except (AssertionError, OSError) as error:
            return f"as user {user} this system does not permit the kind {kind}: {error}"
    return ""


def open_permitted_world(kind: str, user: int) -> Any:
    """Return `open_world`, or skip the test with the reason."""
    if reason := explain_refusal(kind, user):
        pytest.skip(reason)
    return open_world(kind, user)


WORLDS = [("copy", ME), ("overlay", ME), *([("copy", NOBODY), ("overlay", NOBODY)] if ME == 0 else [])]
"""As root, also what an ordinary user meets: a namespace of users, and permissions."""

EVERY_WORLD = [
    pytest.param(world, id=f"{world[0]}-{world[1]}", marks=[] if world == ("overlay", ME) else [pytest.mark.slow])
    for world in WORLDS
]
"""A copy is what a machine without overlays has: what is the same in both, and for another
user, is tried in the slow lane."""
