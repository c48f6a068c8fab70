"""A search of a script on the simulated machine: a process for each seed, nothing learned is nothing shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from simulated import BASELINE, Machine, run_simulated

from autotune.drift.gate.screen import ALLOCATORS
from autotune.drift.policy import USUAL_LOSS_CHECK
from autotune.format import format_factor_down
from autotune.records import TrainConfig
from autotune.records.config import changed_fields, get_knob
from autotune.records.script import Script
from autotune.targets.script import read_script


@pytest.fixture
def script(tmp_path: Path) -> Script:
    (tmp_path / "train.py").write_text("import torch\n")
    return read_script([sys.executable, "train.py"])


@pytest.mark.slow
def test_every_seed_of_a_script_is_a_process_of_its_own(tmp_path: Path, script: Script) -> None:
    machine = Machine(facts={"training_loaders": ("Data[10] by RandomSampler",)})
    run = run_simulated(machine, tmp_path, script=script, budget=600)
    assert run.profile.verdict == "improved"
    learned = [spec for spec in machine.specs if spec.purpose == "quality"]
    seeds = {spec.seeds for spec in learned}
    assert seeds == {(seed,) for seed in range(len(seeds))}
    assert USUAL_LOSS_CHECK.seeds <= len(seeds) <= USUAL_LOSS_CHECK.most_seeds
    # An allocator alone is trained once at most, where no launches have shown that it loses nothing.
    configs = [spec.config for spec in learned if spec.config is not None]
    alone = [one for one in configs if one != BASELINE and set(changed_fields(one, BASELINE)) <= ALLOCATORS]
    arms = {one.to_json() for one in configs if one not in alone}
    assert len(alone) == len({one.to_json() for one in alone})
    assert len(learned) == USUAL_LOSS_CHECK.seeds * len(arms) + len(alone)
    trained = [check for check in run.profile.quality if check.test in ("paired-losses", "exact-losses")]
    assert trained
    assert all(check.seeds == USUAL_LOSS_CHECK.seeds for check in trained)
    assert run.profile.target.training_loaders == ("Data[10] by RandomSampler",)


def test_trials_know_what_the_script_does_by_itself(tmp_path: Path, script: Script) -> None:
    machine = Machine(facts={"training_loaders": ("Data[10] by RandomSampler",)})
    run_simulated(machine, tmp_path, script=script)
    first, *others = machine.specs
    assert (first.purpose, first.baseline) == ("probe", None)
    assert all(spec.baseline == BASELINE for spec in others)
    assert {spec.training_loaders for spec in others} == {("Data[10] by RandomSampler",)}


@pytest.mark.slow
def test_a_workload_still_learns_all_seeds_in_one_process(tmp_path: Path) -> None:
    machine = Machine()
    run_simulated(machine, tmp_path)
    learned = [spec for spec in machine.specs if spec.purpose == "quality"]
    assert len({spec.seeds for spec in learned}) == 1
    assert USUAL_LOSS_CHECK.seeds <= len(learned[0].seeds) <= USUAL_LOSS_CHECK.most_seeds
    assert all(spec.baseline is None for spec in machine.specs)


@pytest.mark.slow
def test_where_nothing_is_learned_losses_judge_nothing(tmp_path: Path, script: Script) -> None:
    machine = Machine(learns=False, gradient_error=lambda config: 0.0 if config == BASELINE else 0.03)
    run = run_simulated(machine, tmp_path, script=script, budget=600)
    assert run.profile.verdict != "improved"
    assert run.profile.config == BASELINE
    assert {check.test: check.verdict for check in run.profile.quality} == {
        "schedule": "non-inferior",
        "gradients": "inconclusive",
        "paired-losses": "inconclusive",
    }
    assert "nothing can be judged" in run.profile.quality[-1].reason


@pytest.mark.slow
def test_where_nothing_is_learned_equal_gradients_are_enough(tmp_path: Path, script: Script) -> None:
    run = run_simulated(Machine(learns=False), tmp_path, script=script)
    assert run.profile.verdict == "improved"
    assert {check.test for check in run.profile.quality} == {"schedule", "gradients"}


@pytest.mark.slow
def test_a_knob_that_the_script_fixes_is_never_varied(tmp_path: Path, script: Script) -> None:
    machine = Machine(facts={"fixed": {"precision": "the script casts by itself"}})
    run_simulated(machine, tmp_path, script=script)
    tried = {get_knob(spec.config, "precision") for spec in machine.specs if spec.config is not None}
    assert tried == {"fp32"}


@pytest.mark.slow
def test_a_knob_that_is_exact_elsewhere_is_judged_by_its_losses_here(tmp_path: Path, script: Script) -> None:
    def workers_win(config: TrainConfig) -> float:
        return 1.5 if config.num_workers > 0 else 1.0

    def workers_hurt(config: TrainConfig) -> float:
        return 1.01 if config.num_workers > 0 else 1.0

    machine = Machine(speed=workers_win, loss=workers_hurt, facts={"numerics": {"num_workers": "rounding"}})
    run = run_simulated(machine, tmp_path, script=script)
    assert run.profile.config.num_workers == 0
    assert any("workers=" in note and "training loss worse by +1.00%" in note for note in run.profile.evidence.notes)


def test_what_the_script_wrote_is_named_once(tmp_path: Path, script: Script) -> None:
    run = run_simulated(Machine(written=("out/ckpt.pt", "log.txt")), tmp_path, script=script)
    told = [note for note in run.profile.evidence.notes if "thrown away" in note]
    assert told == ["what the script wrote in its trials was thrown away: log.txt, out/ckpt.pt"]


def test_a_whole_run_gains_less_than_its_steps_where_it_validates_much(tmp_path: Path, script: Script) -> None:
    run = run_simulated(Machine(facts={"aside_fraction": 0.5}), tmp_path, script=script)
    assert run.profile.verdict == "improved"
    low = run.profile.speedup.low
    whole = format_factor_down(1 / (0.5 + 0.5 / low))
    assert any(f"at least {whole} faster" in note for note in run.profile.evidence.notes)
