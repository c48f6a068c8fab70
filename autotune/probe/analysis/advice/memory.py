"""Advice on what trades memory for time: the micro batch and activation checkpointing; pure."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.format import format_bytes, format_rough_factor, format_share
from autotune.probe.analysis.advice.case import Case, Finding, expect
from autotune.records.probe import GainRange


@dataclass(frozen=True)
class _Fit:
    """Whether settings fit into memory: None when that was not predicted; `peak_bytes` is the predicted peak."""

    fits: bool | None
    peak_bytes: float | None


def advise_micro_batch(case: Case) -> Finding:
    """Return whether the same effective batch in larger or smaller passes would be faster."""
    passes, size, elasticity = case.baseline.gradient_accumulation_steps, case.baseline.micro_batch_size, _read(case)
    if elasticity is not None and elasticity > 1.0 + case.policy.even:
        return _advise_smaller(case, elasticity)
    if passes == 1:
        return None
    same = f"larger passes make the same {passes * size} samples"
    reason = f"a step makes {passes} passes over {size} samples each; {same}"
    largest = _find_largest(case, checkpointing=case.baseline.activation_checkpointing)
    if largest is None:
        return None
    fit = _predict(case, largest, case.baseline.activation_checkpointing)
    reason += _describe_peak(case, largest, fit)
    if elasticity is None:
        return reason, None
    reason += f"; twice the samples take {format_rough_factor(2**elasticity)} the time"
    return reason, _expect_passes(case, elasticity, growth=largest / size)


def _read(case: Case) -> float | None:
    """Return the elasticity, no further from one than a clock can be trusted."""
    elasticity = case.facts.batch_elasticity
    policy = case.policy
    return None if elasticity is None else min(policy.most_elasticity, max(policy.least_elasticity, elasticity))


def _advise_smaller(case: Case, elasticity: float) -> Finding:
    size = case.baseline.micro_batch_size
    if not any(isinstance(value, int) and value < size for value in case.offered.get("micro_batch_size", ())):
        return None
    reason = (
        f"twice the samples take {format_rough_factor(2**elasticity)} the time of a pass: smaller ones may stay in the "
        f"caches; a pass has {size} samples"
    )
    return reason, _expect_passes(case, elasticity, growth=0.5)


def _expect_passes(case: Case, elasticity: float, *, growth: float) -> GainRange:
    """Return the gain of passes that are `growth` times as large: a sample then takes growth ** (elasticity - 1)."""
    return expect(case.figures.model_fraction * (1.0 - growth ** (elasticity - 1.0)))


def _find_largest(case: Case, *, checkpointing: str) -> int | None:
    """Return the largest micro batch on offer that is predicted to fit; None when no larger one does."""
    offered = [value for value in case.offered.get("micro_batch_size", ()) if isinstance(value, int)]
    wanted = [
        size
        for size in offered
        if case.baseline.micro_batch_size < size <= case.baseline.effective_batch_size
        and _predict(case, size, checkpointing).fits is not False
    ]
    return max(wanted, default=None)


def _predict(case: Case, size: int, checkpointing: str) -> _Fit:
    memory = case.facts.memory
    mode = memory.find_mode(case.baseline.precision, checkpointing) if memory is not None else None
    if memory is None or mode is None:
        return _Fit(None, None)
    peak = mode.predict_bytes(size)
    if mode.largest_micro_batch_size is None:
        return _Fit(peak <= memory.limit_bytes, peak)
    return _Fit(size <= mode.largest_micro_batch_size, peak)


def _describe_peak(case: Case, size: int, fit: _Fit) -> str:
    memory = case.facts.memory
    if fit.peak_bytes is not None and memory is not None:
        return f"; {size} are predicted to take {format_bytes(fit.peak_bytes)} of {format_bytes(memory.limit_bytes)}"
    used = case.measurement.peak_memory.device_bytes
    if used is not None and case.hardware.gpus and case.hardware.gpus[0].memory_total_bytes > 0:
        return f" (peak {format_bytes(used)} of {format_bytes(case.hardware.gpus[0].memory_total_bytes)})"
    return ""


def advise_checkpointing(case: Case) -> Finding:
    """Return whether recomputing activations costs time that memory does not ask for, or lets larger passes fit."""
    if case.baseline.activation_checkpointing == "off":
        return _checkpoint_for_larger_passes(case)
    fit = _predict(case, case.baseline.micro_batch_size, "off")
    if fit.fits is False:
        return None
    share = _forward_fraction(case)
    reason = f"recomputed activations repeat up to a forward pass ({format_share(share)} of a step)"
    if fit.peak_bytes is None:
        return f"{reason}; whether they fit without was not predicted", expect(share)
    return f"{reason}{_describe_peak(case, case.baseline.micro_batch_size, fit)} without", expect(share, sure=0.25)


def _checkpoint_for_larger_passes(case: Case) -> Finding:
    elasticity, without = _read(case), _find_largest(case, checkpointing="off")
    modes = [mode for mode in ("selective", "full") if _predict(case, 1, mode).fits is not None]
    sizes = {mode: _find_largest(case, checkpointing=mode) for mode in modes}
    larger = {mode: size for mode, size in sizes.items() if size is not None and size > (without or 0)}
    if elasticity is None or elasticity >= 1.0 - case.policy.even or not larger:
        return None
    mode, size = max(larger.items(), key=lambda item: item[1])
    fit = _predict(case, size, mode)
    reason = (
        f"{mode} checkpointing lets {size} samples a pass fit instead of {without or case.baseline.micro_batch_size}"
        f"{_describe_peak(case, size, fit)}; it repeats up to {format_share(_forward_fraction(case))} of a step"
    )
    gain = _expect_passes(case, elasticity, growth=size / case.baseline.micro_batch_size)
    cost = 1.0 + _forward_fraction(case)
    return reason, GainRange(low=1.0 / cost, high=max(1.0, gain.high / cost))


def _forward_fraction(case: Case) -> float:
    phases = case.facts.phases
    both = phases.forward_seconds + phases.backward_seconds
    return case.figures.model_fraction * phases.forward_seconds / both if both > 0 else 0.0
