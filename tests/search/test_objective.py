from __future__ import annotations

import math

import pytest
from record_factory import make_spec
from simulated import BASELINE, Machine, make_report

from autotune.records import PeakMemory, TrainConfig, TrialResult, TrialStatus
from autotune.search.scores.objective import KEYS, SCREEN_STEPS, Limits, draws_otherwise, score_trial, trim_launch

LIMITS = Limits(host_memory_bytes=2**30, device_memory_bytes=None, max_drift=0.005)


def run(config: TrainConfig = BASELINE, **planted: object) -> TrialResult:
    return Machine(**planted)(make_spec(config))  # type: ignore[arg-type]


BASE_CURVE = run().curves[0]


def test_the_value_is_the_log_of_the_throughput():
    result = run()
    score = score_trial(result, BASE_CURVE, LIMITS)
    assert result.measurement is not None
    assert score.value == pytest.approx(math.log(result.measurement.samples_per_second))
    assert score.feasible


@pytest.mark.parametrize("status", [s for s in TrialStatus if s is not TrialStatus.COMPLETED])
def test_every_failure_has_all_constraints_and_no_value(status):
    result = run().replace(status=status, measurement=None, curves=())
    score = score_trial(result, BASE_CURVE, LIMITS)
    assert score.value is None
    assert set(score.constraints) == set(KEYS)
    assert not score.feasible
    assert (score.constraints["memory"] > 0) == (status is TrialStatus.OUT_OF_MEMORY)


def test_memory_above_the_limit_is_infeasible_by_the_share_it_is_over():
    tight = Limits(host_memory_bytes=400 * 2**20, device_memory_bytes=None, max_drift=0.005)
    score = score_trial(run(), BASE_CURVE, tight)
    assert score.constraints["memory"] == pytest.approx(0.25)
    assert not score.feasible


def test_the_device_has_a_limit_of_its_own():
    result = run()
    assert result.measurement is not None
    peak = PeakMemory(host_bytes=1, device_bytes=3 * 2**30)
    on_device = result.replace(measurement=result.measurement.replace(peak_memory=peak))
    limits = Limits(host_memory_bytes=2**30, device_memory_bytes=2 * 2**30, max_drift=0.005)
    assert score_trial(on_device, BASE_CURVE, limits).constraints["memory"] == pytest.approx(0.5)


@pytest.mark.parametrize(("factor", "status"), [(1.09, TrialStatus.COMPLETED), (1.12, TrialStatus.DRIFTED)])
def test_a_run_that_learns_much_worse_is_screened_out(factor, status):
    score = score_trial(run(BASELINE.replace(precision="bf16"), loss=lambda _c: factor), BASE_CURVE, LIMITS)
    assert score.status is status
    assert score.feasible == (status is TrialStatus.COMPLETED)


@pytest.mark.parametrize(
    ("losses", "kept"),
    [
        ((3.0, 2.0, 1.0), (3.0, 2.0, 1.0)),
        ((3.0, 2.0), (3.0, 2.0)),
        ((3.0, 2.0, 1.0, 0.5), (3.0, 2.0, 1.0, 0.5)),  # it went on for longer
        ((3.0, 2.5, *range(50)), (3.0, 2.5, *range(SCREEN_STEPS - 2))),
        ((3.0, None, 1.0), (3.0, None, 1.0)),
        ((), ()),
    ],
)
def test_what_a_search_keeps_of_a_launch_still_tells_whether_its_losses_are_the_baselines(losses, kept):
    launched, baseline = run(), BASE_CURVE.replace(losses=(3.0, 2.0, 1.0))
    trimmed = trim_launch(launched.replace(curves=(BASE_CURVE.replace(losses=losses),)), baseline)
    assert trimmed.curves[0].losses == kept
    assert launched.measurement is not None
    assert trimmed.measurement == launched.measurement.replace(step_seconds=())


def test_a_launch_without_a_timing_is_kept():
    crashed = run().replace(status=TrialStatus.CRASHED, measurement=None, curves=())
    assert trim_launch(crashed, BASE_CURVE) == crashed


@pytest.mark.parametrize(
    ("change", "draws", "status"),
    [
        ({"compile_mode": "default"}, True, TrialStatus.COMPLETED),
        ({"compile_mode": "default"}, False, TrialStatus.DRIFTED),
        ({"optimizer_implementation": "fused"}, True, TrialStatus.DRIFTED),
        ({"compile_mode": "default", "learning_rate_scale": 2.0}, True, TrialStatus.DRIFTED),
        ({"compile_mode": "default", "user_knobs": {"width": 2}}, True, TrialStatus.DRIFTED),
    ],
)
def test_what_draws_other_masks_is_not_screened_out_for_a_seeds_luck(change, draws, status):
    facts = make_report(Machine()).target
    facts = facts.replace(model=facts.model.replace(draws_random=draws))
    config = facts.baseline.replace(**change)
    slowly = tuple(BASE_CURVE.losses[step // 2] for step in range(len(BASE_CURVE.losses)))
    late = run().replace(curves=(BASE_CURVE.replace(losses=slowly),))
    score = score_trial(late, BASE_CURVE, LIMITS, other_draws=draws_otherwise(config, facts))
    assert score.status is status
