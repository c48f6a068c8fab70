"""`autotune selftest`: replayed in seconds, real searches on request."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.cli.selftest import is_fooled, refuse_false_claims
from autotune.errors import MachineError
from autotune.records import write_record
from autotune.records.selftest import RecordedLaunches, SelftestReport, Tally

COMMAND = [sys.executable, "-P", "-m", "autotune", "selftest"]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        cwd=folder,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def tally(**changes: object) -> Tally:
    fields: dict[str, object] = {
        "truth": 1.0,
        "noise": "quiet",
        "runs": 1000,
        "claims": 0,
        "overclaims": 0,
        "with_finals": 500,
        "covered": 480,
        "launches": 9000,
        "raced": 3,
        "measured_fraction": 0.6,
        "worst_false_rate": 0.003,
    }
    return Tally(**(fields | changes))  # type: ignore[arg-type]


@pytest.mark.slow
def test_replayed_searches_are_counted_in_a_table(tmp_path: Path) -> None:
    shown = run("--aa", "--replay", "2", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].startswith("nothing is faster, every claim is false (")
    assert [line.split()[0] for line in lines[2:]] == ["quiet", "spiky", "drifting", "noisy", "loaded"]
    assert all(line.split()[1:3] == ["1.00x", "2"] for line in lines[2:])
    assert max(map(len, lines)) <= 80
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_counts_are_json_too_and_recorded_launches_are_replayed_beside(tmp_path: Path) -> None:
    rng = random.Random(0)
    launches = tuple(tuple(rng.gauss(0.0, 0.02) for _ in range(8)) for _ in range(40))
    write_record(tmp_path / "launches.json", RecordedLaunches(launches=launches))
    shown = run("--power", "--replay", "2", "--recorded", "launches.json", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (report,) = (SelftestReport.model_validate_json(json.dumps(one)) for one in json.loads(shown.stdout))
    assert report.kind == "power"
    assert {one.noise for one in report.tallies} == {"quiet", "spiky", "drifting", "noisy", "loaded", "recorded"}
    assert sorted({one.truth for one in report.tallies}) == pytest.approx([1.03, 1.05, 1.10, 1.20])
    assert all(one.runs == 2 for one in report.tallies)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(["--recorded", "nowhere.json"], "nowhere.json", marks=pytest.mark.slow),
        (["--budget", "40"], "--budget '40' is not a duration with a unit"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    shown = run("--aa", "--replay", "1", *arguments, folder=tmp_path)
    assert shown.returncode in (2, 7)
    assert message in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_too_few_recorded_launches_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_record(tmp_path / "few.json", RecordedLaunches(launches=((0.0, 0.0, 0.0),)))
    shown = run("--aa", "--replay", "1", "--recorded", "few.json", folder=tmp_path)
    assert shown.returncode == 2
    assert "are too few: give 20" in shown.stderr
    assert "--record FILE" in shown.stderr


@pytest.mark.parametrize(
    ("changes", "fooled"),
    [
        ({}, False),
        ({"overclaims": 3}, False),
        ({"overclaims": 6}, True),
        ({"overclaims": 1, "runs": 60}, False),
        ({"overclaims": 2, "runs": 60}, True),
        ({"truth": 1.05, "overclaims": 15}, False),
        ({"truth": 1.05, "overclaims": 25}, True),
    ],
)
def test_more_false_claims_than_chance_allows_fail_the_self_test(changes: dict[str, object], fooled: bool) -> None:
    counted = tally(**changes)
    assert is_fooled(counted) == fooled
    report = SelftestReport(kind="aa", tallies=(tally(), counted), elapsed_seconds=1.0)
    if not fooled:
        refuse_false_claims([report])
        return
    with pytest.raises(MachineError, match="claimed more than there is"):
        refuse_false_claims([report])


@pytest.mark.slow
def test_a_real_search_over_placebos_claims_nothing_and_leaves_its_launches(tmp_path: Path) -> None:
    shown = run("--aa", "--runs", "1", "--budget", "50s", "--record", "launches.json", "--json", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    (report,) = json.loads(shown.stdout)
    (outcome,) = report["outcomes"]
    assert outcome["verdict"] != "improved"
    assert outcome["noise"] == "real"
    assert json.loads((tmp_path / "launches.json").read_text())["launches"]
