"""Advice on the computation: arithmetic, compilation, the optimizer, layouts and allocators; pure.

A gain's hopeful end lets a change do all it can do to the share of a step it acts on; how much of that is sure, and
what it may cost, is the policy's.
"""

from __future__ import annotations

from autotune.arithmetics import FASTER_PRODUCTS, HALF_TYPES
from autotune.format import format_bytes, format_flops, format_part, format_rough_factor, format_share, format_time
from autotune.probe.analysis.advice.case import Case, Finding, expect, tell_switched
from autotune.probe.analysis.bounds import least_optimizer_seconds
from autotune.probe.analysis.figures import divide


def advise_precision(case: Case) -> Finding:
    """Return whether a 16-bit arithmetic is clearly faster here, or the one in use is emulated."""
    if case.figures.is_emulated:
        return _leave_emulation(case)
    if case.baseline.precision != "fp32":
        return None
    # fp16 needs loss scaling, so it is named only where bf16 is no faster.
    for precision, works in (("bf16", case.facts.supports_bf16), ("fp16", case.on_gpu)):
        finding = _compare_arithmetic(case, precision) if works else None
        if finding is not None:
            return finding
    return None


def _leave_emulation(case: Case) -> Finding:
    rate = case.facts.rates.find_rate(case.figures.arithmetic)
    plain = case.facts.rates.flops_per_second("fp32")
    if rate is None or not plain:
        return None
    rates = f"{format_flops(rate.flops_per_second)}, {format_part(rate.flops_per_second, plain)} of fp32"
    reason = f"{rate.dtype} is emulated here ({rates}); {_describe_products(case)}"
    return reason, expect(
        case.products_fraction * (1.0 - rate.flops_per_second / plain), sure=case.policy.sure_of_products
    )


def advise_matmul_precision(case: Case) -> Finding:
    """Return whether float32 products are clearly faster where they may have fewer digits."""
    precision, arithmetic = FASTER_PRODUCTS[case.facts.device]
    if case.baseline.precision != "fp32" or case.baseline.matmul_precision == precision:
        return None
    tried = case.find_switched("matmul_precision")
    if tried is not None:
        return tell_switched(tried)
    return _compare_arithmetic(case, arithmetic)


def _compare_arithmetic(case: Case, name: str) -> Finding:
    now, other = case.figures.burst_flops_per_second, case.facts.rates.flops_per_second(name)
    if not now or not other or other <= case.policy.faster_arithmetic * now:
        return None
    kind = "matrix products" if case.facts.rates == case.facts.ceilings else "convolutions"
    reason = (
        f"{name} {kind} ran {format_rough_factor(other / now)} as fast as {case.figures.arithmetic} ones "
        f"({format_flops(other)} against {format_flops(now)}); {_describe_products(case)}"
    )
    saved = case.products_fraction * (1.0 - now / other)
    sure = 0.0 if case.facts.work is None else case.policy.sure_of_products
    risk = 1.0
    if name in HALF_TYPES:
        saved += case.policy.half_the_bytes * case.traffic_fraction
        risk = case.policy.cast_risk if case.overhead_fraction > case.policy.much_overhead else 1.0
    return reason, expect(saved, sure=sure, risk=risk)


def _describe_products(case: Case) -> str:
    if case.facts.work is None:
        return case.model_share
    return f"products take {format_share(case.products_fraction)} of a step"


def advise_optimizer(case: Case) -> Finding:
    """Return whether the optimizer's step is worth another implementation."""
    share, facts = case.figures.optimizer_fraction, case.facts
    if share <= case.policy.optimizer_fraction:
        return None
    current = case.baseline.optimizer_implementation
    others = ", ".join(name for name in facts.optimizer.implementations if name != current)
    spent = f"{format_share(share)} of a step ({format_time(facts.phases.optimizer_seconds)})"
    reason = f"the optimizer takes {spent}; {facts.optimizer.name} also has {others}"
    least = divide(least_optimizer_seconds(facts, case.hardware), facts.phases.optimizer_seconds) or 0.0
    return reason, expect(share * (1.0 - least), sure=0.25 if current == "for-loop" else 0.0)


def advise_compilation(case: Case) -> Finding:
    """Return whether a large part of the model's time is what compilation can fuse or leave out."""
    if case.baseline.compile_mode != "off":
        return None
    if case.facts.work is None:
        return _compile_unexplained(case)
    traffic, overhead = case.traffic_fraction, case.overhead_fraction
    if traffic + overhead <= case.policy.unexplained_fraction:
        return None
    reason = (
        f"memory traffic of the model takes {format_share(traffic)} of a step and calling its operations "
        f"{format_share(overhead)}: compilation fuses the one and leaves out most of the other"
    )
    return reason, expect(
        case.policy.fused_traffic * traffic + case.policy.compiled_overhead * overhead, risk=case.policy.compile_risk
    )


def _compile_unexplained(case: Case) -> Finding:
    mfu = case.figures.mfu
    unexplained = 0.0 if mfu is None else case.figures.model_fraction - mfu
    if mfu is None or unexplained <= case.policy.unexplained_fraction:
        return None
    reason = (
        f"{case.model_share}, and its matrix products at the measured {case.figures.arithmetic} rate would fill "
        f"{format_share(mfu)}: the rest is elementwise work, memory traffic and overhead, which compilation can fuse"
    )
    return reason, expect(case.policy.fused_traffic * unexplained, risk=case.policy.compile_risk)


def advise_host_allocator(case: Case) -> Finding:
    """Return whether malloc has part in the time of every step."""
    if case.baseline.host_allocator != "default":
        return None
    peak = format_bytes(case.measurement.peak_memory.host_bytes)
    names = ", ".join(("glibc-tuned", *sorted(case.hardware.host_allocators)))
    reason = f"on a CPU every step takes its activations from malloc (peak {peak}), and {case.model_share}: {names}"
    if case.facts.work is None:
        return reason, expect(case.policy.allocator_saved_untold * case.figures.model_fraction)
    return reason, expect(case.policy.allocator_saved * case.traffic_fraction)


def advise_memory_format(case: Case) -> Finding:
    """Return whether convolutions could use another layout."""
    if case.baseline.memory_format != "contiguous":
        return None
    saved = case.policy.layout_saved * (case.products_fraction + case.traffic_fraction)
    return f"the model has 2-d convolutions, and {case.model_share}", expect(saved, risk=case.policy.layout_risk)


def advise_cudnn(case: Case) -> Finding:
    """Return whether cuDNN could choose its algorithms by timing them."""
    if case.baseline.cudnn_benchmark:
        return None
    reason = f"cuDNN has not timed its algorithms for the model's 2-d convolutions, and {case.model_share}"
    return reason, expect(case.policy.cudnn_saved * case.products_fraction)


def advise_attention(case: Case) -> Finding:
    """Return whether another kernel could compute attention; what it would gain, nothing measured here says."""
    if case.baseline.attention_backend != "auto":
        return None
    return f"the model calls scaled_dot_product_attention, and {case.model_share}", None
