from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.targets.launch.command import Launch, find_launch
from autotune.targets.launch.interpreter import read_first_line
from autotune.targets.launch.refused import LAUNCHER_MODULES
from autotune.targets.launch.torchrun import SHORT, WITH_VALUE, WITHOUT_VALUE, split_torchrun
from autotune.targets.source import fingerprint
from autotune.targets.source import project as sources
from autotune.targets.source.fingerprint import fingerprint_script

ELF = b"\x7fELF\x02\x01\x01" + bytes(64)


class Place:
    """A working folder and a PATH of two folders, `bin` and `other`, beside it; files in them are never run."""

    def __init__(self, root: Path) -> None:
        self.folder, self.bin, self.other = root / "work", root / "bin", root / "other"
        for folder in (self.folder, self.bin, self.other):
            folder.mkdir()
        self.path = f"{self.bin}{os.pathsep}{self.other}"
        for name in ("python", "python3", "python3.12"):
            self.add(self.bin / name)
        self.add(self.folder / "train.py", "print()\n", mode=0o644)

    def add(self, file: Path, content: str | bytes = ELF, *, mode: int = 0o755) -> Path:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)
        return file

    def find(self, *command: str) -> Launch:
        return find_launch(command, folder=self.folder, path=self.path)

    def find_line(self, line: str) -> Launch:
        return self.find(*shlex.split(line))

    def refuse(self, *command: str) -> UsageError:
        with pytest.raises(UsageError) as caught:
            self.find(*command)
        assert "\n" not in f"{caught.value.message}{caught.value.hint}"
        assert caught.value.hint
        return caught.value

    def refuse_line(self, line: str) -> UsageError:
        return self.refuse(*shlex.split(line))


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def torchrun(place: Place) -> Path:
    return place.add(place.bin / "torchrun", f"#!{place.bin}/python3\nimport sys\n")


# --- python


@pytest.mark.parametrize(
    ("line", "options", "kind", "name", "arguments"),
    [
        ("python train.py", (), "file", "train.py", ()),
        ("python ./train.py --lr 1", (), "file", "./train.py", ("--lr", "1")),
        ("python -- train.py", (), "file", "train.py", ()),
        ("python -u -- train.py -- -u", ("-u",), "file", "train.py", ("--", "-u")),
        ("python train.py -m -c - -V", (), "file", "train.py", ("-m", "-c", "-", "-V")),
        ("python -u -X dev train.py -u", ("-u", "-X", "dev"), "file", "train.py", ("-u",)),
        ("python -Xdev -Wignore train.py", ("-Xdev", "-Wignore"), "file", "train.py", ()),
        ("python -W error -X importtime train.py", ("-W", "error", "-X", "importtime"), "file", "train.py", ()),
        ("python -uB train.py", ("-uB",), "file", "train.py", ()),
        ("python -uXdev train.py", ("-uXdev",), "file", "train.py", ()),
        ("python -uBX dev train.py", ("-uBX", "dev"), "file", "train.py", ()),
        ("python --check-hash-based-pycs never train.py", ("--check-hash-based-pycs", "never"), "file", "train.py", ()),
        ("python -m pkg.train --x", (), "module", "pkg.train", ("--x",)),
        ("python -mpkg.train --x", (), "module", "pkg.train", ("--x",)),
        ("python -um pkg.train -m y", ("-u",), "module", "pkg.train", ("-m", "y")),
        ("python -O -umpkg", ("-O", "-u"), "module", "pkg", ()),
        ("python -m pkg - -c", (), "module", "pkg", ("-", "-c")),
        ("python train.py '{\"a\": 1}' '$HOME' \"it's\" 'a\nb' ''", (), "file", "train.py",
         ('{"a": 1}', "$HOME", "it's", "a\nb", "")),
    ],
)  # fmt: skip
def test_a_command_of_python_is_taken_apart(
    place: Place, line: str, options: tuple[str, ...], kind: str, name: str, arguments: tuple[str, ...]
) -> None:
    found = place.find_line(line)
    assert found.interpreter == str(place.bin / "python")
    assert (found.interpreter_options, found.kind, found.name, found.arguments) == (options, kind, name, arguments)
    assert found.launcher_options is None


@pytest.mark.parametrize(
    "option", ["-OO", "-bb", "-vv", "-uOBEsSIPvqbd", *(f"-{letter}" for letter in "uOBEsSIPvqbdx")]
)
def test_options_without_value_are_kept(place: Place, option: str) -> None:
    found = place.find("python", option, "train.py")
    assert found == Launch(str(place.bin / "python"), (option,), "file", "train.py", ())


