"""What a loader's workers and the threads that compute are expected to bring, by what the probe saw. Pure.

    step ──▶ max(load / workers, compute, CPU time of both / CPUs)      at best, as the probe's own advice has it

On a CPU threads that wait for each other wait for workers too: workers alone get between nowhere and there, and with
fewer threads they do get there (1.75x where two workers alone read 1.1x).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from autotune.knobs import most_workers
from autotune.probe.analysis.figures import StepFigures, derive_figures
from autotune.probe.analysis.pipeline import explain_fixed_workers, predict_step
from autotune.records.probe import ProbeReport
from autotune.search.explore.additive import Change, Effect, Prior

WORKERS: Change = ("num_workers", None)
THREADS: Change = ("num_threads", None)

TOGETHER = Effect(0.05, 0.10)
"""Workers and threads share the CPUs: each loses alone where both together may win."""

SHARED_CPUS = Effect(0.25, 0.25)
"""On a GPU where the loader is waited for: workers on the CPUs that fewer threads leave them."""

IDLE_WORKERS = Effect(-0.05, 0.08)
"""On a CPU, of first workers where nothing waits for the loader: they take time from the threads that compute (read:
0.88x and 0.79x)."""

_LEAST_SD = 0.10
"""Of what a number of workers is expected to bring."""


def expect_of_loading(report: ProbeReport, effects: Mapping[Change, Effect]) -> Prior:
    """Return what is to be expected of workers and threads, where that is not what is usual.

    Args:
        report: of the probe.
        effects: of all knobs, moved to what the probe advises.
    """
    found = _expect_of_workers(report, effects)
    taken = report.measurement.taken_fraction
    if report.target.device == "cuda" or not taken:
        return found
    threads = found.effects.get(THREADS, effects.get(THREADS, Effect()))
    return Prior({**found.effects, THREADS: _beside_others(threads, taken)}, found.pairs)


def _expect_of_workers(report: ProbeReport, effects: Mapping[Change, Effect]) -> Prior:
    """Return what is to be expected of workers, and of threads beside them."""
    on_gpu = report.target.device == "cuda"
    advised = next((one.gain for one in report.advice if one.knob == WORKERS[0] and one.gain is not None), None)
    if advised is None:
        is_idle = not on_gpu and report.target.baseline.num_workers == 0
        found = {WORKERS: _expect_of_idle(report, effects.get(WORKERS, Effect()))} if is_idle else {}
        return Prior(found, {(WORKERS, THREADS): TOGETHER})
    figures, low = derive_figures(report.target, report.measurement), math.log(advised.low)
    expected, pairs = dict[Change, Effect](), dict[tuple[Change, Change], Effect]()
    room = _find_room(report, figures)
    for workers, most in _bound_speedups(report, figures).items():
        half = max(0.0, most - low) / 2
        expected[WORKERS[0], workers] = Effect(most - half, max(_LEAST_SD, half))
        pairs[(WORKERS[0], workers), THREADS] = Effect(max(0.0, half - room), half) if workers else TOGETHER
    if on_gpu:
        return Prior(expected, {(WORKERS, THREADS): SHARED_CPUS})
    if report.target.data.waits:  # for a disk or a network: workers are in nobody's way
        pairs = {(WORKERS, THREADS): TOGETHER}
    usual, share = effects.get(THREADS, Effect()), 1.0 - figures.wait_fraction
    # Fewer cost no more than the share of a step that they compute in.
    fewer = Effect(share * usual.mean + room, math.hypot(share * usual.sd, room))
    return Prior(expected | {THREADS: fewer}, pairs)


def _beside_others(threads: Effect, taken: float) -> Effect:
    """Return what fewer threads are expected to bring where others have a share of the CPUs.

    Threads wait for the slowest of them after each operation: two of them on two CPUs, one of which another process
    used, ran at a ninth of their speed, where one alone would have had half.
    """
    return Effect(threads.mean + taken, math.hypot(threads.sd, taken))


def find_compute_share(report: ProbeReport) -> float:
    """Return the share of a step that computes, once as many workers load as can help: what compute knobs act on."""
    figures = derive_figures(report.target, report.measurement)
    least = min([figures.step_seconds, *_predict_steps(report, figures).values()])
    return min(1.0, figures.compute_seconds / least) if least and figures.is_input_bound else 1.0


def _bound_speedups(report: ProbeReport, figures: StepFigures) -> dict[int, float]:
    """Return the log speed-up that each number of workers but the user's own brings at best.

    Where the user's own loader is faster than one process was seen to load, as one of several processes' is, the others
    are taken to be so too.
    """
    steps, own = _predict_steps(report, figures), report.target.baseline.num_workers
    before = max(figures.step_seconds, steps.get(own, 0.0))
    return {workers: math.log(before / one) for workers, one in steps.items() if workers != own and one}


def _predict_steps(report: ProbeReport, figures: StepFigures) -> dict[int, float]:
    """Return the seconds of a step with each number of workers that may be tried, at best."""
    facts, hardware = report.target, report.hardware
    if explain_fixed_workers(facts):
        return {}
    load = facts.data.seconds_per_sample * figures.samples_per_step
    counts = range(max(hardware.usable_cpu_count, most_workers(facts, hardware)) + 1)
    own_step = figures.step_seconds
    return {one: predict_step(facts, hardware, load=load, workers=one, own_step=own_step) for one in counts}


def _find_room(report: ProbeReport, figures: StepFigures) -> float:
    """Return half of the log time that a step with the user's own workers takes too long, which threads may be why.

    Nothing where workers wait for a disk or a network: they are in nobody's way.
    """
    facts = report.target
    own = facts.baseline.num_workers
    best = _predict_steps(report, figures).get(own)
    if not own or not best or facts.data.waits:
        return 0.0
    return max(0.0, math.log(figures.step_seconds / best)) / 2


def _expect_of_idle(report: ProbeReport, usual: Effect) -> Effect:
    """Return what first workers bring on a CPU: no more than the training waits for its data, less what they take."""
    waits = -math.log1p(-min(0.5, report.measurement.data_wait_fraction))
    return Effect(min(usual.mean, IDLE_WORKERS.mean + waits / 2), min(usual.sd, IDLE_WORKERS.sd + waits))
