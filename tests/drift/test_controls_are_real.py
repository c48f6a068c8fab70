"""The ground truth of the controls: each mistake does what it is said to and nothing else, and every baseline learns.

Nothing here knows of a drift gate: gradients are those that the optimizer's step begins with.
"""

from __future__ import annotations

import copy
import math
import re
import runpy
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import controls
import pytest
import synthetic
import torch
from controls import CONTROLS, NEGATIVE, POSITIVE, Control
from models import group_norm
from torch import Tensor, nn

from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import Training, backend_settings
from autotune.records.config import TrainConfig
from autotune.targets.workload import check_workload

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
FOLDER = Path(__file__).parent
FOUR_BY_FOUR: dict[str, Any] = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}
WORKERS: tuple[dict[str, Any], dict[str, Any]] = ({}, {"num_workers": 2})
SUMMED_OTHERWISE = 1e-5
"""Relative error of a gradient whose sums were taken in another order."""
LARGEST_ERRORS = {"bf16": 0.15, "bf16-batch-norm": 0.15, "bf16-transformer": 0.02}
"""Of those that round more: a unit of a ReLU that rounding switches counts whole."""

BY_NAME = {control.name: control for control in CONTROLS}
WORKLOADS = sorted({control.target.split(":")[1] for control in CONTROLS})


class Run:
    """A training of a workload with some settings changed, which remembers what its optimizer got.

    Attributes:
        training: the engine's own.
        gradients: flat gradient of each step, in the order of the parameters.
        learning_rates: of each step.
    """

    def __init__(self, name: str, changes: dict[str, Any] | None = None, **attributes: Any) -> None:
        workload = copy.copy(getattr(controls, name))  # its knobs are attributes: the module's own stay as they are
        vars(workload).update(attributes)
        loaded = check_workload(workload, label=name, fingerprint="0" * 12)
        self.config: TrainConfig = loaded.baseline.replace(**(changes or {}))
        sources = find_random_sources(workload.train_dataset())
        self.training = Training(loaded, self.config, device=CPU, seed=0, random_sources=sources)
        self.workload = workload
        self.gradients: list[Tensor] = []
        self.learning_rates: list[float] = []
        # No reference to the training: what it holds, workers too, then ends with it.
        note = partial(record_step, self.training.model, self.gradients, self.learning_rates)
        self.training.optimizer.register_step_pre_hook(note)

    def step(self, count: int = 1) -> list[float]:
        with backend_settings(self.config):
            return [float(self.training.step().loss) for _ in range(count)]

    def weights(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.training.model.parameters()])

    def accuracy(self) -> float:
        model = copy.deepcopy(self.training.model).eval()
        with torch.no_grad():
            return float(self.workload.evaluate(model, CPU))


def record_step(
    model: nn.Module, gradients: list[Tensor], rates: list[float], optimizer: torch.optim.Optimizer, *_: Any
) -> None:
    gradients.append(torch.cat([gradient_of(parameter).flatten() for parameter in model.parameters()]))
    rates.append(optimizer.param_groups[0]["lr"])


