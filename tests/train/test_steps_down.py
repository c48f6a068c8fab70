"""What is done about a fault: the smallest safe step down, or nothing where none of ours would help."""

from __future__ import annotations

from typing import Any

import pytest
import record_factory

from autotune.records.config import TrainConfig
from autotune.records.run import RunPlan, StepDown
from autotune.sentences.settings import describe_exchanges
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.steps_down import (
    AdjustableKnobs,
    Fault,
    choose_step_down,
    script_knobs,
    workload_knobs,
)

BASELINE = TrainConfig(micro_batch_size=64, num_workers=2)
TUNED = BASELINE.replace(
    micro_batch_size=32,
    gradient_accumulation_steps=2,
    precision="bf16",
    compile_mode="default",
    num_workers=4,
    activation_checkpointing="selective",
    host_allocator="jemalloc",
    user_knobs={"implementation": "fast"},
)


def make_plan(config: TrainConfig = TUNED, baseline: TrainConfig = BASELINE, *earlier: StepDown) -> RunPlan:
    return record_factory.make_plan(config, baseline_config=baseline, epochs=3, step_downs=earlier)


def earlier(cause: str, action: Any, *, step: int = 10, config: TrainConfig = TUNED) -> StepDown:
    return StepDown(step=step, resumed_step=step, cause=cause, detail="", action=action, sentence="", config=config)


def choose(
    cause: str, plan: RunPlan, *, step: int = 20, can_recompute: bool = False, policy: TrainPolicy = TRAIN_POLICY
) -> tuple[str, TrainConfig] | None:
    knobs = workload_knobs(can_recompute=can_recompute)
    choice = choose_step_down(Fault(cause, "", step), plan, knobs, policy=policy)
    return None if choice is None else (choice.action, choice.config)


