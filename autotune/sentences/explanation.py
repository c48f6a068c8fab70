"""What an answer is made of, in words: the worth of a change, what else was tried, the step before and after. Pure."""

from __future__ import annotations

from autotune.format import count, format_bounds, format_bytes, format_factor, format_share, format_time
from autotune.records.config import get_knob
from autotune.records.explanation import ChangeEffect, Explanation, RefusedChanges, StepShare, TriedValue
from autotune.records.measurement import Interval
from autotune.sentences.settings import name_setting, name_value
from autotune.sentences.trials import name_status

WORTH = "the answer over the answer without the change"

NUMERICS = {
    "exact": "losses bit for bit the same",
    "rounding": "the same sums, rounded in another way",
    "semantic": "another training",
}
"""What a class of changes may do to the numbers."""

_TELLING_BYTES = 2**20

_INPUT_BOUND = 0.1
"""Share of a step that is waiting for data above which the probe calls it input-bound."""


def name_change(effect: ChangeEffect, explanation: Explanation, *, arrow: str = "->") -> str:
    """Return what a change changes, e.g. `workers 0 -> 2, prefetch 2 -> 4`."""
    before, after = explanation.baseline_config, explanation.config
    values = ((name_setting(one), get_knob(before, one), get_knob(after, one)) for one in effect.names)
    return ", ".join(f"{name} {old} {arrow} {new}" for name, old, new in values)


def describe_worth(effect: ChangeEffect) -> str:
    """Return what a change is worth and how that is known, e.g. `1.28x (95 % 1.21-1.36, 4 pairs)`."""
    if effect.failure:
        return "needed: the training does not run without it"
    if effect.worth is None:
        return "not measured"
    level = format_level(effect.worth)
    return f"{format_factor(effect.worth.estimate)} ({level}, {describe_source(effect)})"


def describe_source(effect: ChangeEffect) -> str:
    """Return what the worth of a change rests on, in words; empty where nothing is known."""
    with_it, without = effect.launches
    return {
        "none": "",
        "finals": f"{count(with_it, 'pair')} of the proof",
        "search": f"read by the search: {with_it} and {count(without, 'launch', 'launches')}",
        "launches": f"{count(with_it, 'pair')} of fresh processes",
    }[effect.source]


def format_level(interval: Interval, *, dash: str = "-") -> str:
    """Return an interval of factors with its level, rounded outwards, e.g. `95 % 1.21-1.36`."""
    level = f"{100 * interval.confidence_level:.4g} %"
    return f"{level} {format_bounds(interval.low, interval.high, dash=dash)}"


def describe_alone(effect: ChangeEffect, *, sign: str = "x") -> str:
    """Return what a change did with no other beside it, as the search read it; empty where it was not launched."""
    if effect.alone is None:
        return ""
    return f"alone {format_factor(effect.alone, sign=sign)} ({count(effect.alone_launches, 'launch', 'launches')})"


def format_memory(effect: ChangeEffect) -> str:
    """Return what a change adds to the peak, e.g. `+180 MiB`; `0` for next to nothing, empty where it is not known."""
    found = effect.memory_bytes
    if found is None:
        return ""
    return "0" if abs(found) < _TELLING_BYTES else f"{'+' if found > 0 else '-'}{format_bytes(abs(found))}"


def describe_together(explanation: Explanation, *, sign: str = "x", dash: str = "-") -> str:
    """Return what all changes are worth, and that the single ones do not add up to it; empty where not known."""
    found = explanation.together
    if found is None:
        return ""
    all_of_them = f"{format_factor(found.estimate, sign=sign)} ({format_level(found, dash=dash)})"
    if sum(one.worth is not None for one in explanation.changes) < 2:
        return all_of_them
    return f"{all_of_them}; the single ones need not multiply to that: changes help or hinder each other"


def describe_tried(tried: TriedValue, *, sign: str = "x") -> str:
    """Return how a value did that is not the answer's, e.g. `alone 0.96x; 3 launches, 1 of them timed out`."""
    parts = []
    if tried.alone is not None:
        parts.append(f"alone {format_factor(tried.alone, sign=sign)}")
    if tried.best is not None and tried.best != tried.alone:
        parts.append(f"with others at best {format_factor(tried.best, sign=sign)}")
    if tried.least_bytes is not None:
        parts.append(f"{format_bytes(tried.least_bytes)} at least")
    failed = ", ".join(f"{number} {name_status(status)}" for status, number in sorted(tried.failed.items()))
    return "; ".join([*parts, count(tried.launches, "launch", "launches"), *([failed] if failed else [])])


def describe_step(step: StepShare) -> str:
    """Return how long a step takes and how much of it is waiting, e.g. `62 ms, 48 % waiting for data`."""
    return f"{format_time(step.seconds)}, {format_share(step.data_wait_fraction)} waiting for data"


def describe_shift(explanation: Explanation) -> str:
    """Return what became of the bottleneck, as far as waiting for data tells; empty where a step was not timed."""
    before, after = explanation.before, explanation.after
    if before is None or after is None:
        return ""
    waited, waits = (step.data_wait_fraction > _INPUT_BOUND for step in (before, after))
    if waits and waited and explanation.bottleneck and not explanation.bottleneck.startswith("input-bound"):
        return "as before: waiting for data is a part of it, and not the largest"
    if waits:
        return "still the loader" if waited else "now the loader: it was not before"
    return "no longer the loader" if waited else "not the loader, as before"


def describe_refused(refused: RefusedChanges, *, sign: str = "x") -> str:
    """Return what was refused and what it would have gained, e.g. `layout=channels_last threads=1: at best 2.96x`."""
    names = " ".join(map(name_value, refused.changes))
    gain = "not timed" if refused.best is None else f"at best {format_factor(refused.best, sign=sign)}"
    together = " together" if len(refused.changes) > 1 else ""
    return f"{names}{together}: {gain}, and not shown to learn the same"
