"""What is written outside of a view is told; of a copy, what is shared with the original is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from view_world import EVERY_WORLD, ME, NOBODY, World, keep_unchanged, open_permitted_world

from autotune.isolation.sandbox.audit import WriteWatch, list_outside
from autotune.isolation.sandbox.landlock import _call
from autotune.isolation.sandbox.view import View, prepare_view, remove_view

ELSEWHERE = "import os, shutil, sqlite3, subprocess, sys, threading\nFAR = os.environ['FAR']\n"


@pytest.fixture(params=EVERY_WORLD)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_permitted_world(*request.param) as world:
        world.environment["FAR"] = str(world.elsewhere)
        world.give("../../elsewhere/old", "old")
        world.give("../../elsewhere/data/x", "x")
        world.give("../../elsewhere/data/y", "y")
        yield world


@pytest.fixture
def copied() -> Iterator[World]:
    with open_permitted_world("copy", ME) as world:
        world.environment["FAR"] = str(world.elsewhere)
        world.give("../../elsewhere/old", "old")
        yield world


def relative(world: World, paths: tuple[str, ...]) -> list[str]:
    return [os.path.relpath(path, world.elsewhere) for path in paths]


def test_what_is_written_elsewhere_is_told_once_and_by_its_real_name(world: World) -> None:
    program = (
        "os.symlink(FAR, 'far')\nfor step in range(3):\n    open(FAR + '/new', 'w')\n"
        "if view.kind == 'overlay':  # of a copy, the way through a link in the folder is refused\n"
        "    open('far/../elsewhere/new', 'a')\n"
        "open(FAR.encode() + b'/bytes', 'xb')\n"
        "os.close(os.open(FAR + '/low', os.O_WRONLY | os.O_CREAT))\n"
        "os.truncate(FAR + '/old', 1)\nos.mkdir(FAR + '/folder')\nos.makedirs(FAR + '/folder/data', exist_ok=True)\n"
        "os.makedirs(FAR + '/data', exist_ok=True)\n"
        "os.rename(FAR + '/data/x', FAR + '/moved')\nos.remove(FAR + '/data/y')\n"
        "os.symlink('nowhere', FAR + '/link')\nsqlite3.connect(FAR + '/base.db').close()\n"
        "sqlite3.connect(':memory:').close()\n"
        "open(FAR + '/old').read()\nos.listdir(FAR)\n"
        "for path in (FAR + '/no/such/folder/x', '/proc/self/nothing'):\n"
        "    try:\n        open(path, 'w')\n    except OSError:\n        pass\n"
        "print(watch.paths() == tuple(sorted(set(watch.paths()))), len(watch.paths()))\n"
    )
    with keep_unchanged(world, but=(world.elsewhere,)):
        outcome = world.run(ELSEWHERE + program)
    told = ["base.db", "bytes", "data/x", "data/y", "folder", "folder/data", "link", "low", "moved", "new", "old"]
    assert relative(world, outcome.outside) == told
    assert outcome.printed == f"True {len(told)}\n"
    assert outcome.written == ("far",)


def test_forks_and_threads_are_heard_and_what_they_wrote_survives_a_kill(world: World) -> None:
    program = (
        "thread = threading.Thread(target=lambda: open(FAR + '/thread', 'w').close())\nthread.start()\nthread.join()\n"
        "if os.fork() == 0:\n    open(FAR + '/fork', 'w')\n    os._exit(0)\n"
        "os.wait()\nopen(FAR + '/line\\nbreak', 'w')\nopen(FAR.encode() + b'/\\xff', 'w')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    with keep_unchanged(world, but=(world.elsewhere,)):
        outcome = world.run(ELSEWHERE + program, is_fine=False)
    assert outcome.status == -signal.SIGKILL
    assert relative(world, outcome.outside) == ["fork", "line\nbreak", "thread", "\N{REPLACEMENT CHARACTER}"]


def test_nobody_is_told_of_caches_temporary_files_and_devices(world: World) -> None:
    home, cache = world.base / "home", world.elsewhere / "cache"
    for folder in (
        home / ".cache" / "torch",
        home / ".config",
        home / ".triton",
        cache,
        world.elsewhere / "__pycache__",
    ):
        folder.mkdir(parents=True)
    world.environment["TRITON_CACHE_DIR"] = str(cache)
    program = (
        "import tempfile\nHOME = os.environ['HOME']\n"
        "for path in ('/.cache/torch/x', '/.config/x', '/.triton/x'):\n    open(HOME + path, 'w')\n"
        "open(FAR + '/cache/x', 'w')\nopen(FAR + '/__pycache__/m.cpython-311.pyc.140', 'w')\n"
        "tempfile.NamedTemporaryFile(prefix='autotune-test-')\nopen('/dev/null', 'w')\n"
        "shared = f'/dev/shm/{os.getpid()}'\nopen(shared, 'w')\nos.remove(shared)\n"
        "open('/proc/self/comm', 'w').write('x')\n"
        "open(OWN + '/result.json', 'w')\nopen('here', 'w')\nopen('../there', 'w')\n"
    )
    with keep_unchanged(world, but=(home, world.elsewhere, world.own)):
        outcome = world.run(ELSEWHERE + program)
    assert outcome.outside == ()
    assert outcome.written == ("../there", "here")


def test_no_more_than_200_are_kept(world: World) -> None:
    program = "for step in range(300):\n    open(f'{FAR}/{step:03}', 'w')\nprint(len(watch.paths()))"
    world.hand_over()
    assert world.run(ELSEWHERE + program).printed == "200\n"


def test_what_makes_no_sense_fails_as_it_would_without_a_watch(world: World) -> None:
    program = (
        "def fails(kind, call, *arguments, **options):\n"
        "    try:\n        call(*arguments, **options)\n"
        "    except kind as error:\n        assert 'autotune' not in str(error), error\n"
        "    else:\n        raise AssertionError(call)\n"
        "fails(ValueError, open, 'a\\0b', 'w')\nfails(ValueError, os.mkdir, b'a\\0b')\n"
        "fails(TypeError, open, None, 'w')\nfails(TypeError, open, 1.5, 'w')\n"
        "fails(OSError, open, 9999, 'w')\nfails(OSError, open, '', 'w')\n"
        "fails(OSError, os.truncate, 9999, 1)\nfails(OSError, os.mkdir, 'x', dir_fd=9999)\n"
        "fails(OSError, os.rename, 'no', 'where')\nfails(IsADirectoryError, open, '.', 'w')\n"
        "fails(OSError, os.remove, 'n' * 300)\nfails(OSError, open, 'n' * 5000, 'w')\n"
        "class Path:\n    def __fspath__(self):\n        return 'by-path'\n"
        "open(Path(), 'w')\nos.mkdir(Path().__fspath__() + '-folder')\n"
        "class Broken:\n    def __fspath__(self):\n        raise KeyError('mine')\n"
        "fails(KeyError, open, Broken(), 'w')\n"
        "first, second = os.pipe()\nopen(second, 'w').write('x')\nos.close(first)\n"
        "folder = os.open(FAR, os.O_RDONLY)\nos.mkdir('by-descriptor', dir_fd=folder)\n"
        "os.close(os.open('opened', os.O_WRONLY | os.O_CREAT, dir_fd=folder))\n"
        "for words in ((), ('x',), ('x', 'w', 'w'), (None, None, 1)):\n"
        "    sys.audit('open', *words)\n    sys.audit('os.rename', *words)\n    sys.audit('os.mkdir', *words)\n"
        "os.mkdir('gone')\nos.chdir('gone')\nos.rmdir(os.getcwd())\nfails(OSError, open, 'x', 'w')\n"
    )
    with keep_unchanged(world, but=(world.elsewhere,)):
        outcome = world.run(ELSEWHERE + program)
    assert relative(world, outcome.outside) == ["by-descriptor"]
    assert (world.elsewhere / "opened").exists()


def test_the_end_of_the_interpreter_is_a_quiet_one(world: World) -> None:
    program = (
        "import atexit, time\natexit.register(lambda: open('at-exit', 'w').close())\n"
        "class Late:\n    def __del__(self, open=open):\n        open(FAR_LATE, 'w').close()\n"
        "FAR_LATE = FAR + '/late'\nsys.modules['late'] = late = Late()\nlate.itself = late\n"
        "def write(number):\n    while True:\n        open(f'{FAR}/{number}', 'w').close()\n"
        "for number in range(3):\n    threading.Thread(target=write, args=(number,), daemon=True).start()\n"
        "time.sleep(0.05)\n"
    )
    with keep_unchanged(world, but=(world.elsewhere,)):
        outcome = world.run(ELSEWHERE + program)
    assert outcome.error == ""
    assert outcome.written == ("at-exit",)


def test_a_stopped_watch_is_deaf(world: World) -> None:
    program = "open(FAR + '/one', 'w')\nwatch.stop()\nopen(FAR + '/two', 'w')\n"
    with keep_unchanged(world, but=(world.elsewhere,)):
        assert relative(world, world.run(ELSEWHERE + program).outside) == ["one"]


def test_other_events_cost_next_to_nothing(world: World) -> None:
    program = (
        "import time\nbegan = time.process_time()\nfor step in range(100_000):\n    sys.audit('other', step)\n"
        "print(time.process_time() - began)\n"
    )
    world.hand_over()
    assert float(world.run(ELSEWHERE + program).printed) < 1.0  # some 0.02 s on a quiet machine


# ---- a copy's originals

REFUSED = {
    "writes": "open('big.bin', 'wb')",
    "appends": "open('big.bin', 'a')",
    "updates": "open('big.bin', 'r+b')",
    "opens low": "os.open('big.bin', os.O_RDWR)",
    "truncates": "os.truncate('big.bin', 1)",
    "touches": "os.utime('big.bin')",
    "changes the mode": "os.chmod('big.bin', 0o600)",
    "marks": "os.setxattr('big.bin', 'user.a', b'a')",
    "writes absolutely": "open(FOLDER + '/a.txt', 'w')",
    "writes anew absolutely": "open(FOLDER + '/new', 'w')",
    "makes a folder absolutely": "os.mkdir(FOLDER + '/new')",
    "removes absolutely": "os.remove(FOLDER + '/a.txt')",
    "moves away": "os.rename(FOLDER + '/a.txt', 'mine')",
    "moves in": "os.rename('a.txt', FOLDER + '/new')",
    "gives a second name": "os.link(FOLDER + '/a.txt', 'mine')",
    "with the current folder gone": "os.mkdir('g'); os.chdir('g'); os.rmdir('../g'); os.remove(FOLDER + '/a.txt')",
    "writes beside": "open('../top.txt', 'a')",
    "writes below beside": "open('../data/x.txt', 'w')",
    "writes anew below beside": "open('../data/new', 'w')",
    "writes further up": "open('../../elsewhere/old', 'w')",
    "removes below beside": "os.remove('../data/x.txt')",
    "writes by a link": "open('beside/new', 'w')",
    "writes by a link to elsewhere": "open('far/new', 'w')",
    "writes in a linked folder": "open('venv/new', 'w')",
    "makes a folder in a linked one": "os.makedirs('venv/a/b')",
    "writes from within": "os.chdir('venv'); open('new', 'w')",
    "writes from beside": "os.chdir('../data'); open('new', 'w')",
    "keeps a base": "sqlite3.connect('big.bin')",
    "copies over": "shutil.copy('a.txt', 'big.bin')",
}

TRY_ALL = """
for deed, code in DEEDS.items():
    os.chdir(inside)
    try:
        exec(code)
        print(deed, 'was done')
    except PermissionError as error:
        if error.errno != 30 or 'is shared with the original: autotune lets no trial write to it' not in str(error):
            print(deed, error)
