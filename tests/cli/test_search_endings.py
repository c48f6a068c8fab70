"""How `autotune search` exits, and what it prints of an answer in which nothing is proven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from emit_records import BASELINE, TUNED, make_profile

import autotune.search.run as run_module
from autotune.cli.search import search
from autotune.records.profile import Candidate, Evidence, NotTested, Profile

NONE = NotTested(outcomes={"timed_out": 1}, settings=("precision",), settings_known=2, budget_needed_seconds=350.0)


def answer(verdict: str, **changes: Any) -> Profile:
    if verdict == "improved":
        return make_profile()
    if verdict == "not-tested":
        changes = {"candidate_config": None, "speedup": None, "quality": (), "evidence": Evidence(not_tested=NONE)}
    return make_profile(verdict=verdict, config=BASELINE, **changes)


def run(profile: Profile, monkeypatch: pytest.MonkeyPatch, *, as_json: bool = False) -> int:
    monkeypatch.setattr(run_module, "run_search", lambda *_asked, **_named: profile)
    try:
        search(["autotune.targets.demo:workload"], json_output=as_json)
    except typer.Exit as end:
        return end.exit_code
    return 0


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("verdict", "status"), [("improved", 0), ("keep", 0), ("inconclusive", 0), ("not-tested", 3)])
def test_the_exit_status_is_3_where_nothing_could_be_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdict: str, status: int, as_json: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(answer(verdict), monkeypatch, as_json=as_json) == status


def test_what_was_not_tested_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run(answer("not-tested"), monkeypatch)
    printed = capsys.readouterr().out
    assert "not tested: nothing but your own settings could be measured" in printed
    assert "not tried: 1 of 2 settings: precision" in printed
    assert "1.00" not in printed


def test_a_candidate_that_may_be_used_is_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    candidate = Candidate(config=TUNED, speedup_estimate=1.3, pairs=5, passed_checks=True, reason="5 pairs say little")
    run(answer("inconclusive", candidate=candidate), monkeypatch)
    printed = capsys.readouterr()
    assert "about 1.30x, learns as well, not proven faster: 5 pairs say little" in " ".join(printed.out.split())
    assert "--use-candidate" in printed.err
    run(answer("inconclusive", candidate=candidate.replace(passed_checks=False)), monkeypatch)
    assert "--use-candidate" not in capsys.readouterr().err


def test_a_proven_answer_that_is_kept_is_the_one_to_train_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer("improved").save(tmp_path / "best.json")
    run(answer("inconclusive"), monkeypatch)
    told = " ".join(capsys.readouterr().err.split())
    assert "best.json keeps what was proven before; next: autotune train --profile best.json" in told
    assert "written" not in told.partition("report.html")[0]