def gradient_of(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()


def run_pair(name: str, **attributes: Any) -> tuple[Run, Run]:
    """Return the baseline and the changed training of a control, each after its first step."""
    control = BY_NAME[name]
    target = control.target.split(":")[1]
    baseline = Run(target, **attributes)
    baseline.step()  # before the other is built, which seeds the generators that both draw from
    changed = Run(target, control.changes, **attributes)
    changed.step()
    return baseline, changed


def first_error(name: str, **attributes: Any) -> float:
    """Return |changed - baseline| / |baseline| of the first step's gradient."""
    baseline, changed = run_pair(name, **attributes)
    return relative_error(changed.gradients[0], baseline.gradients[0])


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_the_table_names_each_control_once_and_only_what_there_is() -> None:
    assert len(BY_NAME) == len(CONTROLS) == len(NEGATIVE) + len(POSITIVE)
    assert all(control.caught_by for control in NEGATIVE)
    assert not any(control.caught_by for control in POSITIVE)
    for control in CONTROLS:
        file, name = control.target.split(":")
        assert (FOLDER / file).is_file()
        check_workload(copy.copy(getattr(controls, name)), label=name, fingerprint="0" * 12)
        assert set(control.changes) <= set(TrainConfig.model_fields)


def test_every_mistake_can_be_switched_on_and_is_declared_to_be_rounding() -> None:
    for control in NEGATIVE:
        workload = getattr(controls, control.target.split(":")[1])
        for knob, value in control.changes.get("user_knobs", {}).items():  # type: ignore[attr-defined]
            assert value in workload.knobs[knob]
            assert value != getattr(workload, knob)
            expected = None if control.name == "parallel-memory-semantic" else "rounding"
            assert workload.knob_numerics.get(knob) == expected


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_baseline_learns(name: str) -> None:
    losses = Run(name).step(50)
    assert all(math.isfinite(loss) for loss in losses)
    assert mean(losses[-10:]) < 0.8 * mean(losses[:10])


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_baseline_repeats_itself(name: str) -> None:
    assert Run(name).step(2) == Run(name).step(2)


def test_a_mean_of_unequal_means_is_not_the_mean_over_tokens() -> None:
    assert first_error("unequal-means") > 0.1
    assert first_error("micro-batch-counted") < SUMMED_OTHERWISE
    assert Run("unequal_means").step(3) == Run("sequences").step(3)  # in one part they are the same


@pytest.mark.parametrize(("name", "is_printed"), [("loss-scale", True), ("gradient-scale", False)])
def test_a_scaled_loss_has_scaled_gradients(name: str, is_printed: bool) -> None:
    baseline, changed = run_pair(name)
    torch.testing.assert_close(changed.gradients[0], 1.05 * baseline.gradients[0])
    ours, theirs = Run("mistaken_points", BY_NAME[name].changes).step(), Run("mistaken_points").step()
    assert ours == pytest.approx([(1.05 if is_printed else 1.0) * loss for loss in theirs])


def test_batch_norm_sees_the_micro_batch_and_group_norm_does_not() -> None:
    assert first_error("batch-norm-micro-batch") > 0.3
    assert first_error("batch-norm-micro-batch", norm=group_norm) < SUMMED_OTHERWISE


def test_half_precision_without_a_scaler_loses_small_gradients() -> None:
    baseline, changed = run_pair("unscaled-half")
    lost = (changed.gradients[0] == 0) & (baseline.gradients[0] != 0)
    assert float(lost.float().mean()) > 0.3
    # What is lost is too small for half precision, not too small to matter: scaled, it is there again.
    scaled = copy.deepcopy(changed.training.model)
    batch = next(iter(changed.training.windows.loader))
    with torch.autocast("cpu", torch.float16):
        loss = nn.functional.mse_loss(scaled(batch[0]), batch[1])
    parameters = list(scaled.parameters())
    plain, multiplied = (torch.autograd.grad(loss * factor, parameters, retain_graph=True) for factor in (1.0, 2.0**16))
    exact = torch.autograd.grad(nn.functional.mse_loss(scaled(batch[0]), batch[1]), parameters)
    assert relative_error(flatten(multiplied) / 2.0**16, flatten(exact)) < 0.01
    assert relative_error(flatten(plain), flatten(exact)) > 0.3


def flatten(gradients: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])


def test_a_doubled_rate_doubles_the_first_change_and_leaves_the_gradient() -> None:
    for name in ("doubled-rate", "doubled-schedule"):
        target = BY_NAME[name].target.split(":")[1]
        before, (baseline, changed) = Run(target).weights(), run_pair(name)
        assert torch.equal(baseline.gradients[0], changed.gradients[0])
        torch.testing.assert_close(changed.weights() - before, 2 * (baseline.weights() - before), rtol=1e-3, atol=1e-6)
        assert changed.learning_rates[0] == pytest.approx(2 * baseline.learning_rates[0])


def test_a_dropped_batch_shortens_the_epoch_and_changes_nothing_before() -> None:
    baseline, changed = run_pair("dropped-batch")
    assert torch.equal(baseline.gradients[0], changed.gradients[0])
    assert (baseline.training.batches_per_epoch, changed.training.batches_per_epoch) == (63, 62)


def test_a_hurried_schedule_falls_with_the_micro_batches() -> None:
    whole, parts = Run("hurried_schedule"), Run("hurried_schedule", FOUR_BY_FOUR)
    whole.step(9)
    parts.step(3)
    assert parts.learning_rates == pytest.approx(whole.learning_rates[::4])
    assert whole.learning_rates == pytest.approx([3e-3 * controls.decay(step) for step in range(9)])
    assert relative_error(parts.gradients[0], whole.gradients[0]) < SUMMED_OTHERWISE


def test_the_script_hurries_its_schedule_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def read_rate(*words: str) -> float:
        monkeypatch.setattr(sys, "argv", ["scheduler_script.py", "--steps", "40", *words])
        runpy.run_path(str(FOLDER / "scheduler_script.py"))
        return float(re.findall(r"step 20 .* lr (\S+)", capsys.readouterr().out)[0])

    assert read_rate("--bs", "16") == pytest.approx(3e-3 * (1 - 19 / 40))
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        assert read_rate("--bs", "4", "--accum", "4") == pytest.approx(3e-3 * 0.05)


