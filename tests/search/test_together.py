"""A search of several processes: what it begins with, who is refused, what its answer remembers."""

from __future__ import annotations

from typing import Any

import pytest
from record_factory import (
    make_block,
    make_data,
    make_facts,
    make_hardware,
    make_measurement,
    make_model,
    make_profile,
)
from simulated import BASELINE, Machine, run_simulated

from autotune.cli.pages.answer import list_answer
from autotune.cli.target import read_nproc_per_node
from autotune.cli.training_session import choose_ranks
from autotune.distributed.agent import count_ranks, find_cpu_share
from autotune.emit.export.header import list_header
from autotune.errors import TargetError, UsageError
from autotune.explain.run import explain
from autotune.knobs import KNOBS, Facts, most_workers
from autotune.records import Target, TrainConfig, TrialStatus
from autotune.records.config import spread_config
from autotune.records.measurement import Measurement
from autotune.records.script import Script
from autotune.search.launch.together import require_shareable_batch
from autotune.search.run import SearchOptions, run_search
from autotune.search.store.folder import SearchFolder
from autotune.search.store.history import recall
from autotune.train.options import TrainingOptions


def test_every_trial_is_of_all_processes_and_the_answer_remembers_how_many(tmp_path):
    machine = Machine()
    run = run_simulated(machine, tmp_path, world_size=2)
    assert run.profile.verdict == "improved"
    assert run.profile.world_size == 2
    assert {spec.world_size for spec in machine.specs} == {2}
    assert [spec.purpose for spec in machine.specs[:2]] == ["probe", "measure"]
    assert [spec.number for spec in machine.specs] == list(range(len(machine.specs)))
    first = machine.specs[1]
    assert first.config == BASELINE
    assert run.log.judged[0].result.spec == first  # a launch like any other
    report = run.folder.read_probe()
    assert report is not None
    assert report.target.world_size == 2
    assert report.measurement == run.folder.read_trials()[1].measurement
    explained = explain(run.folder, run.profile)
    assert explained.is_proven
    assert explained.config == run.profile.config


def test_a_resumed_search_does_not_begin_anew(tmp_path):
    run = run_simulated(Machine(stop_after=4), tmp_path, world_size=2)
    again = Machine(seed=1)
    resumed = run_simulated(again, tmp_path, folder=run.folder)
    assert resumed.profile.world_size == 2
    assert "probe" not in {spec.purpose for spec in again.specs}
    numbers = [spec.number for spec in again.specs]
    assert min(numbers) > 2
    assert sum(one.result.spec.number == 1 for one in resumed.log.judged) == 1


def test_one_stopped_before_all_processes_were_launched_launches_them(tmp_path):
    with pytest.raises(TargetError):
        run_simulated(Machine(stop_after=2), tmp_path, world_size=2)
    folder = next((tmp_path / ".autotune").glob("toy*"), None)
    assert folder is not None
    again = Machine()
    run_simulated(again, tmp_path, folder=SearchFolder(folder))
    assert (again.specs[0].purpose, again.specs[0].config, again.specs[0].number) == ("measure", BASELINE, 2)


def test_settings_that_fail_with_several_processes_are_told(tmp_path):
    machine = Machine()
    machine.fate = lambda _config: TrialStatus.CRASHED if len(machine.specs) == 2 else TrialStatus.COMPLETED
    with pytest.raises(TargetError, match="fails with its own settings"):
        run_simulated(machine, tmp_path, world_size=2)


@pytest.mark.parametrize(
    ("baseline", "has_batch_norm", "is_refused"),
    [
        (TrainConfig(micro_batch_size=32), False, False),
        (TrainConfig(micro_batch_size=32, gradient_accumulation_steps=2), True, True),
        (TrainConfig(micro_batch_size=32), True, False),  # a synchronised one has the same samples at a time
    ],
)
def test_statistics_over_a_batch_are_of_the_same_samples_or_refused(baseline, has_batch_norm, is_refused):
    facts = make_facts(baseline=baseline, model=make_model(has_batch_norm=has_batch_norm), world_size=2)
    if is_refused:
        with pytest.raises(UsageError, match="--nproc-per-node 2: several processes would learn something else"):
            require_shareable_batch(facts)
    else:
        require_shareable_batch(facts)


def test_an_effective_batch_that_does_not_divide_is_refused():
    with pytest.raises(UsageError, match="cannot be shared out evenly over 5 processes"):
        require_shareable_batch(make_facts(baseline=TrainConfig(micro_batch_size=32), world_size=5))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("micro", "steps"), [(32, 1), (16, 2), (8, 4), (24, 1)])
