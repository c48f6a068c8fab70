"""Whatever a script does in a view, the user's folders stay byte for byte what they were."""

from __future__ import annotations

import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from view_world import (
    BIG,
    CHILD,
    EVERY_WORLD,
    ME,
    NOBODY,
    ODD,
    WORLDS,
    World,
    keep_unchanged,
    open_permitted_world,
    run_as,
    snapshot,
)

from autotune.errors import UsageError
from autotune.isolation.sandbox import copy_view as clone
from autotune.isolation.sandbox import overlay
from autotune.isolation.sandbox import view as view_module
from autotune.isolation.sandbox.view import View, list_written, permits_overlay, prepare_view, remove_view


def name_world(world: tuple[str, int]) -> str:
    return f"{world[0]}-{world[1]}"


@pytest.fixture(params=EVERY_WORLD)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_permitted_world(*request.param) as world:
        yield world


@pytest.fixture(params=[world for world in WORLDS if world[0] == "overlay"], ids=name_world)
def overlaid(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_permitted_world(*request.param) as world:
        yield world


@pytest.fixture(params=[world for world in WORLDS if world[0] == "copy"], ids=name_world)
def copied(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_permitted_world(*request.param) as world:
        yield world


# What a script may do by relative path, and what the user is told of it.
DEEDS = {
    "creates": ("open('new.txt', 'w').write('x')", ["new.txt"]),
    "creates_deep": ("os.makedirs('p/q'); open('p/q/r', 'w')", ["p/q/r"]),
    "creates_and_removes": ("open('new', 'w').close(); os.remove('new')", []),
    "changes": ("open('a.txt', 'w').write('x')", ["a.txt"]),
    "appends": ("open('a.txt', 'a').write('x')", ["a.txt"]),
    "changes_in_place": ("f = open('a.txt', 'r+b'); f.seek(3); f.write(b'X'); f.close()", ["a.txt"]),
    "truncates": ("os.truncate('a.txt', 2)", ["a.txt"]),
    "touches": ("os.utime('a.txt')", ["a.txt"]),
    "deletes": ("os.remove('b.txt')", ["b.txt"]),
    "deletes_folder": ("shutil.rmtree('sub')", ["sub"]),
    "replaces_folder": (
        "shutil.rmtree('sub'); os.mkdir('sub'); open('sub/n', 'w')",
        sorted(["sub/d.txt", "sub/deep", f"sub/{ODD}", "sub/n"]),
    ),
    "replaces_folder_by_file": ("shutil.rmtree('sub'); open('sub', 'w')", ["sub"]),
    "renames": ("os.rename('b.txt', 'bb.txt')", ["b.txt", "bb.txt"]),
    "moves_in": ("os.replace('b.txt', 'sub/deep/b.txt')", ["b.txt", "sub/deep/b.txt"]),
    "replaces": ("os.replace('b.txt', 'a.txt')", ["a.txt", "b.txt"]),
    "moves_folder": ("shutil.move('sub/deep', 'deep')", ["deep/e.txt", "sub/deep"]),
    "odd_names": (
        f"open('sub/' + {ODD!r}, 'a').write('x'); open({ODD!r}, 'w')",
        sorted([f"sub/{ODD}", ODD]),
    ),
    "undecodable_name": ("open(b'\\xff\\xfe', 'w')", ["??"]),
    "follows_link": ("open('link.txt', 'a').write('x')", ["a.txt"]),
    "follows_folder_link": ("open('absolute/n', 'w')", ["sub/n"]),
    "replaces_link": ("os.remove('link.txt'); open('link.txt', 'w')", ["link.txt"]),
    "links": ("os.symlink('a.txt', 'l'); os.link('a.txt', 'h'); open('h', 'a').write('x')", ["a.txt", "h", "l"]),
    "beside": ("open('../y', 'w')", ["../y"]),
    "beside_deep": ("os.makedirs('../runs/1'); open('../runs/1/x', 'w')", ["../runs/1/x"]),
    "beside_gone": ("os.remove('../top.txt')", ["../top.txt"]),
    "replaces_big": ("os.remove('big.bin'); open('big.bin', 'wb').write(b'x')", ["big.bin"]),
    "byte_code": ("os.mkdir('__pycache__'); open('__pycache__/m.cpython-311.pyc', 'w'); open('m.pyc', 'w')", []),
    "by_command": ("subprocess.run('echo x >> a.txt; echo x > n; rm b.txt', shell=True)", ["a.txt", "b.txt", "n"]),
    "by_descriptor": ("d = os.open('sub', 0); os.close(os.open('n', 65, dir_fd=d)); os.close(d)", ["sub/n"]),
    "in_between": ("os.chdir('sub'); open('../n', 'w'); open('../../z', 'w')", ["../z", "n"]),
}


def test_the_folders_stay_and_the_user_is_told(world: World) -> None:
    wanted = {deed: written for deed, (_, written) in DEEDS.items()}
    if (world.kind, world.user) == ("overlay", 0):
        wanted["moves_folder"] = ["deep", "sub/deep"]  # moved as a whole, which only root's overlays can
    with keep_unchanged(world):
        outcomes = world.run_all({deed: f"import os, shutil, subprocess\n{code}" for deed, (code, _) in DEEDS.items()})
    assert {deed: list(outcome.written) for deed, outcome in outcomes.items()} == wanted
    assert {deed: outcome.outside for deed, outcome in outcomes.items()} == dict.fromkeys(DEEDS, ())


def test_the_view_shows_what_is_in_the_folder(world: World) -> None:
    program = (
        "import os, sys, json\n"
        "assert os.getcwd() == os.environ['PWD'] == str(inside)\n"
        "assert os.path.samefile('.', str(inside))\n"
        "names = ['a.txt', 'sub/deep/e.txt', 'link.txt', '../data/x.txt', 'beside/x.txt', '../../elsewhere/far.txt']\n"
        "print(json.dumps([open(name).read() for name in names]))\n"
        "assert len(open('big.bin', 'rb').read()) == 5 * 2**20\n"
        "assert os.stat('a.txt').st_mtime_ns == 10**18\n"
        "assert os.stat('a.txt').st_mode & 0o777 == 0o640\n"
        "assert not os.path.exists('broken') and os.path.lexists('broken')\n"
        "assert sorted(os.listdir('..')) == ['data', os.path.basename(FOLDER), 'top.txt']\n"
        "assert os.path.basename(os.getcwd()) == os.path.basename(FOLDER)\n"
    )
    world.give("../../elsewhere/far.txt", "far\n")
    (world.folder / "a.txt").chmod(0o640)
    with keep_unchanged(world):
        outcome = world.run(program)
    assert outcome.printed.count("this is") == 5
    assert '"far\\n"' in outcome.printed
    assert outcome.written == ()


def test_absolute_paths_into_the_folder_are_caught_too(overlaid: World) -> None:
    program = (
        "import os\nopen(FOLDER + '/new', 'w')\nopen(FOLDER + '/a.txt', 'a').write('x')\nos.remove(FOLDER + '/b.txt')\n"
        "open(os.path.dirname(FOLDER) + '/up', 'w')\nassert str(inside) == FOLDER and os.path.exists('new')\n"
    )
    with keep_unchanged(overlaid):
        outcome = overlaid.run(program)
    assert outcome.written == ("../up", "a.txt", "b.txt", "new")
    assert outcome.outside == ()


def test_processes_of_the_trial_see_its_view(world: World) -> None:
    program = (
        "import os, subprocess, sys\n"
        "open('../up', 'w').write('one')\n"
        'code = \'open("n", "w").write(open("../up").read())\'\n'
        "subprocess.run([sys.executable, '-c', code], check=True)\n"
        "if os.fork() == 0:\n"
        "    open('m', 'w').write(open('n').read() + ' two')\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "print(open('m').read())\n"
    )
    with keep_unchanged(world):
        outcome = world.run(program)
    assert outcome.printed == "one two\n"
    assert outcome.written == ("../up", "m", "n")


def test_results_in_the_search_folder_stay(world: World) -> None:
    results = world.elsewhere / "results"
    results.mkdir()
    program = (
        "open(OWN + '/result.json', 'w').write('result')\n"
        "from pathlib import Path\n"
        f"open(view.locate_kept(Path({str(results)!r})) / 'r', 'w').write('r')\n"
    )
    with keep_unchanged(world, but=(world.own, results)):
        outcome = world.run(program, kept=(results,))
    assert outcome.written == outcome.outside == ()
    assert (world.own / "result.json").read_text() == "result"
    assert (results / "r").read_text() == "r"


def test_a_cache_in_the_search_folder_stays_and_is_found(world: World) -> None:
    cache = world.state / "now" / "inductor"
    cache.mkdir()
    world.environment["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    program = "import os\nopen(os.environ['TORCHINDUCTOR_CACHE_DIR'] + '/kernel', 'w').write('k')\n"
    with keep_unchanged(world, but=(cache,)):
        outcome = world.run(program, kept=(cache,))
    assert outcome.written == outcome.outside == ()
    assert (cache / "kernel").read_text() == "k"


def test_read_only_folders_stay_what_they_are(world: World) -> None:
    world.give("locked/deep/x", "x").parent.chmod(0o555)
    (world.folder / "locked").chmod(0o555)
    program = (
        "import os\n"
        "assert open('locked/deep/x').read() == 'x'\n"
        "for path in ('locked/n', 'locked/deep/n', 'locked/deep/x'):\n"
        "    try:\n        open(path, 'a').write('x')\n        print('wrote')\n"
        "    except PermissionError:\n        print('refused')\n"
    )
    with keep_unchanged(world):
        outcome = world.run(program)
    if world.user != 0:
        # As outside: the file itself may be written to, the folders not. A copy links the whole folder.
        wanted = ["refused", "refused", "wrote" if world.kind == "overlay" else "refused"]
        assert outcome.printed.split() == wanted


def test_what_cannot_be_read_is_no_obstacle(world: World) -> None:
    world.give("secret.txt", "s").chmod(0)
    world.give("closed/x", "x").parent.chmod(0)
    os.mkfifo(world.folder / "pipe")
    with socket.socket(socket.AF_UNIX) as ours:
        before = os.getcwd()
        os.chdir(world.folder)
        try:
            ours.bind("socket")
        finally:
            os.chdir(before)
        with keep_unchanged(world):
            assert world.run("open('n', 'w')").written == ("n",)


def test_a_script_may_take_its_own_permissions_away(world: World) -> None:
    program = (
        "import os\nos.makedirs('p/q')\nopen('p/q/r', 'w')\n"
        "for path in ('p/q/r', 'p/q', 'p', 'sub/deep'):\n    os.chmod(path, 0)\n"
    )
    with keep_unchanged(world):
        world.run(program)  # which asserts that nothing is left of the view


def test_a_script_may_write_deeper_than_a_path_can_say(world: World) -> None:
    program = (
        "import os\nname = 'n' * 200\nfor step in range(25):\n    os.mkdir(name)\n    os.chdir(name)\nopen('x', 'w')\n"
    )
    with keep_unchanged(world):
        world.run(program)


def test_views_know_nothing_of_each_other(world: World) -> None:
    programs = {"one": "open('n', 'w')", "other": "import os; assert not os.path.exists('n')"}
    with keep_unchanged(world):
        outcomes = world.run_all(programs)
    assert outcomes["one"].written == ("n",)
    assert outcomes["other"].written == ()


def enter_and_wait(view: View, world: World) -> subprocess.Popen[str]:
    program = "import time\nopen('n', 'w')\nopen('../up', 'w')\nprint('ready', flush=True)\ntime.sleep(60)\n"
    command = [sys.executable, "-P", "-c", CHILD, program, str(world.own), *view.as_arguments()]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=world.environment)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


@pytest.mark.parametrize("kind", ["copy", "overlay"])
@pytest.mark.fault(
    "20", injected="SIGKILL to a script's trial", outcome="no process, no mount and nothing of the script is left"
)
def test_a_killed_trial_leaves_nothing_behind(kind: str) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    with open_permitted_world(kind, ME) as world, keep_unchanged(world):
        view = prepare_view(world.folder, world.temporary, kind=world.kind)
        with enter_and_wait(view, world) as child:
            # The supervisor finds the trial's processes by their environment.
            assert b"TMPDIR=" in Path(f"/proc/{child.pid}/environ").read_bytes()
            assert Path("/proc/self/mountinfo").read_text() == mounts
            assert not (world.folder / "n").exists()
            child.send_signal(signal.SIGKILL)
            child.wait()
        assert list_written(view) == ("../up", "n")
        remove_view(view)
        assert os.listdir(world.temporary) == []
        assert Path("/proc/self/mountinfo").read_text() == mounts


def test_a_trial_in_a_view_still_dies_with_its_parent_and_has_no_more_rights(world: World) -> None:
    program = (
        "import ctypes\nvalue = ctypes.c_int()\nctypes.CDLL(None).prctl(2, ctypes.byref(value), 0, 0, 0)\n"
        "import os\nprint(value.value, os.getuid(), os.geteuid(), os.getegid())\n"
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('CapEff')][0])\n"
    )
    world.hand_over()
    first, second = world.run(program).printed.splitlines()
    group = world.user or os.getegid()
    assert first == f"9 {world.user} {world.user} {group}"
    if world.user != 0:
        assert int(second, 16) == 0


