"""The page of `autotune probe`, from the machine down to what to try: what matters most ends up above the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cli.pages.layout import LinePage, open_page
from autotune.cli.pages.probe_machine import show_limits, show_machine
from autotune.cli.pages.probe_step import (
    show_input,
    show_memory,
    show_phases,
    show_roofline,
    show_speed,
    show_step,
)
from autotune.format import count, format_bytes, format_factor, format_gain
from autotune.records.probe import Advice, Caution, Issue, MachineReport, ProbeReport, RuledOut, Verdict
from autotune.sentences.settings import name_setting

_MOST_ADVICE, _MOST_ISSUES = 4, 3
"""Lines of a page that fits a screen."""


def print_report(report: ProbeReport, *, full: bool = True) -> None:
    """Print what a probe found out about a target on stdout.

    Args:
        report: of the probe.
        full: all of it; otherwise what fits a screen, the verdict first.
    """
    page = open_page()
    if not full:
        _show_summary(page, report)
        return
    show_machine(page, report.hardware, report.software)
    show_limits(page, report.target.ceilings, report.ceilings_age_seconds)
    show_step(page, report)
    show_roofline(page, report)
    show_memory(page, report)
    show_input(page, report)
    show_ruled_out(page, report.ruled_out)
    _show_cautions(page, report.cautions)
    page.notes((*report.target.warnings, *report.hardware.missing))
    _show_verdict(page, report.verdict)
    _show_issues(page, report.troubles)
    _show_advice(page, report.advice)


def _show_summary(page: LinePage, report: ProbeReport) -> None:
    """Print what fits a screen: where the time goes, what could be gained, and what to try."""
    target, hardware, verdict = report.target, report.hardware, report.verdict
    gpus = ", ".join(gpu.name for gpu in hardware.gpus) or "no GPU"
    cpus = count(hardware.usable_cpu_count, "usable CPU")
    page.heading(target.label, f"{hardware.cpu_name}, {cpus}, {gpus}; torch {report.software.torch}")
    show_speed(page, report)
    page.facts("bottleneck", [verdict.sentence])
    ceiling, reason = verdict.speedup_ceiling, verdict.ceiling_reason
    most = "not known" if ceiling is None else f"at most {format_factor(ceiling)} faster is possible here"
    page.facts("headroom", [f"{most}: {reason}" if reason else most])
    limit = "" if target.memory is None else f" of {format_bytes(target.memory.limit_bytes)}"
    page.facts("memory", [f"peak {format_bytes(report.measurement.peak_memory.used_bytes)}{limit}"])
    show_phases(page, target, report.measurement.seconds_per_step)
    page.heading("try first", "alone; a search combines them")
    for item in report.advice[:_MOST_ADVICE]:
        gain = "" if item.gain is None else f"{format_gain(item.gain.low, item.gain.high)}: "
        page.facts(name_setting(item.knob), [f"{gain}{item.reason}"])
    if not report.advice:
        page.sentence("nothing that this evidence speaks for")
    left_out = (
        f"why {count(len(report.ruled_out), 'value')} are ruled out" if report.ruled_out else "all that was found"
    )
    more = max(0, len(report.advice) - _MOST_ADVICE)
    page.sentence(f"--full: {count(more, 'more setting')} and {left_out}" if more else f"--full: {left_out}")
    for trouble in report.troubles[:_MOST_ISSUES]:
        page.sentence(f"{trouble.sentence}; {trouble.remedy}", style="yellow", bullet=True)
    for warning in target.warnings[:_MOST_ISSUES]:
        page.sentence(warning, style="yellow", bullet=True)


def print_machine(report: MachineReport) -> None:
    """Print what a machine can do on stdout."""
    page = open_page()
    show_machine(page, report.hardware, report.software)
    show_limits(page, report.ceilings, report.ceilings_age_seconds)
    page.notes(report.hardware.missing)
    _show_issues(page, report.troubles)
    page.heading("next")
    page.entry("autotune probe -- python train.py", "where the time of your script goes, and what to try")
    page.entry("autotune probe train.py:workload", "the same for a workload, which can be varied further")
    page.entry("autotune probe demo", "the built-in demo, a small network that learns to name drawn figures")


def _show_verdict(page: LinePage, verdict: Verdict) -> None:
    page.heading("verdict")
    page.sentence(verdict.sentence, style="bold")
    for sentence in verdict.evidence:
        page.sentence(sentence, style="dim", bullet=True)
    if verdict.speedup_ceiling is not None:
        reason = f": {verdict.ceiling_reason}" if verdict.ceiling_reason else ""
        page.sentence(f"at most {format_factor(verdict.speedup_ceiling)} is possible here{reason}")


def _show_issues(page: LinePage, troubles: Sequence[Issue]) -> None:
    if troubles:
        page.heading("troubles")
    for trouble in troubles:
        page.entry(trouble.name, trouble.sentence, remedy=trouble.remedy, style="bold yellow")


def _show_advice(page: LinePage, advice: Sequence[Advice]) -> None:
    page.heading("worth trying", "best first" if len(advice) > 1 else "")
    if not advice:
        page.sentence("nothing that this evidence speaks for")
    for item in advice:
        badge = "" if item.gain is None else format_gain(item.gain.low, item.gain.high)
        page.entry(name_setting(item.knob), item.reason, badge=badge)


def show_ruled_out(page: LinePage, ruled_out: Sequence[RuledOut]) -> None:
    """Print a line a reason: knobs, each with its values."""
    reasons: dict[str, dict[str, list[str]]] = {}
    for item in ruled_out:
        values = reasons.setdefault(item.reason, {}).setdefault(name_setting(item.knob), [])
        values += [] if item.value is None else [str(item.value)]
    if reasons:
        page.heading("ruled out")
    for reason, knobs in reasons.items():
        names = ", ".join(f"{knob}={'/'.join(values)}" if values else knob for knob, values in knobs.items())
        page.sentence(f"{names}: {reason}", bullet=True)


def _show_cautions(page: LinePage, cautions: Sequence[Caution]) -> None:
    if cautions:
        page.heading("not measured")
    for caution in cautions:
        page.sentence(f"{name_setting(caution.knob)}={caution.value}: {caution.reason}", bullet=True)
