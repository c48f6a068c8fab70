"""Which arithmetic is worth trying, by the rates that were measured of it: figures in, reasons out. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.format import format_flops, format_part
from autotune.records.ceilings import Ceilings
from autotune.records.config import KnobValue, MatmulPrecision
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.probe import Caution

HALF_TYPES = ("bf16", "fp16")

_HOPELESS = 0.5
"""Of the fp32 rate: a CPU that emulates bf16 is far below, one that has it above (a judgement, not a measurement)."""
_WORTH_IT = 1.1
"""Of the fp32 rate: less is mostly the luck of two measurements."""

FASTER_PRODUCTS: dict[str, tuple[MatmulPrecision, str]] = {
    "cpu": ("medium", "fp32-medium"),
    "cuda": ("high", "tf32"),
}
"""Of float32 matrices, by device: the `matmul_precision` that may be faster, and its name in the ceilings."""

_ARITHMETICS: dict[str, dict[KnobValue, str]] = {
    "precision": {"bf16": "bf16", "fp16": "fp16"},
    "matmul_precision": dict(FASTER_PRODUCTS.values()),
}
"""Values that are worth trying for their arithmetic's rate alone, each with its name in the ceilings."""


def refuse_bf16(target: TargetFacts) -> str:
    """Return why bf16 is not tried; empty where it is."""
    if not target.supports_bf16:
        return f"bf16 autocast does not run on this {target.device}"
    return _describe_slowness(target.ceilings, "bf16")


def refuse_fp16(target: TargetFacts, hardware: HardwareInfo) -> str:
    """Return why fp16 is not tried; empty where it is."""
    rates = target.ceilings
    if not target.scales_loss:
        return "the script does not scale its loss, and fp16 gradients underflow without"
    slow = _describe_slowness(rates, "fp16")
    if slow or target.device == "cuda":
        return slow
    if not {"avx512_fp16", "amx_fp16", "asimdhp"} & set(hardware.cpu_features):
        return "this CPU has no fp16 arithmetic"
    bf16, fp16 = (rates.flops_per_second(dtype) for dtype in ("bf16", "fp16"))
    if fp16 is None:
        return "fp16 products were not measured on this CPU, and bf16 needs no loss scaling"
    if target.supports_bf16 and bf16 is not None and bf16 >= fp16:
        rate = f"{format_flops(bf16)}, fp16 at {format_flops(fp16)}"
        return f"measured: bf16 products run at {rate}, and bf16 needs no loss scaling"
    return ""


def refuse_medium_products(target: TargetFacts) -> str:
    """Return why float32 products of `matmul_precision` medium are not tried on a CPU; empty where they are."""
    baseline, rates = target.baseline, target.rates
    if baseline.precision != "fp32":
        return "half types leave hardly any product of float32"
    if baseline.matmul_precision == "medium" or not rates.matmul:
        return ""
    faster, plain = (rates.flops_per_second(name) for name in ("fp32-medium", "fp32"))
    if faster is None or plain is None:
        return "no such products were measured on this CPU"
    if faster > _WORTH_IT * plain:
        return ""
    return f"measured: products run at {format_flops(faster)} so, and at {format_flops(plain)} as they are"


def find_cautions(target: TargetFacts, choices: Mapping[str, tuple[KnobValue, ...]]) -> tuple[Caution, ...]:
    """Return the values whose worth rests on a rate that was not measured: to be tried alone, and late.

    Args:
        target: what the rates are among.
        choices: values that may be tried, by knob.
    """
    return tuple(
        Caution(knob=name, value=value, reason=f"{dtype} products were not measured here: tried alone, and late")
        for name, arithmetics in _ARITHMETICS.items()
        for value, dtype in arithmetics.items()
        if value in choices.get(name, ()) and target.ceilings.find_rate(dtype) is None
    )


def _describe_slowness(rates: Ceilings, dtype: str) -> str:
    """Return with its figures why an arithmetic is hopeless; empty where it is not, or was not measured."""
    rate, plain = rates.find_rate(dtype), rates.flops_per_second("fp32")
    if rate is None or not plain or rate.flops_per_second >= _HOPELESS * plain:
        return ""
    if not rate.emulated:
        return f"measured: {dtype} products run at {format_flops(rate.flops_per_second)}, fp32 at {format_flops(plain)}"
    part = f"{format_part(rate.flops_per_second, plain)} of fp32 ({format_flops(plain)})"
    return f"emulated here: {dtype} {format_flops(rate.flops_per_second)}, {part}"
