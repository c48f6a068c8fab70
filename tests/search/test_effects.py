"""What each change was worth, from configs that differ in nothing else."""

from __future__ import annotations

import pytest
from simulated import BASELINE, make_judged

from autotune.search.scores.ranking import Ranking, measure_effects

BF16, BOTH = BASELINE.replace(precision="bf16"), BASELINE.replace(precision="bf16", num_workers=2)
SPLIT = BASELINE.replace(micro_batch_size=16, gradient_accumulation_steps=2)


def effects(*launches):
    judged = [make_judged(BASELINE, 0.0), *(make_judged(config, value) for config, value in launches)]
    return measure_effects(Ranking(judged, BASELINE).entries, BASELINE)


def test_a_change_is_worth_what_it_brings_on_top_of_the_rest():
    found = effects((BF16, 0.2), (BOTH, 0.5))
    assert found["precision=bf16"] == pytest.approx(0.2)
    assert found["num_workers=2"] == pytest.approx(0.3)


def test_the_best_of_several_readings_counts():
    assert effects((BF16, -0.1), (BASELINE.replace(num_workers=2), 0.1), (BOTH, 0.5))["precision=bf16"] == (
        pytest.approx(0.4)
    )


def test_what_was_never_tried_without_says_nothing():
    assert "num_workers=2" not in effects((BOTH, 0.5))


def test_how_a_batch_is_split_is_one_change():
    assert effects((SPLIT, -0.2)) == {"micro_batch_size=16": pytest.approx(-0.2)}
