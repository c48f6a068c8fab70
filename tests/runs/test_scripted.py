"""A script run in a process of ours finds what its interpreter would have shown it; plain `python` is the reference."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.records import TrainConfig
from autotune.records.script import PrintedMetric
from autotune.runs.run_script import LineWatch, call_after_import, forget_imports
from autotune.runs.script_source import read_metric
from autotune.targets.script import read_script, script_values

RUN = """
import json, sys
from autotune.targets.launch.command import Launch
from autotune.runs.run_script import run_script
assert "torch" not in sys.modules, "torch was imported ahead of the script"
def on_torch():
    import torch
    print("hooked", hasattr(torch, "nn"), hasattr(torch, "manual_seed"))
kind, name, *arguments = sys.argv[1:]
status = run_script(Launch(sys.executable, (), kind, name, tuple(arguments)), on_torch=on_torch)
print("status", status)
"""

FACE = """
import json, os, sys
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "file": os.path.realpath(__file__),
    "folder": os.getcwd(), "package": __package__ or "", "doc": __doc__,
    "spec": None if __spec__ is None else __spec__.name, "main": sys.modules["__main__"].__dict__ is globals(),
}))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project: a script beside its modules, a package, and a folder of scripts."""
    for name, text in {
        "train.py": '"""About."""\n' + FACE,
        "parts.py": "VALUE = 7\n",
        "package/__init__.py": "",
        "package/train.py": "from .model import VALUE\nfrom . import model\nassert VALUE == model.VALUE == 3\n" + FACE,
        "package/model.py": "VALUE = 3\n",
        "package/__main__.py": FACE,
        "scripts/run.py": "import near\n" + FACE,
        "scripts/near.py": "",
    }.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return tmp_path


def run(words: list[str], folder: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(Path(autotune.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env={**environment, **options.pop("environment", {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
        **options,
    )


def run_ours(folder: Path, kind: str, name: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(["-P", "-c", RUN, kind, name, *arguments], folder, **options)


def write(folder: Path, text: str) -> str:
    (folder / "own.py").write_text(text)
    return "own.py"


COMMANDS = [
    ("file", "train.py", ["--lr", "1e-3", "-x"]),
    ("file", "./train.py", []),
    ("file", "scripts/run.py", ["a b"]),
    ("module", "package.train", ["--lr", "1"]),
    ("module", "package", []),
]


@pytest.mark.parametrize(("kind", "name", "arguments"), COMMANDS, ids=[name for _, name, _ in COMMANDS])
def test_a_script_sees_what_python_would_show_it(folder: Path, kind: str, name: str, arguments: list[str]) -> None:
    plain = run(["-m", name, *arguments] if kind == "module" else [name, *arguments], folder)
    assert plain.returncode == 0, plain.stderr
    ours = run_ours(folder, kind, name, *arguments)
    assert ours.returncode == 0, ours.stderr
    face, status = ours.stdout.splitlines()
    assert json.loads(face) == json.loads(plain.stdout)
    assert json.loads(face)["name"] == "__main__"
    assert status == "status 0"


def test_a_script_named_by_a_link_finds_the_modules_beside_the_file(folder: Path) -> None:
    (folder / "link.py").symlink_to("scripts/run.py")
    plain, ours = run(["link.py"], folder), run_ours(folder, "file", "link.py")
    assert json.loads(ours.stdout.splitlines()[0]) == json.loads(plain.stdout)


def test_a_script_that_changes_its_folder_still_finds_its_own_file(folder: Path) -> None:
    text = "import os\nfrom pathlib import Path\nos.chdir('/')\nprint(Path(__file__).with_name('parts.py').read_text())"
    name = write(folder, text)
    assert "VALUE = 7" in run([name], folder).stdout
    assert "VALUE = 7" in run_ours(folder, "file", name).stdout


def test_modules_of_the_working_folder_are_not_found_with_minus_p(folder: Path) -> None:
    program = RUN.replace("(), kind", '("-P",), kind')
    name = write(folder, "import parts\n")
    assert run(["-P", name], folder).returncode == 1
    ended = run(["-P", "-c", program, "file", name], folder)
    assert ended.returncode == 1
    assert "No module named 'parts'" in ended.stderr


EXITS: list[tuple[str, int, str]] = [
    ("sys.exit()", 0, ""),
    ("sys.exit(0)", 0, ""),
    ("sys.exit(3)", 3, ""),
    ("sys.exit('no data found')", 1, "no data found\n"),
    ("sys.exit(['a', 1])", 1, "['a', 1]\n"),
    ("raise SystemExit", 0, ""),
    ("argparse.ArgumentParser(prog='p').parse_args()", 2, "unrecognized arguments: --typo"),
]


@pytest.mark.parametrize(("end", "status", "said"), EXITS, ids=[end for end, _, _ in EXITS])
def test_an_exit_is_a_status_and_its_message_is_said(folder: Path, end: str, status: int, said: str) -> None:
    name = write(folder, f"import argparse, sys\n{end}\n")
    ours, plain = run_ours(folder, "file", name, "--typo"), run([name, "--typo"], folder)
    assert plain.returncode == status
    assert ours.stdout == f"status {status}\n"
    assert said in ours.stderr
    assert ours.stderr == plain.stderr


def test_an_exception_passes(folder: Path) -> None:
    ended = run_ours(folder, "file", write(folder, "raise LookupError('no such thing')\n"))
    assert ended.returncode == 1
    assert "status" not in ended.stdout
    assert "LookupError: no such thing" in ended.stderr


def test_what_the_script_sets_ahead_of_torch_is_heeded_and_the_hooks_come_right_after(folder: Path) -> None:
    text = (
        "import os, sys\n"
        "os.environ['OMP_NUM_THREADS'] = '1'\n"
        "assert 'torch' not in sys.modules\n"
        "print('script')\n"
        "import torch.nn.functional\n"
        "print('threads', torch.get_num_threads())\n"
        "print(torch.__spec__.loader is torch.__loader__, type(torch.__loader__).__name__)\n"
    )
    ended = run_ours(folder, "file", write(folder, text), environment={"OMP_NUM_THREADS": "2"})
    assert ended.stdout.splitlines() == [
        "script",
        "hooked True True",
        "threads 1",
        "True SourceFileLoader",
        "status 0",
    ], ended.stderr


def test_a_script_without_torch_is_run_without(folder: Path) -> None:
    text = "import sys\nprint(sorted({'torch', 'numpy'} & sys.modules.keys()))\n"
    assert run_ours(folder, "file", write(folder, text)).stdout == "[]\nstatus 0\n"


def test_asking_whether_torch_is_installed_hooks_nothing_yet(folder: Path) -> None:
    text = "import importlib.util\nprint(importlib.util.find_spec('torch') is not None)\nimport torch\nprint('end')\n"
    ended = run_ours(folder, "file", write(folder, text))
    assert ended.stdout.splitlines() == ["True", "hooked True True", "end", "status 0"], ended.stderr


def test_processes_that_the_script_spawns_find_its_functions(folder: Path) -> None:
    text = (
        "import multiprocessing\n"
        "def double(x):\n    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
        "        pool.close()\n"
        "        pool.join()\n"
    )
    name = write(folder, text)
    assert run([name], folder).stdout == "[2, 4]\n"
    ended = run_ours(folder, "file", name)
    assert ended.stdout == "[2, 4]\nstatus 0\n", ended.stderr
    (folder / "package" / "spawns.py").write_text(text)
    assert run_ours(folder, "module", "package.spawns").stdout == "[2, 4]\nstatus 0\n"


def test_classes_of_the_script_can_be_pickled(folder: Path) -> None:
    text = "import pickle\nclass A:\n    pass\nprint(type(pickle.loads(pickle.dumps(A()))) is A)\n"
    assert run_ours(folder, "file", write(folder, text)).stdout == "True\nstatus 0\n"


@pytest.fixture
def new_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that nobody has imported yet."""
    package = tmp_path / "quite_new_package"
    package.mkdir()
    (package / "__init__.py").write_text("from quite_new_package import part\nREADY = True\n")
    (package / "part.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield package.name
    for name in (package.name, f"{package.name}.part"):
        sys.modules.pop(name, None)
    forget_imports()  # an import that failed may be tried again
    assert sys.meta_path == finders


def test_a_function_is_called_once_right_after_an_import(new_module: str) -> None:
    calls: list[bool] = []
    call_after_import(new_module, lambda: calls.append(sys.modules[new_module].READY))
    importlib.import_module("json")
    assert calls == []
    module = importlib.import_module(f"{new_module}.part")
    assert calls == [True]
    importlib.import_module(new_module)
    importlib.reload(sys.modules[new_module])
    assert calls == [True]
    assert module.__spec__ is not None
    assert type(sys.modules[new_module].__loader__).__name__ == "SourceFileLoader"


def test_a_module_that_is_there_already_calls_at_once() -> None:
    calls: list[str] = []
    finders = list(sys.meta_path)
    call_after_import("json", lambda: calls.append("json"))
    assert calls == ["json"]
    forget_imports()  # an import that failed may be tried again
    assert sys.meta_path == finders


def test_several_functions_wait_for_the_same_module(new_module: str) -> None:
    calls: list[str] = []
    for name in ("first", "second"):
        call_after_import(new_module, lambda name=name: calls.append(name))  # type: ignore[misc]
    importlib.import_module(new_module)
    assert sorted(calls) == ["first", "second"]


def test_an_import_that_fails_is_the_importers_matter(new_module: str) -> None:
    calls: list[str] = []
    call_after_import("no_such_package_anywhere", lambda: calls.append("called"))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_anywhere"):
        importlib.import_module("no_such_package_anywhere")
    assert calls == []


def watch() -> tuple[LineWatch, io.StringIO, list[str]]:
    stream, lines = io.StringIO(newline=""), []  # type: ignore[var-annotated]
    return LineWatch(stream, lines.append), stream, lines


def test_lines_are_heard_when_they_are_whole() -> None:
    watched, stream, lines = watch()
    assert watched.write("loss 0.") == 7
    assert lines == []
    watched.write("5\nacc")
    watched.write("uracy 0.9\n\nend")
    assert lines == ["loss 0.5", "accuracy 0.9", ""]
    assert stream.getvalue() == "loss 0.5\naccuracy 0.9\n\nend"


def test_a_bar_that_returns_to_its_start_is_heard_line_by_line() -> None:
    watched, stream, lines = watch()
    for percent in (10, 20):
        watched.write(f"\r{percent}% loss 0.{percent}")
    watched.write("\r\n")
    assert [line for line in lines if line] == ["10% loss 0.10", "20% loss 0.20"]
    assert stream.getvalue() == "\r10% loss 0.10\r20% loss 0.20\r\n"


def test_print_goes_through_and_is_heard() -> None:
    watched, stream, lines = watch()
    print("a", 1, sep="=", file=watched, flush=True)  # type: ignore[call-overload]
    print("b", end=" ", file=watched)  # type: ignore[call-overload]
    print("c", file=watched)  # type: ignore[call-overload]
    assert lines == ["a=1", "b c"]
    assert stream.getvalue() == "a=1\nb c\n"


def test_lines_written_together_are_heard() -> None:
    watched, stream, lines = watch()
    watched.writelines(["a\n", "b\n"])
    assert stream.getvalue() == "a\nb\n"
    assert lines == ["a", "b"]


@pytest.mark.fault("F9", injected="40,000 dots, one a write", outcome="each costs the same as in a short line")
def test_a_line_written_a_sign_at_a_time_costs_each_sign_the_same() -> None:
    def cpu_seconds(line_length: int) -> float:
        watched, _, lines = watch()
        began = time.process_time()
        for _ in range(40_000 // line_length):
            for _ in range(line_length - 1):
                watched.write(".")
            watched.write("\n")
        assert lines == ["." * (line_length - 1)] * (40_000 // line_length)
        return time.process_time() - began

    assert cpu_seconds(40_000) < 10 * min(cpu_seconds(100) for _ in range(3))


@pytest.mark.fault("F9", injected="60 MB without a line end", outcome="a bounded part is kept, the metric found")
def test_of_output_without_line_ends_a_bounded_part_is_kept() -> None:
    lines: list[str] = []
    with open(os.devnull, "w") as nowhere:
        watched = LineWatch(nowhere, lines.append)
        chunk, most = "." * 65536, 0
        for _ in range(960):
            watched.write(chunk)
            most = max(most, sum(map(len, watched._parts)))
        watched.write(" val_acc=0.5\n")
    assert most < 2**22
    (line,) = lines
    assert read_metric(line, PrintedMetric(name="acc", direction="maximize", pattern="val_acc=([0-9.]+)")) == 0.5


@pytest.mark.fault("F14", injected="a metric of 401 digits in a printed line", outcome="no figure")
def test_a_number_that_is_no_float_is_no_figure() -> None:
    metric = PrintedMetric(name="acc", direction="maximize", key="acc")
    assert read_metric(f'{{"acc": {10**400}}}', metric) is None
    assert read_metric('{"acc": ' + "[" * 100_000, metric) is None
    assert read_metric("{'acc': 0.5, 'epoch': 1.0}\n", metric) == 0.5  # as Python prints it
    assert read_metric("{'acc': f()}", metric) is None


def test_everything_else_is_the_streams() -> None:
    file = open(os.devnull, "w")  # noqa: SIM115
    with file:
        watched = LineWatch(file, lambda line: None)
        assert watched.fileno() == file.fileno()
        assert watched.encoding == file.encoding
        assert watched.buffer is file.buffer
        assert watched.isatty() is False
        with pytest.raises(AttributeError):
            watched.nothing  # noqa: B018


def test_placeholders_stand_for_the_configs_values() -> None:
    script = read_script(
        ["python", "t.py", "--bs", "{micro_batch_size:16}", "--lr={lr:0.1}", "--cast", "{precision}"],
        knobs=["lr=0.1,0.2"],
    )
    assert script_values(script, None) == {"micro_batch_size": 16, "lr": 0.1}
    config = TrainConfig(micro_batch_size=8, precision="bf16", user_knobs={"lr": 0.2})
    assert script_values(script, config) == {"micro_batch_size": 8, "lr": 0.2, "precision": "bf16"}
    threads = read_script(["python", "t.py", "--threads", "{num_threads}"])
    assert script_values(threads, TrainConfig(num_threads=None)) == {}
