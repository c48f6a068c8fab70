"""From what was measured to the profile that is saved. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import fmean, stdev

from autotune.drift.compare.loss_band import calibrate_band
from autotune.format import format_factor_down, format_share
from autotune.measure.confidence import hodges_lehmann
from autotune.probe.analysis.figures import name_arithmetic
from autotune.records.config import TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.measurement import PeakMemory
from autotune.records.objective import Objective
from autotune.records.profile import Candidate, Confirmation, Evidence, OneOffCosts, Profile, ProfileTarget
from autotune.records.quality import is_passed
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.answer.endings import (
    Effort,
    describe_candidate,
    describe_probe_gap,
    find_checked,
    find_leader,
    find_shown,
    find_untested,
    judge,
)
from autotune.search.answer.findings import Findings
from autotune.search.finals.finalist import Finalist, smallest_provable
from autotune.search.finals.more_time import budget_for, seconds_to_settle
from autotune.search.log import samples_ratio
from autotune.search.scores.noise import summarise_noise
from autotune.search.scores.ranking import Ranking, find_compile_seconds, list_alike

WORTH_PROVING = 1.05
"""Where nothing is proven, the budget that would prove at least this gain is told."""

_TELLING_ASIDE = 0.05


def build_profile(findings: Findings, ranking: Ranking, *, budget_seconds: float) -> Profile:
    """Return the answer as it stands: the baseline, unless the finals proved a candidate that passed its checks.

    Args:
        findings: so far.
        ranking: of the search's trials.
        budget_seconds: of the search.
    """
    report, finals = findings.report, findings.finals
    baseline = report.target.baseline
    winner, effort = finals.winner if finals else None, _effort(findings, budget_seconds)
    config = winner.config if winner else baseline
    shown, leader = _choose_shown(findings, ranking)
    candidate = shown.config if shown else find_checked(findings.checks, findings.judged, ranking) or leader
    checks = findings.checks_of(candidate) if candidate else ()
    verdict = judge(shown, is_proven=winner is not None, leader=leader, effort=effort)
    evidence = _evidence(findings, shown, ranking, budget_seconds)
    if verdict == "not-tested":
        evidence = evidence.replace(not_tested=effort.describe_untested())
    gap = describe_probe_gap(effort, report.measurement.samples_per_second)
    evidence = evidence.replace(notes=(*evidence.notes, gap)) if gap else evidence
    unproven = None
    if candidate is not None and winner is None:
        unproven = _describe_unproven(candidate, shown, findings, ranking)
    return Profile(
        verdict=verdict,
        config=config,
        baseline_config=baseline,
        world_size=report.target.world_size,
        allowed=findings.allowed,
        learning_rate_rule=findings.learning_rate_rule,
        objective=findings.objective,
        speedup=shown.ratio if shown else None,
        memory_ratio=shown.memory_ratio if shown else None,
        quality=checks,
        candidate_config=candidate,
        candidate=unproven,
        memory=_peak_memory(config, findings),
        baseline_memory=_peak_memory(baseline, findings),
        pareto=findings.pareto,
        one_off=_one_off_costs(winner, findings),
        target=_name_target(report.target),
        hardware=report.hardware,
        software=report.software,
        evidence=add_flops(evidence, report.target, config),
    )


def _describe_unproven(config: TrainConfig, shown: Finalist | None, findings: Findings, ranking: Ranking) -> Candidate:
    return describe_candidate(
        config,
        findings.checks_of(config),
        shown,
        _expect(config, findings, ranking),
        PeakMemory.largest(one.peak_memory for one in findings.timings_of(config)),
        failure=findings.finals.failure_of(config) if findings.finals else "",
    )


def _name_target(facts: TargetFacts) -> ProfileTarget:
    return ProfileTarget(
        label=facts.label,
        fingerprint=facts.fingerprint,
        training_loaders=facts.training_loaders,
        data_fingerprint=facts.data.fingerprint,
        device=facts.device,
        launched_processes=facts.launched_processes,
    )


def _choose_shown(findings: Findings, ranking: Ranking) -> tuple[Finalist | None, TrainConfig | None]:
    """Return the finalist that the answer is about, and what the search saw as the best.

    That nothing of what was tested is a gain says nothing of what there was no time to test.
    """
    baseline, finals = findings.report.target.baseline, findings.finals
    shown = find_shown(finals)
    if finals is not None and shown is not None and shown.outcome == "no gain":
        untested = find_untested(ranking, baseline, finals, least_gain=math.log(WORTH_PROVING))
        checks = findings.checks_of(untested) if untested is not None else ()
        if untested is not None and (not checks or is_passed(checks)):
            return None, untested
    return shown, find_leader(ranking, baseline, finals, least_gain=findings.least_gain)


def _effort(findings: Findings, budget_seconds: float) -> Effort:
    return Effort(
        judged=findings.judged,
        baseline=findings.report.target.baseline,
        knobs=findings.knobs,
        left_out=findings.left_out,
        interrupted=findings.interrupted,
        launch_seconds=findings.launch_seconds,
        probe_seconds=findings.report.elapsed_seconds,
        budget_seconds=budget_seconds,
    )


def _expect(config: TrainConfig, findings: Findings, ranking: Ranking) -> float | None:
    """Return the log speed-up that the search saw of a config, also of a refused one; None when it was not timed."""
    speeds = [ranking.speed_of(one) for one in findings.judged if one.config == config]
    seen = [speed for speed in speeds if speed is not None]
    return fmean(seen) if seen else None


def _peak_memory(config: TrainConfig, findings: Findings) -> PeakMemory:
    """Return the largest peaks of a config's launches; those of the probe, which does more, where there is none."""
    peaks = PeakMemory.largest(one.peak_memory for one in findings.timings_of(config))
    return peaks or findings.report.measurement.peak_memory


