"""What the tests of emit are about: a training on an H200 that was made 1.38 times as fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import record_factory
from record_factory import GIB, make_block, make_check, make_data, make_gpu, make_model, make_phases

from autotune.records import (
    Advice,
    Evidence,
    HardwareInfo,
    Interval,
    LossCurve,
    Measurement,
    OneOffCosts,
    PeakMemory,
    ProbeReport,
    Profile,
    RuledOut,
    SoftwareInfo,
    TargetFacts,
    TrainConfig,
    TrialResult,
    TrialStatus,
    Verdict,
)
from autotune.search.store.folder import create_search_folder

BASELINE = TrainConfig(num_threads=4, optimizer_implementation="foreach")
TUNED = BASELINE.replace(
    precision="bf16", num_workers=4, pin_memory=True, compile_mode="default", optimizer_implementation="fused"
)


def make_hardware(**changes: Any) -> HardwareInfo:
    fields: dict[str, Any] = {
        "cpu_name": "Xeon Platinum 8480C",
        "usable_cpu_count": 16,
        "cpu_features": ("amx_bf16", "avx512_bf16"),
        "memory_total_bytes": 256 * GIB,
        "memory_limit_bytes": 128 * GIB,
        "memory_available_bytes": 120 * GIB,
        "shared_memory_free_bytes": 64 * GIB,
        "has_cpp_compiler": False,
        "gpus": (
            make_gpu(
                name="NVIDIA H200",
                memory_total_bytes=141 * GIB,
                memory_free_bytes=139 * GIB,
                compute_capability="9.0",
                power_limit_watts=700.0,
            ),
        ),
    }
    return record_factory.make_hardware(**(fields | changes))


def make_software(**changes: Any) -> SoftwareInfo:
    fields = {"autotune": "0.1.0", "python": "3.12.4", "torch": "2.13.0+cu130", "cuda": "13.0", "driver": "580.65"}
    return record_factory.make_software(**{**fields, "platform": "Linux x86_64", **changes})


def make_measurement(rate: float = 1000.0, *, device_bytes: int | None = 9 * GIB) -> Measurement:
    """Return a measurement of `rate` samples per second."""
    return record_factory.make_measurement(
        (make_block(320, 320 / rate),) * 3,
        step_seconds=(32 / rate,) * 30,
        data_wait_seconds=0.1 * 960 / rate,
        warmup_steps=12,
        warmup_seconds=1.5,
        peak_memory=PeakMemory(host_bytes=3 * GIB, device_bytes=device_bytes),
    )


def make_facts(**changes: Any) -> TargetFacts:
    fields: dict[str, Any] = {
        "device": "cuda",
        "baseline": BASELINE,
        "model": make_model(
            parameter_count=12_400_000,
            parameter_bytes=49_600_000,
            calls_attention=True,
            checkpointable_blocks=6,
            flops_per_sample=3.1e9,
        ),
        "data": make_data(sample_count=50_000, seconds_per_sample=2.1e-4, random_sources=("torch",)),
        "phases": make_phases(0.0042, 0.0008, 0.0101, 0.0205, 0.0031),
        "compute_seconds_per_step": 0.0337,
        "ceilings": record_factory.make_ceilings(
            {"fp32": 5.2e13, "bf16": 6.9e14}, memory_bytes_per_second=4.1e12, copy_to_device_bytes_per_second=5.4e10
        ),
    }
    return record_factory.make_facts(**(fields | changes))


def make_report(**changes: Any) -> ProbeReport:
    fields: dict[str, Any] = {
        "hardware": make_hardware(),
        "software": make_software(),
        "target": make_facts(),
        "measurement": make_measurement(),
        "verdict": Verdict(
            limit="compute",
            sentence="The step is bound by arithmetic: 79 % of it is forward and backward.",
            speedup_ceiling=2.4,
        ),
        "advice": (Advice(knob="precision", reason="bf16 products run 13 times faster than fp32 here."),),
        "ruled_out": (
            RuledOut(knob="memory_format", value="channels_last", reason="The model has no 2-d convolution."),
            RuledOut(knob="host_allocator", value=None, reason="The step runs on the GPU."),
        ),
        "elapsed_seconds": 42.0,
    }
    return record_factory.make_report(**(fields | changes))


def make_trial(
    number: int,
    config: TrainConfig | None = TUNED,
    *,
    rate: float | None = 1000.0,
    purpose: str = "measure",
    **changes: Any,
) -> TrialResult:
    """Return a trial that reached `rate` samples per second; without a rate it crashed."""
    target = record_factory.make_target("train.py:workload", "/home/user/project")
    fields: dict[str, Any] = {
        "status": TrialStatus.COMPLETED if rate is not None else TrialStatus.CRASHED,
        "elapsed_seconds": 31.0,
        "measurement": None if rate is None else make_measurement(rate),
    }
    spec = record_factory.make_spec(config, number=number, purpose=purpose, target=target, time_limit_seconds=120.0)
    return record_factory.make_result(spec, **(fields | changes))


def make_finals(ratios: tuple[float, ...], *, first: int = 100, candidate: TrainConfig = TUNED) -> list[TrialResult]:
    """Return fresh-process pairs, baseline first in even rounds and second in odd ones."""
    results = []
    for index, ratio in enumerate(ratios):
        pair = [(BASELINE, 1000.0), (candidate, 1000.0 * ratio)]
        for offset, (config, rate) in enumerate(pair if index % 2 == 0 else pair[::-1]):
            results.append(make_trial(first + 2 * index + offset, config, rate=rate, purpose="final"))
    return results


def make_interval(estimate: float = 1.38, low: float = 1.31, high: float = 1.46) -> Interval:
    return record_factory.make_interval(estimate, low, high)


def make_profile(**changes: Any) -> Profile:
    worsening = record_factory.make_interval(0.0004, -0.001, 0.0018, confidence_level=0.9, method="paired t")
    fields: dict[str, Any] = {
        "config": TUNED,
        "baseline_config": BASELINE,
        "candidate_config": TUNED,
        "speedup": make_interval(),
        "quality": (make_check(difference=worsening, seeds=5, samples=12_800),),
        "memory": PeakMemory(host_bytes=3 * GIB, device_bytes=7 * GIB),
        "one_off": OneOffCosts(compile_seconds=21.0, startup_seconds=4.0, search_seconds=1200.0),
        "hardware": make_hardware(),
        "software": make_software(),
        "evidence": Evidence(
            pairs=8,
            baseline_samples_per_second=1000.0,
            samples_per_second=1380.0,
            launch_noise_fraction=0.021,
            trials={"completed": 20, "out_of_memory": 2},
            stop_reason="budget",
            notes=("The machine was also busy with something else during 2 trials.",),
        ),
    }
    return record_factory.make_profile(**(fields | changes))


def write_search(folder: Path, label: str, profile: Profile) -> None:
    """Write a search that was probed, and has an answer, into a working folder."""
    place = create_search_folder(folder, label)
    place.write_state(record_factory.make_state(target=record_factory.make_target(label, folder)))
    curve = LossCurve(seed=0, losses=(1.0, 0.9, 0.8), samples=96)
    place.adopt_probe(make_report(), make_trial(0, None, purpose="probe", facts=make_facts(), curves=(curve,)))
    profile.save(place.profile)