# ---- overlays


def test_links_to_folders_elsewhere_are_overlaid_too(overlaid: World) -> None:
    (overlaid.folder / "runs").symlink_to(overlaid.elsewhere)
    overlaid.give("../../elsewhere/old", "old")
    program = (
        "import os\nopen('runs/new', 'w')\nos.remove('runs/old')\n"
        f"open({str(overlaid.elsewhere / 'absolute')!r}, 'w')\n"
    )
    with keep_unchanged(overlaid):
        outcome = overlaid.run(program)
    assert outcome.written == ("runs/absolute", "runs/new", "runs/old")
    assert outcome.outside == ()


def test_caches_stay_real_and_settings_do_not(overlaid: World) -> None:
    home = overlaid.parent
    models = overlaid.parent / "models"
    for folder in (home / ".cache", home / ".config", models):
        folder.mkdir()
    overlaid.environment.update(HOME=str(home), HF_HOME=str(models))
    program = "open('../.cache/c', 'w')\nopen('../.config/s', 'w')\nopen('../models/m', 'w')\nopen('../n', 'w')\n"
    with keep_unchanged(overlaid, but=(home / ".cache", models)):
        outcome = overlaid.run(program)
    assert (home / ".cache" / "c").exists()
    assert (models / "m").exists()
    assert outcome.written[0] == "../n"


