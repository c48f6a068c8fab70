"""Planted reports for the page of `autotune probe`: a full GPU machine, a small CPU with a script, hardly anything."""

from __future__ import annotations

from typing import Any

import record_factory
from record_factory import GIB, MIB, make_block, make_data, make_gpu, make_mode, make_model, make_phases, make_software

from autotune.records import (
    Advice,
    Ceilings,
    GainRange,
    HardwareInfo,
    Issue,
    MachineReport,
    MatmulRate,
    Measurement,
    PeakMemory,
    ProbeReport,
    RuledOut,
    StepWork,
    TargetFacts,
    TrainConfig,
    Verdict,
)

SOFTWARE = make_software(
    autotune="0.1.0",
    python="3.12.4",
    torch="2.13.0+cu130",
    cuda="13.0",
    driver="580.65",
    platform="Linux-6.8-x86_64-with-glibc2.39",
)
H100 = make_gpu(
    name="NVIDIA H100 80GB HBM3",
    compute_capability="9.0",
    power_limit_watts=700.0,
    sm_clock_mhz=1410,
    sm_clock_max_mhz=1980,
    temperature_celsius=71,
    slowdowns=("power-cap",),
    utilization_fraction=0.02,
    pcie_generation=5,
    pcie_width=16,
    nvlinks=18,
    mig="off",
    other_processes=1,
)
GPU_CEILINGS = Ceilings(
    matmul=(
        MatmulRate(dtype="fp32", flops_per_second=5.2e13, sustained_flops_per_second=5.0e13),
        MatmulRate(dtype="tf32", flops_per_second=4.0e14, sustained_flops_per_second=3.6e14),
        MatmulRate(dtype="bf16", flops_per_second=7.4e14, sustained_flops_per_second=6.5e14),
    ),
    memory_bytes_per_second=2.9e12,
    triad_bytes_per_second=3.0e12,
    copy_to_device_bytes_per_second=5.4e10,
    copy_from_device_bytes_per_second=5.3e10,
    pageable_to_device_bytes_per_second=1.1e10,
    pageable_from_device_bytes_per_second=9.0e9,
    launch_seconds=4.2e-6,
    synchronize_seconds=8.1e-6,
    all_reduce_bytes_per_second=3.7e11,
    ranks=2,
)
WORK = StepWork(
    products_fraction=0.44,
    traffic_fraction=0.39,
    overhead_fraction=0.17,
    operations_per_step=1204.0,
    host_syncs_per_step=2.0,
    bytes_per_second=2.1e12,
    device_busy_fraction=0.83,
    enqueue_fraction=0.41,
)
MEMORY = record_factory.make_memory(
    *(
        make_mode(
            precision=precision,
            activation_checkpointing=saving,
            fixed_bytes=6.7 * GIB,
            bytes_per_sample=size * MIB,
            largest_micro_batch_size=largest,
        )
        for precision, saving, size, largest in (
            ("fp32", "off", 410, 168),
            ("fp32", "full", 90, 768),
            ("bf16", "off", 220, 312),
            ("bf16", "selective", 130, None),
            ("bf16", "full", 0, 0),
        )
    ),
    base_bytes=1.1 * GIB,
    weights_bytes=1.4 * GIB,
    gradient_bytes=1.4 * GIB,
    optimizer_bytes=2.8 * GIB,
    activation_bytes_per_sample=410 * MIB,
    limit_bytes=78 * GIB,
    calibrated_micro_batch_size=32,
    calibration_error=-0.034,
)


def make_hardware(**changes: Any) -> HardwareInfo:
    fields: dict[str, Any] = {
        "cpu_name": "AMD EPYC 9354 32-Core Processor",
        "usable_cpu_count": 16,
        "cpu_features": ("avx2", "avx512_bf16", "avx512_vnni", "avx512f", "fma"),
        "memory_total_bytes": 1007 * GIB,
        "memory_limit_bytes": 128 * GIB,
        "memory_available_bytes": 117 * GIB,
        "shared_memory_free_bytes": 60 * MIB,
        "shared_memory_total_bytes": 64 * MIB,
        "gpus": (H100, H100.replace(temperature_celsius=44, slowdowns=(), sm_clock_mhz=1980, other_processes=0)),
        "host_allocators": {"jemalloc": "/usr/lib/libjemalloc.so.2"},
        "affinity_cpu_count": 32,
        "cpu_quota": 16.0,
        "core_count": 16,
        "numa_node_count": 2,
        "last_level_cache_bytes": 256 * MIB,
        "swap_total_bytes": 8 * GIB,
        "swap_used_bytes": 1536 * MIB,
        "environment": ("a container", "a Slurm job"),
    }
    return record_factory.make_hardware(**(fields | changes))


def make_measurement(
    *, step_ms: float = 89.0, wait_ms: float = 31.0, device_bytes: int | None = 19 * GIB
) -> Measurement:
    return record_factory.make_measurement(
        (make_block(320, step_ms / 100),) * 2,
        step_seconds=(step_ms / 1000,) * 20,
        data_wait_seconds=20 * wait_ms / 1000,
        warmup_steps=3,
        warmup_seconds=0.3,
        peak_memory=PeakMemory(host_bytes=3 * GIB, device_bytes=device_bytes),
    )


