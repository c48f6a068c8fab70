"""Recorded tables: kept and read again, what they say the truth is, what is left as noise."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import math
import random
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import record_factory
from record_factory import make_block, make_result, make_spec

from autotune.errors import UsageError
from autotune.records import Measurement, PeakMemory, TrainConfig
from autotune.records.measurement import Interference
from autotune.records.trial import TrialStatus
from autotune.selftest.machines import MACHINES
from autotune.selftest.replay import Simulation, search
from autotune.selftest.simulated_target import TARGET, make_report
from autotune.selftest.table import (
    RecordedLaunch,
    Table,
    TableHeader,
    TableWorld,
    format_line,
    make_launch,
    parse_table,
    read_table,
)

NAME = "user_knobs.planted"


def make_measurement(log_rate: float) -> Measurement:
    """Return the timing of a launch, with the log of its samples per second."""
    block = make_block(100, 100 / math.exp(log_rate), steps=1)
    return record_factory.make_measurement((block,) * 4, step_seconds=(0.1, 0.1), peak_memory=PeakMemory(host_bytes=1))


def make_table(*launches: tuple[object, float | None]) -> Table:
    """Return a table of launches: value of the only knob (0 is the baseline's) and log rate; None where it fails."""
    header = TableHeader(
        name="toy",
        recorded_on="2026-11-23",
        report=make_report((0, 1, 2), make_measurement(0.0)),
        choices={NAME: (0, 1, 2)},
        space_size=3,
        recorded_size=3,
        measure_seconds=1.5,
    )
    kept = [
        RecordedLaunch(
            changes={NAME: value} if value else {},  # type: ignore[dict-item]
            status=TrialStatus.CRASHED if rate is None else TrialStatus.COMPLETED,
            elapsed_seconds=3.0,
            measurement=None if rate is None else make_measurement(rate),
        )
        for value, rate in launches
    ]
    return Table(header, tuple(kept))


def change(table: Table, value: int) -> TrainConfig:
    return next(config for config in table.by_config if config.user_knobs["planted"] == value)


def test_a_truth_is_relative_to_the_baseline_at_its_time() -> None:
    table = make_table((0, 5.0), (1, 5.2), (0, 5.0), (0, 4.0), (0, 4.0), (1, 4.2), (0, 4.0))
    assert table.truths[table.baseline] == 0.0
    assert table.truths[change(table, 1)] == pytest.approx(0.2, abs=0.01)


def test_a_config_that_ever_failed_has_no_truth() -> None:
    table = make_table((0, 5.0), (1, 5.2), (2, 5.5), (1, None), (0, 5.0))
    assert change(table, 1) not in table.truths
    assert table.truths[change(table, 2)] == pytest.approx(0.5)


def test_what_is_left_is_the_noise_in_the_order_of_the_launches() -> None:
    noise = (0.01, -0.02, 0.03, -0.01, 0.0, -0.01)
    table = make_table(*((place % 2, 5.0 + 0.3 * (place % 2) + value) for place, value in enumerate(noise)))
    left = [statistics.fmean(blocks) for blocks in table.residuals]
    assert len(left) == 6
    assert left == pytest.approx([-value for value in noise], abs=0.02)
    assert max(left) - min(left) > 0.03


def test_what_is_kept_of_a_result_is_its_blocks() -> None:
    spec = make_spec(TrainConfig(num_workers=2), target=TARGET)
    measured = make_measurement(1.0)
    watched = tuple(block.replace(interference=Interference()) for block in measured.blocks)
    measured = measured.replace(blocks=watched)
    result = make_result(spec, elapsed_seconds=2.0, measurement=measured)
    launch = make_launch(result, TrainConfig())
    assert launch.changes == {"num_workers": 2}
    assert launch.measurement is not None
    assert launch.measurement.step_seconds == ()
    assert {block.interference for block in launch.measurement.blocks} == {None}


def test_a_table_is_read_as_it_was_written_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    table = make_table((0, 5.0), (1, 5.2), (0, None))
    text = "".join(map(format_line, (table.header, *table.launches)))
    (tmp_path / "toy.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "toy.jsonl").write_text(text + '{"changes": {"')
    assert read_table(tmp_path / "toy.jsonl.gz") == read_table(tmp_path / "toy.jsonl") == table


@pytest.mark.parametrize("text", ["", '{"half', "{}\n", '{"schema_version": 99}\n', "[]\n", "\x00\n"])
def test_what_is_no_table_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_table(text.splitlines(keepends=True), "toy.jsonl")
    assert "toy.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_not_packed_is_named(tmp_path: Path) -> None:
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    for name in ("none.jsonl.gz", "plain.jsonl.gz"):
        with pytest.raises(UsageError, match=name):
            read_table(tmp_path / name)


def quiet_paces() -> Iterator[float]:
    return itertools.repeat(0.0)


def test_a_table_has_no_metrics_to_judge_by() -> None:
    table = make_table((0, 5.0), (1, 5.3))
    target = table.header.report.target.replace(metrics={"accuracy": "maximize"})
    measured = table.header.replace(report=table.header.report.replace(target=target))
    world = TableWorld(dataclasses.replace(table, header=measured), quiet_paces)
    assert world.facts.metrics == {}
    assert world.make_report(measured.report.measurement).target == world.facts


@pytest.mark.parametrize(("gain", "verdict"), [(0.3, "improved"), (-0.3, "keep")])
def test_a_search_over_a_table_finds_what_was_recorded(gain: float, verdict: str, tmp_path: Path) -> None:
    table = make_table(*((place % 2, 5.0 + gain * (place % 2)) for place in range(12)), (2, None), (0, 5.0))
    simulation = Simulation(TableWorld(table, quiet_paces), database=tmp_path / "study.db")
    profile = search(simulation, seed=0, budget_seconds=300.0).profile
    assert profile.verdict == verdict
    assert profile.evidence.trials["crashed"] == 1
    if verdict == "improved":
        assert profile.config == change(table, 1)
        assert profile.speedup is not None
        assert profile.speedup.estimate == pytest.approx(math.exp(gain), rel=1e-6)


def test_searches_over_one_table_differ_by_their_noise_alone(tmp_path: Path) -> None:
    table = make_table(*((place % 2, 5.0 + 0.3 * (place % 2)) for place in range(12)), (2, None), (0, 5.0))

    def estimate(seed: int) -> float:
        noise = MACHINES["noisy"](random.Random(seed))
        simulation = Simulation(TableWorld(table, noise), database=tmp_path / "study.db")
        profile = search(simulation, seed=0, budget_seconds=300.0).profile
        assert profile.speedup is not None
        return profile.speedup.estimate

    assert estimate(1) == estimate(1)
    assert estimate(1) != estimate(2)


def test_a_config_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    table = make_table((0, 5.0), (1, 5.2), (0, 5.0))
    with pytest.raises(UsageError, match=r"toy holds 3 of 3 configs, and not .*\"planted\": 2"):
        search(Simulation(TableWorld(table, quiet_paces), database=tmp_path / "study.db"), seed=0, budget_seconds=300.0)


def test_trials_of_the_loss_check_may_take_their_time(tmp_path: Path) -> None:
    table = make_table(*((place % 2, 5.0 + 0.3 * (place % 2)) for place in range(12)), (2, None), (0, 5.0))

    def gate_seconds(price: float | None) -> float:
        simulation = Simulation(
            TableWorld(table, quiet_paces),
            gate_seconds=None if price is None else lambda _spec: price,
            database=tmp_path / "study.db",
        )
        return search(simulation, seed=0, budget_seconds=900.0).log.gate_seconds

    assert gate_seconds(20.0) >= 20.0 > gate_seconds(None)