def test_a_cache_that_holds_the_folder_does_not_unprotect_it(overlaid: World) -> None:
    inner = overlaid.folder / "cache"
    inner.mkdir()
    overlaid.environment.update(HF_HOME=str(overlaid.parent), TORCH_HOME=str(inner), XDG_CACHE_HOME=str(overlaid.base))
    with keep_unchanged(overlaid):
        outcome = overlaid.run("open('n', 'w')\nopen('cache/n', 'w')\nopen('../n', 'w')\n")
    assert outcome.written == ("../n", "cache/n", "n")


def test_the_folder_alone_is_overlaid_where_the_parent_cannot_be(overlaid: World) -> None:
    # The scratch folder would lie under its own overlay.
    scratch = overlaid.parent / "scratch"
    scratch.mkdir()
    temporary, overlaid.temporary = overlaid.temporary, scratch
    with keep_unchanged(overlaid, but=(temporary,)):
        outcome = overlaid.run("import os\nopen('n', 'w')\nopen(FOLDER + '/m', 'w')\n")
    assert outcome.written == ("m", "n")
    assert not overlaid.run("open('n', 'w')").outside


def test_scratch_in_the_folder_itself_permits_no_overlay(tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    assert not permits_overlay(tmp_path, tmp_path)
    assert snapshot(tmp_path).keys() == before.keys()


def test_permission_is_found_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_permitted_world("overlay", ME) as world, keep_unchanged(world):
        monkeypatch.setattr(view_module, "_TRY_SECONDS", 120.0)  # however busy the machine is
        assert permits_overlay(world.folder, world.temporary)
        assert not permits_overlay(world.folder, world.base / "nowhere")
        assert not permits_overlay(Path("/"), world.temporary)
        monkeypatch.setattr(view_module, "_TRY_SECONDS", 0.001)
        assert not permits_overlay(world.folder, world.temporary)
        monkeypatch.undo()
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        assert not permits_overlay(world.folder, world.temporary)
        assert os.listdir(world.temporary) == []


def test_a_system_that_refuses_raises_with_the_errno(overlaid: World) -> None:
    # An overlay cannot be written to an overlay.
    program = (
        "from pathlib import Path\nfrom autotune.isolation.sandbox.view import enter_view, prepare_view\n"
        "scratch = Path(FOLDER, 'scratch')\nscratch.mkdir()\n"
        "try:\n    enter_view(prepare_view(Path(FOLDER, 'sub', 'deep'), scratch, kind='overlay'))\n"
        "except OSError as error:\n    print(error.errno)\n"
    )
    with keep_unchanged(overlaid):
        assert int(overlaid.run(program).printed) > 0


def test_mount_points_are_read_with_their_odd_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = rb"""22 1 8:1 / / rw - ext4 /dev/a rw
23 22 8:2 / /home/me/a\040b\134c rw - ext4 /dev/b rw
24 22 8:3 / /home/me rw - ext4 /dev/c rw
25 22 8:3 / /home/meme rw - ext4 /dev/c rw
"""
    monkeypatch.setattr(Path, "read_bytes", lambda self: lines)
    assert list(overlay._find_mounts(Path("/home/me"))) == [Path("/home/me/a b\\c")]


# ---- copies


def test_a_copy_links_what_is_large_and_copies_the_rest(copied: World) -> None:
    copied.give("model.pt", BIG)
    copied.give("checkpoint.pth.tar", BIG)
    copied.give("venv/lib/x", "x")
    copied.give(".git/HEAD", "ref")
    copied.give(".git/objects/ab/cd", "object")
    program = (
        "import os\n"
        "for name in ('a.txt', 'model.pt', 'checkpoint.pth.tar', '.git', '.git/HEAD', 'sub', 'sub/deep/e.txt'):\n"
        "    assert not os.path.islink(name), name\n"
        "for name in ('big.bin', 'venv', '.git/objects', '../data', '../top.txt'):\n"
        "    assert os.path.islink(name) and os.path.exists(name), name\n"
        "assert not os.path.lexists('.autotune')\n"
        "assert os.readlink('link.txt') == 'a.txt'\n"
        "assert os.path.realpath('absolute') == str(inside / 'sub')\n"
        "open('model.pt', 'wb').write(b'x')\n"
    )
    with keep_unchanged(copied):
        assert copied.run(program).written == ("model.pt",)


def test_a_copy_has_its_caps(copied: World, monkeypatch: pytest.MonkeyPatch) -> None:
    if copied.user != ME:
        pytest.skip("the caps are set in this process, which is another user's")
    monkeypatch.setattr(clone, "_ROOM_BYTES", 30)
    view = prepare_view(copied.folder, copied.temporary, kind="copy")
    inside = view.locate(view.folder)
    assert not (inside / "a.txt").is_symlink()
    assert (inside / "sub" / "deep" / "e.txt").is_symlink()
    remove_view(view)
    monkeypatch.undo()
    monkeypatch.setattr(clone, "_ROOM_ENTRIES", 3)
    view = prepare_view(copied.folder, copied.temporary, kind="copy")
    inside = view.locate(view.folder)
    assert not (inside / "a.txt").is_symlink()
    assert (inside / "sub").is_symlink()
    assert (inside / "sub" / "deep" / "e.txt").read_text() == "this is sub/deep/e.txt\n"
    remove_view(view)


def test_a_changed_original_does_not_go_unnoticed(copied: World) -> None:
    if copied.user != ME:
        pytest.skip("needs the same user")
    view = prepare_view(copied.folder, copied.temporary, kind="copy")
    assert list_written(view) == ()
    copied.give("big.bin", b"changed")
    assert list_written(view) == ("big.bin",)
    remove_view(view)


def test_git_changes_nothing_by_looking(copied: World) -> None:
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "safe.directory=*"]
    copied.hand_over()
    try:
        for words in (["init", "-q"], ["add", "a.txt", "sub"], ["commit", "-q", "-m", "first"]):
            run_as(copied.user, [*git, "-C", str(copied.folder), *words], env=copied.environment).check_returncode()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"git cannot be used here: {error}")
    program = (
        "import os, subprocess\nopen('a.txt', 'a').write('x')\nos.utime('sub/d.txt')\n"
        f"git = {git!r}\n"
        "for words in (['status', '--short'], ['diff', '--stat'], ['rev-parse', 'HEAD']):\n"
        "    print(subprocess.run([*git, *words], check=True, capture_output=True, text=True).stdout)\n"
        "os.chdir('sub')\nsubprocess.run([*git, 'status'], check=True, stdout=subprocess.DEVNULL)\n"
    )
    with keep_unchanged(copied):
        assert " M a.txt" in copied.run(program).printed


