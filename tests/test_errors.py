from __future__ import annotations

import inspect
import re
import sys

import pytest

import autotune
from autotune import errors
from autotune.__main__ import main
from autotune.errors import AutotuneError, MachineError

EXIT_CODES = {
    "AutotuneError": 1,
    "UsageError": 2,
    "NothingFeasibleError": 3,
    "TargetError": 4,
    "MachineError": 5,
    "BusyError": 6,
    "ProfileError": 7,
    "FolderError": 8,
    "CheckpointError": 9,
}

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
}


def test_every_error_has_its_documented_exit_code() -> None:
    assert {name: kind.exit_code for name, kind in CLASSES.items()} == EXIT_CODES


def test_the_docstring_draws_the_whole_tree_with_its_codes() -> None:
    drawn = dict(re.findall(r"(\w+Error) +(\d+) ", errors.__doc__ or ""))
    assert {name: int(code) for name, code in drawn.items()} == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_error_carries_a_sentence_and_a_hint(name: str) -> None:
    error = CLASSES[name]("num_workers is 99", hint="use at most 8")
    assert isinstance(error, AutotuneError)
    assert (str(error), error.message, error.hint) == ("num_workers is 99", "num_workers is 99", "use at most 8")
    assert CLASSES[name]("alone").hint == ""
    assert CLASSES[name].__doc__


def test_another_system_than_linux_is_refused_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(MachineError, match="this system is darwin, and autotune runs on Linux alone"):
        autotune.run_search("train.py:workload")  # the name itself is there: a file may import it
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 5
    assert capsys.readouterr().err.splitlines()[0] == "error: this system is darwin, and autotune runs on Linux alone"
    assert "AutotuneError" in dir(autotune)
