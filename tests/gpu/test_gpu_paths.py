"""What only an NVIDIA GPU runs, path by path: `make test-gpu` prints what passed, each with a figure.

A path that a CPU has too runs there all the same; the others are skipped, and say so.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autotune.engine.hooks.script import ScriptHooks, ScriptSettings
from autotune.isolation.runner import TrialRunner
from autotune.machine.gpu_state import GpuWatch
from autotune.machine.hardware import read_hardware
from autotune.measure.clock import CudaClock
from autotune.probe.run import probe_target
from autotune.records import ProbeReport, Target, TrainConfig, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.records.config import with_knobs
from autotune.search.launch.forecast import Forecast
from autotune.search.scores.objective import Limits
from autotune.targets.resolve import resolve_target

pytestmark = pytest.mark.gpu

ON_GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="no CUDA device")
Note = Callable[[str], None]
Launch = Callable[..., TrialResult]

ROOT = Path(__file__).parents[2]
KNOBS: list[Any] = [
    pytest.param({"precision": "bf16"}, 0.05, id="bf16"),
    pytest.param({"precision": "fp16"}, 0.05, id="fp16 with a loss scaler", marks=needs_gpu),
    pytest.param({"matmul_precision": "high"}, 0.02, id="TF32", marks=needs_gpu),
    pytest.param({"optimizer_implementation": "fused"}, 0.01, id="fused optimizer"),
    pytest.param({"memory_format": "channels_last"}, 0.02, id="channels last"),
    pytest.param({"cudnn_benchmark": True}, 0.02, id="cudnn.benchmark", marks=needs_gpu),
    pytest.param({"device_allocator": "expandable-segments"}, 0.01, id="expandable segments", marks=needs_gpu),
    pytest.param({"compile_mode": "default"}, 0.02, id="compiled"),
    pytest.param({"compile_mode": "reduce-overhead"}, 0.02, id="CUDA graphs", marks=needs_gpu),
    pytest.param({"num_workers": 2, "pin_memory": True, "non_blocking": True}, 0.01, id="pinned", marks=needs_gpu),
]
"""Changes, and how far the mean of the first losses may be from the baseline's: rounding, not another training."""


@needs_gpu
def test_steps_are_timed_by_events(figure: Note) -> None:
    clock, matrix = CudaClock(), torch.randn(2048, 2048, device="cuda")
    clock.synchronize()
    began = time.perf_counter()
    clock.mark()
    for _ in range(20):
        matrix = matrix @ matrix / 45.0
        clock.mark()
    clock.synchronize()
    wall, steps = time.perf_counter() - began, clock.take_intervals()
    assert len(steps) == 20
    assert 0.8 * wall < math.fsum(steps) <= 1.02 * wall
    figure(f"{1000 * steps[-1]:.2f} ms a product, {math.fsum(steps) / wall:.0%} of the wall time")


@needs_gpu
def test_the_driver_is_asked(figure: Note) -> None:
    gpu, watch = read_hardware().gpus[0], GpuWatch()
    try:
        state = watch.read()
    finally:
        watch.close()
    assert state is not None
    total = torch.cuda.get_device_properties(0).total_memory
    assert abs(gpu.memory_total_bytes / total - 1.0) < 0.1
    figure(f"{gpu.name}, {gpu.memory_total_bytes / 2**30:.0f} GiB")


@pytest.mark.parametrize(("changes", "most"), KNOBS)
def test_a_knob_trains_as_the_baseline_does(
    changes: dict[str, Any], most: float, launch: Launch, report: ProbeReport, figure: Note
) -> None:
    before, after = launch(report.target.baseline), launch(with_knobs(report.target.baseline, changes))
    assert (before.status, after.status) == (TrialStatus.COMPLETED, TrialStatus.COMPLETED), after.error
    losses = [[loss for loss in one.curves[0].losses if loss is not None] for one in (before, after)]
    steps = min(map(len, losses))
    own, other = (math.fsum(curve[:steps]) / steps for curve in losses)
    assert abs(other / own - 1.0) < most
    assert before.measurement is not None
    assert after.measurement is not None
    ratio = after.measurement.samples_per_second / before.measurement.samples_per_second
    figure(f"{ratio:.2f}x, loss {100 * (other / own - 1.0):+.2f} % over {steps} steps")