@pytest.mark.parametrize("program", ["python", "python3", "python3.12", "python3.13t", "python3.12d"])
def test_a_bare_python_is_looked_up_on_path(place: Place, program: str) -> None:
    place.add(place.bin / program)
    assert place.find(program, "train.py").interpreter == str(place.bin / program)


def test_the_first_folder_of_path_counts(place: Place) -> None:
    place.add(place.other / "python")
    place.add(place.other / "python3.14")
    assert place.find("python", "train.py").interpreter == str(place.bin / "python")
    assert place.find("python3.14", "train.py").interpreter == str(place.other / "python3.14")


def test_relative_folders_of_path_are_the_working_folder_s(place: Place) -> None:
    place.add(place.folder / "venv/bin/python")
    for path, expected in (("venv/bin", "venv/bin/python"), ("", None)):
        if expected:
            found = find_launch(["python", "train.py"], folder=place.folder, path=path)
            assert found.interpreter == str(place.folder / expected)
        else:
            with pytest.raises(UsageError, match="no program 'python' on PATH"):
                find_launch(["python", "train.py"], folder=place.folder, path=path)


def test_path_is_the_environment_s_by_default(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place.bin))
    assert find_launch(["python", "train.py"], folder=place.folder).interpreter == str(place.bin / "python")


def test_a_python_with_a_slash_is_relative_to_the_folder_and_no_link_is_followed(place: Place) -> None:
    venv = place.folder / "venv/bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(place.bin / "python")
    for typed in ("./venv/bin/python", "venv/bin/python", str(venv / "python")):
        assert place.find(typed, "train.py").interpreter == str(venv / "python")
    outside = place.find("../bin/python", "train.py").interpreter
    assert os.path.isabs(outside)
    assert os.path.samefile(outside, place.bin / "python")


def test_a_relative_working_folder_still_gives_an_absolute_python(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.add(place.folder / "venv/bin/python")
    monkeypatch.chdir(place.folder.parent)
    found = find_launch(["./venv/bin/python", "train.py"], folder=Path("work"), path=place.path)
    assert found.interpreter == str(place.folder / "venv/bin/python")


def test_the_running_python_is_found() -> None:
    found = find_launch([sys.executable, "-m", "pkg"], folder=Path.cwd())
    assert found.interpreter == sys.executable


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("python", "no script", "python train.py"),
        ("python -u", "no script", "python train.py"),
        ("python --", "no script", "python train.py"),
        ("python -", "'-'", "file"),
        ("python -u - x", "'-'", "file"),
        ("python -c 'print()'", "'-c' runs code", "file"),
        ("python -cprint", "'-cprint' runs code", "file"),
        ("python -uc 'print()'", "'-uc' runs code", "file"),
        ("python -i train.py", "'-i' waits", "leave -i out"),
        ("python -ui train.py", "'-ui' waits", "leave -i out"),
        ("python -V", "'-V' is not one", "-u"),
        ("python -h", "'-h' is not one", "-u"),
        ("python --version", "'--version' is not one", "-u"),
        ("python --lr=1 train.py", "'--lr=1' is not one", "-u"),
        ("python -X", "'-X' needs a value", "python"),
        ("python -m", "'-m' needs a value", "-m package.train"),
        ("python -m train.py", "-m 'train.py' is not", "write train.py without -m"),
        ("python -m pkg/train", "-m 'pkg/train' is not", "-m package.train"),
        ("python -m pkg..train", "-m 'pkg..train' is not", "-m package.train"),
        ("python -m ''", "-m '' is not", "-m package.train"),
        ("python3.9 train.py", "no program 'python3.9' on PATH", "activate"),
        ("./venv/bin/python train.py", "no program './venv/bin/python'", "looked up in"),
        ("/no/such/python train.py", "no program '/no/such/python'", "looked up in"),
    ],
)
def test_a_command_of_python_that_cannot_be_used_is_refused(place: Place, line: str, message: str, hint: str) -> None:
    error = place.refuse_line(line)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize("name", ["missing.py", "sub/train.py", "/no/such/train.py", "with space.py", "{x}.py"])
def test_a_missing_script_names_the_folder(place: Place, name: str) -> None:
    error = place.refuse("python", name, "--x")
    assert f"there is no script {name!r}" in error.message
    assert str(place.folder) in error.hint


def test_a_folder_is_no_script_and_no_python(place: Place) -> None:
    (place.folder / "pkg").mkdir()
    (place.folder / "python").mkdir()
    error = place.refuse("python", "pkg")
    assert "'pkg' is a folder" in error.message
    assert "-m package" in error.hint
    assert "'./python' is a folder" in place.refuse("./python", "train.py").message


