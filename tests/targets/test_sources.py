"""Which files a workload's fingerprint stands for: what it may import of the project, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.records.trial import Target
from autotune.targets.resolve import DEMO_TARGET
from autotune.targets.source import project as sources
from autotune.targets.source.fingerprint import fingerprint_target, is_older
from autotune.targets.source.location import locate
from autotune.targets.source.project import list_sources


def plant(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def fingerprint(folder: Path, spec: str = "train.py:workload") -> str | None:
    return fingerprint_target(Target(spec=spec, folder=str(folder)))


def names(folder: Path, location: str = "train.py") -> set[str]:
    found = locate(location, folder=folder)
    assert found is not None
    return set(list_sources(found, folder=folder))


@pytest.mark.fault("F3", injected="an edit of a module that the workload imports", outcome="another fingerprint")
def test_an_edit_of_an_imported_module_is_another_fingerprint(tmp_path: Path) -> None:
    """Only the workload's own file counted: a learning rate a hundred times larger beside it was never seen."""
    plant(tmp_path, train="from helper import LR\n", helper="import deeper\nLR = 0.05\n", deeper="X = 1\n", other="")
    before = fingerprint(tmp_path)
    assert before is not None
    plant(tmp_path, other="not imported\n")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "helper.cpython-311.pyc").write_bytes(b"anything")
    os.utime(tmp_path / "helper.py", (0, 0))
    assert fingerprint(tmp_path) == before
    plant(tmp_path, helper="import deeper\nLR = 5.0\n")
    assert fingerprint(tmp_path) not in (before, None)
    plant(tmp_path, helper="import deeper\nLR = 0.05\n", deeper="X = 2\n")
    assert fingerprint(tmp_path) not in (before, None)


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("import a", {"a.py"}),
        ("import a, b as c", {"a.py", "b.py"}),
        ("import a.part", {"a.py"}),
        ("x = 1; import a", {"a.py"}),
        ("if True: from a import x", {"a.py"}),
        ("def later():\n    from b import (\n        x,\n    )", {"b.py"}),
        ("from package.deep import thing", {"package/__init__.py", "package/deep/thing.py", "package/side.py"}),
        ("from space import thing", {"space/thing.py"}),
        ("import_module('a')", {"a.py"}),
        ("import_module(f'package.{name}')", {"package/__init__.py", "package/deep/thing.py", "package/side.py"}),
        ("_target_ = 'package.deep.thing.Thing'", {"package/__init__.py", "package/deep/thing.py", "package/side.py"}),
        ("split = 'a'", set()),
        ("importlib; kind = 'space'", set()),
        ("import json, random, torch, autotune", set()),
        ("from . import a", set()),
        ("important = a", set()),
        ("import inside", {"inside.py"}),
    ],
)
def test_what_is_imported_of_the_project_is_found_by_reading(tmp_path: Path, statement: str, found: set[str]) -> None:
    plant(tmp_path, train=f"{statement}\n", a="", b="", space__thing="", package__side="", package__deep__thing="")
    plant(tmp_path, src__inside="", autotune__part="", unrelated="")
    (tmp_path / "package" / "__init__.py").write_text("")
    assert names(tmp_path) == {"train.py"} | found


def test_a_file_in_a_folder_imports_from_its_own_and_from_the_working_folder(tmp_path: Path) -> None:
    plant(tmp_path, jobs__train="import near, far, both", jobs__near="", far="", both="", jobs__both="1")
    assert names(tmp_path, "jobs/train.py") == {"train.py", "near.py", "far.py", "both.py"}
    found = locate("jobs/train.py", folder=tmp_path)
    assert found is not None
    assert list_sources(found, folder=tmp_path)["both.py"] == tmp_path / "jobs" / "both.py"


def test_a_folder_that_the_code_puts_on_the_path_is_looked_in(tmp_path: Path) -> None:
    text = "import sys\nsys.path.insert(0, '../common')\nimport shared\nimport above\n"
    plant(tmp_path, job__train=text, common__shared="", above="")
    assert names(tmp_path / "job") == {"train.py", "shared.py", "above.py"}


def test_a_module_of_a_package_stands_for_the_whole_package(tmp_path: Path) -> None:
    plant(
        tmp_path, mine__train="from .model import net\nimport helper", mine__model="", mine__other__part="", helper=""
    )
    (tmp_path / "mine" / "__init__.py").write_text("")
    expected = {"mine/__init__.py", "mine/train.py", "mine/model.py", "mine/other/part.py", "helper.py"}
    assert names(tmp_path, "mine.train") == expected
    assert fingerprint(tmp_path, "mine.train:workload") is not None
    assert fingerprint(tmp_path, "mine.trian:workload") is None


def test_a_moved_project_keeps_its_fingerprint(tmp_path: Path) -> None:
    for folder in (tmp_path / "here", tmp_path / "there"):
        plant(folder, train="import helper", helper="")
    assert fingerprint(tmp_path / "here") == fingerprint(tmp_path / "there")


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES", "MOST_ENTRIES"])
def test_a_project_too_large_leaves_the_file_alone(tmp_path: Path, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(tmp_path, train="import package\n" + "#" * 9, package__a="#", package__b="#", package__c="#")
    (tmp_path / "package" / "__init__.py").write_text("")
    assert len(names(tmp_path)) == 5
    monkeypatch.setattr(sources, limit, 3)
    assert names(tmp_path) == {"train.py"}


def test_nothing_is_waited_for_and_nothing_is_imported(tmp_path: Path) -> None:
    plant(tmp_path, train="import pipe, spy", spy="open('marker', 'w')")
    os.mkfifo(tmp_path / "pipe.py")
    assert names(tmp_path) == {"train.py", "spy.py"}
    assert fingerprint(tmp_path) is not None
    assert not (tmp_path / "marker").exists()


def test_the_demo_is_its_own_file_whatever_the_folder_holds(tmp_path: Path) -> None:
    plant(tmp_path, autotune__targets__demo="")
    found = locate(DEMO_TARGET.partition(":")[0], folder=tmp_path)
    assert found is not None
    assert set(list_sources(found, folder=tmp_path)) == {"autotune/targets/demo.py"}
    assert fingerprint(tmp_path, DEMO_TARGET) == fingerprint(Path("/"), DEMO_TARGET)


def test_both_sides_make_the_same_fingerprint(tmp_path: Path) -> None:
    """The child's path has more in it than the parent's, before and above all after the import."""
    body = "import sys, helper\nsys.path.insert(0, '/nowhere')\n"
    plant(tmp_path, train=body + "class W:\n" + "".join(f"    def {name}(self, *_): ...\n" for name in METHODS))
    plant(tmp_path, helper="")
    with (tmp_path / "train.py").open("a") as file:
        file.write("workload = W()\n")
    program = (
        "from pathlib import Path; from autotune.targets.load import load_workload;"
        "print(load_workload('train.py:workload', folder=Path.cwd()).fingerprint)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert shown.stdout.strip() == fingerprint(tmp_path)


def test_a_fingerprint_of_an_older_version_is_known_as_such() -> None:
    assert is_older("0123456789ab", "m-0123456789ab")
    assert not is_older("m-0123456789ab", "m-ba9876543210")
    assert not is_older("0123456789ab", "ba9876543210")  # of a script


METHODS = ("build_model", "build_optimizer", "train_dataset", "compute_loss")
