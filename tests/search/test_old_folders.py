"""A search as a release has left it on disk is read by every later one, field by field, or refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from simulated import Machine, run_simulated

from autotune.cli.pages.report import render_search
from autotune.errors import AutotuneError, UsageError
from autotune.records.codec import Record, read_record
from autotune.records.finals import FinalsRecord
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile
from autotune.records.search import SearchState
from autotune.records.trial import TrialResult, TrialSpec
from autotune.search.run import SearchOptions, run_search
from autotune.search.store.folder import SearchFolder, find_search_folder, list_searches

RELEASES = sorted((Path(__file__).parent / "data").iterdir())
"""One folder of each schema that was ever released."""

KINDS: dict[str, type[Record]] = {
    "search.json": SearchState,
    "probe.json": ProbeReport,
    "finals.json": FinalsRecord,
    "best.json": Profile,
    "spec.json": TrialSpec,
    "result.json": TrialResult,
}

each_release = pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)


def unpack(release: Path, folder: Path) -> SearchFolder:
    """Copy a stored search into a working folder."""
    shutil.copytree(release, folder / ".autotune" / release.name)
    (folder / ".autotune").chmod(0o700)
    (search,) = list_searches(folder)
    return search


def pick(read: Any, *, like: Any) -> Any:
    """Return of what was read only what an older file has, by its names: fields that came later have their defaults."""
    if isinstance(like, dict):
        read = {"allow_tf32": read.get("matmul_precision") == "high", **read}
        return {name: pick(read[name], like=own) for name, own in like.items()}
    if isinstance(like, list) and len(like) == len(read):
        return [pick(one, like=own) for one, own in zip(read, like, strict=True)]
    return read


@pytest.mark.fault("52", injected="a search folder of an earlier release", outcome="read field by field")
@each_release
def test_every_file_of_it_says_what_it_said(release: Path) -> None:
    files = [path for path in release.rglob("*") if path.is_file()]
    assert {path.name for path in files} == KINDS.keys()
    for path in files:
        record = read_record(path, KINDS[path.name])
        said = json.loads(path.read_text())
        assert pick(record.model_dump(mode="json"), like=said) == said


@each_release
def test_it_is_found_and_reported(tmp_path: Path, release: Path) -> None:
    search = unpack(release, tmp_path)
    found = find_search_folder(tmp_path, "toy.py:workload")
    assert found is not None
    assert found.path == search.path
    assert found.find_damaged() == []
    assert [trial.spec.number for trial in found.read_trials()] == [0, 1, 4]
    finals = found.read_finals()
    assert finals is not None
    assert finals.looks[0].share == 0.5
    assert "toy.py:workload" in render_search(search.path)


@each_release
def test_it_is_gone_on_with(tmp_path: Path, release: Path) -> None:
    search = unpack(release, tmp_path)
    machine = Machine(stop_after=4)
    run = run_simulated(machine, tmp_path, folder=search)
    assert [spec.purpose for spec in machine.specs].count("probe") == 0
    assert [spec.number for spec in machine.specs] == [5, 6, 7, 8]
    assert run.profile.target.label == "toy.py:workload"


@pytest.mark.fault("52", injected="a search folder of a newer release", outcome="refused, says to upgrade")
@each_release
def test_one_of_a_newer_release_is_refused_with_what_to_do(tmp_path: Path, release: Path) -> None:
    search = unpack(release, tmp_path)
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    for path in search.path.rglob("*.json"):
        path.write_text(path.read_text().replace('"schema_version": 1,', '"schema_version": 2,', 1))
    with pytest.raises(UsageError, match=r"written by a newer version \(schema 2, this one reads 1\)") as caught:
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)
    assert caught.value.hint.startswith("upgrade autotune; or delete")
    with pytest.raises(AutotuneError, match="written by a newer version"):
        Profile.load(search.profile)
    with pytest.raises(AutotuneError, match="written by a newer version"):
        search.read_finals()
    assert search.read_trials() == []