def make_facts(**changes: Any) -> TargetFacts:
    fields: dict[str, Any] = {
        "fingerprint": "0" * 12,
        "device": "cuda",
        "baseline": TrainConfig(num_workers=4, micro_batch_size=32),
        "model": make_model(
            parameter_count=374_000_000,
            parameter_bytes=1_496_000_000,
            calls_attention=True,
            checkpointable_blocks=24,
            flops_per_sample=4.4e10,
        ),
        "data": make_data(
            sample_count=1_281_167,
            seconds_per_sample=9.3e-3,
            random_sources=("torch",),
            batch_bytes=18 * MIB,
            loader_seconds_per_step=0.081,
            epoch_start_seconds=2.4,
            slow_batch_ratio=3.1,
            worker_bytes=310 * MIB,
            disk_read_bytes_per_second=2.1e8,
        ),
        "phases": make_phases(0.031, 0.0019, 0.0151, 0.0312, 0.0083),
        "compute_seconds_per_step": 0.0552,
        "ceilings": GPU_CEILINGS,
        "work": WORK,
        "memory": MEMORY,
        "batch_elasticity": 0.71,
        "warnings": ("what the script wrote in its trials was thrown away: log.txt",),
    }
    return record_factory.make_facts(**(fields | changes))


def make_report(**changes: Any) -> ProbeReport:
    fields: dict[str, Any] = {
        "hardware": make_hardware(),
        "software": SOFTWARE,
        "target": make_facts(),
        "measurement": make_measurement(),
        "verdict": Verdict(
            limit="input",
            sentence="input-bound: 35 % of a step waits for the loader; without the wait a step takes 58 ms "
            "instead of 89 ms (1.5x)",
            evidence=(
                "the loader alone needs 81 ms a step, the computation alone 55.2 ms",
                "loading a step's samples takes 298 ms in one process; 4 workers are in use on 16 usable CPUs",
                "matrix products reach 32 % of the sustained fp32 rate",
            ),
            speedup_ceiling=3.07,
            ceiling_reason="16 CPUs cannot load faster than 18.6 ms a step, and the products take 2.2 ms in bf16",
        ),
        "advice": (
            Advice(
                knob="num_workers",
                reason="35 % of a step waits for the loader; one process loads a step's samples in 298 ms, the "
                "computation takes 55.2 ms; workers that match it if they scale: 7; in use: 4; usable CPUs: 16",
                gain=GainRange(low=1.2, high=1.6),
            ),
            Advice(
                knob="precision",
                reason="bf16 matrix products ran 14x as fast as fp32 ones (740 TFLOP/s against 52 TFLOP/s); forward "
                "and backward take 53 % of a step",
                gain=GainRange(low=1.1, high=1.8),
            ),
            Advice(
                knob="optimizer_implementation",
                reason="the optimizer takes 9 % of a step (8.3 ms); AdamW also has foreach, fused",
                gain=GainRange(low=1.01, high=1.06),
            ),
            Advice(knob="attention_backend", reason="the model calls scaled_dot_product_attention"),
        ),
        "ruled_out": (
            RuledOut(knob="memory_format", value="channels_last", reason="the model has no 2-d convolution"),
            RuledOut(knob="cudnn_benchmark", value=True, reason="the model has no 2-d convolution"),
            RuledOut(knob="num_threads", value=1, reason="the GPU does the arithmetic"),
            RuledOut(knob="host_allocator", value="jemalloc", reason="activations are in GPU memory, not in malloc's"),
            RuledOut(knob="host_allocator", value="tcmalloc", reason="activations are in GPU memory, not in malloc's"),
            RuledOut(knob="user_knobs.width", value=None, reason="it changes what is learned"),
        ),
        "troubles": (
            Issue(
                name="shared-memory",
                sentence="/dev/shm has 64 MiB, and 8 batches in flight need 144 MiB",
                remedy="give the container more: docker run --shm-size=8g",
            ),
            Issue(
                name="power-cap",
                sentence="GPU 0 runs at 1410 of 1980 MHz, held down by its power cap of 700 W",
                remedy="nothing within this training; compare timings only on this GPU",
            ),
        ),
        "ceilings_age_seconds": 3 * 86400.0,
        "elapsed_seconds": 42.0,
    }
    return record_factory.make_report(**(fields | changes))


def make_cpu_report(**changes: Any) -> ProbeReport:
    """Return the report of a script on a small CPU, of which little is known."""
    facts = make_facts(
        label="python train.py --lr 0.1",
        device="cpu",
        baseline=TrainConfig(micro_batch_size=64, num_threads=2),
        data=make_data(sample_count=None, seconds_per_sample=2e-5, iterable=True),
        ceilings=record_factory.make_ceilings({"fp32": 1.1e11, "bf16": 3.2e11}, memory_bytes_per_second=1.3e10),
        model=make_facts().model.replace(flops_per_sample=None),
        work=None,
        memory=None,
        batch_elasticity=None,
        aside_fraction=0.12,
        warnings=(),
    )
    fields: dict[str, Any] = {
        "hardware": make_hardware(
            gpus=(),
            cpu_quota=None,
            affinity_cpu_count=None,
            core_count=None,
            numa_node_count=None,
            last_level_cache_bytes=None,
            swap_used_bytes=0,
            shared_memory_total_bytes=None,
            environment=(),
            host_allocators={},
            usable_cpu_count=2,
        ),
        "target": facts,
        "measurement": make_measurement(device_bytes=None),
        "verdict": Verdict(limit="unknown", sentence="unknown: a step takes 89 ms"),
        "software": SOFTWARE.replace(cuda=None, driver=None, torch="2.13.0+cpu"),
        "advice": (),
        "ruled_out": (),
        "troubles": (),
        "ceilings_age_seconds": 0.0,
    }
    return make_report(**(fields | changes))


def make_machine(**changes: Any) -> MachineReport:
    fields: dict[str, Any] = {
        "hardware": make_hardware(),
        "software": SOFTWARE,
        "ceilings": GPU_CEILINGS,
        "ceilings_age_seconds": 5 * 3600.0,
        "troubles": make_report().troubles,
    }
    return MachineReport(**(fields | changes))
