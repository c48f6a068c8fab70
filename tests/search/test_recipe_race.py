"""The benchmark that races recipes, on a simulated machine: its pairs, its arms that fail, and what it says of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from record_factory import make_target
from simulated import BASELINE, Machine, make_report

from autotune.records.config import TrainConfig
from autotune.records.quality import DriftLimits
from autotune.records.trial import TrialStatus

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import recipes
from race import Course, Outcome

BF16, WORKERS = BASELINE.replace(precision="bf16"), BASELINE.replace(num_workers=1)


def run(machine: Machine, arms: dict[str, TrainConfig], *, rounds: int = 6) -> dict[str, Outcome]:
    course = Course(make_target(), make_report(machine), machine)
    return {outcome.arm: outcome for outcome in course.run(arms, DriftLimits(), rounds=rounds, steps=40)}


def test_each_arm_is_paired_with_the_own_settings() -> None:
    found = run(Machine(), {"recipe": WORKERS, "autotune": BF16})
    assert list(found) == ["own", "recipe", "autotune"]
    assert {len(outcome.samples_per_second) for outcome in found.values()} == {6}
    for arm, ratio in (("recipe", 1.0), ("autotune", 1.5)):
        speedup = found[arm].speedup
        assert speedup is not None
        assert speedup.low < ratio < speedup.high
    against = recipes.compare_with_recipe(list(found.values()))
    assert against is not None
    assert against.low < 1.5 < against.high
    assert recipes.describe_learning(found["autotune"]).startswith("as well")


def test_an_arm_that_learns_worse_says_so_with_the_figure() -> None:
    machine = Machine(loss=lambda config: 1.1 if config.precision == "bf16" else 1.0)
    found = run(machine, {"recipe": BF16, "autotune": WORKERS})
    told = recipes.describe_learning(found["recipe"])
    assert told.startswith("worse: training loss +")
    assert "(limit 0.5 %)" in told


def test_settings_are_not_compared_with_themselves() -> None:
    found = run(Machine(), {"recipe": BF16, "autotune": BASELINE})
    assert found["autotune"].speedup is None
    assert recipes.describe_learning(found["autotune"]) == "the same settings"
    same = run(Machine(), {"recipe": BF16, "autotune": BF16})
    assert recipes.compare_with_recipe(list(same.values())) is None


def test_an_arm_that_fails_has_no_speedup_however_fast_it_was() -> None:
    launches = []

    def fail_later(config: TrainConfig) -> TrialStatus:
        launches.append(config)
        is_late = config == BF16 and launches.count(BF16) > 3
        return TrialStatus.OUT_OF_MEMORY if is_late else TrialStatus.COMPLETED

    found = run(Machine(fate=fail_later), {"recipe": BF16, "autotune": WORKERS})
    assert found["recipe"].speedup is None
    assert "out_of_memory" in found["recipe"].failure
    assert found["autotune"].speedup is not None
    assert recipes.compare_with_recipe(list(found.values())) is None


@pytest.mark.parametrize(("has_gpu", "precision"), [(False, "fp32"), (True, "fp16")])
def test_what_needs_a_gpu_is_left_out_without_one(has_gpu: bool, precision: str) -> None:
    recipe = next(one for one in recipes.RECIPES if one.name == "knowledge_tracing")
    preset = recipes.find_preset(str(recipes.EXAMPLES / recipe.name / recipe.file))

    class Answer:
        baseline_config = BASELINE.replace(user_knobs={"implementation": "sequential"})
        config = baseline_config

    arms = recipes.list_arms(recipe, preset, Answer, has_gpu=has_gpu)
    assert {arm: config.user_knobs["implementation"] for arm, config in arms.items()} == {
        recipes.RECIPE: "wrong-parallel",
        recipes.FAIR: "sequential",
        recipes.FOUND: "sequential",
    }
    assert arms[recipes.FAIR].precision == precision
    assert arms[recipes.FAIR].num_workers == 4
    assert arms[recipes.FAIR].effective_batch_size == BASELINE.effective_batch_size
    assert arms[recipes.RECIPE].gradient_accumulation_steps == 2