@pytest.mark.parametrize(
    ("cause", "micro", "accumulation", "smaller"),
    [
        ("oom-device", 64, 1, 32),
        ("oom-device", 32, 2, 16),
        ("oom-device", 3, 1, 1),
        ("oom-device", 9, 1, 3),
        ("oom-device", 7, 1, 1),
        ("oom-device", 12, 5, 6),
        ("oom-device", 2, 1, 1),
        ("oom-host", 12, 5, 6),
        ("oom-killed", 12, 5, 6),
        ("allocator-thrash", 12, 5, 6),
    ],
)
def test_less_memory_is_a_smaller_divisor_of_the_same_effective_batch(
    cause: str, micro: int, accumulation: int, smaller: int
) -> None:
    config = TUNED.replace(micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    found = choose(cause, make_plan(config))
    assert found is not None
    action, changed = found
    assert (action, changed.micro_batch_size) == ("fewer-samples", smaller)
    assert changed.effective_batch_size == micro * accumulation
    assert changed.replace(micro_batch_size=micro, gradient_accumulation_steps=accumulation) == config


def test_one_sample_is_recomputed_as_far_as_the_model_can_be() -> None:
    config = TUNED.replace(micro_batch_size=1, gradient_accumulation_steps=64, activation_checkpointing="off")
    assert choose("oom-device", make_plan(config)) is None
    for wanted in ("selective", "full"):
        found = choose("oom-device", make_plan(config), can_recompute=True)
        assert found == ("recompute", config.replace(activation_checkpointing=wanted))
        config = found[1]
    assert choose("oom-device", make_plan(config), can_recompute=True) is None


@pytest.mark.parametrize("cause", ["dataloader-worker-died", "dataloader-worker-hung", "shm"])
def test_workers_get_a_second_chance_and_no_third_one(cause: str) -> None:
    assert choose(cause, make_plan()) == ("again", TUNED)
    given_up = ("no-workers", TUNED.replace(num_workers=0, persistent_workers=False))
    assert choose(cause, make_plan(TUNED, BASELINE, earlier(cause, "again"))) == given_up
    long_ago = make_plan(TUNED, BASELINE, earlier(cause, "again"))
    assert choose(cause, long_ago, step=11 + TRAIN_POLICY.retry_within_steps) == ("again", TUNED)
    assert choose(cause, long_ago, step=15, policy=TrainPolicy(retry_within_steps=4)) == ("again", TUNED)
    assert choose(cause, make_plan(TUNED.replace(num_workers=0))) is None


@pytest.mark.parametrize("cause", ["compile-error", "not-supported"])
def test_what_does_not_run_here_is_left_out_bit_by_bit(cause: str) -> None:
    eager = TUNED.replace(compile_mode="off")
    assert choose(cause, make_plan()) == ("eager", eager)
    assert choose(cause, make_plan(eager)) == ("baseline", BASELINE.replace(host_allocator="jemalloc"))
    assert choose(cause, make_plan(BASELINE)) is None


def test_an_error_in_the_first_step_may_be_the_settings_own() -> None:
    assert choose("user-error", make_plan(), step=0) == ("eager", TUNED.replace(compile_mode="off"))
    assert choose("user-error", make_plan(), step=1) is None
    assert choose("user-error", make_plan(BASELINE), step=0) is None


@pytest.mark.parametrize("cause", ["non-finite", "skipped-steps"])
def test_arithmetic_goes_back_and_the_rest_stays(cause: str) -> None:
    found = choose(cause, make_plan())
    assert found == ("baseline-numerics", TUNED.replace(precision="fp32", compile_mode="off"))
    assert choose(cause, make_plan(found[1])) is None


@pytest.mark.parametrize("cause", ["drift-gradients", "drift-loss"])
def test_drift_goes_back_to_the_baseline_in_this_process(cause: str) -> None:
    found = choose(cause, make_plan())
    assert found == ("baseline", BASELINE.replace(host_allocator="jemalloc"))
    assert choose(cause, make_plan(BASELINE)) is None


def test_what_was_given_up_does_not_come_back_with_the_baseline() -> None:
    smaller = TUNED.replace(micro_batch_size=16, gradient_accumulation_steps=4, num_workers=0)
    plan = make_plan(
        TUNED,
        BASELINE,
        earlier("oom-device", "fewer-samples", config=smaller),
        earlier("shm", "no-workers", config=smaller),
    )
    found = choose("drift-loss", plan)
    assert found is not None
    assert found[1] == BASELINE.replace(
        micro_batch_size=16, gradient_accumulation_steps=4, num_workers=0, host_allocator="jemalloc"
    )


def test_another_effective_batch_that_was_allowed_is_kept() -> None:
    larger = TUNED.replace(micro_batch_size=128, gradient_accumulation_steps=2, learning_rate_scale=2.0)
    found = choose("drift-gradients", make_plan(larger))
    assert found is not None
    assert (found[1].micro_batch_size, found[1].gradient_accumulation_steps) == (64, 4)
    assert found[1].learning_rate_scale == 2.0


@pytest.mark.parametrize("cause", ["crash-signal", "device-error"])
def test_a_process_that_died_is_started_again_and_then_with_the_baseline(cause: str) -> None:
    assert choose(cause, make_plan()) == ("again", TUNED)
    found = choose(cause, make_plan(TUNED, BASELINE, earlier(cause, "again")))
    assert found == ("baseline", BASELINE.replace(host_allocator="jemalloc"))
    assert choose(cause, make_plan(BASELINE, BASELINE, earlier(cause, "again", config=BASELINE))) is None


@pytest.mark.parametrize("cause", ["user-error", "no-result", ""])
def test_the_targets_own_errors_are_its_own(cause: str) -> None:
    assert choose(cause, make_plan()) is None


def test_changes_are_told_one_by_one() -> None:
    changed = TUNED.replace(micro_batch_size=16, gradient_accumulation_steps=4)
    assert describe_exchanges(TUNED, changed) == "micro_batch 32 -> 16, accumulation 2 -> 4"
    assert describe_exchanges(TUNED, TUNED) == ""


SCRIPT = TrainConfig(micro_batch_size=8)
FLAGS = frozenset({"micro_batch_size", "gradient_accumulation_steps", "num_workers"})
ALL = script_knobs(FLAGS, knows_loaders=True)
NONE = script_knobs(frozenset(), knows_loaders=False)


@pytest.mark.parametrize(
    ("cause", "changes", "knobs", "action"),
    [
        ("oom-host", {"micro_batch_size": 16, "precision": "bf16"}, ALL, "fewer-samples"),
        ("oom-device", {"micro_batch_size": 1, "precision": "bf16"}, ALL, "baseline"),
        ("oom-killed", {"precision": "bf16"}, NONE, "baseline"),
        ("oom-device", {}, NONE, None),
        ("shm", {"num_workers": 4}, ALL, "again"),
        ("dataloader-worker-died", {}, NONE, "again"),
        ("dataloader-worker-died", {}, ALL, None),
        ("dataloader-worker-died", {"precision": "bf16"}, NONE, None),
        ("compile-error", {"compile_mode": "default"}, NONE, "eager"),
        ("compile-error", {}, NONE, None),
        ("not-supported", {"precision": "bf16", "compile_mode": "default"}, NONE, "baseline"),
        ("device-error", {"precision": "bf16"}, NONE, "again"),
        ("user-error", {"precision": "bf16"}, ALL, None),
        ("inference-tensor", {"precision": "bf16"}, ALL, None),
    ],
)
def test_a_script_is_stepped_down_as_far_as_it_can_be_set(
    cause: str, changes: dict[str, Any], knobs: AdjustableKnobs, action: str | None
) -> None:
    choice = choose_step_down(Fault(cause, "", 0), make_plan(SCRIPT.replace(**changes), SCRIPT), knobs)
    assert (choice.action if choice else None) == action


@pytest.mark.parametrize("knobs", [ALL, NONE])
def test_workers_of_a_script_that_cannot_be_set_go_with_all_else(knobs: AdjustableKnobs) -> None:
    config = SCRIPT.replace(num_workers=2, precision="bf16")
    plan = make_plan(config, SCRIPT, earlier("shm", "again", step=0, config=config))
    choice = choose_step_down(Fault("shm", "", 0), plan, knobs)
    assert choice is not None
    assert choice.config == (config.replace(num_workers=0) if knobs is ALL else SCRIPT)


def test_once_more_the_same_is_no_advice_for_later() -> None:
    plan = make_plan(SCRIPT.replace(precision="bf16", num_workers=4), SCRIPT)
    crash = choose_step_down(Fault("crash-signal", "", 5), plan, NONE, repeats=False)
    assert crash is not None
    assert crash.action == "baseline"
    workers = choose_step_down(Fault("dataloader-worker-died", "", 5), plan, ALL, repeats=False)
    assert workers is not None
    assert (workers.action, workers.config.num_workers) == ("no-workers", 0)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("reduce-overhead", "default"),
        ("max-autotune", "max-autotune-no-cudagraphs"),
        ("default", "default"),
        ("off", "off"),
    ],
)
def test_gradients_that_are_accumulated_are_no_cuda_graphs(before: str, after: str) -> None:
    found = choose("oom-device", make_plan(BASELINE.replace(compile_mode=before)))
    assert found is not None
    assert (found[1].gradient_accumulation_steps, found[1].compile_mode) == (2, after)
