"""What each change is worth, as rows with a bar each: records in, words and positions in percent of the width out."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.emit.report.charts import Tick, choose_ticks
from autotune.emit.report.wording import ARROW, shorten, typeset_factor
from autotune.format import EN_DASH, TIMES
from autotune.records.explanation import ChangeEffect, Explanation
from autotune.records.measurement import Interval
from autotune.sentences.explanation import (
    NUMERICS,
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


@dataclass(frozen=True)
class WorthRow:
    """One change; the bar from `low_x` to `high_x` with a mark at `x`, in percent, None where it is not known."""

    change: str
    worth: str
    remark: str
    x: float | None
    low_x: float | None
    high_x: float | None


@dataclass(frozen=True)
class WorthChart:
    """All changes on one scale."""

    rows: tuple[WorthRow, ...]
    ticks: tuple[Tick, ...]
    one_x: float
    is_proven: bool
    note: str


def draw_worth(explanation: Explanation) -> WorthChart | None:
    """Return what each change is worth, and all of them together; None where nothing is changed."""
    if not explanation.changes:
        return None
    known = [one.worth for one in explanation.changes if one.worth is not None]
    together = [] if explanation.together is None else [explanation.together]
    ends = [1.0, *(end for one in (*known, *together) for end in (one.low, one.high))]
    ticks = choose_ticks(min(ends), max(ends), count=4)

    def x_of(ratio: float) -> float:
        return round(2 + 96 * (ratio - ticks[0]) / (ticks[-1] - ticks[0]), 2)

    def row(change: str, worth: str, remark: str, interval: Interval | None) -> WorthRow:
        ends = (None, None, None) if interval is None else (interval.estimate, interval.low, interval.high)
        return WorthRow(shorten(change), worth, shorten(remark), *(None if end is None else x_of(end) for end in ends))

    rows = [
        row(name_change(one, explanation, arrow=ARROW), _name_worth(one), _remark(one), one.worth)
        for one in explanation.changes
    ]
    if explanation.together is not None:
        told = describe_together(explanation, sign=TIMES, dash=EN_DASH).partition("; ")[2]
        level = format_level(explanation.together, dash=EN_DASH)
        worth = typeset_factor(explanation.together.estimate)
        rows.append(row("all together", worth, "; ".join(part for part in (level, told) if part), explanation.together))
    return WorthChart(
        rows=tuple(rows),
        ticks=tuple(Tick(x_of(tick), typeset_factor(tick)) for tick in ticks),
        one_x=x_of(1.0),
        is_proven=explanation.is_proven,
        note=shorten(explanation.note),
    )


def list_tried(explanation: Explanation) -> list[tuple[str, str]]:
    """Return the values that were tried and are not the answer's, and how they did."""
    return [
        (shorten(f"{name_setting(one.knob)}={one.value}"), describe_tried(one, sign=TIMES)) for one in explanation.tried
    ]


def list_refused(explanation: Explanation) -> list[str]:
    """Return what did not pass the loss check, and what it would have gained."""
    return [shorten(describe_refused(one, sign=TIMES)) for one in explanation.refused]


def list_steps(explanation: Explanation) -> list[tuple[str, str]]:
    """Return a step of the user's own settings and of those that are explained, as far as they were timed."""
    whose = "chosen settings" if explanation.is_proven else "the candidate's"
    steps = (("your settings", explanation.before), (whose, explanation.after))
    shift = describe_shift(explanation)
    told = [(name, describe_step(step)) for name, step in steps if step is not None]
    return [*told, ("bottleneck now", shift)] if shift else told


def _name_worth(effect: ChangeEffect) -> str:
    if effect.failure:
        return "needed"
    return "not known" if effect.worth is None else typeset_factor(effect.worth.estimate)


def _remark(effect: ChangeEffect) -> str:
    memory = format_memory(effect)
    parts = (
        f"without it: {effect.failure}" if effect.failure else "",
        "" if effect.worth is None else format_level(effect.worth, dash=EN_DASH),
        describe_source(effect),
        describe_alone(effect, sign=TIMES),
        f"memory {'as before' if memory == '0' else memory}" if memory else "",
        f"{effect.numerics}: {NUMERICS[effect.numerics]}",
    )
    return "; ".join(part for part in parts if part)