# ---- the parent's side


def test_a_view_survives_a_command_line(tmp_path: Path) -> None:
    view = View(Path("/a b:c,\\\n"), tmp_path, "copy", (Path("/a/.autotune"), Path("/x")))
    assert View.from_arguments(view.as_arguments()) == view
    assert View.from_arguments(["overlay", "/a", "/b"]) == View(Path("/a"), Path("/b"), "overlay")
    assert view.locate(Path("/x/y")) == view.locate_kept(Path("/x/y")) == Path("/x/y")
    assert view.locate_kept(Path("/elsewhere")) == Path("/elsewhere")
    overlay = View(view.folder, tmp_path, "overlay", view.kept)
    assert overlay.locate_kept(Path("/x/y")) == tmp_path / "kept-1" / "y"
    assert view.locate(view.folder / "train.py").is_relative_to(tmp_path)


def test_the_root_is_no_working_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the working folder is /"):
        prepare_view(Path("/"), tmp_path, kind="copy")


def test_scratch_is_ours_alone(tmp_path: Path) -> None:
    view = prepare_view(tmp_path / ".." / tmp_path.name, tmp_path, kind="overlay")
    assert stat.S_IMODE(view.scratch.stat().st_mode) == 0o700
    assert view.folder == tmp_path.resolve()
    assert view.kept == ()
    remove_view(view)
    remove_view(view)
    assert list(tmp_path.iterdir()) == []


