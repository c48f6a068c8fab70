"""A search rehearsed: its own decisions, over launches that read what is expected before any was made.

The expectation is the probe's and what is usual (`search.explore.prior`). Real readings differ, and what follows them
does: this tells what fits a budget, in which order it would begin, and what a proof costs.
"""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path

import numpy as np

from autotune.drift.gate.stage import GateStage
from autotune.errors import UsageError
from autotune.records.config import KnobValue, TrainConfig, get_knob
from autotune.records.measurement import Block, Measurement, PeakMemory
from autotune.records.probe import ProbeReport
from autotune.records.script import Script
from autotune.records.search import ExpectedLaunch, KeptProbe, Recalled, SearchForecast, SearchState
from autotune.records.trial import TrialStatus
from autotune.search.explore.additive import Features, Prior, sum_weights
from autotune.search.explore.aim import find_aim
from autotune.search.explore.prior import make_prior
from autotune.search.explore.stage import Explorer
from autotune.search.explore.study import Study
from autotune.search.finals.finalist import LEAST_ROUNDS
from autotune.search.finals.prover import Prover
from autotune.search.finals.reserve import require_memory, require_time
from autotune.search.launch.budget import Budget
from autotune.search.launch.prices import CACHED_SHARE
from autotune.search.launch.starter import SearchContext, TrialStarter
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY
from autotune.search.problem import SearchProblem, make_problem
from autotune.search.progress import SearchReporter
from autotune.search.run import SearchOptions, describe_search
from autotune.search.session import open_prover
from autotune.search.store.history import recall
from autotune.search.store.kept_probe import find_refusal, read_kept_probe
from autotune.selftest.replay import Course, Simulation
from autotune.targets.resolve import resolve_target

_BLOCK_SECONDS = 0.25


class ExpectedWorld:
    """A target on its machine, as it is expected to be.

    Args:
        problem: of the search.
        speed: what is expected of changes.
        saved: the same of the memory; None to expect the same peak of all.
    """

    knobs = ()

    def __init__(self, problem: SearchProblem, speed: Prior, saved: Prior | None = None) -> None:
        space, report = problem.space, problem.report
        self.facts, self.losses = report.target, problem.baseline_losses
        self._report, self._problem = report, problem
        self._places: dict[tuple[str, KnobValue | None], int] = {
            (name, value): place for name, values in space.choices.items() for place, value in enumerate(values)
        }
        own = {name: get_knob(space.baseline, name) for name in space.choices}
        self._speed = Features(space.choices, own, speed)
        self._saved = None if saved is None else Features(space.choices, own, saved)
        self._log: SearchLog = SearchLog(problem)
        self._launched: set[str] = set()

    def make_report(self, measurement: Measurement) -> ProbeReport:
        """Return what the probe said."""
        return self._report

    def expect(self, config: TrainConfig) -> float:
        """Return the expected log speed-up of a config."""
        return self._sum(self._speed, config)

    def _sum(self, features: Features, config: TrainConfig) -> float:
        places = [self._places[name, get_knob(config, name)] for name in self._problem.space.choices]
        row = np.array([places], dtype=np.int64)
        return float(sum_weights(features.prior_mean, features.encode(row))[0]) if places else 0.0

    def _expect_peak(self, config: TrainConfig) -> PeakMemory:
        peak = self._report.measurement.peak_memory
        share = 1.0 if self._saved is None else math.exp(-self._sum(self._saved, config))
        device = peak.device_bytes
        return PeakMemory(
            host_bytes=round(share * peak.host_bytes), device_bytes=None if device is None else round(share * device)
        )

    def launch(self, config: TrainConfig) -> Course:
        """Return how a launch goes: it takes what it is priced at before any was made."""
        measured, prices = self._report.measurement, self._log.prices
        steps = max(1, round(_BLOCK_SECONDS / measured.seconds_per_step))
        samples = steps * self._problem.baseline.effective_batch_size
        pace = -math.log(measured.samples_per_second) - self.expect(config)
        compiling = prices.compile_seconds(config) * (1.0 - CACHED_SHARE * (config.key in self._launched))
        self._launched.add(config.key)
        around = prices.first_seconds(self._problem.baseline) - prices.measure_seconds
        return Course(
            status=TrialStatus.COMPLETED,
            paces=itertools.repeat(pace),
            block=Block(optimizer_steps=steps, samples=samples, seconds=steps * measured.seconds_per_step),
            startup_seconds=self._problem.startup_seconds,
            warmup_seconds=max(0.0, around - self._problem.startup_seconds) + compiling,
            compile_seconds=compiling,
            peak_memory=self._expect_peak(config),
            curve=self.losses,
        )


