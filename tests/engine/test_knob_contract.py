"""One contract for every knob and value that runs on a CPU.

exact      losses and final weights are the baseline's bit for bit, although the dataset draws from every global
           generator, the model has dropout, epochs end in between and the last batch of each is short.
rounding   losses stay in a band around the baseline's, in relative terms over eight steps of AdamW. Measured here: at
           most 2e-7 for fp32 sums in another order, 5e-5 for fp16 (11 bits) and 4e-4 for bf16 (8 bits). The bands are
           about ten times that, for other CPUs, and far below what a wrong mask, weight or batch would do (1e-2).
"""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import numpy as np
import pytest
import torch
from engine_workloads import CPU, PatchWorkload, build, train

from autotune.engine.allocator import launch_environment
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.dataloader import read_generators
from autotune.engine.loop import backend_settings
from autotune.engine.precision import read_matmul_precision
from autotune.knobs import KNOBS
from autotune.machine.toolchain import find_host_allocators, has_cpp_compiler
from autotune.records import TrainConfig
from autotune.records.config import SHARED_KNOBS

pytestmark = pytest.mark.usefixtures("one_thread")

BASELINE = TrainConfig(micro_batch_size=8, num_threads=1, optimizer_implementation="for-loop")
STEPS = 8
"""22 samples in batches of 8 make epochs of three steps: two ends of an epoch and two short batches lie in between."""

NUMERICS = {knob.field: knob.numerics for knob in KNOBS}

EXACT: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 1},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "prefetch_factor": 4},
    {"num_workers": 2, "prefetch_factor": 1, "persistent_workers": True},
    {"prefetch_factor": 4},
    {"persistent_workers": True},
    {"non_blocking": True},
]
IN_ANOTHER_ENVIRONMENT = ["glibc-tuned", "jemalloc", "tcmalloc", "expandable-segments"]
FP32_BAND, FP16_BAND, BF16_BAND = 2e-6, 5e-4, 4e-3
ROUNDING: list[tuple[dict[str, Any], float]] = [
    ({"precision": "bf16"}, BF16_BAND),
    ({"precision": "fp16"}, FP16_BAND),
    ({"matmul_precision": "high"}, BF16_BAND),
    ({"matmul_precision": "medium"}, BF16_BAND),
    ({"attention_backend": "math"}, FP32_BAND),
    ({"attention_backend": "flash"}, FP32_BAND),
    ({"optimizer_implementation": "foreach"}, FP32_BAND),
    ({"optimizer_implementation": "fused"}, FP32_BAND),
    ({"memory_format": "channels_last"}, FP32_BAND),
    ({"cudnn_benchmark": True}, 0.0),
    ({"num_threads": 2}, FP32_BAND),
    ({"micro_batch_size": 4, "gradient_accumulation_steps": 2}, FP32_BAND),
    ({"micro_batch_size": 2, "gradient_accumulation_steps": 4}, FP32_BAND),
    ({"micro_batch_size": 1, "gradient_accumulation_steps": 8}, FP32_BAND),
    ({"activation_checkpointing": "selective"}, FP32_BAND),
    ({"activation_checkpointing": "full"}, FP32_BAND),
    ({"activation_checkpointing": "full", "precision": "bf16"}, BF16_BAND),
    ({"micro_batch_size": 4, "gradient_accumulation_steps": 2, "precision": "fp16"}, FP16_BAND),
]
COMPILED: list[dict[str, Any]] = [
    {"compile_mode": "default"},
    {"compile_mode": "max-autotune-no-cudagraphs"},
    {"compile_mode": "default", "activation_checkpointing": "full"},
    {"compile_mode": "default", "activation_checkpointing": "selective"},
]
NEED_A_GPU = {
    ("pin_memory", True): "page-locked memory needs an accelerator",
    ("attention_backend", "efficient"): "CUDA kernel",
    ("attention_backend", "cudnn"): "CUDA kernel",
    ("compile_mode", "reduce-overhead"): "CUDA graphs",
    ("compile_mode", "max-autotune"): "CUDA graphs",
}
"""What is for several processes is tried in tests/distributed/test_steps.py."""