@needs_gpu
@pytest.mark.parametrize("kernel", ["math", "flash", "efficient", "cudnn"])
def test_an_attention_kernel_trains_as_the_default_does(kernel: Any, launch: Launch, figure: Note) -> None:
    target = resolve_target(str(ROOT / "examples" / "gpt" / "workload.py:workload"), folder=ROOT).target
    own = TrainConfig(micro_batch_size=32, precision="bf16")
    before, after = launch(own, target), launch(own.replace(attention_backend=kernel), target)
    assert before.measurement is not None, before.error
    if after.measurement is None:
        assert kernel == "cudnn", after.error  # of which a card or a release may have none
        pytest.skip(f"{after.status}: {after.error}")
    pairs = [pair for pair in zip(before.curves[0].losses, after.curves[0].losses, strict=False) if None not in pair]
    first, second = (math.fsum(column) / len(pairs) for column in zip(*pairs, strict=True))  # type: ignore[arg-type]
    assert abs(second / first - 1.0) < 0.05
    ratio = after.measurement.samples_per_second / before.measurement.samples_per_second
    figure(f"{ratio:.2f}x, loss {100 * (second / first - 1.0):+.2f} % over {len(pairs)} steps")


class LossInside(nn.Module):
    """A model that computes its loss, as those of language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layers(inputs), labels)


@needs_gpu
@pytest.mark.filterwarnings("default")  # a compiler's remarks on what it does with so small a model
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_losses_that_a_compiled_model_of_a_script_computes_are_read(mode: Any, figure: Note) -> None:
    def train(**changes: Any) -> list[float]:
        torch.manual_seed(5)
        losses: list[torch.Tensor] = []
        settings = ScriptSettings(TrainConfig(**changes), frozenset(changes))
        hooks = ScriptHooks(
            settings, on_step=lambda step: losses.extend(step.losses), turn=lambda _is: None, now=lambda: 0.0
        )
        with hooks.installed():
            model = LossInside().to("cuda")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            inputs, labels = torch.randn(64, 16, device="cuda"), torch.randint(4, (64,), device="cuda")
            for _ in range(12):
                optimizer.zero_grad()
                model(inputs, labels).backward()
                optimizer.step()
        return [float(loss) for loss in losses]

    own, compiled = train(), train(compile_mode=mode)
    assert len(set(own)) == 12
    assert compiled == pytest.approx(own, rel=1e-3)
    figure(f"{len(compiled)} losses, up to {max(abs(a / b - 1) for a, b in zip(compiled, own, strict=True)):.0e} apart")


def test_what_does_not_fit_is_a_result_and_the_next_launch_runs(
    launch: Launch, report: ProbeReport, figure: Note
) -> None:
    side = "device" if ON_GPU else "host"
    peak = report.measurement.peak_memory
    used = peak.device_bytes if ON_GPU else peak.host_bytes
    assert used is not None
    small = launch(report.target.baseline, **{f"{side}_memory_limit_bytes": used // 8})
    assert small.status is TrialStatus.OUT_OF_MEMORY
    assert launch(report.target.baseline).status is TrialStatus.COMPLETED
    figure(f"{small.cause} after {small.elapsed_seconds:.1f} s")


WIDE = """
import sys

sys.path.insert(0, {examples!r})
from autotune import TrainConfig
from workload import GptWorkload


class Wide(GptWorkload):
    baseline = TrainConfig(micro_batch_size={size})


