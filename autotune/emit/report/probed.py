"""What the report says of the probe beyond its verdict: records in, rows of text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.emit.report.wording import shorten
from autotune.format import EN_DASH, TIMES, format_bytes, format_gain
from autotune.records import Advice, GainRange, Issue, ProbeReport, TargetFacts
from autotune.sentences.memory import describe_largest_batch, name_mode

_MAX_NAME_LENGTH = 60


@dataclass(frozen=True)
class ModeRow:
    """One mode of the training's memory."""

    name: str
    peak: str
    per_sample: str
    largest: str
    is_baseline: bool


def list_issues(troubles: Sequence[Issue]) -> list[tuple[str, str]]:
    """Return what was seen and what to do of everything that slows the training and is no setting."""
    return [(shorten(trouble.sentence), shorten(trouble.remedy)) for trouble in troubles]


def list_advice(advice: Sequence[Advice]) -> list[tuple[str, str, str]]:
    """Return knob, expected gain (empty when not known) and reason of what was worth trying."""
    return [(shorten(item.knob, _MAX_NAME_LENGTH), _format_gain(item.gain), shorten(item.reason)) for item in advice]


def _format_gain(gain: GainRange | None) -> str:
    return "" if gain is None else format_gain(gain.low, gain.high, sign=TIMES, dash=EN_DASH)


def list_modes(probe: ProbeReport) -> list[ModeRow]:
    """Return what the baseline's micro batch needs in each mode, and the largest that fits; empty when not known."""
    baseline, memory = probe.target.baseline, probe.target.memory
    if memory is None:
        return []
    yours = memory.find_mode(baseline.precision, baseline.activation_checkpointing)
    return [
        ModeRow(
            name=name_mode(mode),
            peak=format_bytes(mode.predict_bytes(baseline.micro_batch_size)),
            per_sample=format_bytes(mode.bytes_per_sample),
            largest=describe_largest_batch(mode.largest_micro_batch_size),
            is_baseline=mode == yours,
        )
        for mode in probe.memory_modes
    ]


def describe_memory(facts: TargetFacts) -> str:
    """Return what the baseline's memory is made of, or why more could not be said; empty when not known."""
    memory = facts.memory
    if memory is None:
        return ""
    sizes = {"process": memory.base_bytes, "weights": memory.weights_bytes, "gradients": memory.gradient_bytes}
    parts = [f"{name} {format_bytes(size)}" for name, size in (sizes | {"optimizer": memory.optimizer_bytes}).items()]
    if memory.activation_bytes_per_sample is not None:
        parts.append(f"{format_bytes(memory.activation_bytes_per_sample)} of activations a sample")
    text = f"{', '.join(parts)}; {format_bytes(memory.limit_bytes)} may be used."
    return f"{text[0].upper()}{text[1:]} {shorten(memory.missing)}".strip()