def name_of(changes: Any) -> str:
    return ",".join(f"{key}={value}" for key, value in changes.items()) if isinstance(changes, dict) else ""


@functools.cache
def baseline_of(dropout: float) -> tuple[list[float], dict[str, torch.Tensor]]:
    return train(PatchWorkload(dropout=dropout), BASELINE, STEPS)


def test_every_value_of_every_knob_is_tried_here_or_needs_a_gpu() -> None:
    tried = {(field, value) for case in [*EXACT, *COMPILED, *(c for c, _ in ROUNDING)] for field, value in case.items()}
    tried |= {("host_allocator" if "-seg" not in v else "device_allocator", v) for v in IN_ANOTHER_ENVIRONMENT}
    tried |= {(field, getattr(BASELINE, field)) for field in NUMERICS}
    for field in NUMERICS.keys() - {*SHARED_KNOBS}:
        annotation = TrainConfig.model_fields[field].annotation
        literals = [part for part in (annotation, *get_args(annotation)) if get_origin(part) is Literal]
        values = [value for part in literals for value in get_args(part)] or [True] * (annotation is bool)
        assert {(field, value) for value in values} - tried - NEED_A_GPU.keys() == set()
        assert any(name == field for name, _ in tried)


def test_the_baseline_repeats_itself_and_learns() -> None:
    losses, weights = train(PatchWorkload(), BASELINE, STEPS)
    again, same = baseline_of(0.0)
    assert losses == again
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert len(set(losses)) == STEPS
    assert train(PatchWorkload(), BASELINE, 30)[0][-1] < 0.8 * losses[0]


@pytest.mark.parametrize("changes", EXACT, ids=name_of)
def test_an_exact_knob_changes_no_bit(changes: dict[str, Any]) -> None:
    assert {NUMERICS[field] for field in changes} == {"exact"}
    losses, weights = train(PatchWorkload(dropout=0.2), BASELINE.replace(**changes), STEPS)
    expected, expected_weights = baseline_of(0.2)
    assert losses == expected
    assert all(torch.equal(weights[name], expected_weights[name]) for name in expected_weights)


@pytest.mark.parametrize(("changes", "band"), ROUNDING, ids=name_of)
def test_a_rounding_knob_stays_in_its_band(changes: dict[str, Any], band: float) -> None:
    assert {NUMERICS[field] for field in changes} == {"rounding"}
    losses, _ = train(PatchWorkload(), BASELINE.replace(**changes), STEPS)
    expected, _ = baseline_of(0.0)
    assert losses == pytest.approx(expected, rel=band, abs=0.0)
    if band > FP32_BAND and "matmul_precision" not in changes:  # which a CPU need not have units for
        assert losses != expected  # a precision that changes nothing was not applied


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="torch.compile on a CPU needs a C++ compiler on PATH")
@pytest.mark.filterwarnings("ignore")  # torch.compile warns about its own internals
@pytest.mark.parametrize("changes", COMPILED, ids=name_of)
def test_a_compiled_model_stays_in_its_band(changes: dict[str, Any]) -> None:
    before = compiled_graph_count()
    try:
        losses, _ = train(PatchWorkload(), BASELINE.replace(**changes), STEPS)
    finally:
        torch._dynamo.reset()
    expected, _ = baseline_of(0.0)
    assert compiled_graph_count() > before
    assert losses == pytest.approx(expected, rel=FP32_BAND, abs=0.0)