child = os.fork()
if child == 0:
    os.chdir(inside)
    try:
        open('big.bin', 'a')
    except PermissionError as error:
        os._exit(error.errno)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_what_is_shared_with_the_original_is_refused(copied: World) -> None:
    copied.give("venv/lib/x", "x")
    (copied.folder / "far").symlink_to(copied.elsewhere)
    with keep_unchanged(copied):
        outcome = copied.run(f"{ELSEWHERE}DEEDS = {REFUSED!r}\n{TRY_ALL}")
    assert outcome.printed == "30\n"
    assert outcome.written == outcome.outside == ()


def test_what_changes_nothing_is_not_refused(copied: World) -> None:
    copied.give("venv/lib/x", "x")
    (copied.folder / "cache").symlink_to(copied.base / "home" / ".cache")
    (copied.base / "home" / ".cache").mkdir()
    program = (
        "open('big.bin', 'rb').read()\nopen('../data/x.txt').read()\nopen(FOLDER + '/a.txt').read()\n"
        "os.makedirs('venv/lib', exist_ok=True)\nos.makedirs('../data', exist_ok=True)\n"
        "os.makedirs(FOLDER, exist_ok=True)\nopen('cache/x', 'w')\n"
        "os.rename('big.bin', 'bigger.bin')\nos.remove('venv')\nos.remove('../data')\n"
    )
    with keep_unchanged(copied, but=(copied.base / "home",)):
        outcome = copied.run(ELSEWHERE + program)
    assert outcome.written == ("../data", "big.bin", "bigger.bin", "venv")


