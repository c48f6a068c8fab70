"""The page of faults says what the tests do, and no fault of the catalogue is left out."""

from __future__ import annotations

from pathlib import Path

import pytest
from catalogue import FAULTS, NOT_TESTED
from table import TESTS, find_untested, read_injections, render

INJECTIONS = read_injections()


def test_the_page_is_up_to_date() -> None:
    page = (TESTS.parent / "docs" / "faults.md").read_text(encoding="utf-8")
    assert page == render(INJECTIONS), "run: python tests/faults/table.py > docs/faults.md"


def test_every_fault_has_a_test_or_a_reason() -> None:
    assert find_untested(INJECTIONS) == []
    assert NOT_TESTED.keys() <= FAULTS.keys() - {one.key for one in INJECTIONS}


CASES = """
import pytest

SLOW = [pytest.param(1, marks=pytest.mark.slow)]

@pytest.mark.fault("6", injected="a | b", outcome="ends")
@pytest.mark.parametrize(
    "x", [pytest.param(1, marks=[pytest.mark.slow, pytest.mark.fault("7", injected="c", outcome="d")])]
)
def test_one(x): ...

@pytest.mark.slow
@pytest.mark.fault("8", injected="e", outcome="f")
def test_two(): ...
"""


def test_marks_of_tests_and_of_their_cases_are_read(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(CASES)
    (tmp_path / "test_b.py").write_text("import pytest\npytestmark = [pytest.mark.slow]\n" + CASES)
    found = read_injections(tmp_path)
    assert [(one.key, one.test, one.is_slow) for one in found] == [
        ("6", "test_a.py::test_one", False),
        ("7", "test_a.py::test_one", True),
        ("8", "test_a.py::test_two", True),
        ("6", "test_b.py::test_one", True),
        ("7", "test_b.py::test_one", True),
        ("8", "test_b.py::test_two", True),
    ]
    assert "| 6 | Trial hangs in Python | a \\| b | ends | `test_a.py::test_one` | quick |" in render(found)
    assert "1" in find_untested(found)


@pytest.mark.parametrize(
    "text",
    [
        '@pytest.mark.fault("99", injected="a", outcome="b")\ndef test_one(): ...\n',
        '@pytest.mark.fault("6", injected="a")\ndef test_one(): ...\n',
        'A = pytest.mark.fault("6", injected="a", outcome="b")\n',
        '@pytest.mark.fault("6", injected="a" * len("b"), outcome="b")\ndef test_one(): ...\n',
    ],
    ids=["unknown", "incomplete", "on no test", "no literal"],
)
def test_a_mark_that_would_be_lost_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "test_a.py").write_text(text)
    with pytest.raises(ValueError, match=r"test_a|malformed"):
        read_injections(tmp_path)
