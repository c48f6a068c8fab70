"""Training with a candidate that is not proven faster: on request, and only where it was shown to learn as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from emit_records import BASELINE, TUNED, make_profile

from autotune.cli.train import mention_answer
from autotune.errors import ProfileError, UsageError
from autotune.records.profile import Candidate, Profile
from autotune.records.trial import Target
from autotune.train.options import TrainingOptions
from autotune.train.settings.candidate import load_profile


def save(work: Path, **changes: object) -> Path:
    candidate = Candidate(config=TUNED, speedup_estimate=1.3, pairs=5, passed_checks=True, reason="5 pairs say little")
    usual = {"verdict": "inconclusive", "config": BASELINE, "candidate": candidate}
    make_profile(**(usual | changes)).save(work / "best.json")
    return work / "best.json"


def load(work: Path, *, use: bool = True) -> tuple[Profile | None, list[str]]:
    told: list[str] = []
    return load_profile(TrainingOptions(profile="best.json", use_candidate=use), work, told.append), told


def test_its_settings_are_used_on_request_alone(tmp_path: Path) -> None:
    save(tmp_path)
    profile, told = load(tmp_path)
    assert profile is not None
    assert profile.config == TUNED
    assert told == ["the settings are the candidate's, not proven faster (about 1.30x): 5 pairs say little"]
    plain, told = load(tmp_path, use=False)
    assert plain is not None
    assert (plain.config, told) == (BASELINE, [])


def test_one_that_was_not_shown_to_learn_as_well_is_refused(tmp_path: Path) -> None:
    refused = Candidate(config=TUNED, speedup_estimate=1.3, reason="its loss check was not passed: loss")
    save(tmp_path, candidate=refused)
    with pytest.raises(ProfileError, match="may not be used: it was not shown to learn as well"):
        load(tmp_path)


def test_where_there_is_none_that_is_said(tmp_path: Path) -> None:
    save(tmp_path, verdict="improved", config=TUNED, candidate=None)
    with pytest.raises(ProfileError, match="no unproven candidate") as caught:
        load(tmp_path)
    assert "proven" in caught.value.hint
    save(tmp_path, candidate=None)
    with pytest.raises(ProfileError, match="no unproven candidate to use"):
        load(tmp_path)


def test_it_needs_a_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--use-candidate is given without a profile"):
        TrainingOptions(use_candidate=True).check()
    with pytest.raises(UsageError, match="a preset has no candidate"):
        load_profile(TrainingOptions(preset="balanced", use_candidate=True), tmp_path, lambda _told: None)
    assert load_profile(TrainingOptions(), tmp_path, lambda _told: None) is None


def test_an_answer_that_is_not_used_is_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = make_profile()
    target = Target(spec=answer.target.label, folder=str(tmp_path))
    mention_answer(TrainingOptions(), target)
    answer.save(tmp_path / "best.json")
    mention_answer(TrainingOptions(profile=Path("best.json")), target)
    mention_answer(TrainingOptions(), target.replace(spec="other.py:workload"))
    assert capsys.readouterr().err == ""
    mention_answer(TrainingOptions(), target)
    said = " ".join(capsys.readouterr().err.split())
    assert said.endswith("best.json has faster ones for this target, --profile best.json takes them")
