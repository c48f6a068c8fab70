"""A machine in words: its GPUs and the rate of its matrix products. Pure."""

from __future__ import annotations

from autotune.format import count, format_bytes, format_flops, format_part
from autotune.records.ceilings import MatmulRate
from autotune.records.hardware import GpuInfo


def describe_products(rate: MatmulRate, plain: float | None) -> str:
    """Return how fast an arithmetic's matrix products are, what they keep up first, and its convolutions.

    Args:
        rate: of the arithmetic.
        plain: of fp32 products in FLOP/s, to hold an emulated arithmetic against; None when it is not known.
    """
    if rate.emulated:
        part = f", {format_part(rate.flops_per_second, plain)} of fp32" if plain else ""
        return f"{format_flops(rate.flops_per_second)}: emulated{part}"
    said = format_flops(rate.flops_per_second)
    if rate.sustained_flops_per_second is not None:
        said = f"{format_flops(rate.sustained_flops_per_second)} sustained, burst {said}"
    if rate.convolution_flops_per_second is None:
        return said
    return f"{said}; convolutions {format_flops(rate.convolution_flops_per_second)}"


def list_gpu(gpu: GpuInfo) -> list[str]:
    """Return what a GPU is, a fact each, its name first; what it is doing is not among them."""
    facts = [gpu.name, format_bytes(gpu.memory_total_bytes) if gpu.memory_total_bytes else "memory not known"]
    if gpu.compute_capability is not None:
        facts.append(f"compute capability {gpu.compute_capability}")
    if gpu.power_limit_watts is not None:
        facts.append(f"power cap {gpu.power_limit_watts:.0f} W")
    if gpu.pcie_generation is not None:
        facts.append(f"PCIe {gpu.pcie_generation}" + (f" x{gpu.pcie_width}" if gpu.pcie_width else ""))
    if gpu.nvlinks:
        facts.append(count(gpu.nvlinks, "NVLink"))
    mig = {"on": "divided by MIG", "slice": "a MIG slice"}.get(gpu.mig or "")
    return [*facts, mig] if mig else facts
