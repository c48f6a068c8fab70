"""The search space on hand-made facts: what may be varied, what not and why, and the one spelling of a config."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_factory import (
    make_ceilings,
    make_data,
    make_facts,
    make_gpu,
    make_hardware,
    make_model,
    make_optimizer,
    make_phases,
)

from autotune.errors import ProfileError, UsageError
from autotune.knobs import KNOBS, Facts
from autotune.presets import load_presets
from autotune.records import (
    Ceilings,
    DataFacts,
    HardwareInfo,
    MatmulRate,
    TargetFacts,
    TrainConfig,
    changed_fields,
    get_knob,
    with_knobs,
)
from autotune.records.codec import read_record
from autotune.records.search import Preset
from autotune.space import (
    SearchSpace,
    build_space,
    canonical,
    needs_compilation,
    numerics_of,
    require_knobs,
    revert_knobs,
)

GIB = 2**30
BASELINE = TrainConfig(micro_batch_size=12, num_threads=4, optimizer_implementation="for-loop")
MACHINE = make_hardware()
GPU_MACHINE = MACHINE.replace(gpus=(make_gpu(),))
MODEL = make_model(has_4d_convolution=True, calls_attention=True, checkpointable_blocks=2)
DATA = make_data(sample_count=100, seconds_per_sample=0.001)


def ceilings(**rates: float) -> Ceilings:
    return make_ceilings(rates)


def target(**changes: Any) -> TargetFacts:
    fields: dict[str, Any] = {
        "baseline": BASELINE,
        "model": MODEL,
        "data": DATA,
        "phases": make_phases(0.0, 0.0, 1.0, 2.0, 1.0),
        "compute_seconds_per_step": 4.0,
        "ceilings": ceilings(**{"fp32": 1e11, "fp32-medium": 1.6e11, "bf16": 2e11}),
    }
    return make_facts(**(fields | changes))


def cpu_facts(hardware: HardwareInfo = MACHINE, **changes: Any) -> Facts:
    return Facts(target=target(**changes), hardware=hardware)


def gpu_facts(**changes: Any) -> Facts:
    plain = {"device": "cuda", "ceilings": ceilings(fp32=1e13, tf32=1e14, bf16=5e14, fp16=5e14)}
    baseline = BASELINE.replace(num_threads=None)
    return Facts(target=target(**{**plain, "baseline": baseline, **changes}), hardware=GPU_MACHINE)


FACTS: dict[str, Facts] = {
    "cpu": cpu_facts(),
    "gpu": gpu_facts(),
    "batch norm": cpu_facts(model=MODEL.replace(has_batch_norm=True)),
    "plain model": cpu_facts(
        model=MODEL.replace(has_4d_convolution=False, calls_attention=False, checkpointable_blocks=0)
    ),
    "plain model on a gpu": gpu_facts(
        model=MODEL.replace(has_4d_convolution=False, calls_attention=False, checkpointable_blocks=0)
    ),
    "iterable": cpu_facts(data=DATA.replace(iterable=True, sample_count=None)),
    "own optimizer": cpu_facts(
        baseline=BASELINE.replace(optimizer_implementation=None),
        optimizer=make_optimizer(name="Lion", implementations=(), reason="Lion is not one of torch.optim's own"),
    ),
    "slow products": cpu_facts(ceilings=ceilings(**{"fp32": 1e11, "fp32-medium": 1.09e11})),
    "no products": cpu_facts(ceilings=ceilings(fp32=1e11)),
    "no compiler": cpu_facts(MACHINE.replace(has_cpp_compiler=False)),
    "one cpu": cpu_facts(MACHINE.replace(usable_cpu_count=1)),
    "old gpu": gpu_facts(supports_bf16=False, ceilings=ceilings(fp32=1e13, fp16=2e13)),
    "own knobs": cpu_facts(
        baseline=BASELINE.replace(user_knobs={"width": 8}),
        knobs={"width": (8, 16, 32)},
    ),
    "unusual baseline": cpu_facts(
        baseline=BASELINE.replace(
            micro_batch_size=7,
            gradient_accumulation_steps=3,
            num_workers=3,
            prefetch_factor=9,
            precision="fp16",
            compile_mode="reduce-overhead",
        )
    ),
}
SPACES = {name: build_space(facts) for name, facts in FACTS.items()}
each_space = pytest.mark.parametrize("name", SPACES)

ALL_VALUES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "bf16", "fp16"),
    "matmul_precision": ("highest", "high", "medium"),
    "compile_mode": ("off", "default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"),
    "activation_checkpointing": ("off", "selective", "full"),
    "memory_format": ("contiguous", "channels_last"),
    "optimizer_implementation": ("for-loop", "foreach", "fused"),
    "cudnn_benchmark": (False, True),
    "attention_backend": ("auto", "math", "flash", "efficient", "cudnn"),
    "host_allocator": ("default", "glibc-tuned", "jemalloc", "tcmalloc"),
    "device_allocator": ("default", "expandable-segments"),
    "pin_memory": (False, True),
    "persistent_workers": (False, True),
    "non_blocking": (False, True),
    "distributed_strategy": ("ddp", "fsdp"),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, True),
    "reshard_after_forward": (True, False),
    "sync_each_micro_batch": (False, True),
    "reduce_dtype": ("fp32", "bf16"),
}


def reasons_of(space: SearchSpace, knob: str) -> dict[Any, str]:
    return {item.value: item.reason for item in space.ruled_out if item.knob == knob}


@each_space
def test_the_baseline_and_a_second_value_are_among_the_choices(name: str) -> None:
    space = SPACES[name]
    for knob, values in space.choices.items():
        assert get_knob(space.baseline, knob) in values, knob
        assert len(values) == len(set(values)) >= 2, knob
    assert space.contains(space.baseline)


@each_space
def test_every_value_is_a_choice_or_has_a_reason(name: str) -> None:
    space = SPACES[name]
    for knob, values in ALL_VALUES.items():
        tried = {*space.choices.get(knob, ()), get_knob(space.baseline, knob)}
        default = get_knob(TrainConfig(), knob)
        assert set(values) - tried - reasons_of(space, knob).keys() - {default} == set(), knob


@each_space
def test_reasons_are_sentences_about_values_that_are_not_tried(name: str) -> None:
    space = SPACES[name]
    for item in space.ruled_out:
        assert len(item.reason.split()) >= 4
        assert not item.reason.endswith(".")
        assert item.value not in space.choices.get(item.knob, ())
        assert item.value != get_knob(space.baseline, item.knob)
        assert with_knobs(space.baseline, {item.knob: item.value})  # a value the knob knows
    assert len({(item.knob, item.value) for item in space.ruled_out}) == len(space.ruled_out)


def test_a_cpu_offers_what_a_cpu_can_do() -> None:
    assert SPACES["cpu"].choices == {
        "num_workers": (0, 1, 2, 4),
        "prefetch_factor": (2, 4),
        "persistent_workers": (False, True),
        "host_allocator": ("default", "glibc-tuned"),
        "precision": ("fp32", "bf16"),
        "matmul_precision": ("highest", "medium"),
        "attention_backend": ("auto", "math"),
        "optimizer_implementation": ("for-loop", "foreach", "fused"),
        "memory_format": ("contiguous", "channels_last"),
        "num_threads": (1, 2, 3, 4),
        "micro_batch_size": (12, 6, 4, 3, 2, 1),
        "activation_checkpointing": ("off", "selective", "full"),
        "compile_mode": ("off", "default", "max-autotune-no-cudagraphs"),
    }


def test_a_gpu_offers_what_a_gpu_can_do() -> None:
    choices = SPACES["gpu"].choices
    for knob in ("pin_memory", "non_blocking", "cudnn_benchmark"):
        assert choices[knob] == (False, True)
    assert choices["matmul_precision"] == ("highest", "high")
    assert choices["precision"] == ("fp32", "bf16", "fp16")
    assert choices["attention_backend"] == ALL_VALUES["attention_backend"]
    assert set(choices["compile_mode"]) == set(ALL_VALUES["compile_mode"])
    assert choices["device_allocator"] == ("default", "expandable-segments")
    assert not {"num_threads", "host_allocator"} & choices.keys()


@pytest.mark.parametrize(
    ("name", "knob", "value", "word"),
    [
        ("cpu", "matmul_precision", "high", "NVIDIA"),
        ("slow products", "matmul_precision", "medium", "run at 109 GFLOP/s so, and at 100 GFLOP/s"),
        ("no products", "matmul_precision", "medium", "were measured"),
        ("unusual baseline", "matmul_precision", "medium", "half types"),
        ("gpu", "matmul_precision", "medium", "as high is"),
        ("cpu", "pin_memory", True, "GPU"),
        ("cpu", "non_blocking", True, "device"),
        ("cpu", "cudnn_benchmark", True, "NVIDIA"),
        ("cpu", "device_allocator", "expandable-segments", "CUDA"),
        ("cpu", "precision", "fp16", "no fp16 arithmetic"),
        ("cpu", "compile_mode", "reduce-overhead", "CUDA graphs"),
        ("cpu", "attention_backend", "cudnn", "CUDA kernel"),
        ("cpu", "host_allocator", "jemalloc", "not installed"),
        ("gpu", "host_allocator", "glibc-tuned", "GPU memory"),
        ("gpu", "num_threads", 1, "GPU"),
        ("old gpu", "precision", "bf16", "does not run on this cuda"),
        ("old gpu", "matmul_precision", "high", "no TF32"),
        ("batch norm", "micro_batch_size", 6, "BatchNorm"),
        ("batch norm", "activation_checkpointing", "full", "BatchNorm"),
        ("plain model", "memory_format", "channels_last", "convolution"),
        ("plain model", "attention_backend", "math", "scaled_dot_product_attention"),
        ("plain model", "activation_checkpointing", "selective", "repeated blocks"),
        ("plain model on a gpu", "cudnn_benchmark", True, "convolution"),
        ("iterable", "num_workers", 1, "iterable"),
        ("iterable", "prefetch_factor", 4, "workers"),
        ("iterable", "persistent_workers", True, "workers"),
        ("own optimizer", "optimizer_implementation", "fused", "Lion"),
        ("no compiler", "compile_mode", "default", "C++ compiler"),
    ],
)
def test_what_cannot_work_is_ruled_out_with_its_reason(name: str, knob: str, value: Any, word: str) -> None:
    space = SPACES[name]
    assert value not in space.choices.get(knob, ())
    assert word in reasons_of(space, knob)[value]


@pytest.mark.parametrize(("bf16", "is_tried"), [(0.3e11, False), (0.6e11, True)])
def test_bf16_is_left_out_where_its_products_ran_at_less_than_half_the_rate(bf16: float, is_tried: bool) -> None:
    space = build_space(cpu_facts(ceilings=ceilings(fp32=1e11, bf16=bf16)))
    assert ("bf16" in space.choices.get("precision", ())) == is_tried
    if not is_tried:
        reason = reasons_of(space, "precision")["bf16"]
        assert reason == "measured: bf16 products run at 30 GFLOP/s, fp32 at 100 GFLOP/s"


@pytest.mark.parametrize(
    ("features", "rates", "offered"),
    [
        ((), {"fp32": 1e11, "bf16": 1e11, "fp16": 9e11}, False),
        (("avx512_fp16",), {"fp32": 1e11, "bf16": 1e11, "fp16": 2e11}, True),
        (("avx512_fp16",), {"fp32": 1e11, "bf16": 2e11, "fp16": 1e11}, False),
        (("asimdhp",), {"fp32": 1e11, "bf16": 1e11}, False),
    ],
)
def test_fp16_on_a_cpu_needs_its_arithmetic_and_has_to_beat_bf16(
    features: tuple[str, ...], rates: dict[str, float], offered: bool
) -> None:
    space = build_space(cpu_facts(MACHINE.replace(cpu_features=features), ceilings=ceilings(**rates)))
    assert ("fp16" in space.choices["precision"]) is offered
    assert ("fp16" in reasons_of(space, "precision")) is not offered


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_what_is_emulated_is_ruled_out_with_its_figures(name: str) -> None:
    plain = MatmulRate(dtype="fp32", flops_per_second=122e9)
    slow = MatmulRate(dtype=name, flops_per_second=0.94e9, emulated=True)
    features = MACHINE.replace(cpu_features=("amx_fp16", "avx512_bf16"))
    space = build_space(cpu_facts(features, ceilings=Ceilings(matmul=(plain, slow))))
    assert name not in space.choices.get("precision", ())
    figures = f"emulated here: {name} 940 MFLOP/s, 1/130 of fp32 (122 GFLOP/s)"
    assert reasons_of(space, "precision")[name] == figures


def test_a_rate_that_was_not_measured_speaks_neither_for_nor_against_and_says_so() -> None:
    space = build_space(cpu_facts(ceilings=ceilings(fp32=1e11)))
    assert space.choices["precision"] == ("fp32", "bf16")
    assert space.unproven == {("precision", "bf16")}
    (caution,) = space.cautions
    assert caution.reason == "bf16 products were not measured here: tried alone, and late"
    assert SPACES["cpu"].unproven == SPACES["gpu"].unproven == frozenset()
    assert space.without(["precision"], "for another reason").unproven == frozenset()


def test_an_arithmetic_that_a_gpu_hardly_has_is_ruled_out() -> None:
    space = build_space(gpu_facts(supports_bf16=False, ceilings=ceilings(fp32=1e13, fp16=2e11)))
    assert "precision" not in space.choices
    assert reasons_of(space, "precision")["fp16"] == "measured: fp16 products run at 200 GFLOP/s, fp32 at 10 TFLOP/s"


def test_a_gpu_of_which_nothing_was_measured_may_have_all_arithmetics() -> None:
    space = build_space(gpu_facts(ceilings=Ceilings()))
    assert space.unproven == {("precision", "bf16"), ("precision", "fp16"), ("matmul_precision", "high")}


def test_the_users_own_arithmetic_needs_no_proof() -> None:
    facts = cpu_facts(ceilings=ceilings(fp32=1e11), baseline=BASELINE.replace(precision="bf16"))
    assert build_space(facts).unproven == frozenset()


def test_a_library_that_is_installed_is_offered() -> None:
    space = build_space(cpu_facts(MACHINE.replace(host_allocators={"tcmalloc": "/usr/lib/libtcmalloc.so.4"})))
    assert space.choices["host_allocator"] == ("default", "glibc-tuned", "tcmalloc")
    assert list(reasons_of(space, "host_allocator")) == ["jemalloc"]
    assert "apt install libjemalloc2" in reasons_of(space, "host_allocator")["jemalloc"]


def test_a_library_that_the_user_preloads_is_the_baselines_and_is_not_tried_again() -> None:
    machine = MACHINE.replace(
        host_allocators={"tcmalloc": "/t.so", "jemalloc": "/j.so"}, preloaded_malloc="libjemalloc.so.2"
    )
    space = build_space(cpu_facts(machine))
    assert space.choices["host_allocator"] == ("default", "glibc-tuned", "tcmalloc")
    assert "your own LD_PRELOAD has it (libjemalloc.so.2)" in reasons_of(space, "host_allocator")["jemalloc"]


def test_the_users_own_values_stay_even_when_they_would_not_be_offered() -> None:
    space = SPACES["unusual baseline"]
    assert space.choices["precision"][0] == "fp16"
    assert space.choices["compile_mode"][0] == "reduce-overhead"
    assert space.choices["num_workers"][0] == 3
    assert space.choices["prefetch_factor"] == (9, 2, 4)
    assert space.choices["micro_batch_size"] == (21, 7, 3, 1)


def test_workers_are_bounded_by_the_cpus() -> None:
    assert SPACES["one cpu"].choices["num_workers"] == (0, 1)
    many = build_space(cpu_facts(MACHINE.replace(usable_cpu_count=96))).choices["num_workers"]
    assert many == (0, 1, 2, 4, 8, 16)


# 12 samples a step of 0.5 s each, nine tenths of it waiting, beside 1 s of computation.
WAITING = DATA.replace(seconds_per_sample=0.5, cpu_fraction=0.1, worker_bytes=200 * 2**20)


@pytest.mark.parametrize(
    ("data", "machine", "workers"),
    [
        pytest.param(WAITING, MACHINE, (0, 1, 2, 4, 8), id="8 are enough to match the computation"),
        pytest.param(WAITING.replace(seconds_per_sample=5.0), MACHINE, (0, 1, 2, 4, 8, 16), id="never more than 16"),
        pytest.param(WAITING.replace(seconds_per_sample=0.01), MACHINE, (0, 1, 2, 4), id="little to load"),
        pytest.param(WAITING.replace(cpu_fraction=0.5), MACHINE, (0, 1, 2, 4), id="as much work as waiting"),
        pytest.param(WAITING.replace(cpu_fraction=None), MACHINE, (0, 1, 2, 4), id="not known"),
        pytest.param(WAITING.replace(cpu_fraction=0.0), MACHINE, (0, 1, 2, 4, 8), id="nothing but waiting"),
        pytest.param(
            WAITING.replace(cpu_fraction=0.4),
            MACHINE.replace(usable_cpu_count=2),
            (0, 1, 2, 4, 5),
            id="the work of 5 keeps 2 CPUs busy",
        ),
        pytest.param(WAITING, MACHINE.replace(usable_cpu_count=1), (0, 1, 2, 4, 8), id="one CPU"),
        pytest.param(
            WAITING, MACHINE.replace(memory_available_bytes=2400 * 2**20), (0, 1, 2, 3, 4, 6), id="memory for six"
        ),
        pytest.param(
            WAITING.replace(worker_bytes=None),
            MACHINE.replace(memory_available_bytes=2 * GIB),
            (0, 1, 2, 4),
            id="a worker that was not seen is taken to be large",
        ),
    ],
)
def test_more_workers_than_cpus_can_wait_at_once(
    data: DataFacts, machine: HardwareInfo, workers: tuple[int, ...]
) -> None:
    space = build_space(cpu_facts(machine, data=data, compute_seconds_per_step=1.0))
    assert space.choices["num_workers"] == workers


@each_space
def test_every_choice_alone_is_in_the_space_and_holds_the_effective_batch(name: str) -> None:
    space = SPACES[name]
    for knob, values in space.choices.items():
        for value in values:
            config = space.complete({knob: value})
            assert config.effective_batch_size == space.baseline.effective_batch_size
            assert space.contains(config), (knob, value)
            if (
                knob not in ("prefetch_factor", "persistent_workers", "non_blocking")
                and value not in space.half_kernels
            ):
                assert get_knob(config, knob) == value


@each_space
@given(data=st.data())
def test_any_combination_is_complete_canonical_and_inside(name: str, data: st.DataObject) -> None:
    space = SPACES[name]
    values = {knob: data.draw(st.sampled_from(allowed)) for knob, allowed in space.choices.items()}
    config = space.complete(values)
    assert config.effective_batch_size == space.baseline.effective_batch_size
    assert space.contains(config)
    assert canonical(config, space.baseline) == config
    assert space.keep(config) == config
    assert {*changed_fields(config, space.baseline)} <= {*space.choices, "gradient_accumulation_steps"}


def test_kernels_for_half_precision_go_with_it_alone() -> None:
    space = SPACES["gpu"]
    assert {"flash", "cudnn"} <= {*space.choices["attention_backend"]}
    alone = space.complete({"attention_backend": "flash"})
    assert alone == space.baseline
    assert space.complete({"attention_backend": "flash", "precision": "bf16"}).attention_backend == "flash"
    assert space.complete({"attention_backend": "efficient"}).attention_backend == "efficient"
    assert not SPACES["cpu"].half_kernels
    both = space.complete({"attention_backend": "flash", "precision": "bf16"})
    assert revert_knobs(both, space.baseline, ["precision"]) == space.baseline
    half = build_space(gpu_facts(fixed={"precision": "its parameters are bfloat16"}))
    assert half.complete({"attention_backend": "cudnn"}).attention_backend == "cudnn"


def test_products_of_a_cpu_that_the_user_has_may_be_taken_back() -> None:
    space = build_space(cpu_facts(baseline=BASELINE.replace(matmul_precision="medium")))
    assert space.choices["matmul_precision"] == ("highest", "medium")
    of_convolutions = (
        MatmulRate(dtype="fp32", flops_per_second=1e11, convolution_flops_per_second=2.4e11),
        MatmulRate(dtype="fp32-medium", flops_per_second=2e11, convolution_flops_per_second=2.4e11),
    )
    model = MODEL.replace(has_4d_convolution=True, calls_attention=False)
    facts = cpu_facts(ceilings=Ceilings(device="cpu", matmul=of_convolutions), model=model)
    assert "matmul_precision" not in build_space(facts).choices


def test_tf32_that_is_on_is_not_taken_back() -> None:
    space = build_space(gpu_facts(baseline=BASELINE.replace(num_threads=None, matmul_precision="high")))
    assert "matmul_precision" not in space.choices
    assert "no product is faster" in reasons_of(space, "matmul_precision")["highest"]


def test_settings_without_effect_have_one_spelling() -> None:
    idle = BASELINE.replace(prefetch_factor=4, persistent_workers=True, non_blocking=True)
    assert canonical(idle, BASELINE) == BASELINE
    working = idle.replace(num_workers=2, pin_memory=True)
    assert canonical(working, BASELINE) == working
    unpinned = canonical(idle.replace(num_workers=2), BASELINE)
    assert unpinned == BASELINE.replace(num_workers=2, prefetch_factor=4, persistent_workers=True)
    products = BASELINE.replace(matmul_precision="medium")
    assert canonical(products, BASELINE) == products
    assert canonical(products.replace(precision="bf16"), BASELINE) == BASELINE.replace(precision="bf16")


@pytest.mark.parametrize(("workers", "pinned"), [(0, False), (0, True), (2, False), (2, True)])
def test_canonical_is_idempotent(workers: int, pinned: bool) -> None:
    for prefetch, persistent, asynchronous in itertools.product((2, 4), (False, True), (False, True)):
        config = BASELINE.replace(
            num_workers=workers,
            pin_memory=pinned,
            prefetch_factor=prefetch,
            persistent_workers=persistent,
            non_blocking=asynchronous,
        )
        once = canonical(config, BASELINE)
        assert canonical(once, BASELINE) == once


def test_going_back_to_the_baselines_workers_keeps_its_own_settings() -> None:
    baseline = BASELINE.replace(num_workers=2, prefetch_factor=4, persistent_workers=True)
    space = build_space(cpu_facts(baseline=baseline))
    assert space.complete({}) == baseline
    assert space.complete({"num_workers": 0}) == baseline.replace(num_workers=0)


@pytest.mark.parametrize(
    ("changes", "inside"),
    [
        ({"micro_batch_size": 6, "gradient_accumulation_steps": 2}, True),
        ({"micro_batch_size": 6}, False),
        ({"gradient_accumulation_steps": 2}, False),
        ({"micro_batch_size": 5, "gradient_accumulation_steps": 2}, False),
        ({"num_workers": 3}, False),
        ({"matmul_precision": "high"}, False),
        ({"precision": "fp16"}, False),
        ({"user_knobs": {"width": 16}}, False),
    ],
)
def test_what_is_outside_the_space(changes: dict[str, Any], inside: bool) -> None:
    assert SPACES["cpu"].contains(BASELINE.replace(**changes)) is inside


def test_the_workloads_own_knobs_are_part_of_the_space() -> None:
    space = SPACES["own knobs"]
    config = space.complete({"user_knobs.width": 32, "precision": "bf16"})
    assert config.user_knobs == {"width": 32}
    assert space.contains(config)
    assert not space.contains(config.replace(user_knobs={"width": 64}))


@pytest.mark.parametrize(
    ("only", "exclude", "left"),
    [
        (("width", "num_workers"), (), {"user_knobs.width", "num_workers"}),
        (("user_knobs.width",), (), {"user_knobs.width"}),
        (("num_workers", "precision"), ("precision", "matmul_precision"), {"num_workers"}),
        (("workers", "precision"), ("precision", "matmul"), {"num_workers"}),
        ((), ("gradient_accumulation_steps",), {*SPACES["own knobs"].choices} - {"micro_batch_size"}),
    ],
)
def test_a_space_is_cut_to_some_knobs(only: tuple[str, ...], exclude: tuple[str, ...], left: set[str]) -> None:
    space = SPACES["own knobs"]
    cut = space.restrict(only, exclude)
    assert cut.choices == {name: values for name, values in space.choices.items() if name in left}
    assert {out.knob for out in cut.ruled_out if "left out by --" in out.reason} == space.choices.keys() - left


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"only": ("num_worker",)}, ("--only 'num_worker' is no knob", "did you mean workers?")),
        ({"exclude": ("lr",)}, ("--exclude 'lr' is no knob", "what can be varied here: ")),
        ({"only": ("cudnn_benchmark",)}, ("--only cudnn_benchmark cannot be varied here: cuDNN runs", "width")),
        ({"only": ("num_workers",), "exclude": ("num_workers",)}, ("leave no knob to vary", "workers")),
    ],
)
def test_a_knob_that_cannot_be_varied_is_told_with_those_that_can(options: Any, words: tuple[str, str]) -> None:
    with pytest.raises(UsageError) as raised:
        SPACES["own knobs"].restrict(**options)
    assert words[0] in raised.value.message
    assert words[1] in (raised.value.hint or "")


@pytest.mark.parametrize("name", ["workers", "num_workers", "user_knobs.width", "width", "accumulation", "matmul"])
def test_a_knob_is_known_by_either_name_and_one_of_the_users_by_its_own(name: str) -> None:
    require_knobs([name], {"width"})


def test_what_is_no_knob_is_told_before_anything_is_measured() -> None:
    with pytest.raises(UsageError, match="'wrkers' is no knob") as caught:
        require_knobs(["precision", "wrkers"], {"width"})
    assert caught.value.hint.startswith("did you mean workers? the knobs are workers, prefetch,")
    assert caught.value.hint.endswith(", width")


def test_keep_puts_back_what_is_not_allowed() -> None:
    foreign = BASELINE.replace(
        pin_memory=True, precision="bf16", num_workers=64, matmul_precision="high", prefetch_factor=4
    )
    assert SPACES["cpu"].keep(foreign) == BASELINE.replace(precision="bf16")
    other_batch = foreign.replace(micro_batch_size=32, gradient_accumulation_steps=4)
    assert SPACES["cpu"].keep(other_batch) == BASELINE.replace(precision="bf16")


@pytest.mark.parametrize(
    ("changes", "numerics"),
    [
        ({}, "exact"),
        ({"num_workers": 2, "pin_memory": True}, "exact"),
        ({"host_allocator": "glibc-tuned"}, "exact"),
        ({"precision": "bf16"}, "rounding"),
        ({"num_workers": 2, "num_threads": 1}, "rounding"),
        ({"micro_batch_size": 6, "gradient_accumulation_steps": 2}, "rounding"),
        ({"user_knobs": {"width": 16}}, "semantic"),
        ({"user_knobs": {"width": 16}, "num_workers": 2, "precision": "bf16"}, "semantic"),
    ],
)
def test_the_strongest_change_gives_the_class(changes: dict[str, Any], numerics: str) -> None:
    assert numerics_of(BASELINE.replace(**changes), BASELINE) == numerics


def test_only_compiled_configs_need_a_compilation() -> None:
    needing = [mode for mode in ALL_VALUES["compile_mode"] if needs_compilation(BASELINE.replace(compile_mode=mode))]
    assert needing == [mode for mode in ALL_VALUES["compile_mode"] if mode != "off"]


def test_costs_say_what_a_change_needs() -> None:
    costs = {knob.field: knob.cost for knob in KNOBS}
    assert {field for field, cost in costs.items() if cost == "compile"} == {"compile_mode"}
    assert {field for field, cost in costs.items() if cost == "environment"} == {"host_allocator", "device_allocator"}


PRESETS = {preset.name: preset for preset in load_presets()}


def test_the_shipped_presets_are_all_there() -> None:
    assert list(PRESETS) == ["balanced", "baseline", "low-memory", "reproducible"]
    assert PRESETS["baseline"].settings == {}
    assert all(preset.description for preset in PRESETS.values())


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_sets_known_knobs_to_values_they_take(preset: str) -> None:
    settings = PRESETS[preset].settings
    assert settings.keys() <= {knob.field for knob in KNOBS}
    config = TrainConfig(**settings)  # type: ignore[arg-type]
    if preset == "reproducible":
        assert numerics_of(config, TrainConfig()) == "exact"


@pytest.mark.parametrize("preset", PRESETS)
@each_space
def test_a_preset_is_cut_to_the_space(name: str, preset: str) -> None:
    space = SPACES[name]
    config = space.keep(space.baseline.replace(**PRESETS[preset].settings))
    assert space.contains(config)
    assert canonical(config, space.baseline) == config


def test_the_reproducible_preset_stays_exact_when_cut() -> None:
    for space in SPACES.values():
        config = space.keep(space.baseline.replace(**PRESETS["reproducible"].settings))
        assert numerics_of(config, space.baseline) == "exact"


def test_a_preset_with_a_typing_error_is_refused(tmp_path: Any) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"name": "mine", "description": "d", "settings": {}, "setings": {}}')
    with pytest.raises(ProfileError, match="setings"):
        read_record(file, Preset)


SHARED = {
    "distributed_strategy": ("ddp", "fsdp"),
    "bucket_cap_mb": (25, 50, 100, 250),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, True),
    "reshard_after_forward": (True, False),
    "sync_each_micro_batch": (False, True),
    "reduce_dtype": ("fp32", "bf16"),
}


def test_what_several_processes_share_is_varied_where_there_are_several() -> None:
    model = MODEL.replace(parameter_bytes=150 * 2**20)
    several = build_space(cpu_facts(model=model, world_size=2))
    assert {name: several.choices.get(name) for name in SHARED} == SHARED | {"bucket_cap_mb": (5, *(25, 50, 100, 250))}
    alone = build_space(cpu_facts(model=model))
    assert not SHARED.keys() & alone.choices.keys()
    for name in SHARED:
        assert {text[:31] for text in reasons_of(alone, name).values()} == {"it is for several processes: --"}


def test_a_script_under_a_launcher_of_its_own_has_several_processes() -> None:
    model = MODEL.replace(parameter_bytes=150 * 2**20)
    script = build_space(cpu_facts(model=model, launched_processes=2, fixed={"distributed_strategy": "its own"}))
    assert {*SHARED} - script.choices.keys() == {"distributed_strategy"}
    alone, several = (build_space(cpu_facts(launched_processes=size)).choices["num_threads"] for size in (1, 2))
    assert len(several) < len(alone)  # each has its share of the CPUs


def test_buckets_are_varied_where_there_is_more_than_one() -> None:
    small = build_space(cpu_facts(model=MODEL.replace(parameter_bytes=2**19), world_size=2))
    assert "bucket_cap_mb" not in small.choices
    assert {*reasons_of(small, "bucket_cap_mb").values()} == {"all gradients fit into the first bucket"}
    some = build_space(cpu_facts(model=MODEL.replace(parameter_bytes=3 * 2**20), world_size=2))
    assert some.choices["bucket_cap_mb"] == (5, 25)


def test_what_is_the_other_strategys_is_without_effect() -> None:
    base = BASELINE.replace(gradient_accumulation_steps=2)
    changed = base.replace(
        bucket_cap_mb=100, static_graph=True, reshard_after_forward=False, reduce_dtype="bf16", precision="bf16"
    )
    assert changed_fields(canonical(changed, base), base) == ("precision", "bucket_cap_mb", "reduce_dtype")
    sharded = changed.replace(distributed_strategy="fsdp", memory_format="channels_last", precision="fp32")
    assert changed_fields(canonical(sharded, base), base) == ("distributed_strategy", "reshard_after_forward")
    meets = base.replace(sync_each_micro_batch=True, static_graph=True)
    assert canonical(meets, base) == meets
    assert canonical(meets.replace(gradient_accumulation_steps=1), BASELINE).static_graph