def rehearse_search(target: str | Script | None, options: SearchOptions, *, folder: Path) -> SearchForecast:
    """Return what a search would do; nothing is launched or written.

    Args:
        target: as of `run_search`.
        options: of the search.
        folder: the working folder, which has the probe.

    Raises:
        UsageError: an option cannot be used as given, no probe of this target is there that a search would take, or the
            budget is too small.
        NothingFeasibleError: the user's own settings break the memory limit.
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    state = describe_search(resolve_target(target, folder=folder).target, options)
    kept = _require_probe(state, folder)
    recalled = recall(kept.report, folder) if options.history else Recalled()
    return rehearse(state, kept, options.budget_seconds, make_prior(kept.report, recalled.effects))


def rehearse(state: SearchState, kept: KeptProbe, budget_seconds: float, prior: Prior | None = None) -> SearchForecast:
    """Return what a search would do from a probe that it would take; errors as of `rehearse_search`.

    Args:
        state: what it is asked to do.
        kept: the probe.
        budget_seconds: of the search.
        prior: what is expected; None for what the probe and other trainings tell.
    """
    prior = prior or make_prior(kept.report)
    problem = make_problem(state, kept.report, kept.trial, USUAL_POLICY)
    require_memory(kept.report, problem.limits)
    log = SearchLog(problem)
    aim = find_aim(log, prior)
    expected = ExpectedWorld(problem, prior, None if aim.floor is None else aim.prior)
    simulation = Simulation(expected)
    simulation.now = 0.0  # its own probe took some
    context = SearchContext(
        Budget(budget_seconds, 0.0, simulation.clock), simulation.run, SearchReporter(), lambda: False
    )
    starter = TrialStarter(log, context, number=1)
    gate = GateStage(log, starter, ())
    prover = open_prover(simulation, log, starter, gate, ())
    require_time(prover.reserve, kept.trial)
    study = Study(None, problem.space, seed=state.seed, prior=aim.prior, price=gate.price_answer, floor=aim.floor)
    Explorer(
        log,
        starter,
        study,
        kept_seconds=prover.kept_seconds,
        is_proof_due=prover.is_due,
        proof_seconds=gate.foretell_seconds,
        average_proof_seconds=gate.average_seconds,
    ).run()
    return _describe(log, expected, prover, gate, budget_seconds)


def _describe(
    log: SearchLog, expected: ExpectedWorld, prover: Prover, gate: GateStage, budget_seconds: float
) -> SearchForecast:
    problem, best = log.problem, log.ranking.leader
    leader = best.config if best is not None and best.score > problem.policy.least_gain else None
    launched = math.fsum(one.result.elapsed_seconds for one in log.judged)
    check, pairs, each = 0.0, 0, 0.0
    if leader is not None:
        check, pairs = gate.expect_seconds(leader), prover.reserve.count_pairs(leader)
        each = prover.reserve.round_seconds(leader)
        fitting = int(max(0.0, budget_seconds - launched - check) / each)
        pairs = min(pairs, fitting) if fitting >= LEAST_ROUNDS else pairs
    return SearchForecast(
        label=problem.report.target.label,
        budget_seconds=budget_seconds,
        baseline_config=problem.baseline,
        choices=problem.space.choices,
        ruled_out=problem.space.ruled_out,
        launches=tuple(
            ExpectedLaunch(
                config=one.config, speedup=math.exp(expected.expect(one.config)), seconds=one.result.elapsed_seconds
            )
            for one in log.judged
        ),
        leader=leader,
        check_seconds=check,
        pairs=pairs,
        pairs_seconds=pairs * each,
    )


def _require_probe(state: SearchState, folder: Path) -> KeptProbe:
    kept = read_kept_probe(folder)
    refusal = None if kept is None else find_refusal(kept, state, time.time() - kept.made_at)
    if kept is not None and refusal is None:
        return kept
    reason = "none was made in this folder" if kept is None else f"the last one is not taken: {refusal}"
    raise UsageError(
        f"--dry-run looks ahead from a probe of this training, and {reason}",
        hint=f"make one: autotune probe {'-- ' if state.target.script is not None else ''}{state.target.spec}",
    )
