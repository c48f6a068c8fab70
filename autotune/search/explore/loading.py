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
    on_gpu, usual = report.target.device == "cuda", effects.get(WORKERS, Effect())
    advised = next((one.gain for one in report.advice if one.knob == WORKERS[0] and one.gain is not None), None)
    if advised is None:
        is_idle = not on_gpu and report.target.baseline.num_workers == 0
        found = {WORKERS: _expect_of_idle(report, usual)} if is_idle else {}
        return Prior(found, {(WORKERS, THREADS): TOGETHER})
    figures, low = derive_figures(report.target, report.measurement), math.log(advised.low)
    expected, pairs = dict[Change, Effect](), dict[tuple[Change, Change], Effect]()
    for workers, most in _bound_speedups(report, figures).items():
        half = max(0.0, most - low) / 2
        expected[WORKERS[0], workers] = Effect(most - half, max(_LEAST_SD, half))
        pairs[(WORKERS[0], workers), THREADS] = Effect(half, half) if workers else TOGETHER
    if on_gpu:
        return Prior(expected, {(WORKERS, THREADS): SHARED_CPUS})
    return Prior(expected | _expect_of_threads(report, figures, effects), pairs)


def find_compute_share(report: ProbeReport) -> float:
    """Return the share of a step that computes, once as many workers load as can help: what compute knobs act on."""
    figures = derive_figures(report.target, report.measurement)
    least = min([figures.step_seconds, *_predict_steps(report, figures).values()])
    return min(1.0, figures.compute_seconds / least) if least and figures.is_input_bound else 1.0


def _bound_speedups(report: ProbeReport, figures: StepFigures) -> dict[int, float]:
    """Return the log speed-up that each number of workers but the user's own brings at best."""
    steps, own = _predict_steps(report, figures), report.target.baseline.num_workers
    return {workers: math.log(figures.step_seconds / one) for workers, one in steps.items() if workers != own and one}


def _predict_steps(report: ProbeReport, figures: StepFigures) -> dict[int, float]:
    """Return the seconds of a step with each number of workers that may be tried, at best."""
    facts, hardware = report.target, report.hardware
    if explain_fixed_workers(facts):
        return {}
    load = facts.data.seconds_per_sample * figures.samples_per_step
    counts = range(max(hardware.usable_cpu_count, most_workers(facts, hardware)) + 1)
    return {workers: predict_step(facts, hardware, load=load, workers=workers) for workers in counts}


def _expect_of_threads(
    report: ProbeReport, figures: StepFigures, effects: Mapping[Change, Effect]
) -> dict[Change, Effect]:
    """Return what fewer threads cost: no more than the share of a step that they compute in.

    Where the user has workers already, they bring what a step takes longer than it has to.
    """
    usual, share = effects.get(THREADS, Effect()), 1.0 - figures.wait_fraction
    own, room = report.target.baseline.num_workers, 0.0
    best = _predict_steps(report, figures).get(own)
    if own and best:
        room = max(0.0, math.log(figures.step_seconds / best)) / 2
    return {THREADS: Effect(share * usual.mean + room, math.hypot(share * usual.sd, room))}


def _expect_of_idle(report: ProbeReport, usual: Effect) -> Effect:
    """Return what first workers bring on a CPU: no more than the training waits for its data, less what they take."""
    waits = -math.log1p(-min(0.5, report.measurement.data_wait_fraction))
    return Effect(min(usual.mean, IDLE_WORKERS.mean + waits / 2), min(usual.sd, IDLE_WORKERS.sd + waits))
