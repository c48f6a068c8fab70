"""What a training's step is made of, on the page of `autotune probe`: time, work, roofline, memory, input."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cli.pages.layout import LinePage, Part
from autotune.format import (
    count,
    format_bandwidth,
    format_bytes,
    format_factor,
    format_flops,
    format_of,
    format_rate,
    format_share,
    format_time,
    times,
)
from autotune.probe.analysis.figures import StepFigures, derive_figures
from autotune.records.facts import MemoryFacts, MemoryMode, StepWork, TargetFacts
from autotune.records.measurement import Measurement
from autotune.records.probe import ProbeReport
from autotune.sentences.memory import describe_largest_batch, name_mode
from autotune.sentences.noise import list_remarks

_TELLING_RATIO = 1.5


def show_step(page: LinePage, report: ProbeReport) -> None:
    """Print the section on what a step is made of."""
    target, measurement = report.target, report.measurement
    figures = derive_figures(target, measurement)
    page.heading("step", "your settings")
    page.facts("target", [f"{target.label} on {target.device}", f"{target.model.parameter_count:,} parameters"])
    page.facts("speed", _list_speed(target, measurement, figures))
    show_phases(page, target, figures.step_seconds)
    _show_loops(page, target, figures)
    if target.work is not None:
        _show_work(page, target.work, target.compute_seconds_per_step)
    if target.batch_elasticity is not None:
        factor = 2.0 ** max(-30.0, min(30.0, target.batch_elasticity))
        page.facts("larger batch", [f"a pass over twice the micro batch takes {format_factor(factor)} the time"])


def _list_speed(target: TargetFacts, measurement: Measurement, figures: StepFigures) -> list[str]:
    samples = count(round(figures.samples_per_step), "sample")
    facts = [f"{format_time(figures.step_seconds)} a step of {samples}", format_rate(measurement.samples_per_second)]
    if target.baseline.gradient_accumulation_steps > 1:
        facts.append(f"{target.baseline.gradient_accumulation_steps} passes of {target.baseline.micro_batch_size}")
    if target.aside_fraction > 0:
        facts.append(f"{format_share(target.aside_fraction)} of the time aside, on validation and the like")
    return facts + list_remarks(measurement)


def show_speed(page: LinePage, report: ProbeReport) -> None:
    """Print how fast the own settings are."""
    target, measurement = report.target, report.measurement
    page.facts("speed", _list_speed(target, measurement, derive_figures(target, measurement)))


def show_phases(page: LinePage, target: TargetFacts, step_seconds: float) -> None:
    """Print what a step's time is spent on, phase by phase."""
    phases = target.phases
    timed = (
        ("data wait", phases.data_wait_seconds, "yellow"),
        ("copy", phases.copy_seconds, "magenta"),
        ("forward", phases.forward_seconds, "cyan"),
        ("backward", phases.backward_seconds, "bright_blue"),
        ("optimizer", phases.optimizer_seconds, "green"),
        ("other", phases.other_seconds, "red"),
    )
    total = sum(max(0.0, seconds) for _, seconds, _ in timed)
    if total <= 0:
        return
    shown = [(name, max(0.0, seconds), style) for name, seconds, style in timed if name != "other" or seconds > 0]
    page.parts("phases", [Part(name, sec / total, format_time(sec), style) for name, sec, style in shown])
    if not 1 / _TELLING_RATIO < total / step_seconds < _TELLING_RATIO:
        page.facts("their sum", [f"{format_time(total)}, timed apart from the real loop and one after the other"])


def _show_loops(page: LinePage, target: TargetFacts, figures: StepFigures) -> None:
    """Print the loader, the computation and both together on one scale: what overlaps, and what waits."""
    loops = {
        "loader alone": (target.data.loader_seconds_per_step, "yellow"),
        "compute alone": (target.compute_seconds_per_step, "bright_blue"),
        "real loop": (figures.step_seconds, "white"),
    }
    longest = max(seconds or 0.0 for seconds, _ in loops.values())
    for label, (seconds, style) in loops.items():
        if seconds is not None and longest > 0:
            page.scale(label, seconds / longest, f"{format_time(seconds)} a step", style=style)


def _show_work(page: LinePage, work: StepWork, compute_seconds: float) -> None:
    shares = (
        ("matrix products", work.products_fraction, "bright_blue"),
        ("memory traffic", work.traffic_fraction, "cyan"),
        ("overhead", work.overhead_fraction, "red"),
    )
    page.parts(
        "work", [Part(name, share, format_time(share * compute_seconds), style) for name, share, style in shares]
    )
    kind = "operation" if work.device_busy_fraction is None else "kernel"
    facts = [f"{count(round(work.operations_per_step), kind)} a step"]
    if work.host_syncs_per_step > 0:
        facts.append(f"the host asks for a value {times(work.host_syncs_per_step)} a step")
    if work.device_busy_fraction is not None:
        facts.append(f"the GPU is busy {format_share(work.device_busy_fraction)} of the time")
    if work.enqueue_fraction is not None:
        facts.append(f"handing a step over takes {format_share(work.enqueue_fraction)} of a step")
    page.facts("operations", facts)


