"""A search in a notebook: one output below the cell, drawn anew in its place, and an answer that shows itself."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_profile

from autotune.cli.view import notebook
from autotune.cli.view.notebook import NotebookView, Output, is_notebook
from autotune.cli.view.search import search_view

PLAYED = """
import time
import autotune
from autotune.search import run as stage
from autotune.search.progress import SearchProgress

def play(target, options, *, reporter, **_others):
    reporter.stage_started(SearchProgress("search", 1, 48.0), "<b>9</b> settings to vary")
    for number in range(40):
        reporter.told(f"line {number}")
        time.sleep(0.05)
    return autotune.Profile.load("best.json")

stage.run_search = play
profile = autotune.run_search("train.py:workload", budget="2m", progress=True)
"""


class Cell:
    """What stands below a cell."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.times: list[float] = []

    def display(self, output: Output) -> Any:
        self.replace(output)
        return self.replace

    def replace(self, output: Output) -> None:
        self.outputs.append(output)
        self.times.append(time.monotonic())


def test_no_process_is_a_notebook_by_itself() -> None:
    assert not is_notebook()


def test_lines_stay_and_the_block_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell()
    monkeypatch.setattr(notebook, "_display", cell.display)
    monkeypatch.setattr("autotune.cli.view.search.is_notebook", lambda: True)
    with search_view(60.0) as view:
        view.told("something <i>first</i>")
        time.sleep(0.7)
        for number in range(100):
            view.told(f"line {number} \x1b[31m{'x' * 200}")
            time.sleep(0.01)
    first, last = cell.outputs[0], cell.outputs[-1]
    assert "stopping the cell keeps what is known" in first["text/plain"]
    assert "stopping" not in last["text/plain"]
    assert last["text/plain"].splitlines() == [
        "something <i>first</i>",
        *(f"line {n} ?[31m{'x' * 200}" for n in range(100)),
    ]
    assert last["text/html"].startswith('<pre style="white-space:pre-wrap">something &lt;i&gt;first&lt;/i&gt;\nline 0 ')
    between = [after - before for before, after in zip(cell.times[:-2], cell.times[1:-1], strict=True)]
    assert all(one >= 0.5 for one in between)


def test_a_notebook_that_is_gone_ends_no_search() -> None:
    def fail(_output: Output) -> Any:
        raise ConnectionError("the kernel is gone")

    view = NotebookView(lambda _width: [], fail)
    with view.opened():
        view.say("something")
        view.tick()


def execute(folder: Path, *cells: str, timeout: int) -> tuple[list[Any], list[str]]:
    """Return the outputs of a notebook's cells, and what replaced an output while they ran."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    page = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(page, timeout=timeout, resources={"metadata": {"path": str(folder)}})
    plain, replaced = client._update_display_id, []

    def update(name: str, message: Any) -> None:
        replaced.append(message["content"]["data"]["text/plain"])
        plain(name, message)

    client._update_display_id = update
    client.execute()
    return [cell.outputs for cell in page.cells], replaced


@pytest.mark.filterwarnings("ignore")
def test_a_search_is_shown_in_a_real_notebook(tmp_path: Path) -> None:
    make_profile().save(tmp_path / "best.json")
    (shown, table, printed), replaced = execute(tmp_path, PLAYED, "profile", "print(profile)", timeout=120)
    assert [output.output_type for output in shown] == ["display_data"]
    assert shown[0].data["text/plain"].splitlines()[1:] == [f"line {number}" for number in range(40)]
    assert "&lt;b&gt;9&lt;/b&gt; settings to vary" in shown[0].data["text/html"]
    assert 1 <= len(replaced) <= 8  # of two seconds
    assert any(re.search(r"^search, .* left; stopping the cell keeps", one, re.MULTILINE) for one in replaced)
    assert table[0].data["text/plain"].startswith("<Profile improved: at least 1.20x faster")
    assert table[0].data["text/html"].startswith("<table>")
    assert printed[0].text.startswith("improved: at least 1.20x faster")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_search_of_the_demo_in_a_notebook(tmp_path: Path) -> None:
    search = (
        "import autotune\nprofile = autotune.run_search('autotune.targets.demo:workload', budget='5m', progress=True)"
    )
    (shown, table), replaced = execute(tmp_path, f"import autotune\n{search}", "profile", timeout=900)
    assert [output.output_type for output in shown] == ["display_data"]
    text = shown[0].data["text/plain"]
    assert "your settings, as they run now" in text
    assert re.search(r"^#\d+ ", text, re.MULTILINE)
    assert replaced
    assert "<table>" in table[0].data["text/html"]
    assert (tmp_path / "best.json").exists()
