"""A search that was stopped and goes on: what its loss checks have shown is not shown again, and not forgotten."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from simulated import BASELINE, Machine, Run, run_simulated

from autotune.records import TrainConfig, TrialSpec
from autotune.records.config import changed_fields
from autotune.records.quality import is_passed
from autotune.records.search import Screens
from autotune.search.log import list_changes

ONLY = ("precision", "num_workers", "optimizer_implementation", "attention_backend")


def speed(config: TrainConfig) -> float:
    return (1.6 if config.precision == "bf16" else 1.0) * (1.2 if config.num_workers else 1.0)


def machine(**options: object) -> Machine:
    """Return a machine without noise on which bf16 is fast and learns something else."""
    return Machine(
        speed=speed,
        noise=0.0,
        repeats_losses=True,
        gradient_error=lambda config: 0.5 if config.precision == "bf16" else 0.0,
        **options,  # type: ignore[arg-type]
    )


def search(work: Path, **options: object) -> Run:
    return run_simulated(machine(**options), work, budget=200.0, only=ONLY)


def list_measured(run: Run) -> list[str]:
    """Return what was launched before the first proof."""
    specs = itertools.takewhile(lambda spec: spec.purpose != "tape", run.machine.specs)
    configs = [spec.config for spec in specs if spec.purpose == "measure" and spec.config is not None]
    return [" ".join(sorted(list_changes(one, BASELINE, changed_fields(one, BASELINE)))) for one in configs]


def list_new(measured: list[str]) -> list[str]:
    """Return the configs by their first launches, in order."""
    return [*dict.fromkeys(measured)]


def of_gate(run: Run) -> list[TrialSpec]:
    return [spec for spec in run.machine.specs if spec.purpose in ("fidelity", "tape", "quality")]


def resume(first: Run, work: Path) -> Run:
    return run_simulated(machine(), work, budget=200.0, only=ONLY, folder=first.folder)


def test_what_was_refused_stays_refused(tmp_path: Path) -> None:
    first = search(tmp_path, stop_after=9)
    assert first.log.refused == (frozenset({"precision=bf16"}),)
    second = resume(first, tmp_path)
    assert second.log.refused == first.log.refused
    configs = [spec.config for spec in second.machine.specs if spec.config is not None]
    assert [one for one in configs if one.precision == "bf16"] == []
    assert second.profile.verdict == "improved"


def test_its_first_answer_knows_what_was_launched(tmp_path: Path) -> None:
    first = search(tmp_path, stop_after=9)
    assert first.profile.verdict != "not-tested"
    begun = resume(first, tmp_path).saved[0]
    assert begun.evidence.stop_reason == "running"
    assert begun.verdict == first.profile.verdict
    assert begun.candidate_config == first.profile.candidate_config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return search(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stop_after", [9, 12, 14])
def test_it_goes_on_as_it_would_have(tmp_path: Path, uninterrupted: Run, stop_after: int) -> None:
    """Without noise, up to the first proof: but for the baseline, launched first as the machine may be another one."""
    whole = list_new(list_measured(uninterrupted))
    first = search(tmp_path, stop_after=stop_after)
    begun = list_new(list_measured(first))
    gone_on = list_new([*begun, *list_measured(resume(first, tmp_path))])
    assert len(gone_on) >= len(begun) + 3
    assert gone_on == whole[: len(gone_on)]


def test_what_was_shown_is_not_shown_again(tmp_path: Path, uninterrupted: Run) -> None:
    specs = uninterrupted.machine.specs
    first_final = next(place for place, spec in enumerate(specs) if spec.purpose == "final")
    first = search(tmp_path, stop_after=first_final + 2)
    ((checked, checks),) = first.log.checks
    assert is_passed(checks)
    second = resume(first, tmp_path)
    assert second.log.checks_of(checked) == checks
    assert [spec for spec in of_gate(second) if spec.config == checked] == []
    assert second.profile.verdict == "improved"


def test_a_look_that_was_cut_is_taken_again(tmp_path: Path) -> None:
    first = search(tmp_path, stop_after=4)
    assert first.machine.specs[-1].purpose == "fidelity"
    assert first.log.refused == ()
    second = resume(first, tmp_path)
    assert second.log.refused == (frozenset({"precision=bf16"}),)
    launched = [spec.purpose for spec in second.machine.specs]
    assert launched.index("fidelity") == 0


def test_screens_that_cannot_be_read_are_made_again(tmp_path: Path) -> None:
    first = search(tmp_path, stop_after=9)
    (first.folder.path / "screens.json").write_text("{")
    assert first.folder.read_screens() == Screens()
    second = resume(first, tmp_path)
    assert second.log.refused == first.log.refused
