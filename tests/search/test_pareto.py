"""Throughput against memory: what no other setting beats in both."""

from __future__ import annotations

import math

from record_factory import make_profile
from simulated import BASELINE, Machine, make_judged, make_report

from autotune.knobs import Facts
from autotune.presets import load_presets
from autotune.records import PeakMemory, TrainConfig
from autotune.search.answer.pareto import find_pareto
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Ranking
from autotune.sentences.answer import describe_saving, list_evidence
from autotune.space import SearchSpace, build_space

BF16 = BASELINE.replace(precision="bf16")
WORKERS = BASELINE.replace(num_workers=2)
SPLIT = BASELINE.replace(micro_batch_size=8, gradient_accumulation_steps=4)


def make_space() -> SearchSpace:
    report = make_report(Machine())
    return build_space(Facts(target=report.target, hardware=report.hardware))


def launch(config: TrainConfig, score: float, host: int, device: int | None = None) -> Judged:
    judged = make_judged(config, score)
    assert judged.result.measurement is not None
    measurement = judged.result.measurement.replace(peak_memory=PeakMemory(host_bytes=host, device_bytes=device))
    return Judged(judged.result.replace(measurement=measurement), judged.score)


def rank(*launches: Judged) -> Ranking:
    return Ranking(launches, BASELINE)


def test_each_needs_less_than_every_faster_one() -> None:
    ranking = rank(
        launch(BASELINE, 0.0, 1000), launch(BF16, 0.3, 900), launch(WORKERS, 0.1, 1500), launch(SPLIT, -0.2, 600)
    )
    front = find_pareto(ranking, make_space())
    assert [one.config for one in front] == [BF16, SPLIT]
    assert [one.memory.host_bytes for one in front] == [900, 600]
    assert math.isclose(front[1].speedup, math.exp(-0.2))


def test_it_is_the_devices_memory_where_there_is_one_and_the_largest_of_all_launches() -> None:
    ranking = rank(
        launch(BASELINE, 0.0, 10, 1000),
        launch(BF16, 0.3, 10, 900),
        launch(SPLIT, -0.2, 99, 600),
        launch(SPLIT, -0.2, 9, 950),
    )
    assert [one.config for one in find_pareto(ranking, make_space())] == [BF16]


def test_a_hundredth_less_is_no_saving() -> None:
    ranking = rank(launch(BASELINE, 0.0, 1000), launch(SPLIT, -0.2, 985))
    assert [one.config for one in find_pareto(ranking, make_space())] == [BASELINE]


def test_presets_on_it_are_named() -> None:
    space = make_space()
    presets = {one.name: space.keep(one.apply_to(BASELINE)) for one in load_presets()}
    assert presets["low-memory"] != BASELINE
    ranking = rank(launch(BASELINE, 0.0, 1000), launch(presets["low-memory"], -0.2, 500))
    front = find_pareto(ranking, space, load_presets())
    assert "low-memory" in front[-1].presets
    assert front[0].presets == ()  # what is left of a preset that changes nothing is none


def test_what_needs_much_less_is_told() -> None:
    space = make_space()
    front = find_pareto(rank(launch(BASELINE, 0.0, 1000 * 2**20), launch(SPLIT, -0.2, 600 * 2**20)), space)
    profile = make_profile(
        baseline_config=BASELINE, config=BASELINE, memory=PeakMemory(host_bytes=1000 * 2**20), pareto=front
    )
    told = describe_saving(profile)
    assert told is not None
    assert told.startswith("least memory that was read: 600 MiB at 0.82x with micro_batch=8 ")
    assert told in list_evidence(profile)
    assert describe_saving(profile.replace(memory=PeakMemory(host_bytes=620 * 2**20))) is None
    assert describe_saving(profile.replace(pareto=front[:1])) is None
