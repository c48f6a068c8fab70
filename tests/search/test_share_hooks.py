"""What the exploring stage does about other workers, and by what they know a search."""

from __future__ import annotations

from collections.abc import Collection, Container
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_state
from simulated import BASELINE, Machine, explore, make_problem, make_report, number_of, open_search, run_simulated

from autotune.records import TrainConfig, TrialStatus
from autotune.records.probe import ProbeReport
from autotune.records.quality import DriftLimits, Margin
from autotune.records.search import PlannedRun
from autotune.search.launch.suspects import Ended
from autotune.search.share.alone import Alone
from autotune.search.share.naming import name_study
from autotune.search.store.folder import create_search_folder
from autotune.space import SearchSpace


class Others(Alone):
    """Other workers that have begun some placebos, and take some more as soon as this worker asks for them."""

    def __init__(
        self,
        *,
        taken: Collection[int] = (),
        quick: Collection[int] = (),
        failed: Collection[int] = (),
        answered_after: int = 10**6,
    ) -> None:
        self.taken, self.quick, self.left = {*taken}, {*quick}, answered_after
        self.failed = [(BASELINE.replace(user_knobs={"placebo": one}), TrialStatus.CRASHED) for one in failed]

    def list_ended(self) -> list[Ended]:
        return self.failed

    def list_taken(self) -> Container[str]:
        return Keys(self.taken)

    def claim(self, config: TrainConfig) -> bool:
        if number_of(config) in self.quick - self.taken:
            self.taken.add(number_of(config))
            return False
        return True

    def is_answered(self) -> bool:
        self.left -= 1
        return self.left < 0


class Keys:
    def __init__(self, numbers: set[int]) -> None:
        self._texts = [f'"placebo": {number}}}' for number in numbers]

    def __contains__(self, key: object) -> bool:
        return any(text in str(key) for text in self._texts)


def test_what_others_have_is_not_launched_nor_what_they_are_quicker_to_begin() -> None:
    search = open_search(Machine(), budget=200.0)
    explore(search, count=8, fleet=Others(taken={1, 4}, quick={2}))
    launched = {number_of(one.config) for one in search.log.judged}
    assert launched == {0, 3, 5, 6, 7, 8}
    assert not search.log.interrupted


def test_what_failed_elsewhere_is_not_tried_here() -> None:
    search = open_search(Machine(), budget=200.0)
    explore(search, count=6, fleet=Others(failed={2, 5}))
    assert {number_of(one.config) for one in search.log.judged} == {0, 1, 3, 4, 6}


def test_a_search_that_is_answered_elsewhere_explores_no_more() -> None:
    search = open_search(Machine(), budget=600.0)
    assert explore(search, count=50, fleet=Others(answered_after=5)) == "exhausted"
    assert len(search.log.judged) == 5


class Leading(Others):
    """Others that have read one config to be the best, many launches ago."""

    explored = 30
    has_finals_elsewhere = False

    def __init__(self, lead: TrainConfig, *, elsewhere: bool = False) -> None:
        super().__init__()
        self.lead, self.has_finals_elsewhere = lead, elsewhere

    def list_taken(self) -> Container[str]:
        return {self.lead.key}

    def list_leads(self) -> list[TrainConfig]:
        return [self.lead]

    def take_finals(self) -> bool:
        return not self.has_finals_elsewhere


LEAD = BASELINE.replace(precision="bf16")


@pytest.mark.parametrize("elsewhere", [False, True])
def test_what_others_have_found_is_launched_and_proven_here_unless_it_is_proven_there(
    tmp_path: Path, elsewhere: bool
) -> None:
    fleet = Leading(LEAD, elsewhere=elsewhere)
    run = run_simulated(Machine(), tmp_path, only=("precision", "num_threads"), fleet=fleet)
    launched = {one.config for one in run.log.judged}
    assert (LEAD in launched) is not elsewhere
    assert (run.profile.verdict == "improved") is not elsewhere
    if not elsewhere:
        assert run.profile.config == LEAD
        first = next(spec for spec in run.machine.specs if spec.purpose == "final")
        assert first.number < 16, "what others have launched counts as explored"


def test_a_search_keeps_its_identity_and_draws_another_where_that_is_damaged(tmp_path: Path) -> None:
    folder = create_search_folder(tmp_path, "toy.py:workload")
    folder.write_state(make_state())
    drawn = folder.read_worker()
    assert folder.read_worker() == drawn
    assert drawn != create_search_folder(tmp_path, "toy.py:workload").read_worker()
    (folder.path / "worker").write_bytes(b"\xff\x00")
    again = folder.read_worker()
    assert again != drawn
    assert len(again) == len(drawn) == 16


def name(changed: dict[str, Any] | None = None, **asked: Any) -> str:
    """Return the name of a search's study; changed are fields of the probe's report, by the record that has them."""
    report: ProbeReport = make_report(Machine())
    for part, fields in (changed or {}).items():
        report = report.replace(**{part: getattr(report, part).replace(**fields)})
    return name_study(make_problem(Machine(), report=report, **asked))


def test_seed_and_budget_make_no_other_study_nor_what_changes_by_the_minute() -> None:
    assert name(seed=7, budget_seconds=60.0, uses_history=True) == name()
    assert name({"hardware": {"memory_available_bytes": 1}}) == name()


@pytest.mark.parametrize(
    ("changed", "asked"),
    [
        ({"target": {"label": "other.py:workload"}}, {}),
        ({"target": {"fingerprint": "m-0123456789ab"}}, {}),
        ({"target": {"world_size": 2}}, {}),
        ({"target": {"baseline": BASELINE.replace(num_threads=1)}}, {}),
        ({"hardware": {"cpu_name": "another"}}, {}),
        ({"software": {"torch": "3"}}, {}),
        ({}, {"planned_run": PlannedRun(amount=3.0, unit="epochs"), "planned_samples": 3.0}),
        ({}, {"max_drift": DriftLimits(loss=Margin(amount=0.1))}),
        ({}, {"space": SearchSpace(BASELINE, {"num_threads": (2, 1)}, ())}),
    ],
    ids=["target", "code", "processes", "baseline", "machine", "versions", "length", "limits", "space"],
)
def test_what_a_speedup_depends_on_makes_another_study(changed: dict[str, Any], asked: dict[str, Any]) -> None:
    assert name(changed, **asked) != name()