def test_a_python_that_is_not_executable_says_so(place: Place) -> None:
    place.add(place.folder / "venv/bin/python", mode=0o644)
    place.add(place.other / "python3.9", mode=0o644)
    error = place.refuse("./venv/bin/python", "train.py")
    assert "'./venv/bin/python' is not executable" in error.message
    assert "chmod +x ./venv/bin/python" in error.hint
    assert f"'python3.9' in {place.other} is not executable" in place.refuse("python3.9", "train.py").message


@pytest.mark.parametrize("module", LAUNCHER_MODULES)
def test_modules_that_start_other_programs_are_refused(place: Place, module: str) -> None:
    error = place.refuse("python", "-m", module, "train.py")
    assert f"-m {module}" in error.message
    assert "torchrun" in error.hint


# --- first lines


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("#!/opt/python3\nx", ("/opt/python3",)),
        ("#! /opt/python3 -u \nx", ("/opt/python3", "-u")),
        ("#!/opt/python3 -u -X dev", ("/opt/python3", "-u -X dev")),
        ("#!/opt/python3\r\nx", ("/opt/python3",)),
        ("#!/usr/bin/env python3\n", ("python3",)),
        ("#!/usr/bin/env -S python3 -u -X dev\n", ("python3", "-u", "-X", "dev")),
        ("#!/usr/bin/env -Spython3 -u\n", ("python3", "-u")),
        ("#!/usr/bin/env --split-string=python3 -u\n", ("python3", "-u")),
        ("#!/usr/bin/env\n", ("/usr/bin/env",)),
        ("#!/usr/bin/env -S uv run 'x\n", ("uv run 'x",)),
        ("#!/bin/sh\n'''exec' \"/a long path/python\" \"$0\" \"$@\"\n' '''\n", ("/a long path/python",)),
        ("#!/bin/sh\n'''exec' /opt/python -I \"$0\" \"$@\"\n' '''\n", ("/opt/python", "-I")),
        ("#!/bin/sh\n'''exec' '/a b/python3' \"$0\" \"$@\"\n' '''\n", ("/a b/python3",)),
        ("#!/bin/sh\nexec python\n", ("/bin/sh",)),
        ("#!\n", ("",)),
        ("", ()),
        ("import sys\n#!/opt/python3\n", ()),
        (ELF, ()),
    ],
)
def test_a_first_line_is_read(place: Place, content: str | bytes, words: tuple[str, ...]) -> None:
    assert read_first_line(place.add(place.folder / "file", content)) == words


def test_a_first_line_of_this_environment_s_scripts_names_its_python() -> None:
    script = Path(sys.executable).parent / "torchrun"
    if not script.is_file():
        pytest.skip("torch is installed without torchrun beside this python")
    launch = find_launch([str(script), "-m", "pkg"], folder=Path.cwd())
    assert os.path.samefile(launch.interpreter, sys.executable)
    assert launch.launcher_options == ()


def test_a_console_script_on_path_runs_under_its_own_python(place: Place) -> None:
    python = place.add(place.folder / "venv/bin/python")
    script = place.add(place.bin / "train-it", f"#!{python}\n")
    assert place.find("train-it", "--lr", "1") == Launch(str(python), (), "file", str(script), ("--lr", "1"))


def test_a_console_script_with_a_slash_stays_as_typed(place: Place) -> None:
    python = place.add(place.folder / "venv/bin/python")
    script = place.add(place.folder / "venv/bin/train-it", f"#!{python}\n")
    assert place.find("venv/bin/train-it").name == "venv/bin/train-it"
    assert place.find(str(script)).name == str(script)


def test_a_console_script_with_a_long_path_is_followed(place: Place) -> None:
    python = place.add(place.folder / "a long path/python")
    script = place.add(place.bin / "train-it", f"#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''\n")
    assert place.find("train-it", "x") == Launch(str(python), (), "file", str(script), ("x",))


def test_a_console_script_may_ask_the_environment_for_its_python(place: Place) -> None:
    script = place.add(place.other / "train-it", "#!/usr/bin/env python3\n")
    assert place.find("train-it") == Launch(str(place.bin / "python3"), (), "file", str(script), ())


