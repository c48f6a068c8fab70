"""The report of a search: one HTML page that needs no other file, and no script but to sort its table of trials.

Records in, page out. What is shown is put into words and rows here in Python; the templates only lay it out.
"""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections.abc import Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from autotune.emit.report import charts, plots, probed, tables, wording
from autotune.emit.report.origin import Origin, describe_gain, find_command, list_origin
from autotune.emit.report.worth import draw_worth, list_refused, list_steps, list_tried
from autotune.records import DriftLimits, Margin, ProbeReport, Profile, TrialResult
from autotune.records.explanation import Explanation
from autotune.records.facts import TargetFacts
from autotune.search.scores.objective import Limits, draws_otherwise, score_trial
from autotune.sentences.loss_check import describe_drift

__all__ = ["Origin", "render_report"]


def render_report(
    profile: Profile,
    probe: ProbeReport,
    trials: Sequence[TrialResult],
    explanation: Explanation | None = None,
    origin: Origin | None = None,
) -> str:
    """Return a self-contained HTML page about a search.

    Args:
        profile: the answer.
        probe: what was found before the search.
        trials: every trial, in any order; they are shown by number, those in turns with another one as part of it.
        explanation: what each change is worth; None where that is not known.
        origin: what is known of the search beside its records.
    """
    limit = profile.evidence.loss_limit or DriftLimits().loss
    told = (trial for trial in trials if trial.spec.purpose != "reference")  # their timings are in the other one's
    ordered = _mark_drifted(sorted(told, key=lambda trial: trial.spec.number), limit, probe.target)
    baseline_rate = tables.find_baseline_rate(profile, probe)
    context = _describe_search(profile, probe, ordered, explanation, origin or Origin())
    context |= {
        "label": wording.shorten(profile.target.label),
        "verdict": wording.describe_verdict(profile),
        "figures": tables.list_figures(profile, probe),
        "settings": tables.list_settings(profile),
        "candidate_shown": tables.is_candidate_apart(profile),
        "limit": wording.describe_limit(probe),
        "phases": charts.draw_phases(probe.target.phases),
        "work": charts.draw_work(probe.target),
        "memory": probed.describe_memory(probe.target),
        "modes": probed.list_modes(probe),
        "troubles": probed.list_issues(probe.troubles if explanation is None else explanation.troubles),
        "trials_chart": charts.draw_trials(ordered, profile.baseline_config, baseline_rate=baseline_rate),
        "pareto": tables.list_pareto(profile),
        "memory_chart": plots.draw_memory(profile, explanation),
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
    return _build_environment().get_template("report.html.j2").render(context | _load_sorting())


def _load_sorting() -> dict[str, Markup]:
    """Return the one script of the page, and what its policy knows it by: no other is run."""
    script = resources.files(__name__).joinpath("sort.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return {"sorting": Markup(script), "sorting_hash": Markup(f"sha256-{digest}")}


def _describe_search(
    profile: Profile,
    probe: ProbeReport,
    trials: Sequence[TrialResult],
    explanation: Explanation | None,
    origin: Origin,
) -> dict[str, Any]:
    """Return what the page says of the search as a whole, of its changes, its time and its trainings."""
    return {
        "target": profile.target.label,
        "gain": describe_gain(profile, probe, origin),
        "command": find_command(origin),
        "origin": list_origin(profile, origin),
        "worth": None if explanation is None else draw_worth(explanation),
        "tried": [] if explanation is None else list_tried(explanation),
        "refused": [] if explanation is None else list_refused(explanation),
        "steps": [] if explanation is None else list_steps(explanation),
        "timeline": plots.draw_timeline(trials, profile.one_off.search_seconds),
        "losses": plots.draw_losses(trials, profile),
    }


def _mark_drifted(trials: Sequence[TrialResult], loss_limit: Margin, facts: TargetFacts) -> list[TrialResult]:
    """Return the trials with the status of those that the search, with its own limit, screened out for their losses."""
    probed = next((trial.curves[0] for trial in trials if trial.spec.purpose == "probe" and trial.curves), None)
    if probed is None:
        return list(trials)
    limits = Limits(host_memory_bytes=2**62, device_memory_bytes=None, max_drift=loss_limit.amount)

    def mark(trial: TrialResult) -> TrialResult:
        if trial.spec.purpose != "measure" or trial.spec.config is None:
            return trial
        redraws = draws_otherwise(trial.spec.config, facts)
        return trial.replace(status=score_trial(trial, probed, limits, other_draws=redraws).status)

    return [*map(mark, trials)]


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
