"""Changes that another effective batch makes: their class, putting them back, and the space that allows them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_space import BASELINE, DATA, MODEL, cpu_facts, reasons_of

from autotune.knobs import KNOBS, Facts
from autotune.records import TrainConfig, changed_fields, get_knob
from autotune.records.facts import Additivity
from autotune.space import (
    BATCH_KNOBS,
    SearchSpace,
    build_space,
    canonical,
    classify_changes,
    numerics_of,
    revert_knobs,
    scale_learning_rate,
)

RULES: Any = ("none", "sqrt", "linear")
each_rule = pytest.mark.parametrize("rule", RULES)
TABLE = {knob.field: knob.numerics for knob in KNOBS}
NOT_ADDITIVE = Additivity(error=0.25, reordering=1e-7, limit=1e-4, parts=3)
ADDITIVE = Additivity(error=1e-6, reordering=1e-7, limit=1e-4, parts=3)
SPLIT: dict[str, Any] = {"micro_batch_size": 6, "gradient_accumulation_steps": 2}
LARGER: dict[str, Any] = {"micro_batch_size": 24, "gradient_accumulation_steps": 1, "learning_rate_scale": 2.0}


def freed(**changes: Any) -> Facts:
    """Return facts where the user allows another batch."""
    return dataclasses.replace(cpu_facts(**changes), allowed=frozenset({"batch"}))


# Classes


@pytest.mark.parametrize("field", [field for field in TABLE if field not in BATCH_KNOBS])
def test_a_change_alone_has_the_class_of_its_row(field: str) -> None:
    other = {bool: True, int: 3, float: 2.0}.get(type(get_knob(TrainConfig(), field)))
    value: Any = {
        "precision": "bf16",
        "matmul_precision": "medium",
        "activation_checkpointing": "full",
        "compile_mode": "default",
        "optimizer_implementation": "fused",
        "memory_format": "channels_last",
        "attention_backend": "math",
        "host_allocator": "jemalloc",
        "device_allocator": "expandable-segments",
        "num_threads": 1,
        "distributed_strategy": "fsdp",
        "reshard_after_forward": False,
        "reduce_dtype": "bf16",
    }.get(field, other)
    config = TrainConfig().replace(**{field: value})
    assert classify_changes(config, TrainConfig()) == {field: TABLE[field]}


@pytest.mark.parametrize(
    ("changes", "special", "expected"),
    [
        ({}, {}, {}),
        (SPLIT, {}, {"micro_batch_size": "rounding", "gradient_accumulation_steps": "rounding"}),
        (
            SPLIT,
            {"micro_batch_size": "semantic", "gradient_accumulation_steps": "semantic"},
            {"micro_batch_size": "semantic", "gradient_accumulation_steps": "semantic"},
        ),
        ({"micro_batch_size": 24}, {}, {"micro_batch_size": "semantic"}),
        ({"gradient_accumulation_steps": 2}, {}, {"gradient_accumulation_steps": "semantic"}),
        (
            {"micro_batch_size": 6, "gradient_accumulation_steps": 4, "learning_rate_scale": 2.0},
            {},
            dict.fromkeys(("micro_batch_size", "gradient_accumulation_steps", "learning_rate_scale"), "semantic"),
        ),
        ({"learning_rate_scale": 0.5}, {}, {"learning_rate_scale": "semantic"}),
        ({"precision": "bf16", "num_workers": 2}, {}, {"precision": "rounding", "num_workers": "exact"}),
        ({"precision": "bf16"}, {"precision": "exact"}, {"precision": "exact"}),
        ({"user_knobs": {"width": 16}}, {}, {"user_knobs.width": "semantic"}),
        ({"user_knobs": {"width": 16}}, {"user_knobs.width": "rounding"}, {"user_knobs.width": "rounding"}),
        (
            {"micro_batch_size": 24, "precision": "bf16"},
            {"micro_batch_size": "rounding"},
            {"micro_batch_size": "semantic", "precision": "rounding"},
        ),
    ],
)
def test_every_change_has_a_class(changes: dict[str, Any], special: Any, expected: dict[str, str]) -> None:
    config = BASELINE.replace(**changes)
    assert classify_changes(config, BASELINE, special) == expected
    rank = ["exact", "rounding", "semantic"]
    assert numerics_of(config, BASELINE, special) == max(expected.values(), key=rank.index, default="exact")


# Putting back


@pytest.mark.parametrize("name", sorted(BATCH_KNOBS))
def test_the_batch_is_put_back_as_a_whole(name: str) -> None:
    config = BASELINE.replace(**LARGER, precision="bf16")
    assert revert_knobs(config, BASELINE, [name]) == BASELINE.replace(precision="bf16")


@pytest.mark.parametrize("changes", [SPLIT, LARGER], ids=["split", "larger"])
def test_what_is_put_back_leaves_the_batch_alone(changes: dict[str, Any]) -> None:
    config = BASELINE.replace(**changes, precision="bf16", num_workers=2, user_knobs={"width": 16})
    assert revert_knobs(config, BASELINE, ["precision", "num_workers"]) == BASELINE.replace(
        **changes, user_knobs={"width": 16}
    )
    assert revert_knobs(config, BASELINE, []) == config


def test_an_own_knob_is_put_back_to_the_baselines_value_or_taken_out() -> None:
    baseline = BASELINE.replace(user_knobs={"width": 8})
    config = baseline.replace(user_knobs={"width": 16, "depth": 3}, precision="bf16")
    assert revert_knobs(config, baseline, ["user_knobs.width"]).user_knobs == {"width": 8, "depth": 3}
    assert revert_knobs(config, baseline, ["user_knobs.depth"]).user_knobs == {"width": 16}


def test_what_has_no_effect_any_more_is_put_back_as_well() -> None:
    config = BASELINE.replace(num_workers=2, prefetch_factor=4, persistent_workers=True, precision="bf16")
    assert revert_knobs(config, BASELINE, ["num_workers"]) == BASELINE.replace(precision="bf16")


@given(data=st.data())
def test_putting_everything_back_gives_the_baseline(data: st.DataObject) -> None:
    space = build_space(freed(), learning_rate_rule="linear")
    values = {knob: data.draw(st.sampled_from(allowed)) for knob, allowed in space.choices.items()}
    config = space.complete(values)
    changed = changed_fields(config, space.baseline)
    assert revert_knobs(config, space.baseline, changed) == space.baseline
    for name in changed:
        rest = revert_knobs(config, space.baseline, [name])
        assert name not in changed_fields(rest, space.baseline)
        assert {*changed_fields(rest, space.baseline)} <= {*changed}
        assert canonical(rest, space.baseline) == rest


# Learning rates


@pytest.mark.parametrize(
    ("growth", "rule", "expected"),
    [
        (4.0, "none", 1.0),
        (4.0, "sqrt", 2.0),
        (4.0, "linear", 4.0),
        (0.25, "sqrt", 0.5),
        (0.25, "linear", 0.25),
        (2.0, "sqrt", math.sqrt(2.0)),
    ],
)
def test_the_rate_follows_the_batch_by_the_rule(growth: float, rule: Any, expected: float) -> None:
    assert scale_learning_rate(growth, rule) == pytest.approx(expected, rel=1e-15)


@each_rule
def test_the_same_batch_keeps_its_rate_under_every_rule(rule: Any) -> None:
    assert scale_learning_rate(1.0, rule) == 1.0


# The space


def test_larger_batches_are_offered_where_they_are_allowed() -> None:
    space = build_space(freed())
    assert space.choices["micro_batch_size"] == (12, 6, 4, 3, 2, 1, 24, 48)
    assert reasons_of(space, "micro_batch_size") == {}
    assert space.batch_is_free
    assert not {"gradient_accumulation_steps", "learning_rate_scale"} & space.choices.keys()  # they follow


def test_larger_batches_are_ruled_out_with_the_option_that_allows_them() -> None:
    space = build_space(cpu_facts())
    assert space.choices["micro_batch_size"] == (12, 6, 4, 3, 2, 1)
    assert {
        value: "--tune-batch-size" in reason for value, reason in reasons_of(space, "micro_batch_size").items()
    } == {
        24: True,
        48: True,
    }
    assert not space.batch_is_free
    assert not space.contains(BASELINE.replace(micro_batch_size=24))


NOT_SPLIT = {
    "not additive": {"additivity": NOT_ADDITIVE},
    "batch norm": {"model": MODEL.replace(has_batch_norm=True), "additivity": NOT_ADDITIVE},
    "batch norm that was not tested": {"model": MODEL.replace(has_batch_norm=True)},
}


@pytest.mark.parametrize("why", NOT_SPLIT)
def test_a_batch_that_cannot_be_split_offers_no_other_size_and_says_why(why: str) -> None:
    space = build_space(cpu_facts(**NOT_SPLIT[why]))
    assert "micro_batch_size" not in space.choices
    reasons = reasons_of(space, "micro_batch_size")
    word = "BatchNorm" if "norm" in why else "25 % (limit 0.01 %)"
    assert {size for size, reason in reasons.items() if word in reason} == {6, 4, 3, 2, 1}
    assert {size for size, reason in reasons.items() if "--tune-batch-size" in reason} == {24, 48}


@pytest.mark.parametrize("why", NOT_SPLIT)
def test_a_user_who_allows_another_batch_may_split_it_too(why: str) -> None:
    assert build_space(freed(**NOT_SPLIT[why])).choices["micro_batch_size"] == (12, 6, 4, 3, 2, 1, 24, 48)


@pytest.mark.parametrize("additivity", [None, ADDITIVE], ids=["not tested", "additive"])
def test_a_batch_that_can_be_split_offers_its_parts(additivity: Additivity | None) -> None:
    assert build_space(cpu_facts(additivity=additivity)).choices["micro_batch_size"] == (12, 6, 4, 3, 2, 1)


def test_the_baselines_own_split_is_no_reason_against_itself() -> None:
    baseline = BASELINE.replace(**SPLIT)
    space = build_space(cpu_facts(baseline=baseline, additivity=NOT_ADDITIVE))
    assert "micro_batch_size" not in space.choices
    assert 6 not in reasons_of(space, "micro_batch_size")
    assert space.contains(baseline)


def test_an_iterable_dataset_offers_no_other_batch_even_where_allowed() -> None:
    space = build_space(freed(data=DATA.replace(iterable=True, sample_count=None)))
    assert "micro_batch_size" not in space.choices
    assert "iterable" in reasons_of(space, "micro_batch_size")[6]


@each_rule
@pytest.mark.parametrize("micro", [48, 24, 12, 6, 4, 3, 2, 1])
def test_accumulation_and_rate_follow_the_size(micro: int, rule: Any) -> None:
    space = build_space(freed(), learning_rate_rule=rule)
    config = space.complete({"micro_batch_size": micro, "precision": "bf16"})
    growth = max(1, micro // 12)
    scale = {"none": 1.0, "sqrt": math.sqrt(growth), "linear": float(growth)}[rule]
    assert config == BASELINE.replace(
        micro_batch_size=micro,
        gradient_accumulation_steps=max(1, 12 // micro),
        learning_rate_scale=scale,
        precision="bf16",
    )
    assert space.contains(config)
    assert space.keep(config) == config


@pytest.mark.parametrize("micro", [48, 24, 12, 6, 4, 3, 2, 1])
def test_a_baseline_that_accumulates_is_split_and_grown_from_its_effective_batch(micro: int) -> None:
    space = build_space(freed(baseline=BASELINE.replace(**SPLIT)), learning_rate_rule="linear")
    assert {*space.choices["micro_batch_size"]} == {48, 24, 12, 6, 4, 3, 2, 1}
    config = space.complete({"micro_batch_size": micro})
    assert config.effective_batch_size == max(12, micro)
    assert config.learning_rate_scale == max(12, micro) / 12
    assert space.contains(config)


def all_batches(rule: Any) -> list[tuple[TrainConfig, bool]]:
    """Return many batches and whether they belong to a free space with a rule."""
    found = []
    for micro, steps, scale in itertools.product((1, 4, 5, 12, 24, 36, 48), (1, 2, 3, 4, 12), (1.0, math.sqrt(2), 2.0)):
        config = BASELINE.replace(micro_batch_size=micro, gradient_accumulation_steps=steps, learning_rate_scale=scale)
        is_offered = micro in (1, 4, 12, 24, 48)
        found.append((config, is_offered and scale == scale_learning_rate(micro * steps / 12, rule)))
    return found


@each_rule
def test_a_free_space_holds_the_batches_whose_rate_follows_the_rule(rule: Any) -> None:
    space = build_space(freed(), learning_rate_rule=rule)
    cases = all_batches(rule)
    assert {inside for _, inside in cases} == {True, False}
    for config, inside in cases:
        assert space.contains(config) is inside, (config.micro_batch_size, config.gradient_accumulation_steps)


@each_rule
def test_a_held_batch_is_the_only_one_inside_whatever_the_rule(rule: Any) -> None:
    space = build_space(cpu_facts(), learning_rate_rule=rule)
    for config, _ in all_batches(rule):
        expected = config.effective_batch_size == 12 and config.learning_rate_scale == 1.0
        assert space.contains(config) is (expected and config.micro_batch_size in (1, 4, 12))


def space_of_a_scaled_baseline() -> SearchSpace:
    return build_space(freed(baseline=BASELINE.replace(learning_rate_scale=0.5)), learning_rate_rule="linear")


@pytest.mark.parametrize("micro", [48, 12, 6])
def test_the_rule_multiplies_the_baselines_own_scale(micro: int) -> None:
    space = space_of_a_scaled_baseline()
    assert space.complete({"micro_batch_size": micro}).learning_rate_scale == 0.5 * max(12, micro) / 12


@pytest.mark.parametrize("micro", [48, 12, 6])
def test_a_space_holds_its_baseline_and_what_it_completes_whatever_the_baselines_scale(micro: int) -> None:
    space = space_of_a_scaled_baseline()
    assert space.contains(space.complete({"micro_batch_size": micro}))


@each_rule
def test_a_space_that_is_cut_to_some_knobs_keeps_its_rule(rule: Any) -> None:
    space = build_space(freed(), learning_rate_rule=rule).restrict(["micro_batch_size"])
    config = space.complete({"micro_batch_size": 48})
    assert config.learning_rate_scale == scale_learning_rate(4.0, rule)
    assert space.contains(config)
    assert not space.contains(config.replace(precision="bf16"))
