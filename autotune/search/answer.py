"""From what was measured to the profile that is saved. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from autotune.measure.confidence import minimum_detectable_speedup
from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory, QualityCheck
from autotune.records.probe import ProbeReport
from autotune.records.profile import (
    Evidence,
    OneOffCosts,
    Profile,
    ProfileTarget,
    SearchVerdict,
    StopReason,
    baseline_interval,
)
from autotune.records.trial import TrialResult
from autotune.search.finals import CLAIM_RISK, THRESHOLD, Finalist, FinalsOutcome, launch_noise
from autotune.search.objective import Judged, best_of

_TELLING_ASIDE = 0.05


@dataclass
class Findings:
    """Everything a search knows so far.

    Attributes:
        report: of the probe.
        judged: the search's trials.
        checks: drift checks by config, in the order they were made.
        finals: None before they were run.
        stop_reason: why the search ended.
        notes: for the user, one sentence each.
        elapsed_seconds: of the whole command.
    """

    report: ProbeReport
    judged: list[Judged] = field(default_factory=list)
    checks: list[tuple[TrainConfig, tuple[QualityCheck, ...]]] = field(default_factory=list)
    finals: FinalsOutcome | None = None
    stop_reason: StopReason = "running"
    notes: list[str] = field(default_factory=list)
    elapsed_seconds: float = 0.0

    def checks_of(self, config: TrainConfig) -> tuple[QualityCheck, ...]:
        """Return the drift checks of a config; empty when it was not checked."""
        return next((checks for checked, checks in self.checks if checked == config), ())


def build_profile(findings: Findings) -> Profile:
    """Return the answer as it stands: the baseline, unless the finals proved a candidate that passed its checks."""
    report, finals = findings.report, findings.finals
    baseline = report.target.baseline
    winner = finals.winner if finals else None
    shown = winner or (finals.best if finals else None)
    candidate = shown.config if shown else _refused_candidate(findings)
    return Profile(
        verdict=_verdict(shown, proven=winner is not None),
        config=winner.config if winner else baseline,
        baseline_config=baseline,
        speedup=shown.ratio if shown and shown.ratio else baseline_interval(1 - 2 * CLAIM_RISK),
        quality=findings.checks_of(candidate) if candidate else (),
        candidate_config=candidate,
        memory=_peak_memory(winner, report),
        one_off=_one_off_costs(winner, findings.elapsed_seconds),
        target=ProfileTarget(
            label=report.target.label,
            fingerprint=report.target.fingerprint,
            training_loaders=report.target.training_loaders,
        ),
        hardware=report.hardware,
        software=report.software,
        evidence=_evidence(findings, shown),
    )


def _verdict(shown: Finalist | None, *, proven: bool) -> SearchVerdict:
    if proven:
        return "improved"
    ratio = shown.ratio if shown else None
    return "inconclusive" if ratio is not None and ratio.estimate > 1.0 and ratio.high > THRESHOLD else "keep"


def _refused_candidate(findings: Findings) -> TrainConfig | None:
    """Return the fastest config that the drift check refused; None when nothing was refused."""
    return findings.checks[0][0] if findings.checks else None


def _peak_memory(winner: Finalist | None, report: ProbeReport) -> PeakMemory:
    peaks = [r.measurement.peak_memory for r in winner.results if r.measurement] if winner else []
    return max(
        peaks, key=lambda peak: (peak.device_bytes or 0, peak.host_bytes), default=report.measurement.peak_memory
    )


def _one_off_costs(winner: Finalist | None, elapsed_seconds: float) -> OneOffCosts:
    results: Sequence[TrialResult] = winner.results if winner else ()
    compile_seconds = [r.measurement.compile_seconds for r in results if r.measurement]
    return OneOffCosts(
        compile_seconds=max(compile_seconds, default=0.0),
        startup_seconds=max((r.startup_seconds for r in results), default=0.0),
        search_seconds=elapsed_seconds,
    )


def _evidence(findings: Findings, shown: Finalist | None) -> Evidence:
    finals = findings.finals
    base_rates = finals.baseline.rates if finals else []
    rates = shown.rates if shown else []
    noise = launch_noise(base_rates, rates)
    notes = list(findings.notes)
    if shown is not None and not shown.is_faster and noise is not None:
        smallest = minimum_detectable_speedup(noise, len(rates)) * THRESHOLD
        notes.append(f"{len(rates)} pairs with this noise could have shown a gain of {smallest:.2f}x or more")
    aside = findings.report.target.aside_fraction
    if shown is not None and shown.is_faster and shown.ratio is not None and aside > _TELLING_ASIDE:
        whole = 1 / (aside + (1 - aside) / shown.ratio.low)
        notes.append(
            f"{100 * aside:.0f} % of your run is validation and the like, which stays as it is: the whole of it gets "
            f"at least {whole:.2f}x faster"
        )
    best = best_of(findings.judged)
    if finals is None and best is not None and best.config != findings.report.target.baseline and not findings.checks:
        notes.append(f"unconfirmed: the search's best ran at {_relative(best, findings.report):.2f}x the baseline")
    return Evidence(
        pairs=len(rates),
        baseline_samples_per_second=fmean(base_rates) if base_rates else findings.report.measurement.samples_per_second,
        samples_per_second=fmean(rates) if rates else None,
        launch_noise_fraction=noise,
        trials=dict(Counter(judged.score.status.value for judged in findings.judged)),
        stop_reason=findings.stop_reason,
        notes=tuple(notes),
    )


def _relative(judged: Judged, report: ProbeReport) -> float:
    measurement = judged.result.measurement
    return measurement.samples_per_second / report.measurement.samples_per_second if measurement else 0.0
