"""Read how a script's own figures of merit are found in what it prints: expressions or JSON keys, and directions."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Sequence
from itertools import cycle
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


def read_metrics(
    *, regexes: Sequence[str] = (), keys: Sequence[str] = (), directions: Sequence[str] = ()
) -> tuple[PrintedMetric, ...]:
    """Return where each figure is found and which way it is better; empty when none is asked for.

    Args:
        regexes: each finds a figure in a printed line; has one group.
        keys: each finds a figure in a printed JSON object.
        directions: one for all figures, or one for each, those of the regexes first.

    Raises:
        UsageError: an expression is not valid or has not one group, two figures have the same name, or the directions
            do not go with them.
    """
    known = [_read_direction(text) for text in directions]
    for regex in regexes:
        _check_regex(regex)
    for key in keys:
        if not key.strip():
            hint = "write the key as the script prints it: --metric-key val_acc"
            raise UsageError(f"--metric-key {key!r} is empty", hint=hint)
    options = [f"--metric-regex {regex!r}" for regex in regexes] + [f"--metric-key {key!r}" for key in keys]
    _check_directions(known, options)
    names = [*map(name_metric, regexes), *keys]
    _check_names(names, options)
    where = [(regex, None) for regex in regexes] + [(None, key) for key in keys]
    return tuple(
        PrintedMetric(name=name, direction=direction, pattern=regex, key=key)
        for name, direction, (regex, key) in zip(names, cycle(known), where, strict=False)
    )


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


def _read_direction(text: str) -> Literal["minimize", "maximize"]:
    for known in _DIRECTIONS:
        if text == known:
            return known
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


def _check_directions(directions: Sequence[str], options: Sequence[str]) -> None:
    if directions and not options:
        raise UsageError(
            f"--direction {directions[0]} is given without a metric",
            hint="add --metric-regex 'val_acc=([0-9.]+)' or --metric-key val_acc",
        )
    if options and not directions:
        raise UsageError(
            f"{options[0]} is given without a direction", hint="add --direction maximize, or --direction minimize"
        )
    if len(directions) not in (0, 1, len(options)):
        raise UsageError(
            f"{len(directions)} times --direction for {len(options)} metrics",
            hint="give it once for all of them, or once for each, the expressions before the keys",
        )


def _check_names(names: Sequence[str], options: Sequence[str]) -> None:
    for index, name in enumerate(names):
        first = names.index(name)
        if first < index:
            raise UsageError(
                f"{options[first]} and {options[index]} are both called {name!r}",
                hint="write more of what stands before the figure: 'val_acc=([0-9.]+)'",
            )