@pytest.mark.parametrize(
    ("first_line", "options"),
    [("#!{python} -u", ("-u",)), ("#!/usr/bin/env -S {python} -u -X dev", ("-u", "-X", "dev"))],
)
def test_options_of_a_first_line_count(place: Place, first_line: str, options: tuple[str, ...]) -> None:
    python = str(place.bin / "python")
    place.add(place.bin / "train-it", first_line.format(python=python) + "\n")
    found = place.find("train-it", "-x")
    assert (found.interpreter, found.interpreter_options, found.arguments) == (python, options, ("-x",))


@pytest.mark.parametrize("mode", [0o755, 0o644])
@pytest.mark.parametrize("typed", ["./run.py", "run.py", "sub/../run.py"])
def test_a_script_given_directly_runs_under_the_python_of_its_first_line(place: Place, typed: str, mode: int) -> None:
    (place.folder / "sub").mkdir()
    place.add(place.folder / "run.py", "#!/usr/bin/env python3\n", mode=mode)
    assert place.find(typed, "-v") == Launch(str(place.bin / "python3"), (), "file", typed, ("-v",))


def test_an_absolute_script_given_directly_stays_as_typed(place: Place) -> None:
    script = place.add(place.folder / "run.py", "#!/usr/bin/env python3\n")
    assert place.find(str(script)).name == str(script)


@pytest.mark.parametrize(
    ("content", "message"),
    [("print()\n", "names no python"), ("#!/bin/bash\n", "names '/bin/bash', which is no python")],
)
@pytest.mark.parametrize("typed", ["./run.py", "run.py"])
def test_a_script_given_directly_without_python_in_its_first_line_is_refused(
    place: Place, typed: str, content: str, message: str
) -> None:
    place.add(place.folder / "run.py", content)
    error = place.refuse(typed, "--x")
    assert f"script {typed!r}: its first line {message}" in error.message
    assert f"write python {typed}" in error.hint


@pytest.mark.parametrize(
    ("content", "message"),
    [(ELF, "it has no #! line"), ("#!/bin/bash\n", "'/bin/bash'"), ("#!/usr/bin/env node\n", "'node'")],
)
def test_another_program_is_refused(place: Place, content: str | bytes, message: str) -> None:
    place.add(place.bin / "tool", content)
    place.add(place.folder / "tool", content)
    for typed in ("tool", "./tool"):
        error = place.refuse(typed, "x")
        assert f"{typed!r} is not a Python program" in error.message
        assert message in error.message
        assert "python train.py" in error.hint


def test_a_first_line_whose_python_is_gone_is_refused(place: Place) -> None:
    place.add(place.bin / "train-it", "#!/gone/venv/bin/python\n")
    error = place.refuse("train-it")
    assert "'train-it' names its python in its first line" in error.message
    assert "'/gone/venv/bin/python'" in error.message


@pytest.mark.parametrize(
    ("typed", "message", "hint"),
    [
        ("no-such-tool", "there is no program 'no-such-tool' on PATH", "activate"),
        ("train-me.py", "there is no script 'train-me.py'", "and on PATH"),
        ("./train-me.py", "there is no program './train-me.py'", "looked up in"),
        ("python train.py --lr 1", "'python train.py --lr 1' is one word", "without the quotes: python train.py"),
        ("no such tool", "'no such tool' is one word", "without the quotes: no such tool"),
    ],
)
def test_a_missing_program_is_refused(place: Place, typed: str, message: str, hint: str) -> None:
    error = place.refuse(typed)
    assert message in error.message
    assert hint in error.hint


def test_a_program_of_the_folder_needs_its_slash(place: Place) -> None:
    place.add(place.folder / "tool", "#!/usr/bin/env python3\n")
    error = place.refuse("tool")
    assert "there is no program 'tool' on PATH" in error.message
    assert "python tool or ./tool" in error.hint


def test_a_program_that_cannot_be_read_is_refused(place: Place) -> None:
    gone = place.folder / "gone"
    with pytest.raises(UsageError) as caught:
        read_first_line(gone)
    assert f"{str(gone)!r} cannot be read: No such file" in caught.value.message
    assert "permissions" in caught.value.hint


# --- torchrun