def _baseline_rate(findings: Findings) -> float:
    """Return the samples per second of the user's own settings: in the finals, else in the search, else in the probe.

    It is what every page shows, and holds the other launches against.
    """
    if findings.finals is not None and findings.finals.baseline.rates:
        return fmean(findings.finals.baseline.rates)
    rates = [one.samples_per_second for one in findings.timings_of(findings.report.target.baseline)]
    return fmean(rates) if rates else findings.report.measurement.samples_per_second


def _one_off_costs(winner: Finalist | None, findings: Findings) -> OneOffCosts:
    finals: Sequence[TrialResult] = winner.results if winner else ()
    compile_seconds = 0.0 if winner is None else _find_compile_seconds(winner.config, findings, finals)
    extra = max(0.0, compile_seconds - _find_compile_seconds(findings.report.target.baseline, findings))
    saved = _saved_per_sample(winner, findings)
    return OneOffCosts(
        compile_seconds=compile_seconds,
        # Of a pair in turns both start at a time, and each takes longer for that.
        startup_seconds=min((r.startup_seconds for r in finals), default=0.0),
        search_seconds=findings.elapsed_seconds,
        planned_samples=findings.planned_samples,
        planned_seconds=findings.planned_seconds,
        aside_fraction=findings.report.target.aside_fraction,
        break_even_samples=extra / saved if saved else None,
        search_break_even_samples=(extra + findings.elapsed_seconds) / saved if saved else None,
    )


def _find_compile_seconds(config: TrainConfig, findings: Findings, finals: Sequence[TrialResult] = ()) -> float:
    """Return how long a config's code was compiled for, by whichever launch was the first to need it."""
    return find_compile_seconds([*list_alike(config, findings.judged), *finals])


def _saved_per_sample(winner: Finalist | None, findings: Findings) -> float | None:
    """Return the seconds that a sample takes less once compiled, at the lower end; None without a gain.

    A sample of the user's own training: where more of them are needed for the same loss, they are counted in.
    """
    finals = findings.finals
    if winner is None or winner.ratio is None or finals is None:
        return None
    more = samples_ratio(findings.checks_of(winner.config))
    low = winner.ratio.low * math.exp(winner.cost - finals.baseline.cost) / more
    return (1.0 - 1.0 / low) / fmean(finals.baseline.rates) if low > 1.0 else None


