"""Advice on the loader, on copies to the device and on who gets the CPUs; pure."""

from __future__ import annotations

import statistics

from autotune.format import (
    count,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_rough_factor,
    format_share,
    format_time,
)
from autotune.knobs import most_workers
from autotune.probe.analysis.advice.case import Case, Finding, expect, tell_switched
from autotune.probe.analysis.bounds import least_load_seconds
from autotune.probe.analysis.figures import divide
from autotune.records.probe import GainRange


def advise_workers(case: Case) -> Finding:
    """Return whether more workers would shorten the waiting, or fewer take less of the CPUs."""
    baseline, figures, plan, usable = case.baseline, case.figures, case.plan, case.hardware.usable_cpu_count
    most = max(usable, most_workers(case.facts, case.hardware))
    if not case.on_gpu and plan.workers < baseline.num_workers and (fewer := _advise_fewer_workers(case)):
        return fewer
    if not (case.limit == "input" or figures.is_input_bound) or baseline.num_workers >= most:
        return None
    reason = (
        f"{format_share(figures.wait_fraction)} of a step waits for the loader; one process loads a step's samples in "
        f"{format_time(plan.load_seconds)}, the computation takes {format_time(figures.compute_seconds)}"
    )
    if case.facts.data.waits:
        share = format_share(1.0 - (case.facts.data.cpu_fraction or 0.0))
        reason += f", {share} of it waiting, so that more workers than CPUs can wait at once"
    if plan.matching_workers is not None:
        reason += f"; workers that match it if they scale: {max(1, plan.matching_workers)}"
    if plan.workers_reason:
        reason += f"; best as predicted: {plan.workers} ({plan.workers_reason})"
    reason += f"; in use: {baseline.num_workers}; usable CPUs: {usable}"
    if plan.shared_memory_bytes is not None and plan.shared_memory_fits is False:
        free = format_bytes(case.hardware.shared_memory_free_bytes)
        reason += f"; /dev/shm would need {format_bytes(plan.shared_memory_bytes)}, {free} are free"
    return reason, _expect_workers(case)


def _advise_fewer_workers(case: Case) -> Finding:
    """Return whether a step is predicted to be shorter with fewer workers on a CPU, which they share with it."""
    plan, alone = case.plan, case.facts.data.loader_seconds_per_step
    saved = 1.0 - plan.step_seconds / case.figures.step_seconds
    if saved < case.policy.least_saved_by_threads or alone is None:
        return None
    own = count(case.baseline.num_workers, "worker")
    reason = (
        f"{own} and the computation share {count(case.hardware.usable_cpu_count, 'CPU')}; one process loads a step's "
        f"samples in {format_time(plan.load_seconds)}, {own} alone in {format_time(alone)}; best as predicted: "
        f"{plan.workers}"
    )
    return reason, expect(saved, risk=case.policy.shared_cpus_risk)


def _expect_workers(case: Case) -> GainRange:
    figures = case.figures
    best = max(figures.step_seconds - figures.wait_seconds, least_load_seconds(case.facts, figures, case.hardware))
    if case.facts.data.waits and case.plan.workers > 0:
        best = max(best, case.plan.load_seconds / case.plan.workers)
    saved = 1.0 - best / figures.step_seconds
    if case.facts.data.waits:
        return expect(saved, sure=case.policy.sure_of_waiting)
    return expect(saved, sure=0.25) if case.on_gpu else expect(saved, risk=case.policy.shared_cpus_risk)


def advise_prefetch(case: Case) -> Finding:
    """Return whether batches come unevenly, which more of them in reserve would hide."""
    steps, ratio = case.measurement.step_seconds, case.facts.data.slow_batch_ratio
    if (
        case.limit != "input"
        or case.baseline.num_workers == 0
        or case.baseline.prefetch_factor > case.policy.default_prefetch
    ):
        return None
    gain = expect(0.5 * case.figures.wait_fraction)
    if case.plan.prefetch_worthwhile is not None and ratio is not None:
        reason = f"batches come unevenly: one in twenty takes {format_rough_factor(ratio)} the median or more to load"
        return (reason, gain) if case.plan.prefetch_worthwhile else None
    if len(steps) < case.policy.least_steps:
        return None
    slow, median = statistics.quantiles(steps, n=20)[-1], statistics.median(steps)
    if slow <= case.policy.uneven_steps * median:
        return None
    times = format_rough_factor(slow / median)
    reason = f"steps are uneven: one in twenty takes {times} the median or more ({format_time(slow)})"
    return reason, gain


