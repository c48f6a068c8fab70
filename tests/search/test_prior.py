"""What is expected of changes before anything was launched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from simulated import Machine, make_report

from autotune.records import Advice, GainRange, ProbeReport
from autotune.records.facts import StepWork, Switched
from autotune.search.explore.additive import Effect, Features, LogAdditiveModel, Prior
from autotune.search.explore.loading import THREADS, TOGETHER, WORKERS
from autotune.search.explore.prior import ALIKE, COMPILED_HALF, OWN, USUAL, USUAL_ON_GPU, make_prior


def test_a_knob_of_ones_own_is_taken_for_the_bottleneck() -> None:
    prior = make_prior(make_report(Machine(knobs={"kernel": ("old", "new")})))
    assert prior.find("user_knobs.kernel", "new") == OWN
    assert prior.find("num_threads", 1) == USUAL["num_threads", None]
    assert prior.pairs[WORKERS, THREADS] == TOGETHER


@pytest.mark.parametrize(("waits", "mean", "sd"), [(0.0, -0.05, 0.08), (0.01, -0.045, 0.09), (0.3, -0.02, 0.10)])
def test_first_workers_bring_no_more_than_the_training_waits_for_its_data(waits: float, mean: float, sd: float) -> None:
    report = report_of()
    waited = waits * report.measurement.seconds
    found = make_prior(report.replace(measurement=report.measurement.replace(data_wait_seconds=waited)))
    workers = found.find("num_workers", 2)
    assert (workers.mean, workers.sd) == pytest.approx((mean, sd), abs=1e-3)
    assert make_prior(report_of(device="cuda")).find("num_workers", 2) == USUAL_ON_GPU["num_workers", None]


def report_of(*, device: str = "cpu", **own: Any) -> ProbeReport:
    report = make_report(Machine())
    target = report.target
    return report.replace(target=target.replace(device=device, baseline=target.baseline.replace(**own)), advice=())


@pytest.mark.parametrize(("overhead", "lost"), [(0.0, 0.10), (0.5, 0.55)])
@pytest.mark.parametrize(
    ("knob", "value", "features"),
    [("precision", "bf16", ()), ("matmul_precision", "medium", ("amx_bf16",)), ("matmul_precision", "medium", ())],
)
def test_half_types_bring_less_on_a_cpu_where_a_step_is_all_calls(
    overhead: float, lost: float, knob: str, value: str, features: tuple[str, ...]
) -> None:
    advice = Advice(knob=knob, reason="products are faster", gain=GainRange(low=1.2, high=2.4))
    casts = knob == "precision" or bool(features)
    for device, taken in (("cpu", lost if casts else 0.0), ("cuda", 0.0)):
        report = report_of(device=device)
        report = report.replace(hardware=report.hardware.replace(cpu_features=features))
        shares = {"products_fraction": 0.4, "traffic_fraction": 0.6 - overhead, "overhead_fraction": overhead}
        work = StepWork(**shares, operations_per_step=500, host_syncs_per_step=0)
        told = report.replace(advice=(advice,), target=report.target.replace(work=work))
        plain = report.replace(advice=(advice,), target=report.target.replace(work=None))
        before, found = (make_prior(one).find(knob, value) for one in (plain, told))
        assert found.mean == pytest.approx(before.mean - taken)
        assert found.sd == before.sd


def test_what_was_tried_in_the_running_training_is_expected_of_a_process_of_its_own() -> None:
    report = report_of()
    report = report.replace(hardware=report.hardware.replace(cpu_features=("amx_bf16",)))
    advice = Advice(knob="matmul_precision", reason="it was faster", gain=GainRange(low=1.3, high=1.5))
    tried = [Switched(knob="matmul_precision", value="medium", log_speedup=0.34, log_sd=0.05)]
    tried.append(Switched(knob="num_threads", value=1, log_speedup=-0.5, log_sd=0.05))
    found = make_prior(report.replace(advice=(advice,), target=report.target.replace(switched=tuple(tried))))
    for one in tried:
        expected = found.find(one.knob, one.value)
        assert expected.mean == pytest.approx(one.log_speedup, abs=0.06)
        assert expected.sd < one.log_sd
    assert found.find("num_threads", 3) == make_prior(report).find("num_threads", 3)


def test_what_is_turned_on_already_costs_what_it_has_brought() -> None:
    prior = make_prior(report_of(memory_format="channels_last", optimizer_implementation="fused"))
    layout = USUAL["memory_format", None]
    assert prior.find("memory_format", "contiguous") == Effect(-layout.mean, layout.sd)
    assert prior.find("optimizer_implementation", "for-loop").mean < 0.0
    assert prior.find("optimizer_implementation", "foreach").mean == 0.0
    assert prior.find("pin_memory", True) == USUAL["pin_memory", None]


def test_on_a_gpu_other_things_are_usual() -> None:
    prior = make_prior(report_of(device="cuda", optimizer_implementation="foreach"))
    assert prior.find("precision", "bf16") == USUAL_ON_GPU["precision", None]
    assert prior.find("attention_backend", "math").mean < prior.find("attention_backend", "flash").mean == 0.0
    fused, loop = (prior.find("optimizer_implementation", name).mean for name in ("fused", "for-loop"))
    assert loop < 0.0 < fused
    assert (("precision", "bf16"), ("attention_backend", "math")) not in prior.pairs


def test_advice_on_an_optimizer_counts_for_its_better_implementations() -> None:
    advice = Advice(knob="optimizer_implementation", reason="it takes long", gain=GainRange(low=1.2, high=1.6))
    report = report_of(device="cuda", optimizer_implementation="foreach")
    before, after = make_prior(report), make_prior(report.replace(advice=(advice,)))
    assert after.find("optimizer_implementation", "fused").mean > before.find("optimizer_implementation", "fused").mean
    assert after.find("optimizer_implementation", "for-loop") == before.find("optimizer_implementation", "for-loop")


COMPILERS = (("compile_mode", None),)


def test_what_the_user_has_on_already_is_like_no_other_value() -> None:
    assert make_prior(report_of(device="cuda", precision="bf16")).alike.keys() == {COMPILERS}
    assert COMPILED_HALF not in make_prior(report_of(device="cuda", precision="bf16")).pairs
    assert COMPILED_HALF in make_prior(report_of(device="cuda")).pairs
    assert make_prior(report_of()).alike.keys() == set(ALIKE)
    assert make_prior(report_of(compile_mode="default")).alike.keys() == set(ALIKE) - {COMPILERS}


def test_products_of_bf16_that_are_slow_are_expected_to_be_slow_inside_float32_too() -> None:
    values = {"matmul_precision": ("highest", "medium"), "precision": ("fp32", "bf16")}
    prior = make_prior(report_of())
    features = Features(values, {"matmul_precision": "highest", "precision": "fp32"}, prior)
    model = LogAdditiveModel(features, 0.02)
    model.add((0, 1), prior.find("precision", "bf16").mean - 0.4)
    mean = float(model.foretell(features.encode(np.array([[1, 0]])))[0][0])
    assert mean < prior.find("matmul_precision", "medium").mean - 0.05


def test_what_one_mode_of_a_compiler_brought_is_expected_of_the_others() -> None:
    values = {"compile_mode": ("off", "default", "max-autotune")}
    prior = Prior({("compile_mode", None): Effect(0.1, 0.2)}, {}, alike=make_prior(report_of(device="cuda")).alike)
    means = []
    for one in (prior, Prior(prior.effects, {})):
        features = Features(values, {"compile_mode": "off"}, one)
        model = LogAdditiveModel(features, 0.02)
        model.add((1,), 0.5)
        means.append(float(model.foretell(features.encode(np.array([[2]])))[0][0]))
    assert means[0] > 0.35
    assert means[1] == pytest.approx(0.1)
