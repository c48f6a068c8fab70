"""What a target that cannot be one is told, from reading alone: nothing is imported, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.records.trial import Target
from autotune.targets.check import check_target
from autotune.targets.source.neighbours import find_trainings

METHODS = ("build_model", "build_optimizer", "train_dataset", "compute_loss")
BODY = "".join(f"    def {name}(self, *_): ...\n" for name in METHODS)
MODULE = f"""
import torch
open("marker", "w")
DEPTH = 3
class Base:
    def build_model(self): ...
class Own(Base):
{BODY}
class Half(Base):
    def train_dataset(self): ...
class Elsewhere(torch.Training):
    pass
workload = Own()
half = Half()
derived = Elsewhere()
first, *rest = Own(), 1
if DEPTH:
    chosen = torch.thing()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mod.py").write_text(MODULE)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "inner.py").write_text(MODULE)
    (tmp_path / "torn.py").write_text("def build_model(:\n")
    return tmp_path


def refusal(spec: str, folder: Path, kind: type[AutotuneError] = UsageError) -> tuple[str, str]:
    before = sorted(folder.rglob("*"))
    with pytest.raises(AutotuneError) as caught:
        check_target(Target(spec=spec, folder=str(folder)), command="probe")
    assert type(caught.value) is kind
    assert sorted(folder.rglob("*")) == before
    return caught.value.message, caught.value.hint


@pytest.mark.parametrize(
    "spec",
    [
        "mod.py:workload",
        "mod:workload",
        "mod.py:derived",
        "mod.py:first",
        "mod.py:rest",
        "mod.py:chosen",
        "mod.py:torch.thing",
        "mod.py:Own.inner",
        "package.inner:workload",
        "package:anything",
        "autotune.targets.demo:workload",
    ],
)
def test_what_may_be_a_workload_is_left_to_the_child(folder: Path, spec: str) -> None:
    check_target(Target(spec=spec, folder=str(folder)))
    assert not (folder / "marker").exists()


@pytest.mark.parametrize(
    "line",
    [
        "from elsewhere import *",
        "globals()['wrokload'] = 1",
        "def __getattr__(name): return 1",
        "def late():\n    global wrokload",
        "import sys\nsetattr(sys.modules[__name__], 'wrokload', 1)",
        "vars()['wrokload'] = 1",
        "wrokload = workload",
        "with open('x') as wrokload: pass",
        "try:\n    import wrokload\nexcept ImportError:\n    wrokload = None",
        "for wrokload in []: pass",
        "(wrokload := 3)",
        "wrokload: int = 3 + 4",
    ],
)
def test_a_name_that_may_be_given_in_another_way_is_not_refused(folder: Path, line: str) -> None:
    (folder / "open.py").write_text(f"workload = 1\n{line}\n")
    check_target(Target(spec="open.py:wrokload", folder=str(folder)))


WRONG = {
    "train.py": ("'train.py' is a script, not a workload", "write its command: autotune probe -- python train.py"),
    "mod.py": ("'mod.py' does not say which workload", "write autotune probe mod.py:workload"),
    "help": ("there is no target 'help'", "autotune probe --help says more"),
    "train": ("there is no target 'train'", "did you mean autotune probe -- python train.py"),
    "package": ("'package' is a folder", "autotune probe -- python package/train.py"),
    "python train.py": ("'python train.py' is one word", "without quotes: autotune probe -- python train.py"),
    "trian.py": ("there is no file 'trian.py'", "did you mean train.py?"),
    "nothere.py:w": ("there is no file 'nothere.py'", "it is looked up in"),
    "moed.py:workload": ("there is no file 'moed.py'", "did you mean mod.py?"),
    "package/iner.py:w": ("there is no file 'package/iner.py'", "did you mean package/inner.py?"),
    "no_such_module:w": ("there is no module 'no_such_module'", "or name a file: train.py:workload"),
    "no_such_package.part:w": ("there is no module 'no_such_package.part'", ""),
    "package.iner:w": ("there is no module 'package.iner'", ""),
    "mod:wrokload": ("mod has no 'wrokload'", "did you mean 'workload'? workloads in it: workload"),
    "mod.py:DEPHT": ("mod.py has no 'DEPHT'", "did you mean 'DEPTH'? workloads in it: workload"),
    "package.inner:wrokload": ("package.inner has no 'wrokload'", "did you mean 'workload'?"),
    "train.py:zzz": ("train.py has no 'zzz'", "no object in it has a workload's methods"),
    "train.ipynb": ("'train.ipynb' is a notebook", "jupyter nbconvert --to script train.ipynb"),
    "train.ipynb:w": ("'train.ipynb' is a notebook", "jupyter nbconvert --to script train.ipynb"),
    ":": ("target ':' is not LOCATION:ATTRIBUTE", ""),
}


@pytest.mark.parametrize(("spec", "message", "hint"), [(spec, *said) for spec, said in WRONG.items()], ids=WRONG)
def test_what_is_not_there_is_told_with_what_may_be_meant(folder: Path, spec: str, message: str, hint: str) -> None:
    told = refusal(spec, folder)
    assert message in told[0]
    assert hint in told[1]


@pytest.mark.parametrize(
    ("spec", "message", "hint"),
    [
        ("mod.py:Own", "mod.py:Own is the class Own", "name the instance: workload"),
        ("mod.py:half", "mod.py:half is a Half without build_optimizer(), compute_loss()", "see docs/workloads.md"),
        ("mod.py:DEPTH", "mod.py:DEPTH is an int without build_model(), ", "see docs/workloads.md"),
        ("torn.py:workload", "importing torn.py failed: SyntaxError: invalid syntax", ""),
    ],
)
def test_what_is_no_workload_is_told_as_the_child_would(folder: Path, spec: str, message: str, hint: str) -> None:
    told = refusal(spec, folder, TargetError)
    assert message in told[0]
    assert hint in told[1]


def test_the_page_that_is_named_is_there() -> None:
    from autotune.targets.workload import DOCS_PART

    assert (Path(__file__).parents[2] / DOCS_PART).is_file()


def test_the_trainings_of_a_folder_are_named_and_never_run(tmp_path: Path) -> None:
    main = "if __name__ == '__main__': open('marker', 'w')\n"
    files = {
        "a_model.py": "import torch\n",
        "plain.py": "import torch, a_model\nopen('marker', 'w')\n",
        "run it.py": f"from torch import nn\n{main}",
        "with_workload.py": f"import torch\nclass Own:\n{BODY}\nmine = Own()\n",
        "no_torch.py": main,
        "test_it.py": "import torch\n",
        "_private.py": "import torch\n",
        "torn.py": "import torch\ndef (:\n",
        "text_only.py": "'''\nimport torch\n'''\n# import torch\nimport torchlight\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "train.py").write_text("import torch\n")
    assert [training.words for training in find_trainings(tmp_path)] == [
        "-- python 'run it.py'",
        "-- python plain.py",
        "with_workload.py:mine",
    ]
    assert len(find_trainings(tmp_path, most=2)) == 2
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted(files)
    assert find_trainings(tmp_path / "nothing") == []
