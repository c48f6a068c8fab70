"""Which knobs to try first, and why. Records in, ranked `Advice` out; pure.

A knob is named only when the space has another value for it here. First come those whose evidence says how much of a
step they act on, largest share first; then those that are known to matter for this kind of model. A reason states
what was measured, never what will be gained.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from autotune.knobs import KNOBS, Facts
from autotune.probe.figures import StepFigures, derive_figures, format_flops, format_share, format_step
from autotune.records.config import KnobValue, TrainConfig, get_knob
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Advice, Limit
from autotune.units import format_bytes, format_duration

_FASTER_ARITHMETIC = 1.3
_OPTIMIZER_FRACTION = 0.10
_COPY_FRACTION = 0.05
_UNEXPLAINED_FRACTION = 0.30
_UNEVEN_STEPS = 2.0
# One step in twenty is a tail only when there are twenty.
_STEPS_FOR_A_TAIL = 20
_DEFAULT_PREFETCH = 2
_WORKER_MARGIN = 1.2
_SHORT_EPOCH_SECONDS = 60.0


@dataclass(frozen=True)
class _Case:
    facts: TargetFacts
    measurement: Measurement
    hardware: HardwareInfo
    figures: StepFigures
    limit: Limit

    @property
    def baseline(self) -> TrainConfig:
        return self.facts.baseline

    @property
    def on_gpu(self) -> bool:
        return self.facts.device == "cuda"

    @property
    def model_share(self) -> str:
        return f"forward and backward take {format_share(self.figures.model_fraction)} of a step"


# The share of a step a knob acts on (0 when the evidence does not say) and the reason; None when there is no reason.
_Finding = tuple[float, str] | None


def advise(facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo, *, limit: Limit) -> tuple[Advice, ...]:
    """Return the knobs worth trying, best first.

    Args:
        facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
        limit: what binds a step; when it is the input, the loader's knobs come first.
    """
    case = _Case(facts, measurement, hardware, derive_figures(facts, measurement), limit)
    table = Facts(target=facts, hardware=hardware)
    offered: dict[str, tuple[KnobValue, ...]] = {knob.field: knob.choices(table)[0] for knob in KNOBS}
    found: list[tuple[float, Advice]] = []
    for name, adviser in _ADVISERS.items():
        if set(offered[name]) <= {get_knob(case.baseline, name)}:
            continue
        finding = adviser(case)
        if finding is not None:
            found.append((finding[0], Advice(knob=name, reason=finding[1])))
    found.sort(key=lambda entry: -entry[0])
    return tuple(advice for _, advice in found)


def _advise_workers(case: _Case) -> _Finding:
    baseline, figures, usable = case.baseline, case.figures, case.hardware.usable_cpu_count
    if case.limit != "input" or baseline.num_workers >= usable:
        return None
    load_seconds = case.facts.data.seconds_per_sample * figures.samples_per_step
    reason = (
        f"{format_share(figures.wait_fraction)} of a step waits for the loader; one process loads a step's samples in "
        f"{format_step(load_seconds)}, the computation takes {format_step(figures.compute_seconds)}"
    )
    if figures.compute_seconds > 0:
        matching = max(1, math.ceil(_WORKER_MARGIN * load_seconds / figures.compute_seconds))
        reason += f"; workers that match it if they scale: {matching}"
    # The loader binds, so its knobs come before every share of the computation.
    return 1.0 + figures.wait_fraction, f"{reason}; in use: {baseline.num_workers}; usable CPUs: {usable}"


def _advise_prefetch(case: _Case) -> _Finding:
    steps = case.measurement.step_seconds
    if case.limit != "input" or case.baseline.num_workers == 0 or len(steps) < _STEPS_FOR_A_TAIL:
        return None
    if case.baseline.prefetch_factor > _DEFAULT_PREFETCH:
        return None
    slow, median = statistics.quantiles(steps, n=20)[-1], statistics.median(steps)
    if slow <= _UNEVEN_STEPS * median:
        return None
    return 1.0, f"steps are uneven: one in twenty takes {slow / median:.2g}x the median or more ({format_step(slow)})"


def _advise_persistence(case: _Case) -> _Finding:
    count, workers = case.facts.data.sample_count, case.baseline.num_workers
    if count is None or workers == 0 or case.baseline.persistent_workers:
        return None
    epoch_seconds = count / case.measurement.samples_per_second
    if epoch_seconds > _SHORT_EPOCH_SECONDS:
        return None
    return (
        0.0,
        f"an epoch lasts {format_duration(epoch_seconds)} and starts its loader workers anew each time ({workers})",
    )


def _advise_pinning(case: _Case) -> _Finding:
    if case.baseline.pin_memory or case.figures.copy_fraction <= _COPY_FRACTION:
        return None
    reason = f"copies to the device take {format_share(case.figures.copy_fraction)} of a step from pageable memory"
    rate = case.facts.ceilings.copy_to_device_bytes_per_second
    if rate is not None:
        reason += f"; page-locked memory copies at {rate / 1e9:.3g} GB/s here"
    return case.figures.copy_fraction, reason


def _advise_non_blocking(case: _Case) -> _Finding:
    baseline = case.baseline
    if not baseline.pin_memory or baseline.non_blocking or case.figures.copy_fraction <= _COPY_FRACTION:
        return None
    share = format_share(case.figures.copy_fraction)
    return case.figures.copy_fraction, f"copies from page-locked memory take {share} of a step and hold up the host"


def _advise_precision(case: _Case) -> _Finding:
    if case.baseline.precision != "fp32":
        return None
    # fp16 needs loss scaling, so it is named only where bf16 is no faster.
    fp16_works = case.on_gpu
    for precision, works in (("bf16", case.facts.supports_bf16), ("fp16", fp16_works)):
        finding = _compare_arithmetic(case, precision) if works else None
        if finding is not None:
            return finding
    return None


def _advise_tf32(case: _Case) -> _Finding:
    if case.baseline.precision != "fp32" or case.baseline.allow_tf32:
        return None
    return _compare_arithmetic(case, "tf32")


def _compare_arithmetic(case: _Case, name: str) -> _Finding:
    now, other = case.figures.ceiling_flops_per_second, case.facts.ceilings.flops_per_second(name)
    if not now or not other or other <= _FASTER_ARITHMETIC * now:
        return None
    reason = (
        f"{name} matrix products ran {other / now:.2g}x as fast as {case.figures.arithmetic} ones "
        f"({format_flops(other)} against {format_flops(now)}); {case.model_share}"
    )
    return case.figures.model_fraction * (1 - now / other), reason


def _advise_optimizer(case: _Case) -> _Finding:
    share = case.figures.optimizer_fraction
    if share <= _OPTIMIZER_FRACTION:
        return None
    seconds, optimizer = case.facts.phases.optimizer_seconds, case.facts.optimizer
    others = ", ".join(name for name in optimizer.implementations if name != case.baseline.optimizer_implementation)
    spent = f"{format_share(share)} of a step ({format_step(seconds)})"
    return share, f"the optimizer takes {spent}; {optimizer.name} also has {others}"


def _advise_compilation(case: _Case) -> _Finding:
    mfu = case.figures.mfu
    if case.baseline.compile_mode != "off" or mfu is None:
        return None
    unexplained = case.figures.model_fraction - mfu
    if unexplained <= _UNEXPLAINED_FRACTION:
        return None
    reason = (
        f"{case.model_share}, and its matrix products at the measured {case.figures.arithmetic} rate would fill "
        f"{format_share(mfu)}: the rest is elementwise work, memory traffic and overhead, which compilation can fuse"
    )
    return unexplained, reason


def _advise_host_allocator(case: _Case) -> _Finding:
    if case.baseline.host_allocator != "default":
        return None
    peak = format_bytes(case.measurement.peak_memory.host_bytes)
    names = ", ".join(("glibc-tuned", *sorted(case.hardware.host_allocators)))
    return 0.0, f"on a CPU every step takes its activations from malloc (peak {peak}), and {case.model_share}: {names}"


def _advise_memory_format(case: _Case) -> _Finding:
    if case.baseline.memory_format != "contiguous":
        return None
    return 0.0, f"the model has 2-d convolutions, and {case.model_share}"


def _advise_cudnn(case: _Case) -> _Finding:
    if case.baseline.cudnn_benchmark:
        return None
    return 0.0, f"cuDNN has not timed its algorithms for the model's 2-d convolutions, and {case.model_share}"


def _advise_attention(case: _Case) -> _Finding:
    if case.baseline.attention_backend != "auto":
        return None
    return 0.0, f"the model calls scaled_dot_product_attention, and {case.model_share}"


def _advise_micro_batch(case: _Case) -> _Finding:
    passes, size = case.baseline.gradient_accumulation_steps, case.baseline.micro_batch_size
    if passes == 1:
        return None
    reason = (
        f"a step makes {passes} passes over {size} samples each; larger passes make the same {passes * size} samples"
    )
    used = case.measurement.peak_memory.device_bytes
    if used is not None and case.hardware.gpus and case.hardware.gpus[0].memory_total_bytes > 0:
        reason += f" (peak {format_bytes(used)} of {format_bytes(case.hardware.gpus[0].memory_total_bytes)})"
    return 0.0, reason


def _advise_threads(case: _Case) -> _Finding:
    usable, workers = case.hardware.usable_cpu_count, case.baseline.num_workers
    threads = case.baseline.num_threads or usable
    if threads + workers <= usable and case.limit != "input":
        return None
    return 0.0, f"threads: {threads}, loader workers: {workers}, usable CPUs to share: {usable}"


_ADVISERS: dict[str, Callable[[_Case], _Finding]] = {
    "num_workers": _advise_workers,
    "prefetch_factor": _advise_prefetch,
    "pin_memory": _advise_pinning,
    "non_blocking": _advise_non_blocking,
    "precision": _advise_precision,
    "allow_tf32": _advise_tf32,
    "compile_mode": _advise_compilation,
    "optimizer_implementation": _advise_optimizer,
    "memory_format": _advise_memory_format,
    "host_allocator": _advise_host_allocator,
    "attention_backend": _advise_attention,
    "cudnn_benchmark": _advise_cudnn,
    "micro_batch_size": _advise_micro_batch,
    "num_threads": _advise_threads,
    "persistent_workers": _advise_persistence,
}
