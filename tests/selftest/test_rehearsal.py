"""What a search would do is its own decisions over what is expected; nothing is launched."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from record_factory import make_facts, make_report, make_result, make_spec, make_state

from autotune.cli.pages.forecast import print_forecast
from autotune.errors import UsageError
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.search import KeptProbe, SearchForecast
from autotune.records.trial import LossCurve, Target
from autotune.selftest.rehearsal import rehearse

BASELINE = TrainConfig(micro_batch_size=32, num_threads=2, optimizer_implementation="for-loop")
CURVE = LossCurve(seed=0, losses=tuple(1.0 / step for step in range(1, 40)), samples=1248)


def make_kept(report: ProbeReport | None = None) -> KeptProbe:
    found = report or make_report(target=make_facts(baseline=BASELINE, compute_seconds_per_step=0.03))
    trial = make_result(make_spec(None, purpose="probe"), facts=found.target, curves=(CURVE,), startup_seconds=2.0)
    target = Target(spec="toy.py:workload", folder="/")
    return KeptProbe(made_at=time.time(), target=target, environment={}, report=found, trial=trial)


def forecast(budget_seconds: float = 600.0) -> SearchForecast:
    return rehearse(make_state(), make_kept(), budget_seconds)


@pytest.mark.slow
def test_it_begins_with_the_users_own_settings_and_tries_what_is_expected_to_gain() -> None:
    found = forecast()
    first, second = found.launches[:2]
    assert (first.config, first.speedup) == (found.baseline_config, 1.0)
    assert second.speedup > 1.0
    assert found.leader is not None
    assert max(found.launches, key=lambda one: one.speedup).speedup > 1.05


def test_everything_fits_the_budget() -> None:
    for budget in (120.0, 300.0, 1200.0):
        found = forecast(budget)
        launched = math.fsum(one.seconds for one in found.launches)
        assert launched + found.check_seconds + found.pairs_seconds <= budget
        assert found.pairs >= 3


def test_the_same_probe_gives_the_same_forecast() -> None:
    assert forecast() == forecast()


def test_a_second_launch_finds_its_compilation() -> None:
    seconds: dict[TrainConfig, list[float]] = {}
    for one in forecast(3600.0).launches:
        if one.config.compile_mode != "off":
            seconds.setdefault(one.config, []).append(one.seconds)
    again = [took for took in seconds.values() if len(took) > 1]
    assert again
    assert all(took[1] < took[0] for took in again)


def test_a_budget_that_is_too_small_is_refused_as_the_search_does() -> None:
    with pytest.raises(UsageError, match="too small for this target"):
        forecast(16.0)


def test_it_is_printed_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = forecast()
    print_forecast(found)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a search of 10m would begin so; nothing was launched")
    assert any(line.startswith("  varied: ") for line in lines)
    assert any(line.split()[:3] == ["1", "your", "settings,"] for line in lines)
    assert sum(line.lstrip()[0].isdigit() and "launches:" not in line for line in lines[1:]) == len(found.launches)
    assert "pairs of launches about" in lines[-2]
    assert lines[-1].startswith("  left for more of both: ")


@pytest.mark.slow
def test_without_a_probe_it_says_how_to_make_one(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-m", "autotune", "search", "--dry-run", "demo"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "--dry-run looks ahead from a probe of this training, and none was made in this folder" in done.stderr
    assert "make one: autotune probe autotune.targets.demo:workload" in done.stderr
    assert "Traceback" not in done.stderr