@pytest.mark.parametrize(
    ("line", "options", "kind", "name", "arguments"),
    [
        ("train.py", (), "file", "train.py", ()),
        ("-- train.py --standalone", (), "file", "train.py", ("--standalone",)),
        ("--standalone train.py --lr 1", ("--standalone",), "file", "train.py", ("--lr", "1")),
        ("--nproc-per-node 2 train.py", ("--nproc-per-node", "2"), "file", "train.py", ()),
        ("--nproc_per_node 2 train.py", ("--nproc_per_node", "2"), "file", "train.py", ()),
        ("--nproc-per-node=2 train.py", ("--nproc-per-node=2",), "file", "train.py", ()),
        ("--nproc_per_node=gpu train.py", ("--nproc_per_node=gpu",), "file", "train.py", ()),
        ("--nnodes 1 train.py", ("--nnodes", "1"), "file", "train.py", ()),
        ("--nnodes=1:1 train.py", ("--nnodes=1:1",), "file", "train.py", ()),
        ("-r 3 -t3 train.py", ("-r", "3", "-t3"), "file", "train.py", ()),
        ("-m pkg.train -m x", (), "module", "pkg.train", ("-m", "x")),
        ("--standalone --module --tee 3 pkg.train", ("--standalone", "--tee", "3"), "module", "pkg.train", ()),
        ("--from-the-future=3 train.py", ("--from-the-future=3",), "file", "train.py", ()),
        ("--virtual-local-rank train.py", ("--virtual-local-rank",), "file", "train.py", ()),
        ("--rdzv-conf=timeout=900,x=y train.py", ("--rdzv-conf=timeout=900,x=y",), "file", "train.py", ()),
        ("train.py --nnodes 4 --no-python", (), "file", "train.py", ("--nnodes", "4", "--no-python")),
    ],
)
@pytest.mark.parametrize("launcher", ["torchrun", "python3 -m torch.distributed.run", "python3 BIN/torchrun"])
@pytest.mark.usefixtures("torchrun")
def test_a_command_of_torchrun_is_taken_apart(
    place: Place,
    launcher: str,
    line: str,
    options: tuple[str, ...],
    kind: str,
    name: str,
    arguments: tuple[str, ...],
) -> None:
    found = place.find_line(f"{launcher.replace('BIN', str(place.bin))} {line}")
    assert found.interpreter == str(place.bin / "python3")
    assert found.launcher_options == options
    assert (found.interpreter_options, found.kind, found.name, found.arguments) == ((), kind, name, arguments)


def test_torchrun_keeps_the_options_of_python(place: Place, torchrun: Path) -> None:
    torchrun.write_text(f"#!{place.bin}/python3.12 -s\n")
    assert place.find("torchrun", "train.py").interpreter_options == ("-s",)
    found = place.find_line("python -u -X dev -m torch.distributed.run --standalone train.py")
    assert (found.interpreter_options, found.launcher_options) == (("-u", "-X", "dev"), ("--standalone",))


@pytest.mark.parametrize("name", WITH_VALUE)
def test_an_option_of_torchrun_takes_its_value_in_every_spelling(name: str) -> None:
    value = "1"
    for spelling in {name, "--" + name[2:].replace("-", "_")}:
        assert split_torchrun([spelling, value, "a.py", "b"]).options == (spelling, value)
        assert split_torchrun([f"{spelling}={value}", "a.py", "b"]).options == (f"{spelling}={value}",)
        assert split_torchrun([spelling, value, "a.py", "b"]).arguments == ("b",)


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("", "no script", "train.py"),
        ("--standalone", "no script", "train.py"),
        ("--nproc-per-node 2", "no script", "train.py"),
        ("--nproc-per-node", "'--nproc-per-node' needs a value", "--nproc-per-node=VALUE"),
        ("--nproc_per_node --standalone train.py", "'--nproc_per_node' needs a value", "--nproc-per-node=VALUE"),
        ("-r", "'-r' needs a value", "--redirects=VALUE"),
        ("--standalone=1 train.py", "'--standalone=1' takes no value", "--standalone"),
        ("--no-python ./train", "'--no-python' is not supported", "leave the option out"),
        ("--no_python ./train", "'--no_python' is not supported", "leave the option out"),
        ("--run-path /a/train.py", "'--run-path' is not supported", "leave the option out"),
        ("--nnodes 2 train.py", "--nnodes '2' is more than this machine", "one machine"),
        ("--nnodes=1:4 train.py", "--nnodes '1:4' is more than this machine", "one machine"),
        ("--nnodes= train.py", "--nnodes '' is more", "one machine"),
        ("--nnode=2 train.py", "'--nnode=2' is not one", "write it in full: --nnodes"),
        ("--nproc 2 train.py", "'--nproc' is not one", "write it in full: --nproc-per-node"),
        ("--rdzv=x train.py", "'--rdzv=x' is not one", "--rdzv-backend or --rdzv-endpoint"),
        ("--standlone train.py", "'--standlone' is not one", "--standalone"),
        ("--from-the-future 3 train.py", "'--from-the-future' is not one", "--option=VALUE"),
        ("-x train.py", "'-x' is not one", "--option=VALUE"),
        ("-mpkg.train", "'-mpkg.train' is not one", "--option=VALUE"),
        ("missing.py", "there is no script 'missing.py'", "looked up in"),
        ("-m train.py", "-m 'train.py' is not the name of a module", "without -m"),
    ],
)
@pytest.mark.usefixtures("torchrun")
def test_a_command_of_torchrun_that_cannot_be_used_is_refused(place: Place, line: str, message: str, hint: str) -> None:
    for launcher in ("torchrun", "python -m torch.distributed.run"):
        error = place.refuse_line(f"{launcher} {line}")
        assert message in error.message
        assert hint in error.hint


