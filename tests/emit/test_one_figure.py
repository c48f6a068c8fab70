"""One recorded search on every surface: one throughput and one peak of the user's own settings, speed-ups of these."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

import pytest
from simulated import BASELINE, Machine, UnsavedStudy, run_simulated
from typer.testing import CliRunner

from autotune.api.profile import Profile as NotebookProfile
from autotune.cli import app
from autotune.cli.pages.answer import list_answer
from autotune.cli.pages.report import render_search
from autotune.emit.report.tables import list_figures, list_trials
from autotune.emit.report.wording import typeset_factor
from autotune.format import format_bytes, format_rate
from autotune.records import PeakMemory, Profile, TrialResult, TrialSpec
from autotune.search.store.folder import SearchFolder

PROBE_BYTES = 900 * 2**20


@dataclass
class UnevenMachine(Machine):
    """Launches of one setting differ in their peaks, as they do on a host, and the probe's is larger than any."""

    peaks: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, spec: TrialSpec) -> TrialResult:
        result = super().__call__(spec)
        if result.measurement is None:
            return result
        own = self.peaks.setdefault((spec.config or BASELINE).key, [])
        own.append((500 + 7 * (len(own) % 4)) * 2**20)
        peak = PeakMemory(host_bytes=PROBE_BYTES if spec.purpose == "probe" else own[-1])
        return result.replace(measurement=result.measurement.replace(peak_memory=peak))


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> SearchFolder:
    run = run_simulated(
        UnevenMachine(noise=0.01), tmp_path_factory.mktemp("uneven"), budget=400.0, open_study=UnsavedStudy
    )
    run.profile.save(run.folder.profile)
    return run.folder


def find_launches(place: SearchFolder, purpose: str, *, own: bool) -> list[TrialResult]:
    return [
        one
        for one in place.read_all_trials()
        if one.spec.purpose == purpose and (one.spec.config == BASELINE) is own and one.measurement is not None
    ]


@pytest.mark.slow
def test_the_rate_is_that_of_the_proof_and_the_memory_that_of_every_launch(searched: SearchFolder) -> None:
    profile = Profile.load(searched.profile)
    assert profile.verdict == "improved"
    record = searched.read_finals()
    assert record is not None
    numbers = {one.baseline for look in record.looks if look.candidate == profile.config for one in look.rounds}
    beside = [one for one in find_launches(searched, "final", own=True) if one.spec.number in numbers]
    finals = [one.measurement.samples_per_second for one in beside]  # type: ignore[union-attr]
    launches = [*find_launches(searched, "measure", own=True), *find_launches(searched, "final", own=True)]
    largest = max(one.measurement.peak_memory.host_bytes for one in launches)  # type: ignore[union-attr]
    assert profile.evidence.baseline_samples_per_second == pytest.approx(fmean(finals))
    assert profile.baseline_memory == PeakMemory(host_bytes=largest)
    assert largest < PROBE_BYTES
    trials = [one for one in searched.read_all_trials() if one.measurement is not None]
    for config, memory in [(profile.config, profile.memory), *((one.config, one.memory) for one in profile.pareto)]:
        own = [one.measurement.peak_memory.host_bytes for one in trials if one.spec.config == config]  # type: ignore[union-attr]
        assert memory == PeakMemory(host_bytes=max(own))


def test_without_a_proof_the_rate_is_that_of_the_search(tmp_path: Path) -> None:
    machine = UnevenMachine(speed=lambda _config: 1.0, noise=0.03)
    run = run_simulated(machine, tmp_path, budget=60.0, open_study=UnsavedStudy)
    assert run.profile.evidence.pairs == 0
    rates = [one.measurement.samples_per_second for one in find_launches(run.folder, "measure", own=True)]  # type: ignore[union-attr]
    assert len(rates) > 1
    assert run.profile.evidence.baseline_samples_per_second == pytest.approx(fmean(rates))
    assert run.profile.memory == run.profile.baseline_memory


def _show(place: SearchFolder) -> str:
    return "\n".join(line.plain for line in list_answer(Profile.load(place.profile)))


def _notebook(place: SearchFolder) -> str:
    return NotebookProfile.load(place.profile)._repr_html_()


def _text(place: SearchFolder) -> str:
    return CliRunner().invoke(app, ["report", "--text", str(place.path)]).stdout


def _page(place: SearchFolder) -> str:
    return re.sub(r"<[^>]+>", " ", render_search(place.path))


@pytest.mark.parametrize("surface", [_show, _notebook, _text, _page])
def test_every_surface_shows_them(searched: SearchFolder, surface: Callable[[SearchFolder], str]) -> None:
    profile, text = Profile.load(searched.profile), surface(searched)
    assert profile.memory is not None
    assert profile.baseline_memory is not None
    assert format_rate(profile.evidence.baseline_samples_per_second or 0.0) in text
    assert format_bytes(profile.baseline_memory.used_bytes) in text
    assert format_bytes(profile.memory.used_bytes) in text


def test_the_table_of_launches_holds_each_against_that_rate(searched: SearchFolder) -> None:
    profile, probe = Profile.load(searched.profile), searched.read_probe()
    assert probe is not None
    rate = profile.evidence.baseline_samples_per_second or math.nan
    trials = searched.read_all_trials()
    rows = {row.number: row for row in list_trials(trials, BASELINE, baseline_rate=rate)}
    for trial in trials:
        if trial.measurement is None:
            continue
        expected = typeset_factor(trial.measurement.samples_per_second / rate)
        is_own = trial.spec.config in (None, BASELINE)
        assert rows[trial.spec.number].ratio == ("\N{EN DASH}" if is_own else expected)
    assert dict(list_figures(profile, probe))["your settings"] == format_rate(rate)
