"""What is typed as a target: what it is taken for, and that a wrong one is told before anything begins."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli import app
from autotune.cli.target import find_command, read_target, set_device
from autotune.errors import UsageError
from autotune.records.script import Script
from autotune.records.trial import DEVICE_VARIABLE

SCRIPT = 'import torch\nif __name__ == "__main__":\n    open("marker", "w")\n'
WORKLOAD = """
class Own:
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def train_dataset(self): ...
    def compute_loss(self, model, batch): ...
workload = Own()
"""

FAILS_EARLY = """
import sys
from autotune.__main__ import main
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "optuna"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Refused())
import subprocess
def start(*arguments, **options):
    raise AssertionError("a process is started")
subprocess.Popen.__init__ = start
main()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "mod.py").write_text(WORKLOAD)
    (tmp_path / "bad5.py").write_text("print(5)\n")
    return tmp_path


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line; an import of torch or a process that is started ends it with a traceback."""
    return subprocess.run(
        [sys.executable, "-c", FAILS_EARLY, *arguments],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


WRONG = {
    "search train.py": ("'train.py' is a script, not a workload", "autotune search -- python train.py"),
    "probe train.py": ("'train.py' is a script, not a workload", "autotune probe -- python train.py"),
    "train train.py": ("'train.py' is a script, not a workload", "autotune train -- python train.py"),
    "search nothere.py:w": ("there is no file 'nothere.py'", "it is looked up in"),
    "search mod.py:wrokload": ("mod.py has no 'wrokload'", "did you mean 'workload'?"),
    "search -- nothere": ("there is no program 'nothere' on PATH", ""),
    "search -- ./bad5.py": ("its first line names no python", "write python ./bad5.py"),
    "search -- python nothere.py": ("there is no script 'nothere.py'", ""),
    "search --": ("there is no command after --", "autotune search -- python train.py"),
    "train --": ("there is no command after --", "autotune train -- python train.py"),
    "train demo demo": ("there is one target, and 2 words were given: demo demo", "write autotune train demo"),
    "search demo extra": ("there is one target, and 2 words were given: demo extra", ""),
}


@pytest.mark.slow_cases("probe train.py", "train train.py", "search -- ./bad5.py", "train --")
@pytest.mark.parametrize(("typed", "message", "hint"), [(typed, *said) for typed, said in WRONG.items()], ids=WRONG)
def test_a_target_that_is_none_is_told_before_anything_is_started_or_written(
    folder: Path, typed: str, message: str, hint: str
) -> None:
    before = sorted(folder.rglob("*"))
    shown = run(*typed.split(), folder=folder)
    assert (shown.returncode, shown.stdout) == (2, ""), shown.stderr
    said = shown.stderr.splitlines()
    assert len(said) == 2
    assert message in said[0]
    assert hint in said[1]
    assert sorted(folder.rglob("*")) == before


def test_a_command_in_one_word_is_told_apart(folder: Path) -> None:
    shown = run("search", "--", "python bad5.py", folder=folder)
    assert "'python bad5.py' is one word" in shown.stderr
    assert "without the quotes: python bad5.py" in shown.stderr


@pytest.mark.parametrize(("option", "said"), [("--profile", "no answer nothere.json"), ("--preset", "no preset")])
def test_settings_that_are_not_there_are_told_before_anything_is_started(folder: Path, option: str, said: str) -> None:
    before = sorted(folder.rglob("*"))
    shown = run("train", option, "nothere.json" if option == "--profile" else "nothere", folder=folder)
    assert shown.returncode == 7, shown.stderr
    assert said in shown.stderr
    assert sorted(folder.rglob("*")) == before


def test_an_early_error_is_json_too(folder: Path) -> None:
    shown = run("search", "--json", "train.py", folder=folder)
    error = json.loads(shown.stdout)["error"]
    assert (error["code"], error["hint"]) == (2, "write its command: autotune search -- python train.py")


def parsed(*arguments: str) -> list[str] | None:
    """Return the words that a command is given as its target."""
    import typer.main

    group = typer.main.get_command(app)
    context = group.commands["search"].make_context("search", list(arguments))  # type: ignore[attr-defined]
    words = context.params["target"]
    return None if words is None else list(words)


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", None),
        ("--seed 1", None),
        ("demo --seed 1", ["demo"]),
        ("--", ["--"]),
        ("--seed 1 -- nothere", ["--", "nothere"]),
        ("-- python train.py --seed 2", ["--", "python", "train.py", "--seed", "2"]),
        ("-- python train.py -- more", ["--", "python", "train.py", "--", "more"]),
        ("python train.py", ["python", "train.py"]),
        ("python train.py -- --lr 1", ["python", "train.py", "--", "--lr", "1"]),
    ],
)
def test_the_command_line_tells_where_a_scripts_command_begins(typed: str, words: list[str] | None) -> None:
    assert (parsed(*typed.split()) or None) == words


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ([], None),
        (["demo"], None),
        (["mod.py:workload"], None),
        (["--", "python", "train.py"], ("python", "train.py")),
        (["--", "demo"], ("demo",)),
        (["python", "train.py"], ("python", "train.py")),
        (["python", "train.py", "--", "x"], ("python", "train.py", "--", "x")),
        (["./train.py", "3"], ("./train.py", "3")),
        (["python"], ("python",)),
        (["nothere"], None),
    ],
)
def test_what_is_a_scripts_command(folder: Path, words: list[str], command: tuple[str, ...] | None) -> None:
    assert find_command(words) == command


@pytest.mark.parametrize("words", [["demo", "demo"], ["mod.py:workload", "x"], ["demo", "--", "python"], ["x", "--"]])
def test_two_targets_are_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(UsageError, match="there is one target"):
        find_command(words)


def test_options_for_a_script_are_for_the_one_in_the_settings_file_too(folder: Path) -> None:
    (folder / "autotune.toml").write_text('command = "python train.py --lr {lr}"')
    script = read_target(None, knobs=["lr=1e-3,2e-3:semantic"])
    assert isinstance(script, Script)
    assert script.command == ("python", "train.py", "--lr", "{lr}")
    assert [knob.name for knob in script.knobs] == ["lr"]
    assert read_target(None) is None


SUGGESTED = "  train.py imports torch: for it write autotune {} -- python train.py"


@pytest.mark.parametrize("command", ["search", "train"])
def test_without_a_target_the_demo_is_said_first_and_what_is_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    from autotune.cli.target import announce_target

    announce_target(None, folder, command=command)
    first, *more = capsys.readouterr().err.splitlines()
    assert first.startswith("no target given: using the built-in demo")
    assert more == [SUGGESTED.format(command)]
    assert not (folder / "marker").exists()


def test_a_target_of_the_settings_is_said_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from autotune.cli.target import announce_target

    (folder / "autotune.toml").write_text('command = "python train.py"')
    announce_target(None, folder)
    assert capsys.readouterr().err == "target: python train.py (from [tool.autotune])\n"


def test_a_device_is_for_all_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEVICE_VARIABLE, "auto")
    set_device("cpu", "demo")
    assert os.environ[DEVICE_VARIABLE] == "cpu"
    set_device(None, "demo")
    assert os.environ[DEVICE_VARIABLE] == "cpu"  # as the environment has it


def test_a_device_that_cannot_be_chosen_is_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--device mps: no device to choose"):
        set_device("mps", "demo")
    with pytest.raises(UsageError, match="--device is for a workload"):
        set_device("cpu", read_target(["--", sys.executable, "train.py"]))
