"""The page on GPUs says which lines only a GPU runs, and every one of them has a test that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_lines import EXERCISED, ROOT, count_run, find_functions, find_test, list_lines, make_page

TESTS = "\n".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "gpu.md").read_text() == make_page(), "run: python tests/gpu/gpu_lines.py > docs/gpu.md"


def test_every_line_that_only_a_gpu_runs_has_a_test() -> None:
    assert [module for module in list_lines() if find_test(module) is None] == []


@pytest.mark.parametrize("name", sorted({*EXERCISED.values()}))
def test_the_tests_are_there(name: str) -> None:
    assert f"def {name}(" in TESTS


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def a():\n    return torch.cuda.is_available()", [("a", [2])]),
        ("def a(device):\n    if device.type == 'cuda':\n        torch.cuda.synchronize()", [("a", [2, 3])]),
        ("def a(device):\n    return on_accelerator(device)", [("a", [2])]),
        ("def a():\n    return 'cpu'", []),
    ],
)
def test_functions_that_ask_for_a_gpu_are_found(source: str, found: list[tuple[str, list[int]]]) -> None:
    assert [(name, list(lines)) for name, lines in find_functions(source)] == found


def test_a_line_that_was_changed_since_counts_as_not_run() -> None:
    run = {"a": ["return torch.cuda.is_available()"]}
    assert count_run({"a": {2: "return torch.cuda.is_available()", 3: "torch.cuda.synchronize()"}}, run) == 1
    assert count_run({"b": {2: "return torch.cuda.is_available()"}}, run) == 0


def test_the_longest_beginning_of_a_path_counts() -> None:
    assert find_test("autotune/measure/clock.py") == "test_steps_are_timed_by_events"
    assert find_test("autotune/measure/memory.py") == "test_a_knob_trains_as_the_baseline_does"
    assert find_test(str(Path("autotune") / "nothing.py")) is None