def _evidence(findings: Findings, shown: Finalist | None, ranking: Ranking, budget_seconds: float) -> Evidence:
    finals = findings.finals
    rates = shown.rates if shown else []
    confirmation = _confirmation(findings, shown, ranking, budget_seconds)
    notes = [*findings.notes]
    aside = findings.report.target.aside_fraction
    if shown is not None and shown.outcome == "proven" and shown.ratio is not None and aside > _TELLING_ASIDE:
        whole = 1 / (aside + (1 - aside) / shown.ratio.low)
        notes.append(
            f"{format_share(aside)} of your run is validation and the like, which was not measured: if that gets no "
            f"faster, the whole of it gets at least {format_factor_down(whole)} faster"
        )
    launches = [*(one.result for one in findings.judged), *(finals.results if finals else ())]
    used = findings.elapsed_seconds
    return Evidence(
        pairs=len(rates),
        baseline_samples_per_second=_baseline_rate(findings),
        samples_per_second=fmean(rates) if rates else None,
        launch_noise_fraction=stdev(shown.log_ratios) if shown is not None and shown.ratio is not None else None,
        confirmation=confirmation,
        noise=summarise_noise(launches, ranking) if findings.judged else None,
        loss_limit=findings.loss_limit,
        loss_band=calibrate_band(findings.baseline_curves),
        measured_fraction=min(1.0, findings.measured_seconds / used) if used > 0 else None,
        drift_fraction=min(1.0, findings.gate_seconds / used) if used > 0 else None,
        trials=_tally(findings),
        stop_reason=findings.stop_reason,
        notes=tuple(notes),
    )


def _tally(findings: Findings) -> dict[str, int]:
    """Return the search's launches by how they ended, those that were cut among them."""
    statuses = Counter(judged.score.status.value for judged in findings.judged)
    statuses[TrialStatus.INTERRUPTED.value] += findings.interrupted
    return {status: number for status, number in statuses.items() if number}


def _confirmation(
    findings: Findings, shown: Finalist | None, ranking: Ranking, budget_seconds: float
) -> Confirmation | None:
    plan, finals = findings.plan, findings.finals
    if shown is None or len(shown.log_ratios) < 2 or plan is None or finals is None:
        return None
    logs = shown.log_ratios
    sd = shown.pair_sd if len(logs) > 1 else None
    entry = ranking.find(shown.config)
    wanted = needed = extra = None
    seconds = plan.round_seconds
    if shown.ratio is not None and shown.outcome == "unclear" and sd is not None:
        keeps = findings.objective is Objective.MEMORY  # its speed: a gain is none of its aims
        target = shown.ratio.estimate if keeps else max(shown.ratio.estimate, WORTH_PROVING)
        extra = seconds_to_settle(shown, target, share=finals.next_share, pair_seconds=seconds)
        wanted = None if keeps else target
    if wanted is not None and sd is not None:
        needed = budget_for(math.log(wanted), pair_sd=sd, pair_seconds=seconds, budget_seconds=budget_seconds)
    return Confirmation(
        # A claim that later pairs have left open is of an earlier look, whose pairs were all that it needed.
        pairs_planned=plan.kept + plan.rounds if len(logs) > plan.kept else len(logs),
        pairs_reserved=plan.reserve,
        log_ratios=tuple(logs),
        candidate_first=tuple(a < b for a, b in zip(shown.places, finals.baseline.places, strict=False)),
        interval=shown.speed.interval_at(0.95) if shown.ratio is not None else None,
        hodges_lehmann=math.exp(hodges_lehmann(logs)),
        expected_speedup=math.exp(entry.speed) if entry else None,
        shrunk_speedup=math.exp(ranking.shrunk_score(entry)) if entry and not shown.claim.saving else None,
        smallest_detectable=(
            smallest_provable(sd, len(logs), risk_share=finals.risk_share, pilot=shown.pilot)
            if shown.ratio is not None and sd is not None and not shown.claim.saving
            else None
        ),
        wanted_speedup=wanted,
        budget_needed_seconds=needed,
        extra_seconds_needed=extra,
        futile=finals.futile,
    )


def add_flops(evidence: Evidence, facts: TargetFacts, config: TrainConfig) -> Evidence:
    """Return the evidence with what a training's model FLOPs utilization is reckoned with, as far as it was found.

    Args:
        evidence: of a profile.
        facts: of its target; the same operations are counted with any settings, recomputed ones not again.
        config: the settings whose arithmetic is held against the machine's rate, as the probe does for the baseline.
    """
    arithmetic = name_arithmetic(facts.replace(baseline=config))
    return evidence.replace(
        flops_per_sample=facts.model.flops_per_sample or None,
        peak_flops_per_second=facts.rates.sustained_flops_per_second(arithmetic),
    )
