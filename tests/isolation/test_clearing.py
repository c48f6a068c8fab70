"""A script that clears its working folder, in whatever way, takes nothing of `.autotune` with it but its view."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from record_factory import make_result
from trial_world import make_spec
from view_world import EVERY_WORLD, ME, World, keep_unchanged, open_permitted_world

from autotune.isolation.sandbox import view as view_module
from autotune.isolation.sandbox.landlock import _call
from autotune.isolation.sandbox.view import prepare_view
from autotune.isolation.script_starter import ScriptStarter

CLEARING = {
    "all at once": "shutil.rmtree('.', ignore_errors=True)",
    "one by one": (
        "for name in os.listdir():\n"
        "    shutil.rmtree(name) if os.path.isdir(name) and not os.path.islink(name) else os.remove(name)\n"
        "assert not os.listdir()"
    ),
    "by its name": "shutil.rmtree('.autotune', ignore_errors=True)",
    "by its path": "shutil.rmtree(FOLDER + '/.autotune', ignore_errors=True)",
    "through links": (
        "for parent, folders, files in os.walk('.', topdown=False, followlinks=True):\n"
        "    if '.autotune' in parent:\n"
        "        shutil.rmtree(parent, ignore_errors=True)"
    ),
    "moved away": "attempt(os.rename, '.autotune', 'old')\nattempt(os.rename, FOLDER + '/.autotune', 'older')",
    "overwritten": (
        "for name in ('lock', 'older/best.json', 'now/study.db'):\n"
        "    attempt(lambda: open('.autotune/' + name, 'w'))\n"
        "    attempt(lambda: open(FOLDER + '/.autotune/' + name, 'w'))"
    ),
    "by a command": "subprocess.run(['rm', '-rf', '.autotune'])",
    "by a command that follows links": "subprocess.run('rm -rf .autotune/*', shell=True)",
}
BY_PATH = {
    "by its path and a command": "subprocess.run(['rm', '-rf', FOLDER + '/.autotune'])",
    "all of it by its path and a command": "subprocess.run(['rm', '-rf', FOLDER])",
}
HEAD = """
import os, shutil, subprocess
def attempt(function, *arguments):
    try:
        function(*arguments)
    except OSError:
        pass
"""
RESULT = "\nopen(OWN + '/result.json', 'w').write('done')\n"


@pytest.fixture(params=EVERY_WORLD)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    with open_permitted_world(*request.param) as world:
        yield world


def clear(world: World, deeds: dict[str, str]) -> None:
    """Run scripts that clear, each in a view; their results arrive, and all else is as it was."""
    for name, deed in deeds.items():
        with keep_unchanged(world, but=(world.own,), only=(world.parent, world.elsewhere)):
            outcome = world.run(HEAD + deed + RESULT)
        assert not any(".autotune" in path for path in (*outcome.written, *outcome.outside)), name
        assert (world.own / "result.json").read_text() == "done", name
        (world.own / "result.json").unlink()


@pytest.mark.fault("F1", injected="a script clears its working folder", outcome="the search and all before it intact")
def test_a_script_that_clears_its_folder_clears_its_view_alone(world: World) -> None:
    has_kernel = world.kind == "overlay" or _call(444, None, 0, 1) >= 2
    clear(world, CLEARING | (BY_PATH if has_kernel else {}))


@pytest.mark.slow
@pytest.mark.fault("F1", injected="the same, no overlay, no Landlock", outcome="the search and all before it intact")
def test_a_copy_without_a_fence_refuses_python_code_all_the_same() -> None:
    with open_permitted_world("copy", ME) as world:
        world.environment["TMPDIR"] = str(world.base)  # a project in the temporary folder goes without a fence
        clear(world, CLEARING)
        program = f"{HEAD}attempt(os.rmdir, OWN)\nattempt(os.rename, OWN, OWN + '-2'){RESULT}"
        with keep_unchanged(world, but=(world.own,), only=(world.parent,)):
            world.run(program)
        assert (world.own / "result.json").read_text() == "done"


@pytest.mark.fault(
    "F8", injected="a script removes our notes of its view", outcome="its trial counts, the search goes on"
)
@pytest.mark.parametrize("kind", ["overlay", "copy"])
def test_a_view_that_is_damaged_ends_no_search(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, own, temporary = (tmp_path / name for name in ("work", "own", "temporary"))
    for folder in (work, own, temporary):
        folder.mkdir()
    spec = make_spec("learns")
    result = make_result(spec, captures="/seen/captures.npz")
    view = prepare_view(work, temporary, kind="overlay" if kind == "overlay" else "copy", kept=(own,))
    for path in view.scratch.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    if kind == "overlay":
        (view.scratch / "layer-x").mkdir()
        (view.scratch / "layer-x" / "root.json").write_text("no JSON")

    def refuse(folder: Path) -> None:
        raise OSError(folder)

    monkeypatch.setattr(view_module, "remove_scratch", refuse)
    starter = ScriptStarter()
    starter._running = view, spec
    finished = starter.finish(result)
    assert finished == result.replace(captures=str(own / "captures.npz"))
