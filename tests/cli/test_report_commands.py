"""`autotune explain` and `report`: which search is meant, where the page goes, what a search leaves by itself."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from test_plots import make_study
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli.pages.report import write_page_beside
from autotune.records import Profile
from autotune.records.explanation import Explanation
from autotune.search.store.folder import SearchFolder

sys.path.insert(0, str(Path(__file__).parents[1] / "search"))

from simulated import BASELINE, Machine, UnsavedStudy, run_simulated


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("searched")
    run = run_simulated(Machine(), folder, budget=400, only=("precision", "num_workers"), open_study=UnsavedStudy)
    for path in (run.folder.profile, folder / "best.json"):
        run.profile.save(path)
    return folder


@pytest.fixture
def folder(searched: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    work = tmp_path / "work"
    shutil.copytree(searched, work)
    monkeypatch.chdir(work)
    return work


def find_place(folder: Path) -> SearchFolder:
    (state,) = folder.glob(".autotune/*/search.json")
    return SearchFolder(state.parent)


def invoke(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, words)
    return done.exit_code, done.stdout, done.stderr


def test_an_explanation_is_printed_and_is_json(folder: Path) -> None:
    code, printed, _ = invoke("explain", "--budget", "0")
    assert code == 0
    assert "what each change is worth" in printed
    assert "precision fp32 -> bf16" in printed
    code, printed, _ = invoke("explain", "--budget", "0", "--json")
    found = Explanation.model_validate_json(printed)
    assert code == 0
    assert found.changes[0].source == "finals"


def test_the_answer_is_shown_with_the_worth_of_its_change(folder: Path) -> None:
    confirmation = Profile.load("best.json").evidence.confirmation
    assert confirmation is not None
    _, printed, _ = invoke("show")
    assert "fp32 -> bf16   worth 1." in printed
    assert f"{len(confirmation.log_ratios)} pairs of the proof" in printed


@pytest.mark.parametrize("name", [None, "best.json", "the folder"])
def test_a_search_is_meant_by_its_answer_or_its_folder(folder: Path, name: str | None) -> None:
    words = {None: [], "the folder": [str(find_place(folder).path)]}.get(name, [str(name)])
    assert invoke("report", *words)[0] == 0
    assert "At least" in Path("report.html").read_text()


def test_an_answer_that_no_search_has_is_refused(folder: Path) -> None:
    Profile.load("best.json").replace(verdict="keep", config=BASELINE).save("other.json")
    for command in ("report", "explain"):
        code, _, said = invoke(command, "other.json")
        assert code == 2
        assert "no search in" in said
    (folder / "empty").mkdir()
    assert invoke("report", "empty")[0] == 2
    assert invoke("report", "nothere.json")[0] != 0
    assert not Path("report.html").exists()


def test_a_report_is_made_anew_and_what_is_not_ours_stays(folder: Path) -> None:
    assert invoke("report")[0] == 0
    code, printed, _ = invoke("report", "--json")
    assert (code, json.loads(printed)) == (0, {"report": "report.html"})
    Path("report.html").write_text("<p>mine</p>")
    code, _, said = invoke("report")
    assert code == 2
    assert "--force" in said
    assert Path("report.html").read_text() == "<p>mine</p>"
    assert invoke("report", "--force")[0] == 0


def test_optunas_plots_are_written_beside_it(folder: Path) -> None:
    pytest.importorskip("plotly")
    make_study(find_place(folder).database, 2)
    code, printed, said = invoke("report", "--plots", "--json")
    assert (code, json.loads(printed)) == (0, {"report": "plots.html"}), said
    assert "Hyperparameter Importances" in Path("plots.html").read_text()
    assert not Path("report.html").exists()
    assert invoke("report", "--plots")[0] == 2


def test_a_report_is_printed_as_text(folder: Path) -> None:
    code, printed, _ = invoke("report", "--text")
    assert code == 0
    assert printed.startswith("improved: at least")
    assert "what each change is worth" in printed
    assert not Path("report.html").exists()


def test_a_report_is_opened_where_that_is_asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    invoke("report")
    assert opened == []
    invoke("report", "--open", "-o", "page.html")
    assert opened == [(folder / "page.html").resolve().as_uri()]


def test_a_search_leaves_its_page_and_nothing_of_others_is_touched(folder: Path) -> None:
    profile = Profile.load("best.json")
    explanation, told = write_page_beside(profile, Path("best.json"), force=False)
    assert explanation is not None
    assert told.startswith("report.html written")
    assert write_page_beside(profile, Path("best.json"), force=False)[1].startswith("report.html written")
    Path("report.html").write_text("<p>mine</p>")
    explanation, told = write_page_beside(profile, Path("best.json"), force=False)
    assert explanation is not None
    assert told == "report.html is left alone, it is no report of this target"
    assert write_page_beside(profile, Path("best.json"), force=True)[1].startswith("report.html written")


def test_a_page_that_cannot_be_written_fails_no_search(folder: Path) -> None:
    profile = Profile.load("best.json")
    _, told = write_page_beside(profile, Path("missing") / "best.json", force=False)
    assert told.startswith("no report was written: ")
    (find_place(folder).path / "probe.json").write_text("{")
    assert write_page_beside(profile, Path("best.json"), force=False)[1].startswith("no report was written: ")


@pytest.mark.parametrize("file", ["search.json", "trials/0000/result.json", "finals.json"])
def test_a_damaged_file_costs_only_what_it_said(folder: Path, file: str) -> None:
    (find_place(folder).path / file).write_text("{")
    assert invoke("report", "-o", "page.html")[0] == 0
    page = Path("page.html").read_text()
    assert "At least" in page
    assert "How to repeat it" in page
    assert "What each change is worth" not in page
    assert invoke("show")[0] == 0
    code, _, said = invoke("explain", "--budget", "0")
    assert code != 0
    assert "Traceback" not in said
