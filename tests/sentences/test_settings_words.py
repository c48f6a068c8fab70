"""What people call settings, and what became of a bottleneck."""

from __future__ import annotations

import pytest

from autotune.records import TrainConfig
from autotune.records.config import SHORT_NAMES
from autotune.records.explanation import Explanation, StepShare
from autotune.sentences.explanation import describe_shift
from autotune.sentences.settings import describe_changes, describe_exchanges, name_setting


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("num_workers", "workers"),
        ("precision", "precision"),
        ("user_knobs.implementation", "implementation"),
        ("user_knobs.workers", "user_knobs.workers"),  # which is what another knob is called
        ("user_knobs.num_workers", "user_knobs.num_workers"),
    ],
)
def test_a_setting_has_the_name_that_people_use_and_no_two_have_the_same(field: str, name: str) -> None:
    assert name_setting(field) == name


def test_short_names_are_of_fields_and_differ_from_all_of_them() -> None:
    assert SHORT_NAMES.keys() <= TrainConfig.model_fields.keys()
    assert not set(SHORT_NAMES.values()) & TrainConfig.model_fields.keys()
    assert len(set(SHORT_NAMES.values())) == len(SHORT_NAMES)


def test_changes_are_told_by_them() -> None:
    before = TrainConfig(micro_batch_size=64)
    after = before.replace(micro_batch_size=32, gradient_accumulation_steps=2, user_knobs={"width": 8})
    assert describe_changes(after, before) == "micro_batch=32 accumulation=2 width=8"
    assert describe_exchanges(before, after) == "micro_batch 64 -> 32, accumulation 1 -> 2, width None -> 8"


def step(waiting: float) -> StepShare:
    return StepShare(seconds=0.03, data_wait_fraction=waiting, launches=3)


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        (step(0.86), step(0.53), "still the loader"),
        (step(0.86), step(0.02), "no longer the loader"),
        (step(0.02), step(0.30), "now the loader: it was not before"),
        (step(0.02), step(0.04), "not the loader, as before"),
        (step(0.86), None, ""),
        (None, step(0.86), ""),
    ],
)
def test_what_became_of_the_bottleneck(before: StepShare | None, after: StepShare | None, told: str) -> None:
    config = TrainConfig(num_workers=2)
    found = Explanation(
        label="x",
        config=config,
        baseline_config=TrainConfig(),
        is_proven=True,
        before=before,
        after=after,
        bottleneck="input-bound: 86 % of a step waits",
    )
    assert describe_shift(found) == told


def test_waiting_that_was_never_the_bottleneck_is_not_called_one() -> None:
    found = Explanation(
        label="x",
        config=TrainConfig(num_workers=2),
        baseline_config=TrainConfig(),
        is_proven=True,
        before=step(0.11),
        after=step(0.14),
        bottleneck="compute-bound: MFU 40 %",
    )
    assert describe_shift(found) == "as before: waiting for data is a part of it, and not the largest"