def test_a_view_is_removed_with_odd_permissions_and_never_through_a_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "deep").mkdir(parents=True)
    (outside / "deep" / "x").write_text("x")
    outside.chmod(0o750)
    before = snapshot(outside)
    view = prepare_view(tmp_path / "outside", tmp_path, kind="overlay")
    (view.scratch / "p" / "q").mkdir(parents=True)
    (view.scratch / "p" / "q" / "to").symlink_to(outside)
    (view.scratch / "p" / "q" / "file").symlink_to(outside / "deep" / "x")
    (view.scratch / "p" / "q").chmod(0)
    (view.scratch / "p").chmod(0)
    if ME == 0:
        for parent, folders, _ in os.walk(tmp_path):
            for name in (".", *folders):
                os.chown(os.path.join(parent, name), NOBODY, NOBODY)
    remove_view(view)
    assert list(tmp_path.iterdir()) == [outside]
    after = snapshot(outside)
    assert [entry[3:] for entry in after.values()] == [entry[3:] for entry in before.values()]


# ---- anything at all

ANYTHING = """
import os, random, shutil, subprocess
chance = random.Random(SEED)
places = ['.', 'sub', 'sub/deep', 'absolute', 'beside', '..', '../data', 'p', 'p/q', '../new', 'locked', 'runs',
          FOLDER, FOLDER + '/sub']
if view.kind == 'overlay':
    places.append(os.path.dirname(FOLDER))  # in a copy, outside of the folder, it is reported only
names = ['a.txt', 'b.txt', 'c.txt', 'd.txt', 'e.txt', 'x.txt', 'big.bin', 'link.txt', 'broken', 'top.txt', ODD, 'sub',
         'deep', 'p', 'q', '\\udcff']
def any_path():
    return os.path.join(chance.choice(places), chance.choice(names))
def write(mode):
    with open(any_path(), mode) as file:
        file.write(b'y' * chance.choice([0, 1, 5000]))
def write_low():
    descriptor = os.open(any_path(), chance.choice([os.O_WRONLY, os.O_RDWR | os.O_CREAT, os.O_WRONLY | os.O_TRUNC]))
    os.write(descriptor, b'z')
    os.close(descriptor)
deeds = [
    lambda: write('wb'), lambda: write('ab'), lambda: write('r+b'), lambda: write('xb'), write_low,
    lambda: os.remove(any_path()), lambda: os.rmdir(any_path()), lambda: shutil.rmtree(any_path()),
    lambda: os.rename(any_path(), any_path()), lambda: os.replace(any_path(), any_path()),
    lambda: os.mkdir(any_path()), lambda: os.makedirs(any_path(), exist_ok=True),
    lambda: os.symlink(any_path(), any_path()), lambda: os.link(any_path(), any_path()),
    lambda: os.truncate(any_path(), chance.choice([0, 1, 9])), lambda: os.utime(any_path()),
    lambda: os.chmod(any_path(), chance.choice([0o600, 0o755])),
    lambda: shutil.copy(any_path(), any_path()), lambda: shutil.move(any_path(), any_path()),
    lambda: os.setxattr(any_path(), 'user.a', b'a'),
]
if view.kind == 'copy':  # in an overlay, a folder moved up and entered leads out of the parent, which is reported only
    deeds.append(lambda: os.chdir(chance.choice(['sub', 'absolute', str(inside)])))
done = 0
for step in range(400):
    try:
        chance.choice(deeds)()
        done += 1
    except (OSError, shutil.Error, RecursionError):
        pass
print(done)
"""


def test_no_sequence_of_deeds_changes_the_folders(world: World) -> None:
    (world.folder / "runs").symlink_to(world.elsewhere)
    world.give("../../elsewhere/a.txt", "far")
    world.give("locked/a.txt", "x").parent.chmod(0o555)
    first = random.Random(f"{world.kind}{world.user}").randrange(10**6)
    # By a relative link that is moved up, deeds reach what is above the parent, and are reported.
    with keep_unchanged(world, only=(world.parent, world.elsewhere)):
        outcomes = world.run_all(
            {f"seed {seed}": f"SEED = {seed}\nODD = {ODD!r}\n{ANYTHING}" for seed in range(first, first + 10)}
        )
    for outcome in outcomes.values():
        assert int(outcome.printed) > 40
        assert outcome.written
