"""The report of a search: one HTML page that needs no script, no network and no other file.

Records in, page out. What is shown is put into words and rows here in Python; the templates only lay it out.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from autotune.emit.report import charts, probed, tables, wording
from autotune.records import DriftLimits, Margin, ProbeReport, Profile, TrialResult
from autotune.search.scores.objective import Limits, score_trial
from autotune.sentences.loss_check import describe_drift

__all__ = ["render_report"]


def render_report(profile: Profile, probe: ProbeReport, trials: Sequence[TrialResult]) -> str:
    """Return a self-contained HTML page about a search.

    Args:
        profile: the answer.
        probe: what was found before the search.
        trials: every trial, in any order; they are shown by number.
    """
    limit = profile.evidence.loss_limit or DriftLimits().loss
    ordered = _mark_drifted(sorted(trials, key=lambda trial: trial.spec.number), limit)
    baseline_rate = tables.find_baseline_rate(profile, probe, ordered)
    context: dict[str, Any] = {
        "label": wording.shorten(profile.target.label),
        "verdict": wording.describe_verdict(profile),
        "figures": tables.list_figures(profile, probe, baseline_rate=baseline_rate),
        "settings": tables.list_settings(profile),
        "candidate_shown": tables.is_candidate_apart(profile),
        "limit": wording.describe_limit(probe),
        "phases": charts.draw_phases(probe.target.phases),
        "work": charts.draw_work(probe.target),
        "memory": probed.describe_memory(probe.target),
        "modes": probed.list_modes(probe),
        "troubles": probed.list_issues(probe.troubles),
        "trials_chart": charts.draw_trials(ordered, profile.baseline_config, baseline_rate=baseline_rate),
        "pareto": tables.list_pareto(profile),
        "finals_chart": charts.draw_finals(ordered, profile),
        "trials": tables.list_trials(ordered, profile.baseline_config, baseline_rate=baseline_rate),
        "tally": wording.tally(ordered),
        "quality": tables.list_quality(profile.quality),
        "drift": describe_drift(profile),
        "ruled_out": tables.list_ruled_out(probe.ruled_out),
        "advice": probed.list_advice(probe.advice),
        "notes": tables.list_notes(profile, probe),
        "machine": tables.list_machine(profile, probe),
        "versions": tables.list_versions(profile),
    }
    return _build_environment().get_template("report.html.j2").render(context)


def _mark_drifted(trials: Sequence[TrialResult], loss_limit: Margin) -> list[TrialResult]:
    """Return the trials with the status of those that the search, with its own limit, screened out for their losses."""
    probed = next((trial.curves[0] for trial in trials if trial.spec.purpose == "probe" and trial.curves), None)
    if probed is None:
        return list(trials)
    limits = Limits(host_memory_bytes=2**62, device_memory_bytes=None, max_drift=loss_limit.amount)
    return [
        trial.replace(status=score_trial(trial, probed, limits).status) if trial.spec.purpose == "measure" else trial
        for trial in trials
    ]


def _build_environment() -> Environment:
    return Environment(
        loader=PackageLoader("autotune.emit.report", package_path="."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_make_harmless,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _make_harmless(value: Any) -> Any:
    """Replace what a page cannot show: control characters, text-direction overrides, lone surrogates.

    Labels, errors and knob values come from user code and are untrusted. Markup was made from harmless parts.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return "".join(
        c if c in "\n\t" or unicodedata.category(c)[0] != "C" else "\N{REPLACEMENT CHARACTER}" for c in value
    )
