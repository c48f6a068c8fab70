"""An answer as a small table, for a notebook; what comes from files and users is escaped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from autotune.cli.view.terminal import one_line
from autotune.format import format_bytes, format_rate
from autotune.records.config import changed_fields, get_knob
from autotune.records.measurement import PeakMemory
from autotune.records.profile import Profile
from autotune.sentences.answer import describe_candidate, describe_speedup
from autotune.sentences.loss_check import describe_check, describe_drift
from autotune.sentences.settings import describe_changes, name_setting


def draw_profile(profile: Profile) -> str:
    """Return an answer as HTML: the verdict, what was before and what is after, each change, the loss check."""
    verdict, _, rest = describe_speedup(profile).partition(":")
    caption = f"<b>{_text(verdict)}</b>{_text(f':{rest}' if rest else '')}"
    head = "<tr><th></th><th>your settings</th><th>this answer</th></tr>" if profile.verdict == "improved" else ""
    rows = [*_list_figures(profile), *_list_changes(profile), *_list_notes(profile)]
    return f'<table><caption style="text-align:left">{caption}</caption>{head}{"".join(map(_row, rows))}</table>'


def _row(cells: Sequence[str]) -> str:
    """Return a row: its name, and what was before and is after, or one cell for both."""
    name, *values = cells
    if len(values) == 1:
        shown = f'<td colspan="2" style="text-align:left">{_text(values[0])}</td>'
    else:
        shown = "".join(f"<td>{_text(value)}</td>" for value in values)
    return f"<tr><th>{_text(name)}</th>{shown}</tr>"


def _list_figures(profile: Profile) -> Iterator[tuple[str, ...]]:
    evidence, is_better = profile.evidence, profile.verdict == "improved"
    before, after = evidence.baseline_samples_per_second, evidence.samples_per_second
    if before is not None:
        yield "throughput", format_rate(before), *([_rate(after)] if is_better else [])
    if profile.memory is not None:
        if is_better:
            yield "peak memory", _memory(profile.baseline_memory), _memory(profile.memory)
        else:
            yield "peak memory", _memory(profile.memory)


def _list_changes(profile: Profile) -> Iterator[tuple[str, ...]]:
    for name in changed_fields(profile.config, profile.baseline_config):
        before, after = get_knob(profile.baseline_config, name), get_knob(profile.config, name)
        yield name_setting(name), str(before), str(after)


def _list_notes(profile: Profile) -> Iterator[tuple[str, str]]:
    if profile.verdict != "improved" and profile.candidate_config is not None:
        known = describe_candidate(profile)
        changes = describe_changes(profile.candidate_config, profile.baseline_config)
        yield "candidate", f"{changes} ({known})" if known else changes
    for check in profile.quality:
        yield "loss check", describe_check(check)
    tested = describe_drift(profile)
    if tested is not None:
        yield "tested", tested


def _rate(rate: float | None) -> str:
    return "-" if rate is None else format_rate(rate)


def _memory(memory: PeakMemory | None) -> str:
    return "-" if memory is None else format_bytes(memory.used_bytes)


def _text(text: str) -> str:
    return escape(one_line(text))