# ---- what no hook sees


FENCED = [
    "echo x >> big.bin",
    ": > big.bin",
    'echo x > "$WAS/new"',
    'rm "$WAS/a.txt"',
    'mv "$WAS/a.txt" .',
    'ln "$WAS/a.txt" .',
    'mkdir "$WAS/new"',
    'cp a.txt "$WAS/a.txt"',
    'rm -r "$WAS/.autotune/older"',
    'echo x > "$WAS/.autotune/lock"',
    'mv "$OWN" "$OWN-2"',
    'rmdir "$OWN"',
]
OPEN = [
    "echo x > new",
    "mkdir -p p/q && mv new p/q",
    "rm b.txt",
    "echo x > $FAR/new",
    "mkdir $FAR/p && mv p/q $FAR/p",
    'echo x > "$OWN/r" && mv "$OWN/r" "$OWN/s" && rm "$OWN/s"',
    "echo > $TMPDIR/t && rm $TMPDIR/t",
    "echo x > /dev/null",
]


def skip_without_landlock() -> None:
    if (version := _call(444, None, 0, 1)) < 2:
        pytest.skip(f"this kernel has no Landlock of version 2: {version}")


@pytest.mark.parametrize("user", [ME, *([NOBODY] if ME == 0 else [])])
def test_the_kernel_keeps_other_programs_from_the_original(user: int) -> None:
    skip_without_landlock()
    with open_permitted_world("copy", user) as world:
        world.environment.update(FAR=str(world.elsewhere), WAS=str(world.folder), OWN=str(world.own))
        program = (
            f"for line in {[*FENCED, *OPEN]!r}:\n"
            "    print(subprocess.run(line, shell=True, capture_output=True).returncode == 0)\n"
        )
        with keep_unchanged(world, but=(world.elsewhere, world.own)):
            outcome = world.run(ELSEWHERE + program)
        assert outcome.printed.split() == ["False"] * len(FENCED) + ["True"] * len(OPEN)