def test_the_table_of_torchrun_s_options_is_the_installed_one_s() -> None:
    from torch.distributed.run import get_args_parser

    with_value, without_value = set[str](), set[str]()
    for action in get_args_parser()._actions:
        if action.option_strings and action.dest != "help":
            (without_value if action.nargs == 0 else with_value).update(action.option_strings)
    known = {name for name in with_value | without_value if "_" not in name}
    short = {name for name in known if not name.startswith("--")}
    assert short == SHORT.keys()
    assert with_value - short <= {
        spelled for name in WITH_VALUE for spelled in (name, "--" + name[2:].replace("-", "_"))
    }
    assert known - short <= {*WITH_VALUE, *WITHOUT_VALUE}  # an older torch has fewer
    assert {name for name in without_value if name in WITH_VALUE} == set()
    assert {name for name in with_value if name in WITHOUT_VALUE} == set()


# --- what is not started


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("bash run.sh", "python train.py ..."),
        ("sh -c 'python train.py'", "python train.py ..."),
        ("/bin/zsh run.sh", "python train.py ..."),
        ("env A=1 python train.py --lr 1", "export the variables before you start autotune, then write python"),
        ("/usr/bin/env python train.py", "write python train.py"),
        ("horovodrun -np 2 train.py --lr 1", "write python train.py --lr 1, or torchrun"),
        ("uv run python train.py --lr 1", "activate the environment first, then write python train.py --lr 1"),
        ("uv run train.py", "then write python train.py"),
        ("poetry run python -m pkg.train", "then write python -m pkg.train"),
        ("conda run -n x python3.12 train.py", "then write python3.12 train.py"),
        ("mpirun -n 2 python train.py", "one machine: start it inside the job, and write python train.py"),
        ("srun torchrun --standalone train.py", "write torchrun --standalone train.py"),
        ("sudo python train.py", "put it before autotune itself, or leave it out: write python train.py"),
        ("nohup python train.py", "write python train.py"),
        ("time ./venv/bin/python train.py 'a b'", "write ./venv/bin/python train.py 'a b'"),
        ("numactl -N 0 python train.py", "write python train.py"),
        ("jupyter execute x.ipynb", "save the code as a file"),
        ("cd src", "do that before you start autotune"),
        (". venv/bin/activate", "do that before you start autotune"),
        ("source venv/bin/activate", "do that before you start autotune"),
        (f"nohup python train.py {'x' * 90}", "write python train.py ..."),
        ("nohup python train.py 'two\nlines'", "write python train.py ..."),
    ],
)  # fmt: skip
def test_other_launchers_are_refused_with_what_to_write(place: Place, line: str, hint: str) -> None:
    error = place.refuse_line(line)
    assert repr(shlex.split(line)[0]) in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("words", "exported"),
    [
        (["CUDA_VISIBLE_DEVICES=0", "python", "train.py"], "export CUDA_VISIBLE_DEVICES=0 before"),
        (["A=two words", "python", "train.py"], "export A='two words' before"),
        (["A=", "python", "train.py"], "export A='' before"),
        (["A=two\nlines", "python", "train.py"], "export A=... before"),
    ],
)
def test_a_variable_before_the_program_is_refused(place: Place, words: list[str], exported: str) -> None:
    error = place.refuse(*words)
    assert repr(words[0]) in error.message
    assert exported in error.hint
    assert "then write python train.py" in error.hint


@pytest.mark.parametrize(
    "operator", ["&&", "||", "|&", ">>", "2>", "&>", "2>&1", "<<", "<<<", ";;", "|", ";", "&", ">", "<"]
)
def test_operators_of_a_shell_are_refused(place: Place, operator: str) -> None:
    for words in (["python", "train.py", operator, "x"], ["python", "train.py", "--lr=1", operator], [operator, "x"]):
        error = place.refuse(*words)
        assert repr(operator) in error.message
        assert "no shell is involved" in error.message