workload = Wide()
"""


def test_peak_memory_is_predicted(launch: Launch, tmp_path: Path, figure: Note) -> None:
    """Of a step whose tensors outweigh what libraries take for themselves; a CPU would take half a minute for it."""
    size = 512 if ON_GPU and torch.cuda.get_device_name() != "Fake GPU" else 64
    (tmp_path / "wide.py").write_text(WIDE.format(examples=str(ROOT / "examples" / "gpt"), size=size))
    target = resolve_target("wide.py:workload", folder=tmp_path).target
    limits = TrialLimits(time_limit_seconds=120.0, measure_seconds=1.5)
    with TrialRunner(tmp_path / "probe") as runner:
        report = probe_target(target, runner, limits=limits)[0]
    half = report.target.baseline.replace(micro_batch_size=size // 2, gradient_accumulation_steps=2)
    predicted = Forecast(report, Limits(2**50, 2**50, max_drift=1.0)).predict_peak_bytes(half)
    measured = launch(half, target).measurement
    assert predicted is not None
    assert measured is not None
    used = measured.peak_memory.device_bytes if ON_GPU else measured.peak_memory.host_bytes
    assert used is not None
    assert 0.6 < predicted / used < 1.5
    figure(f"{predicted / 2**20:.0f} MiB predicted, {used / 2**20:.0f} MiB used")


def run(folder: Path, *words: str, seconds: float = 240.0) -> dict[str, Any]:
    """Run a command of ours and return its answer."""
    command = [sys.executable, "-m", "autotune", words[0], "--json", *words[1:]]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False)
    if ended.returncode == 2 and "is too small for this target" in ended.stdout:
        pytest.skip(json.loads(ended.stdout)["error"]["message"])
    assert ended.returncode in (0, 3), ended.stderr[-2000:] + ended.stdout[-2000:]
    answer: dict[str, Any] = json.loads(ended.stdout)
    return answer


@pytest.mark.parametrize(
    ("target", "budget"),
    [
        ("demo", "80s"),
        (str(ROOT / "examples" / "detector" / "workload.py:workload"), "110s"),
        (str(ROOT / "examples" / "text_price" / "workload.py:workload"), "110s"),
    ],
    ids=["demo", "detector", "text price"],
)
def test_a_search_ends_in_time_with_an_answer(target: str, budget: str, tmp_path: Path, figure: Note) -> None:
    began = time.monotonic()
    answer = run(tmp_path, "search", target, "--budget", budget)
    took = time.monotonic() - began
    assert answer["verdict"] in ("improved", "keep", "inconclusive", "not-tested")
    assert took < float(budget.removesuffix("s")) + 15.0
    speedup = answer["speedup"]
    gain = "" if speedup is None else f" {speedup['estimate']:.2f}x ({speedup['low']:.2f}-{speedup['high']:.2f})"
    figure(f"{answer['verdict']}{gain}, {answer['evidence']['trials']}, {took:.0f} s")


def test_a_training_that_was_taken_up_again_is_the_same(tmp_path: Path, figure: Note) -> None:
    """As far as the device's kernels repeat themselves: some of a GPU's add up in the order that threads arrive in."""
    settings = ("demo", "--preset", "reproducible", "--seed", "3")
    run(tmp_path, "train", *settings, "--steps", "24", "--out", "whole")
    run(tmp_path, "train", *settings, "--steps", "12", "--out", "parts")
    run(tmp_path, "train", *settings, "--steps", "24", "--out", "parts", "--resume")
    whole, parts = (read_weights(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    apart = find_distance(whole, parts)
    if apart == 0.0:
        figure(f"{len(whole)} tensors, equal bit for bit")
        return
    assert ON_GPU
    run(tmp_path, "train", *settings, "--steps", "24", "--out", "again")
    by_itself = find_distance(whole, read_weights(tmp_path / "again"))
    assert 0.0 < apart < 5.0 * by_itself
    figure(f"{apart:.0e} apart, where two whole trainings are {by_itself:.0e} apart")


def find_distance(first: dict[str, Any], second: dict[str, Any]) -> float:
    """Return the largest difference of two trainings' weights, in parts of each tensor's largest value."""
    pairs = [(first[name].double(), second[name].double()) for name in first]
    return max(float((one - other).abs().max() / one.abs().max().clamp_min(1e-12)) for one, other in pairs)


def read_weights(folder: Path) -> dict[str, Any]:
    """Return the weights of a run's newest checkpoint."""
    newest = max((folder / "checkpoints").glob("step-*/state.pt"), key=lambda path: path.parent.name)
    weights: dict[str, Any] = torch.load(newest, weights_only=True, map_location="cpu")["model"]
    return weights


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = TensorDataset(torch.randn(2048, 64), torch.randint(8, (2048,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
total = 0.0
for epoch in range(EPOCHS):
    for inputs, labels in DataLoader(data, batch_size=64, shuffle=True):
        loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
"""


def test_a_script_is_probed_and_trained(tmp_path: Path, figure: Note) -> None:
    (tmp_path / "long.py").write_text(SCRIPT.replace("EPOCHS", "1000"))
    found = run(tmp_path, "probe", "--", sys.executable, "long.py")["target"]
    assert found["device"] == ("cuda" if ON_GPU else "cpu")
    work = found["work"]
    if work is not None:  # the profiler may be kept from seeing the kernels
        assert work["host_syncs_per_step"] >= 1
        assert work["host_sync_places"][0] == "long.py:18"
    (tmp_path / "short.py").write_text(SCRIPT.replace("EPOCHS", "3"))
    trained = run(tmp_path, "train", "--", sys.executable, "short.py")
    assert trained["steps"] == 96
    figure(f"{0 if work is None else work['host_syncs_per_step']:.0f} waits a step, {trained['steps']} steps")


BREAKS = """
import torch
from autotune.targets.demo import workload as demo


class TooLarge:
    def __getattr__(self, name):
        return getattr(demo, name)

    def compute_loss(self, model, batch):
        first = next(model.parameters())
        if len(batch[0]) > 8:
            torch.empty(2**50, device=first.device)  # more than any device has: the allocator's own error
        return demo.compute_loss(model, batch)


workload = TooLarge()
"""


@needs_gpu
def test_a_training_that_runs_out_of_memory_takes_smaller_micro_batches(tmp_path: Path, figure: Note) -> None:
    (tmp_path / "large.py").write_text(BREAKS)
    summary = run(tmp_path, "train", "large.py:workload", "--steps", "10", "--out", "run")
    downs = [(one["cause"], one["action"]) for one in summary["step_downs"]]
    assert downs
    assert set(downs) == {("oom-device", "fewer-samples")}
    assert summary["config"]["micro_batch_size"] <= 8
    figure(f"{len(downs)} steps down, to micro batches of {summary['config']['micro_batch_size']}")


def count_sharing() -> int:
    """Return how many processes, each on a GPU of its own, can share out an effective batch of 12."""
    return max(size for size in (1, 2, 3, 4, 6, 12) if size <= max(1, torch.cuda.device_count()))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_launch_of_a_process_on_each_gpu_is_timed_by_the_slowest(strategy: Any, tmp_path: Path, figure: Note) -> None:
    shutil.copy(ROOT / "tests" / "distributed" / "shared_workloads.py", tmp_path)
    with TrialRunner(tmp_path / "trials") as runner:
        spec = TrialSpec(
            number=0,
            purpose="measure",
            target=Target(spec="shared_workloads.py:stacked", folder=str(tmp_path)),
            config=TrainConfig(micro_batch_size=12, distributed_strategy=strategy),
            world_size=count_sharing() if ON_GPU else 2,
            limits=TrialLimits(time_limit_seconds=120.0, measure_seconds=2.0),
        )
        result = runner(spec)
    assert result.measurement is not None, result.error
    skew = result.measurement.rank_skew
    assert (skew is None) == (spec.world_size == 1)
    figure(f"{spec.world_size}: {result.measurement.samples_per_second:,.0f} samples/s, skew {skew or 1.0:.2f}")


@pytest.mark.parametrize("name", ["counted", "sharded"])
def test_a_process_on_each_gpu_takes_the_steps_of_one(name: str, tmp_path: Path, figure: Note) -> None:
    shutil.copy(ROOT / "tests" / "distributed" / "shared_workloads.py", tmp_path)
    count = count_sharing()
    ranks = ("gpu" if count == torch.cuda.device_count() else str(count)) if ON_GPU else "2"
    for out, more in (("one", ()), ("several", ("--nproc-per-node", ranks))):
        words = ("train", f"shared_workloads.py:{name}", "--epochs", "3", "--out", out, *more)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "autotune", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    one, several = (
        [line["loss"] for line in map(json.loads, (tmp_path / out / "metrics.jsonl").open()) if "loss" in line]
        for out in ("one", "several")
    )
    assert several == pytest.approx(one, rel=1e-3)
    figure(f"{ranks}: {max(abs(a / b - 1) for a, b in zip(one, several, strict=True)):.1e} from the losses of one")
