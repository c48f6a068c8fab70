"""Read how a script's own figure of merit is found in what it prints: an expression or a JSON key, and a direction."""

from __future__ import annotations

import difflib
import re
import warnings
from typing import Literal

from autotune.errors import UsageError
from autotune.records.script import PrintedMetric

_DIRECTIONS: tuple[Literal["minimize", "maximize"], ...] = ("minimize", "maximize")
_REGEX_HINT = "write the figure itself as the one group: 'val_acc=([0-9.]+)'"
_PART = re.compile(
    r"\\(?P<literal>[^A-Za-z0-9])"
    r"|\\."
    r"|\[\^?\]?(?:\\.|[^\]\\])*\]"
    r"|\(\?(?!P<)[aiLmsux-]*[:=!)]?"
    r"|(?P<group>\((?:\?P<(?P<name>\w+)>)?)"
    r"|\{[0-9,]*\}"
    r"|[.^$*+?|)]"
    r"|(?P<plain>.)",
    re.DOTALL,
)
"""One part of a regular expression; only `literal` and `plain` stand for themselves."""


def read_metric(*, regex: str | None, key: str | None, direction: str | None) -> PrintedMetric | None:
    """Return where the figure is found and which way it is better; None when none is asked for.

    Raises:
        UsageError: the expression is not valid or has not one group, or the three do not go together.
    """
    if regex is not None and key is not None:
        raise UsageError(f"--metric-regex {regex!r} and --metric-key {key!r} are both given", hint="give one of them")
    found = _read_direction(direction)
    if regex is None and key is None:
        if found is not None:
            raise UsageError(
                f"--direction {found} is given without a metric",
                hint="add --metric-regex 'val_acc=([0-9.]+)' or --metric-key val_acc",
            )
        return None
    option = f"--metric-regex {regex!r}" if regex is not None else f"--metric-key {key!r}"
    if regex is not None:
        _check_regex(regex)
    elif key is not None and not key.strip():
        raise UsageError(f"{option} is empty", hint="write the key as the script prints it: --metric-key val_acc")
    if found is None:
        raise UsageError(
            f"{option} is given without a direction", hint="add --direction maximize, or --direction minimize"
        )
    return PrintedMetric(name=key or name_metric(regex or ""), direction=found, pattern=regex, key=key)


def name_metric(regex: str) -> str:
    """Return what an expression's figure is called: the last text before its group, else the group's name."""
    texts = [""]
    for part in _PART.finditer(regex):
        if part["group"]:
            named = (re.sub(r"^[\W_]+|[\W_]+$", "", text) for text in reversed(texts))
            return next((name for name in named if re.search("[^\\W\\d_]", name)), part["name"] or "metric")
        plain = part["literal"] or part["plain"]
        if plain:
            texts[-1] += plain
        else:
            texts.append("")
    return "metric"


def _read_direction(text: str | None) -> Literal["minimize", "maximize"] | None:
    for known in _DIRECTIONS:
        if text == known:
            return known
    if text is None:
        return None
    near = difflib.get_close_matches(text, _DIRECTIONS, n=1)
    hint = f"did you mean --direction {near[0]}?" if near else "write --direction maximize or --direction minimize"
    raise UsageError(f"--direction {text!r} is neither minimize nor maximize", hint=hint)


def _check_regex(regex: str) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of syntax that another Python may read differently
            groups = re.compile(regex).groups
    except (re.error, OverflowError, RecursionError) as reason:
        raise UsageError(f"--metric-regex {regex!r} is not a regular expression: {reason}", hint=_REGEX_HINT) from None
    if groups != 1:
        hint = _REGEX_HINT if groups == 0 else f"{_REGEX_HINT}; write the others as (?:...)"
        raise UsageError(f"--metric-regex {regex!r} has {groups} groups, not one", hint=hint)