def test_a_project_in_the_temporary_folder_goes_without_a_fence(copied: World) -> None:
    copied.environment["TMPDIR"] = str(copied.base)
    program = "open(os.environ['TMPDIR'] + '/new', 'w')\nos.remove(os.environ['TMPDIR'] + '/new')\n"
    copied.hand_over()
    copied.run(ELSEWHERE + program)


def test_the_list_is_empty_without_a_watch(tmp_path: Path) -> None:
    view = View(tmp_path, tmp_path / "gone", "overlay")
    assert list_outside(view) == ()
    assert WriteWatch(view, own=tmp_path).paths() == ()


def test_a_watch_of_a_copy_in_this_process_judges_without_a_hook(copied: World) -> None:
    view = prepare_view(copied.folder, copied.temporary, kind="copy")
    try:
        watch = WriteWatch(view, own=copied.own)
        refusal = watch.judge("open", (str(copied.folder / "new"), "w", os.O_WRONLY))
        assert isinstance(refusal, PermissionError)
        assert watch.judge("open", (str(copied.folder / "a.txt"), "r", os.O_RDONLY)) is None
        assert watch.judge("open", (str(view.locate(copied.folder / "new")), "w", os.O_WRONLY)) is None
        watch.stop()
        assert watch.judge("open", (str(copied.folder / "new"), "w", os.O_WRONLY)) is None
    finally:
        remove_view(view)


def test_the_hook_holds_in_a_script_that_is_run_as_one(copied: World) -> None:
    copied.give("train.py", "import sys\nopen('out.txt', 'w').write(__file__)\nopen('big.bin', 'a')\n")
    program = "import runpy\nrunpy.run_path('train.py', run_name='__main__')\n"
    with keep_unchanged(copied):
        outcome = copied.run(program, is_fine=False)
    assert outcome.status == 1
    assert "PermissionError: [Errno 30] big.bin is shared with the original" in outcome.error
    assert outcome.written == ("out.txt",)