def test_forgotten_masks_spoil_the_gradient_of_the_right_loss() -> None:
    baseline, changed = run_pair("forgotten-masks")
    assert relative_error(changed.gradients[0], baseline.gradients[0]) > 0.1
    assert Run("sequences_dropout", BY_NAME["forgotten-masks"].changes).step() == Run("sequences_dropout").step()
    assert first_error("forgotten-masks", dropout=0.1) > 0.05
    assert first_error("forgotten-masks", dropout=0.0) < SUMMED_OTHERWISE


@pytest.mark.slow
def test_the_parallel_memory_is_faster_and_forgets() -> None:
    sequential, parallel = (
        Run("learners", {"user_knobs": {"implementation": value}}) for value in ("sequential", "parallel")
    )
    sequential.step(200)
    parallel.step(200)
    assert sequential.accuracy() > 0.55
    assert parallel.accuracy() < 0.35
    assert 1.5 * min_seconds(parallel.step) < min_seconds(sequential.step)


def min_seconds(call: Callable[[], Any], times: int = 7) -> float:
    taken = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    return min(taken)


def test_the_order_of_the_answers_tells_the_next_one() -> None:
    run = Run("learners")
    run.step(100)
    questions, answers = synthetic.held_out_learners().tensors
    generator = torch.Generator().manual_seed(0)
    last = synthetic.HISTORY_LENGTH - 1
    order = torch.cat([torch.randperm(last, generator=generator), torch.tensor([last])])
    with torch.no_grad():
        before, after = (
            run.training.model(questions[:, positions], answers[:, positions])[:, -1].argmax(-1)
            for positions in (torch.arange(last + 1), order)
        )
    correct = [float((guess == answers[:, -1]).float().mean()) for guess in (before, after)]
    assert correct[0] > correct[1] + 0.2


def test_the_parallel_memory_has_another_gradient_and_the_hoisted_one_the_same() -> None:
    assert first_error("parallel-memory-rounding") > 0.3
    assert first_error("hoisted-memory") < SUMMED_OTHERWISE


def test_noise_of_a_worker_changes_the_samples_but_not_their_order() -> None:
    alone, with_workers = (next(iter(Run("noise_of_worker", changes).training.windows.loader)) for changes in WORKERS)
    assert torch.equal(alone[1], with_workers[1])
    assert float((alone[0] - with_workers[0]).std()) == pytest.approx(0.1 * math.sqrt(2), rel=0.1)


@pytest.mark.parametrize("name", ["images", "images_augmented"])
def test_other_samples_are_the_same_in_workers(name: str) -> None:
    alone, with_workers = (next(iter(Run(name, changes).training.windows.loader)) for changes in WORKERS)
    assert torch.equal(alone[0], with_workers[0])
    assert torch.equal(alone[1], with_workers[1])


@pytest.mark.parametrize("control", POSITIVE, ids=lambda control: control.name)
def test_what_must_pass_only_rounds(control: Control) -> None:
    # Another split of a batch draws its masks in another order; there only training without dropout can be compared.
    attributes = {"dropout": 0.0} if control.name == "micro-batch-dropout" else {}
    error = first_error(control.name, **attributes)
    assert error < LARGEST_ERRORS.get(control.name, SUMMED_OTHERWISE)
    assert error > 0 or control.name not in LARGEST_ERRORS


def test_a_fused_optimizer_makes_the_same_change() -> None:
    for name in ("fused", "foreach"):
        baseline, changed = run_pair(name)
        torch.testing.assert_close(changed.weights(), baseline.weights())


def test_a_bias_before_a_batch_norm_has_a_gradient_of_mere_rounding() -> None:
    """Compared layer by layer, the errors of two right arithmetics are as large there as the gradients."""
    baseline, changed = run_pair("channels-last")
    sizes = {name: parameter.numel() for name, parameter in baseline.training.model.named_parameters()}
    ours, theirs = (
        dict(zip(sizes, torch.split(run.gradients[0], list(sizes.values())), strict=True))
        for run in (changed, baseline)
    )
    assert relative_error(ours["layers.0.0.bias"], theirs["layers.0.0.bias"]) > 0.01
    assert theirs["layers.0.0.bias"].norm() < 1e-5 * theirs["layers.0.0.weight"].norm()