def test_no_two_micro_batches_come_to_the_same(size, micro, steps):
    baseline = TrainConfig(micro_batch_size=micro, gradient_accumulation_steps=steps)
    facts = Facts(target=make_facts(baseline=baseline, world_size=size), hardware=make_hardware())
    row = next(knob for knob in KNOBS if knob.field == "micro_batch_size")
    sizes, _ = row.choices(facts)
    assert baseline.micro_batch_size in sizes
    effective = baseline.effective_batch_size
    configs = [baseline.replace(micro_batch_size=one, gradient_accumulation_steps=effective // one) for one in sizes]
    spread = {spread_config(baseline if one.micro_batch_size == micro else one, size).key for one in configs}
    assert len(spread) == len(sizes)
    assert all(config.effective_batch_size == effective for config in configs)


def test_processes_share_the_cpus(monkeypatch):
    hardware = make_hardware(usable_cpu_count=8)
    row = next(knob for knob in KNOBS if knob.field == "num_threads")
    for size, most in ((1, 8), (2, 4), (16, 1)):
        facts = make_facts(data=make_data(), world_size=size)
        assert most_workers(facts, hardware) == most
        assert max(row.choices(Facts(target=facts, hardware=hardware))[0]) == most
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert find_cpu_share(1) == {}
    assert find_cpu_share(10_000) == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert find_cpu_share(2) == {}  # the user's own


@pytest.mark.slow
def test_what_one_process_has_read_is_no_guess_for_several(tmp_path):
    run_simulated(Machine(), tmp_path, world_size=2, uses_history=True)
    run = run_simulated(Machine(), tmp_path, world_size=1, uses_history=False)
    report = run.folder.read_probe()
    assert report is not None
    assert recall(report, tmp_path).effects == ()
    assert recall(report.replace(target=report.target.replace(world_size=2)), tmp_path).effects


def test_a_number_of_processes_is_read_or_refused():
    assert (read_nproc_per_node("2"), read_nproc_per_node("gpu")) == (2, "gpu")
    for text in ("0", "two", "-1", "1.5"):
        with pytest.raises(UsageError, match="no number of processes"):
            read_nproc_per_node(text)
    assert [count_ranks(*asked) for asked in (("2", 0), ("2", 4), ("gpu", 4))] == [2, 2, 4]
    with pytest.raises(UsageError, match="there are 1 GPUs for 2"):
        count_ranks("2", 1)
    with pytest.raises(UsageError, match="sees no GPU"):
        count_ranks("gpu", 0)
    with pytest.raises(UsageError, match="nproc_per_node is 0"):
        SearchOptions(nproc_per_node=0)


def test_the_answer_says_what_each_process_does(tmp_path):
    profile = make_profile(world_size=2)
    (shown,) = [line.plain for line in list_answer(profile) if "processes" in line.plain]
    assert shown.strip() == "2 processes, each with micro batch 5 x 1"
    assert any("Measured with 2 processes" in line for line in list_header(profile))
    alone = make_profile()
    assert not [line for line in (*map(str, list_answer(alone)), *list_header(alone)) if "processes" in line]


def test_a_resumed_search_has_as_many_processes_as_it_had(tmp_path):
    run_simulated(Machine(stop_after=4), tmp_path, world_size=2)
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    with pytest.raises(UsageError, match="--resume: nproc_per_node was 2 when the search began and is 1 now"):
        run_search("toy.py:workload", SearchOptions(resume=True, nproc_per_node=1), folder=tmp_path)
    with pytest.raises(UsageError, match="--resume: the search was begun by an older version") as caught:
        run_search("toy.py:workload", SearchOptions(resume=True), folder=tmp_path)
    assert "nproc" not in caught.value.message


def test_a_training_takes_as_many_processes_as_its_profile_was_measured_with(tmp_path):
    profile = make_profile(world_size=2)
    profile.save(tmp_path / "best.json")
    asked: Any = tmp_path / "best.json"
    target = run_target(tmp_path)
    assert choose_ranks(None, TrainingOptions(profile=asked), target) == "2"
    assert choose_ranks(None, TrainingOptions(profile=profile), target) == "2"
    assert choose_ranks("1", TrainingOptions(profile=asked), target) is None
    assert choose_ranks("gpu", TrainingOptions(profile=asked), target) == "gpu"
    assert choose_ranks(None, TrainingOptions(), target) is None


def run_target(folder) -> Any:
    return Target(spec="train.py:workload", folder=str(folder))


def test_a_script_has_its_own_launcher(tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    script = Script(command=("python", "train.py"))
    with pytest.raises(UsageError, match="--nproc-per-node is for a workload") as caught:
        run_search(script, SearchOptions(nproc_per_node=2), folder=tmp_path)
    assert "torchrun" in caught.value.hint


def test_the_slowest_process_is_told_from_the_rest(tmp_path):
    blocks = tuple(make_block(rank_seconds=seconds) for seconds in ((1.0, 1.0, 2.0), (1.0, 1.2, 2.0)))
    measured: Measurement = make_measurement().replace(blocks=blocks)
    assert measured.rank_skew == pytest.approx(4.0 / 2.2)
    assert make_measurement().rank_skew is None
