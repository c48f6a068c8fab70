"""Why an answer is what it is, on stdout: what each change is worth, what did not pay, and what is left to the user."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.cli.pages.layout import LinePage, open_page
from autotune.cli.pages.probe import show_ruled_out
from autotune.format import format_factor
from autotune.records.explanation import ChangeEffect, Explanation
from autotune.records.probe import Issue
from autotune.sentences.explanation import (
    WORTH,
    describe_alone,
    describe_refused,
    describe_shift,
    describe_source,
    describe_step,
    describe_together,
    describe_tried,
    format_level,
    format_memory,
    name_change,
)
from autotune.sentences.settings import name_setting


def print_explanation(explanation: Explanation) -> None:
    """Print an explanation on stdout."""
    page = open_page()
    _show_changes(page, explanation)
    _show_step(page, explanation)
    if explanation.tried:
        page.heading("tried, and not in the answer", "as the search read it")
    for one in explanation.tried:
        page.sentence(f"{name_setting(one.knob)}={one.value}: {describe_tried(one)}", bullet=True)
    if explanation.refused:
        page.heading("refused by the loss check")
    for refused in explanation.refused:
        page.sentence(describe_refused(refused), bullet=True)
    show_ruled_out(page, explanation.ruled_out)
    _show_troubles(page, explanation.troubles)
    if explanation.note:
        page.notes([explanation.note])


def _show_changes(page: LinePage, explanation: Explanation) -> None:
    whose = "" if explanation.is_proven else " of the candidate, which is not proven,"
    if not explanation.changes:
        page.heading("what each change is worth")
        page.sentence("your own settings are the answer: there is nothing to take apart")
        return
    page.heading(f"what each change{whose} is worth", WORTH)
    page.table(
        ("change", "worth", "interval", "memory", "numerics", "from"),
        [_make_row(one, explanation) for one in explanation.changes],
    )
    page.facts("all together", [text for text in [describe_together(explanation)] if text])


def _make_row(effect: ChangeEffect, explanation: Explanation) -> tuple[str, ...]:
    worth, interval = ("not known", "-") if effect.worth is None else (
        format_factor(effect.worth.estimate), format_level(effect.worth)
    )  # fmt: skip
    if effect.failure:
        worth = "needed"
    source = [effect.failure or describe_source(effect), describe_alone(effect)]
    return (
        name_change(effect, explanation),
        worth,
        interval,
        format_memory(effect) or "-",
        effect.numerics,
        "; ".join(one for one in source if one) or "-",
    )


def _show_step(page: LinePage, explanation: Explanation) -> None:
    page.heading("a step, before and after")
    page.facts("bottleneck", [explanation.bottleneck] if explanation.bottleneck else [])
    for label, step in (("your settings", explanation.before), ("these settings", explanation.after)):
        page.facts(label, [] if step is None else [describe_step(step)])
    page.facts("bottleneck now", [text for text in [describe_shift(explanation)] if text])


def _show_troubles(page: LinePage, troubles: Sequence[Issue]) -> None:
    if troubles:
        page.heading("what only you can do", "no setting mends it")
    for trouble in troubles:
        page.entry(trouble.name, trouble.sentence, remedy=trouble.remedy, style="bold yellow")