def show_roofline(page: LinePage, report: ProbeReport) -> None:
    """Print what the step reaches of what the machine keeps up; left out when neither end is known."""
    target = report.target
    figures = derive_figures(target, report.measurement)
    reached, most, share = figures.flops_per_second, figures.ceiling_flops_per_second, figures.mfu
    moved = None if target.work is None else target.work.bytes_per_second
    copied = target.ceilings.memory_bytes_per_second
    if share is None and not (moved and copied):
        return
    page.heading("roofline", "what a step reaches of what this machine keeps up")
    if reached is not None and most is not None and share is not None:
        rates = format_of(format_flops(reached), format_flops(most))
        needed = format_of(format_time(share * figures.step_seconds), format_time(figures.step_seconds))
        text = f"MFU {format_share(share)}: {rates} in {figures.arithmetic}; the products alone take {needed}"
        page.scale("arithmetic", share, text, style="bright_blue")
    if moved and copied:
        rates = format_of(format_bandwidth(moved), format_bandwidth(copied))
        text = f"{format_share(moved / copied)} of the copy rate, by the operations that it limits: {rates}"
        page.scale("memory", moved / copied, text, style="cyan")


def show_memory(page: LinePage, report: ProbeReport) -> None:
    """Print what the memory is made of, and what other settings would need."""
    memory, target = report.target.memory, report.target
    measured = report.measurement.peak_memory
    on_device = measured.device_bytes is not None
    peak = format_bytes(measured.used_bytes)
    place = "of the device" if on_device else "of the host"
    page.heading("memory", place if memory is None else f"{format_bytes(memory.limit_bytes)} {place} may be used")
    host = format_bytes(measured.host_bytes)
    page.facts("peak", [f"{peak} {place}", f"{host} of the host"] if on_device else [peak])
    if memory is None:
        return
    _show_contents(page, memory, target.baseline.micro_batch_size)
    if report.memory_modes:
        _show_modes(page, report.memory_modes, memory, target)
    error, size = memory.calibration_error, memory.calibrated_micro_batch_size
    if error is not None and size is not None:
        way = "too high" if error > 0 else "too low"
        off = f"{format_share(abs(error))} {way} for a real step of {count(size, 'sample')}"
        page.facts("prediction", [f"by shapes alone {off}, which is corrected here"])
    page.facts("not predicted", [memory.missing] if memory.missing else [])


def _show_contents(page: LinePage, memory: MemoryFacts, micro_batch_size: int) -> None:
    growth = memory.activation_bytes_per_sample
    sizes = [
        ("process", memory.base_bytes, "white"),
        ("weights", memory.weights_bytes, "bright_blue"),
        ("gradients", memory.gradient_bytes, "cyan"),
        ("optimizer", memory.optimizer_bytes, "green"),
    ]
    if growth is not None:
        sizes.append(("activations", growth * micro_batch_size, "magenta"))
    used = sum(size for _, size, _ in sizes)
    sizes.append(("free", max(0.0, memory.limit_bytes - used), ""))
    total = max(used, memory.limit_bytes)
    if total > 0:
        page.parts("made of", [Part(name, size / total, format_bytes(size), style) for name, size, style in sizes])


def _show_modes(page: LinePage, modes: Sequence[MemoryMode], memory: MemoryFacts, target: TargetFacts) -> None:
    size = target.baseline.micro_batch_size
    yours = memory.find_mode(target.baseline.precision, target.baseline.activation_checkpointing)
    rows = []
    for mode in modes:
        name = f"{name_mode(mode)} (yours)" if mode == yours else name_mode(mode)
        rows.append([
            name,
            format_bytes(mode.predict_bytes(size)),
            format_bytes(mode.bytes_per_sample),
            describe_largest_batch(mode.largest_micro_batch_size),
        ])  # fmt: skip
    page.table(("settings", f"peak at {size}", "a sample", "largest batch"), rows)


def show_input(page: LinePage, report: ProbeReport) -> None:
    """Print what the data costs and how it is loaded."""
    data, baseline = report.target.data, report.target.baseline
    size = "length not known" if data.sample_count is None else count(data.sample_count, "sample")
    page.heading("input")
    page.facts("dataset", [size, f"{format_time(data.seconds_per_sample)} a sample in one process"])
    workers = "no workers: the training loads" if baseline.num_workers == 0 else count(baseline.num_workers, "worker")
    facts = [workers]
    if data.worker_bytes is not None and baseline.num_workers > 0:
        facts[0] += f" of {format_bytes(data.worker_bytes)} each"
    if data.batch_bytes is not None:
        facts.append(f"{format_bytes(data.batch_bytes)} a batch")
        if baseline.num_workers > 0:
            waiting = baseline.num_workers * baseline.prefetch_factor
            free = format_bytes(report.hardware.shared_memory_free_bytes)
            needed = format_bytes(waiting * data.batch_bytes)
            facts.append(f"{count(waiting, 'batch', 'batches')} in flight need {needed} and /dev/shm has {free} free")
    page.facts("loader", facts)
    first = data.epoch_start_seconds
    page.facts("epoch start", [] if first is None else [f"{format_time(first)} to the first batch"])
    slow = data.slow_batch_ratio
    if slow is not None and slow >= _TELLING_RATIO:
        page.facts("slow batches", [f"one in twenty takes {format_factor(slow)} the median or more"])
    disk = data.disk_read_bytes_per_second
    page.facts("disk", [] if disk is None else [f"{format_bandwidth(disk)} past the page cache"])