@pytest.mark.parametrize("value", ["|", ";", "&", ">", "<"])
def test_such_a_character_may_be_a_flag_s_value(place: Place, value: str) -> None:
    assert place.find("python", "train.py", "--separator", value).arguments == ("--separator", value)


def test_an_operator_inside_a_word_is_the_word_s(place: Place) -> None:
    words = ("a|b", "--filter=x>1", "x && y", ";x")
    assert place.find("python", "train.py", *words).arguments == words


@pytest.mark.parametrize("command", [(), ("",), (" ",)])
def test_an_empty_command_is_refused(place: Place, command: tuple[str, ...]) -> None:
    place.refuse(*command)


# --- fingerprint


@pytest.fixture
def tree(place: Place) -> Place:
    place.add(place.folder / "model.py", "width = 1\n")
    place.add(place.folder / "lib/data.py", "size = 1\n")
    place.add(place.folder / "config.yaml", "lr: 1\n")
    place.add(place.folder / "pkg/train.py", "import pkg\n")
    place.add(place.folder / "pkg/__init__.py", "")
    place.add(place.folder / "pkg/sub/__main__.py", "x = 1\n")
    return place


SCRIPT = ("python", "train.py", "--lr", "{lr}")
MODULE = ("python", "-m", "pkg.train")


def fingerprint_of(place: Place, command: tuple[str, ...] = SCRIPT) -> str:
    return fingerprint_script(place.find(*command), command, folder=place.folder)


def test_a_fingerprint_is_twelve_digits_and_repeats_itself(tree: Place) -> None:
    first = fingerprint_of(tree)
    assert len(first) == 12
    assert int(first, 16) >= 0
    assert fingerprint_of(tree) == first


@pytest.mark.parametrize(
    "other",
    [
        ("python", "train.py", "--lr", "{lr:1}"),
        ("python", "train.py", "--lr {lr}"),
        ("python", "train.py", "--lr", "{lr}", ""),
        ("python3", "train.py", "--lr", "{lr}"),
        ("python", "model.py", "--lr", "{lr}"),
    ],
)
def test_another_command_is_another_fingerprint(tree: Place, other: tuple[str, ...]) -> None:
    assert fingerprint_of(tree, other) != fingerprint_of(tree)


@pytest.mark.parametrize("name", ["train.py", "model.py", "lib/data.py", "config.yaml", "pkg/sub/__main__.py"])
@pytest.mark.parametrize("change", ["edit", "remove", "rename"])
def test_a_changed_source_is_another_fingerprint(tree: Place, name: str, change: str) -> None:
    launch, before, file = tree.find(*SCRIPT), fingerprint_of(tree), tree.folder / name
    if change == "edit":
        file.write_text("other\n")
    elif change == "remove":
        file.unlink()
    else:
        file.rename(file.with_name(f"z_{file.name}"))
    assert fingerprint_script(launch, SCRIPT, folder=tree.folder) != before


@pytest.mark.parametrize(
    "name",
    [
        "new.py",
        "lib/deep/er/new.py",
        *(f"new{suffix}" for suffix in (".json", ".toml", ".yaml", ".yml", ".cfg", ".ini")),
    ],
)
def test_an_added_source_is_another_fingerprint(tree: Place, name: str) -> None:
    before = fingerprint_of(tree)
    tree.add(tree.folder / name, "1")
    assert fingerprint_of(tree) != before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"{folder}/new.py", "x") for folder in (".hidden", ".venv", "venv", "__pycache__", "lib/site-packages")),
        *((f"{folder}/new.py", "x") for folder in ("node_modules", "build", "dist", ".autotune", "lib/.git")),
        ("lib/config.json", "{}"),
        ("notes.txt", "x"),
        ("weights.pt", "x"),
        (".pre-commit-config.yaml", "x"),
        ("best.json", "{}"),
        ("autotune.toml", "budget = '1m'"),
        ("answer.json", json.dumps({"schema_version": 1, "verdict": "improved", "more": 1})),
        ("large.json", "1" * (1024**2 + 1)),
    ],
)
def test_what_is_no_source_does_not_count(tree: Place, name: str, content: str) -> None:
    before = fingerprint_of(tree)
    tree.add(tree.folder / name, content)
    assert fingerprint_of(tree) == before


@pytest.mark.parametrize("content", ["[1]", "{", '{"verdict": 1}', "[" * 100_000, "\udcff"])
def test_other_json_counts(tree: Place, content: str) -> None:
    before = fingerprint_of(tree)
    tree.add(tree.folder / "settings.json", os.fsencode(content))
    assert fingerprint_of(tree) != before