@pytest.mark.slow_cases("tcmalloc", "glibc-tuned", "expandable-segments")
@pytest.mark.parametrize("allocator", IN_ANOTHER_ENVIRONMENT)
def test_an_allocator_changes_no_bit(allocator: str) -> None:
    libraries = find_host_allocators(Path("/"))
    if allocator in ("jemalloc", "tcmalloc") and allocator not in libraries:
        pytest.skip(f"{allocator} is not installed")
    field = "device_allocator" if allocator == "expandable-segments" else "host_allocator"
    assert NUMERICS[field] == "exact"
    environment = launch_environment(BASELINE.replace(**{field: allocator}), libraries)
    assert environment
    program = (
        "import torch; torch.set_num_threads(1); import json\n"
        "import test_knob_contract as t\n"
        "print(json.dumps(t.train(t.PatchWorkload(dropout=0.2), t.BASELINE, t.STEPS)[0]))"
    )
    paths = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout) == baseline_of(0.2)[0]


def global_state() -> dict[str, Any]:
    cuda = torch.backends.cuda
    return {
        "threads": torch.get_num_threads(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "new matmul": tuple(
            getattr(one, "fp32_precision", None)
            for one in (cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
        ),
        "cudnn": (
            torch.backends.cudnn.benchmark,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.allow_tf32,
            torch.backends.cudnn.enabled,
        ),
        "attention": (
            cuda.math_sdp_enabled(),
            cuda.flash_sdp_enabled(),
            cuda.mem_efficient_sdp_enabled(),
            cuda.cudnn_sdp_enabled(),
        ),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "grad": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "compile cache": torch.compiler.config.cache_key_tag,
    }


EVERYTHING = BASELINE.replace(
    num_threads=2,
    matmul_precision="high",
    cudnn_benchmark=True,
    attention_backend="math",
    precision="bf16",
    memory_format="channels_last",
    optimizer_implementation="fused",
    activation_checkpointing="full",
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("fails", [False, True])
def test_global_state_of_torch_is_set_and_restored(device: str, fails: bool) -> None:
    before = global_state()
    try:
        with backend_settings(EVERYTHING):
            inside = global_state()
            if fails:
                raise RuntimeError("out of memory")
    except RuntimeError:
        assert fails
    assert global_state() == before
    assert inside["threads"] == 2
    assert inside["cudnn"][0] is True
    assert inside["attention"] == (True, False, False, False)
    assert inside["matmul"] == "high"


def test_the_settings_a_user_made_are_restored_to_the_users() -> None:
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    before = global_state()
    try:
        cudnn.benchmark = True
        cuda.enable_flash_sdp(False)
        torch.set_float32_matmul_precision("medium")
        users = global_state()
        with backend_settings(BASELINE):
            assert global_state()["cudnn"][0] is False
            assert global_state()["matmul"] == "highest"
        assert global_state() == users
    finally:
        cudnn.benchmark = before["cudnn"][0]
        cuda.enable_flash_sdp(before["attention"][1])
        torch.set_float32_matmul_precision(before["matmul"])
        if before["new matmul"] != (None, None):
            cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before["new matmul"]


@pytest.fixture
def matmul_switches() -> Iterator[Any]:
    """What the newer switch of each device is an attribute of; put back afterwards, as the older one is."""
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("this PyTorch has one switch only")
    switches: dict[str, Any] = {"cuda": torch.backends.cuda.matmul, "cpu": torch.backends.mkldnn.matmul}
    legacy, newer = (
        torch.get_float32_matmul_precision(),
        {name: one.fp32_precision for name, one in switches.items()},
    )
    yield switches
    torch.set_float32_matmul_precision(legacy)
    for name, one in switches.items():
        one.fp32_precision = newer[name]


NEWER = [
    *(("cuda", "tf32", "high"), ("cuda", "ieee", "highest")),
    *(("cpu", "bf16", "medium"), ("cpu", "ieee", "highest")),
]
"""What a user has set on a device, and what that is called."""


@pytest.mark.parametrize(("device", "users", "told"), NEWER)
def test_a_user_of_the_newer_switch_is_served(matmul_switches: Any, device: str, users: str, told: str) -> None:
    matmul_switches[device].fp32_precision = users
    assert read_matmul_precision(torch.device(device)) == told
    for wanted in ("highest", "high"):
        with backend_settings(BASELINE.replace(matmul_precision=wanted)):
            assert read_matmul_precision(torch.device(device)) == wanted
            assert torch.get_float32_matmul_precision() == wanted
        assert matmul_switches[device].fp32_precision == users


@pytest.mark.usefixtures("matmul_switches")
@pytest.mark.parametrize("users", ["highest", "high", "medium"])
def test_the_older_switch_is_read_right(users: str) -> None:
    torch.set_float32_matmul_precision(users)
    assert read_matmul_precision(CPU) == users
    assert read_matmul_precision(torch.device("cuda")) == ("highest" if users == "highest" else "high")


def test_no_attention_kernel_is_forced_by_auto() -> None:
    before = global_state()
    with backend_settings(BASELINE):
        assert global_state()["attention"] == before["attention"]


def test_training_leaves_the_global_state_as_it_was() -> None:
    before = global_state()
    train(PatchWorkload(), EVERYTHING, 2)
    assert global_state() == before


@pytest.mark.parametrize("workers", [1, 2])
def test_the_random_stream_of_the_training_does_not_depend_on_the_workers(workers: int) -> None:
    def stream(config: TrainConfig) -> tuple[bytes, bytes, Any]:
        training = build(PatchWorkload(dropout=0.2), config)
        for _ in range(4):
            training.step()
        states = read_generators()
        return states["torch"].numpy().tobytes(), states["numpy"][1].tobytes(), states["random"]

    assert stream(BASELINE.replace(num_workers=workers)) == stream(BASELINE)


def test_the_augmentation_really_draws_from_every_generator() -> None:
    from autotune.engine.dataloader import find_random_sources

    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    assert find_random_sources(PatchWorkload().train_dataset()) == ("torch", "numpy", "random")


def test_fp16_has_a_scaler_and_nothing_else_has() -> None:
    scaled = {
        name: build(PatchWorkload(), BASELINE.replace(precision=name)).scaler for name in ("fp32", "bf16", "fp16")
    }
    assert scaled["fp32"] is None
    assert scaled["bf16"] is None
    assert isinstance(scaled["fp16"], torch.amp.GradScaler)


@pytest.mark.parametrize(("implementation", "flags"), [("for-loop", (False, False)), ("foreach", (True, False))])
def test_the_optimizer_is_switched(implementation: Any, flags: tuple[bool, bool]) -> None:
    group = build(PatchWorkload(), BASELINE.replace(optimizer_implementation=implementation)).optimizer.param_groups[0]
    assert (group["foreach"], group["fused"]) == flags


def test_the_optimizer_is_switched_to_fused_and_left_alone_by_none() -> None:
    fused = build(PatchWorkload(), BASELINE.replace(optimizer_implementation="fused")).optimizer.param_groups[0]
    assert (fused["foreach"], fused["fused"]) == (False, True)
    own = PatchWorkload(optimizer={"foreach": True})
    left = build(own, BASELINE.replace(optimizer_implementation=None)).optimizer.param_groups[0]
    assert (left["foreach"], left["fused"]) == (True, None)


def test_channels_last_reaches_the_weights_and_the_inputs() -> None:
    training = build(PatchWorkload(), BASELINE.replace(memory_format="channels_last"))
    assert training.model.convolution.weight.is_contiguous(memory_format=torch.channels_last)
    image, tokens, labels = torch.randn(2, 3, 8, 8), torch.randn(2, 16, 8), torch.zeros(2, 3, 8, 8, dtype=torch.long)
    placed = training.place([image, tokens, labels])
    assert placed[0].is_contiguous(memory_format=torch.channels_last)
    assert [part.is_contiguous() for part in placed] == [False, True, True]
    assert torch.equal(placed[0], image)


def test_the_math_kernel_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bool, ...]] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked.append(global_state()["attention"])
        return plain(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    train(PatchWorkload(), BASELINE.replace(attention_backend="math"), 1)
    assert set(asked) == {(True, False, False, False)}
