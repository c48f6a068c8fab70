"""Small records for the tests of emit: plausible by default, any part replaceable."""

from __future__ import annotations

from typing import Any

from autotune.records import (
    Advice,
    Block,
    Ceilings,
    DataFacts,
    Evidence,
    GpuInfo,
    HardwareInfo,
    Interval,
    Margin,
    MatmulRate,
    Measurement,
    ModelFacts,
    OneOffCosts,
    OptimizerFacts,
    PeakMemory,
    ProbeReport,
    Profile,
    ProfileTarget,
    QualityCheck,
    RuledOut,
    SoftwareInfo,
    StepPhases,
    Target,
    TargetFacts,
    TrainConfig,
    TrialLimits,
    TrialResult,
    TrialSpec,
    TrialStatus,
    Verdict,
)

BASELINE = TrainConfig(num_threads=4, optimizer_implementation="foreach")
TUNED = BASELINE.replace(
    precision="bf16", num_workers=4, pin_memory=True, compile_mode="default", optimizer_implementation="fused"
)


def make_hardware(**changes: Any) -> HardwareInfo:
    gpu = GpuInfo(
        name="NVIDIA H200",
        memory_total_bytes=141 * 2**30,
        memory_free_bytes=139 * 2**30,
        compute_capability="9.0",
        power_limit_watts=700.0,
    )
    fields: dict[str, Any] = {
        "cpu_name": "Xeon Platinum 8480C",
        "usable_cpu_count": 16,
        "cpu_features": ("amx_bf16", "avx512_bf16"),
        "memory_total_bytes": 256 * 2**30,
        "memory_limit_bytes": 128 * 2**30,
        "memory_available_bytes": 120 * 2**30,
        "shared_memory_free_bytes": 64 * 2**30,
        "gpus": (gpu,),
    }
    return HardwareInfo(**(fields | changes))


def make_software(**changes: Any) -> SoftwareInfo:
    fields: dict[str, Any] = {
        "autotune": "0.1.0",
        "python": "3.12.4",
        "torch": "2.13.0+cu130",
        "cuda": "13.0",
        "driver": "580.65",
        "platform": "Linux x86_64",
    }
    return SoftwareInfo(**(fields | changes))


def make_measurement(rate: float = 1000.0, *, device_bytes: int | None = 9 * 2**30) -> Measurement:
    """Return a measurement of `rate` samples per second."""
    blocks = tuple(Block(optimizer_steps=10, samples=320, seconds=320 / rate) for _ in range(3))
    return Measurement(
        blocks=blocks,
        step_seconds=(32 / rate,) * 30,
        data_wait_seconds=0.1 * 960 / rate,
        steady=True,
        warmup_steps=12,
        warmup_seconds=1.5,
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=3 * 2**30, device_bytes=device_bytes),
    )


def make_facts(**changes: Any) -> TargetFacts:
    fields: dict[str, Any] = {
        "label": "train.py:workload",
        "fingerprint": "0123456789ab",
        "device": "cuda",
        "baseline": BASELINE,
        "model": ModelFacts(
            parameter_count=12_400_000,
            parameter_bytes=49_600_000,
            has_batch_norm=False,
            has_4d_convolution=False,
            calls_attention=True,
            checkpointable_blocks=6,
            flops_per_sample=3.1e9,
        ),
        "data": DataFacts(sample_count=50_000, seconds_per_sample=2.1e-4, random_sources=("torch",), iterable=False),
        "optimizer": OptimizerFacts(name="AdamW", implementations=("for-loop", "foreach", "fused")),
        "phases": StepPhases(
            data_wait_seconds=0.0042,
            copy_seconds=0.0008,
            forward_seconds=0.0101,
            backward_seconds=0.0205,
            optimizer_seconds=0.0031,
        ),
        "compute_seconds_per_step": 0.0337,
        "ceilings": Ceilings(
            matmul=(
                MatmulRate(dtype="fp32", flops_per_second=5.2e13),
                MatmulRate(dtype="bf16", flops_per_second=6.9e14),
            ),
            memory_bytes_per_second=4.1e12,
            copy_to_device_bytes_per_second=5.4e10,
        ),
    }
    return TargetFacts(**(fields | changes))


def make_probe(**changes: Any) -> ProbeReport:
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
    return ProbeReport(**(fields | changes))


def make_trial(
    number: int, config: TrainConfig | None = TUNED, *, rate: float | None = 1000.0, **changes: Any
) -> TrialResult:
    """Return a trial; without a rate it has no measurement."""
    purpose = changes.pop("purpose", "measure")
    spec = TrialSpec(
        number=number,
        purpose=purpose,
        target=Target(spec="train.py:workload", folder="/home/user/project"),
        config=config,
        limits=TrialLimits(time_limit_seconds=120.0),
    )
    fields: dict[str, Any] = {
        "spec": spec,
        "status": TrialStatus.COMPLETED if rate is not None else TrialStatus.CRASHED,
        "elapsed_seconds": 31.0,
        "measurement": None if rate is None else make_measurement(rate),
    }
    return TrialResult(**(fields | changes))


def make_finals(ratios: tuple[float, ...], *, first: int = 100, candidate: TrainConfig = TUNED) -> list[TrialResult]:
    """Return fresh-process pairs, baseline first in even rounds and second in odd ones."""
    results = []
    for index, ratio in enumerate(ratios):
        pair = [(BASELINE, 1000.0), (candidate, 1000.0 * ratio)]
        for offset, (config, rate) in enumerate(pair if index % 2 == 0 else pair[::-1]):
            results.append(make_trial(first + 2 * index + offset, config, rate=rate, purpose="final"))
    return results


def make_interval(estimate: float = 1.38, low: float = 1.31, high: float = 1.46) -> Interval:
    return Interval(estimate=estimate, low=low, high=high, confidence_level=0.98, method="t on paired log ratios")


def make_profile(**changes: Any) -> Profile:
    quality = QualityCheck(
        test="paired-losses",
        metric="training loss",
        difference=Interval(estimate=0.0004, low=-0.001, high=0.0018, confidence_level=0.9, method="paired t"),
        margin=Margin(amount=0.005),
        verdict="non-inferior",
        seeds=5,
        samples=12_800,
    )
    fields: dict[str, Any] = {
        "verdict": "improved",
        "config": TUNED,
        "baseline_config": BASELINE,
        "candidate_config": TUNED,
        "speedup": make_interval(),
        "quality": (quality,),
        "memory": PeakMemory(host_bytes=3 * 2**30, device_bytes=7 * 2**30),
        "one_off": OneOffCosts(compile_seconds=21.0, startup_seconds=4.0, search_seconds=1200.0),
        "target": ProfileTarget(label="train.py:workload", fingerprint="0123456789ab"),
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
    return Profile(**(fields | changes))
