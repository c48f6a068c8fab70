"""Whole searches that share a study: who launches what, who proves it, and a database that is away for a while."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from shared_workers import PLACEBOS, Named, Worker, count_launches, search_together, wait_until
from simulated import Machine, make_problem

import autotune.search.share.fleet as fleet_module
from autotune.records import TrialSpec
from autotune.search.share.address import open_storage, read_address
from autotune.search.share.fleet import Fleet
from autotune.search.store.folder import list_searches


class Cut:
    """A storage whose database can be taken away."""

    is_cut = False

    def __init__(self, storage: BaseStorage) -> None:
        self._storage = storage

    def __getattr__(self, name: str) -> Any:
        if Cut.is_cut:
            raise OSError("server closed the connection")
        return getattr(self._storage, name)


@pytest.fixture
def cuttable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fleet_module, "open_storage", lambda address: Cut(open_storage(address)))
    yield
    Cut.is_cut = False


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('study')}/study.db"


@pytest.fixture(scope="module")
def pair(url: str, tmp_path_factory: pytest.TempPathFactory) -> list[Worker]:
    """Return two that have searched at once, one of them on a machine twice as fast."""
    work = tmp_path_factory.mktemp("pair")
    workers = [Worker(work / "one", url, 1), Worker(work / "two", url, 2, pace=2.0)]
    search_together(workers)
    return workers


def read_study(url: str) -> list[Any]:
    """Return the readings of the only study."""
    storage = open_storage(read_address(url))
    (study,) = (one for one in storage.get_all_studies() if not one.study_name.endswith("-leases"))
    return storage.get_all_trials(study._study_id)


def test_one_proves_and_the_other_says_where_the_answer_is(pair: list[Worker]) -> None:
    (prover,) = (one for one in pair if one.profile.verdict == "improved")
    (other,) = (one for one in pair if one is not prover)
    assert prover.profile.speedup is not None
    assert prover.profile.speedup.low > 1.1
    assert prover.profile.config.user_knobs == {"planted": 7}
    assert other.profile.verdict in ("inconclusive", "keep")
    assert other.profile.config.user_knobs == {"planted": 0}
    # One that has nothing left to try may end while the winner is still launched elsewhere.
    words = (f"{prover.work}/best.json", "1 other worker still searches this study: an answer may yet come from there")
    assert any(word in note for note in other.profile.evidence.notes for word in words)
    assert "final" not in {spec.purpose for spec in other.specs}


def test_the_launches_are_shared_out(pair: list[Worker]) -> None:
    counts = count_launches(pair)
    assert len(counts) == len(PLACEBOS) - 1
    # Once more elsewhere is launched only what has led the search.
    assert sum(count > 1 for count in counts.values()) <= len(counts) / 2


def test_only_ratios_to_ones_own_baseline_are_compared(pair: list[Worker], url: str) -> None:
    readings = read_study(url)
    assert len({one.user_attrs["worker"] for one in readings}) == 2
    assert {one.state for one in readings} == {TrialState.COMPLETE}
    others = [one.value for one in readings if one.params["user_knobs.planted"] != 7]
    assert abs(statistics.fmean(others)) < 0.1 < math.log(2.0)
    own = {one.work.name: len(one.launched) for one in pair}
    assert own == {name: sum(one.user_attrs["worker"] == name for one in readings) for name in own}


@pytest.mark.slow
def test_a_later_search_begins_with_what_is_read_and_proves_it_itself(
    pair: list[Worker], url: str, tmp_path: Path
) -> None:
    known = {one.params["user_knobs.planted"] for one in read_study(url)}
    later = Worker(tmp_path / "later", url, 3)
    profile = later.search().profile
    assert profile.verdict == "improved"
    assert profile.config.user_knobs == {"planted": 7}
    assert known & {one.user_knobs["planted"] for one in later.launched} == {7}
    assert any("readings" in sentence for sentence in later.heard.sentences)


@pytest.mark.fault(
    "F20", injected="every call to the database raises for a while", outcome="said once, gone on alone, joined again"
)
@pytest.mark.usefixtures("cuttable")
def test_a_database_that_goes_away_is_told_of_once_and_joined_again(tmp_path: Path) -> None:
    def cut(spec: TrialSpec) -> None:
        Cut.is_cut = 5 <= spec.number < 9
        if spec.number == 9:
            link = worker.fleet._link
            wait_until(lambda: link.reason is None)

    worker = Worker(tmp_path / "one", f"sqlite:///{tmp_path}/study.db", 1, before=cut)
    run = worker.search(fleet={"beat_seconds": 0.01})
    assert run.profile.verdict == "improved"
    away = [one for one in worker.heard.sentences if "is away (server closed the connection)" in one]
    back = [one for one in worker.heard.sentences if "is back: " in one]
    assert (len(away), len(back)) == (1, 1), worker.heard.sentences
    numbers = [one.user_attrs["number"] for one in read_study(worker.url)]
    launched = [one.result.spec.number for one in run.log.judged if one.config.user_knobs["planted"]]
    assert sorted(numbers) == launched


@pytest.mark.slow
@pytest.mark.fault("F20", injected="the database stays away", outcome="--resume sends what was read meanwhile")
@pytest.mark.usefixtures("cuttable")
def test_what_a_search_has_read_alone_is_sent_when_it_is_resumed(tmp_path: Path) -> None:
    def cut(spec: TrialSpec) -> None:
        Cut.is_cut = spec.number >= 5

    worker = Worker(tmp_path / "one", f"sqlite:///{tmp_path}/study.db", 1, before=cut)
    worker.search(budget=60.0)
    Cut.is_cut = False
    before = len(read_study(worker.url))
    alone = len(worker.launched)
    assert 0 < before < alone
    (folder,) = list_searches(worker.work)
    resumed = Worker(worker.work, worker.url, 1)
    resumed.search(folder=folder, budget=40.0)
    numbers = [one.user_attrs["number"] for one in read_study(worker.url)]
    assert len(numbers) == len(set(numbers)) == len(resumed.launched) >= alone


def test_a_worker_says_where_the_finals_were_that_proved_nothing(tmp_path: Path) -> None:
    address, problem = read_address(f"sqlite:///{tmp_path}/study.db"), make_problem(Machine())
    holder, other = Fleet(address), Fleet(address)
    for fleet, name in ((holder, "holder"), (other, "other")):
        fleet.settle(Named(name), tmp_path / name / "best.json")
        fleet.join(problem, lambda _sentence: None)
    assert holder.take_finals()
    assert not other.take_finals()
    assert f"the answer will be there, in {tmp_path}/holder/best.json" in other.describe_answer()
    holder.leave(None)
    assert not other.is_answered()
    assert f"proved nothing: what it has found is there, in {tmp_path}/holder/best.json" in other.describe_answer()
    assert other.take_finals()
    assert other.describe_answer() == ""
    other.leave(None)