def test_files_that_cannot_be_read_do_not_count_and_are_not_waited_for(tree: Place) -> None:
    before = fingerprint_of(tree)
    os.mkfifo(tree.folder / "pipe.py")
    (tree.folder / "gone.py").symlink_to(tree.folder / "nowhere.py")
    (tree.folder / "gone.json").symlink_to(tree.folder / "nowhere.json")
    (tree.folder / "loop").symlink_to(tree.folder)
    (tree.folder / "folder.py").mkdir()
    (tree.folder / "folder.json").mkdir()
    assert fingerprint_of(tree) == before


@pytest.mark.parametrize("limit", ["MOST_FILES", "MOST_BYTES", "MOST_ENTRIES"])
def test_a_folder_too_large_leaves_the_script_alone(tree: Place, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint_of(tree)
    for module in (fingerprint, sources):
        monkeypatch.setattr(module, limit, 2, raising=False)
    alone = fingerprint_of(tree)
    assert alone != whole
    tree.add(tree.folder / "model.py", "other\n")
    tree.add(tree.folder / "config.yaml", "other\n")
    assert fingerprint_of(tree) == alone
    tree.add(tree.folder / "train.py", "other\n")
    assert fingerprint_of(tree) != alone


def test_a_script_in_another_folder_has_that_folder_s_sources(tree: Place) -> None:
    command = ("python", "pkg/train.py")
    before = fingerprint_of(tree, command)
    tree.add(tree.folder / "model.py", "other\n")
    assert fingerprint_of(tree, command) == before
    tree.add(tree.folder / "pkg/sub/__main__.py", "other\n")
    assert fingerprint_of(tree, command) != before


def test_the_working_folder_may_be_relative_and_elsewhere(tree: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = fingerprint_of(tree)
    monkeypatch.chdir(tree.folder.parent)
    launch = find_launch(SCRIPT, folder=Path("work"), path=tree.path)
    assert fingerprint_script(launch, SCRIPT, folder=Path("work")) == expected
    moved = tree.folder.rename(tree.folder.with_name("moved"))
    assert fingerprint_script(launch, SCRIPT, folder=moved) == expected


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("pkg/train.py", True),
        ("pkg/__init__.py", True),
        ("pkg/sub/__main__.py", True),
        ("pkg/settings.ini", True),
        ("pkg/sub/settings.ini", False),
        ("train.py", False),
        ("config.yaml", False),
    ],
)
def test_a_module_has_its_package_s_sources(tree: Place, name: str, counts: bool) -> None:
    before = fingerprint_of(tree, MODULE)
    tree.add(tree.folder / name, "other\n")
    assert (fingerprint_of(tree, MODULE) != before) == counts


def test_a_package_run_as_a_whole_has_its_own_settings(tree: Place) -> None:
    command = ("python", "-m", "pkg.sub")
    before = fingerprint_of(tree, command)
    tree.add(tree.folder / "pkg/sub/settings.ini", "x")
    assert fingerprint_of(tree, command) != before


def test_a_module_that_is_a_file_has_its_folder_s_sources(tree: Place) -> None:
    command = ("python", "-m", "train")
    before = fingerprint_of(tree, command)
    tree.add(tree.folder / "model.py", "other\n")
    assert fingerprint_of(tree, command) != before


def test_a_module_that_is_installed_is_its_command(tree: Place) -> None:
    commands: list[tuple[str, ...]] = [("python", "-m", "elsewhere.train"), ("python", "-m", "elsewhere.train", "x")]
    before = [fingerprint_of(tree, command) for command in commands]
    assert before[0] != before[1]
    tree.add(tree.folder / "train.py", "other\n")
    assert [fingerprint_of(tree, command) for command in commands] == before


def test_a_module_without_a_file_has_its_package_s_sources(tree: Place) -> None:
    command = ("python", "-m", "pkg.gone")
    before = fingerprint_of(tree, command)
    tree.add(tree.folder / "pkg/settings.ini", "x")
    assert fingerprint_of(tree, command) != before


def test_torchrun_has_the_script_s_sources(tree: Place, torchrun: Path) -> None:
    command = (str(torchrun), "--standalone", "train.py")
    before = fingerprint_of(tree, command)
    tree.add(tree.folder / "model.py", "other\n")
    assert fingerprint_of(tree, command) != before


def test_a_folder_that_cannot_be_listed_is_passed_over(tree: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint_of(tree)

    def refused(folder: object) -> list[str]:
        raise PermissionError(folder)

    monkeypatch.setattr(os, "listdir", refused)
    assert fingerprint_of(tree) != before