def advise_persistence(case: Case) -> Finding:
    """Return whether starting the workers anew takes a part of an epoch worth saving."""
    count, workers = case.facts.data.sample_count, case.baseline.num_workers
    if count is None or workers == 0 or case.baseline.persistent_workers:
        return None
    epoch_seconds = count / case.measurement.samples_per_second
    start = case.facts.data.epoch_start_seconds
    worthwhile = case.plan.persistent_worthwhile
    if worthwhile is False or (worthwhile is None and epoch_seconds > case.policy.short_epoch_seconds):
        return None
    reason = f"an epoch lasts {format_duration(epoch_seconds)} and starts its loader workers anew each time ({workers})"
    if start is None:
        return reason, None
    # The first batch has to be loaded however the workers came to be, so little is sure.
    share = start / (start + epoch_seconds)
    return f"{reason}, which takes {format_duration(start)}", expect(share, sure=0.25)


def advise_pinning(case: Case) -> Finding:
    """Return whether copies from pageable memory take a part of a step worth saving."""
    share, ceilings = case.figures.copy_fraction, case.facts.ceilings
    if case.baseline.pin_memory or share <= case.policy.copy_fraction:
        return None
    reason = f"copies to the device take {format_share(share)} of a step from pageable memory"
    pinned, pageable = ceilings.copy_to_device_bytes_per_second, ceilings.pageable_to_device_bytes_per_second
    if pinned is not None:
        reason += f"; page-locked memory copies at {format_bandwidth(pinned)} here"
    if pinned is not None and pageable is not None:
        reason += f", pageable memory at {format_bandwidth(pageable)}"
    slower = divide(pageable, pinned)
    return reason, expect(share * (case.policy.pinned_saved if slower is None else 1.0 - slower))


def advise_non_blocking(case: Case) -> Finding:
    """Return whether copies hold up the host for a part of a step worth hiding."""
    baseline, share = case.baseline, case.figures.copy_fraction
    if not baseline.pin_memory or baseline.non_blocking or share <= case.policy.copy_fraction:
        return None
    reason = f"copies from page-locked memory take {format_share(share)} of a step and hold up the host"
    return reason, expect(share)


def advise_threads(case: Case) -> Finding:
    """Return whether threads and workers have to share the CPUs otherwise."""
    tried = case.find_switched("num_threads")
    if tried is not None and case.limit != "input":
        return tell_switched(tried)
    usable, workers = case.hardware.usable_cpu_count, case.baseline.num_workers
    threads = case.baseline.num_threads or usable
    crowded = threads + workers > usable
    if not crowded and case.limit != "input":
        return None
    reason = f"threads: {threads}, loader workers: {workers}, usable CPUs to share: {usable}"
    # Workers take of the CPUs what loading takes: most of the time they wait to be asked.
    data = case.facts.data
    load = data.seconds_per_sample * (1.0 if data.cpu_fraction is None else data.cpu_fraction)
    busy = min(workers, load * case.measurement.samples_per_second)
    saved = case.figures.model_fraction * max(0.0, 1.0 - usable / (threads + busy)) if crowded else 0.0
    if case.limit != "input" and saved < case.policy.least_saved_by_threads:
        return None
    if case.limit == "input" and workers > 0:
        # Fewer threads leave the loader more of the CPUs: at most those that its own workers do not have.
        gained = min(1.0, max(0.0, (usable - workers) / usable)) * (data.cpu_fraction or 0.0)
        saved = max(saved, case.figures.wait_fraction * gained)
    # Fewer threads only make room for workers, which are another knob.
    return reason, expect(saved, risk=case.policy.shared_cpus_risk) if saved > 0 else None
