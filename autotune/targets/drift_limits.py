"""Read `--max-drift`: how much worse than the baseline's the training loss and each metric may get.

    0.5%   percent-max-degradation=0.5     relative: a share of the baseline's own figure
    0.1pp  max-degradation=0.001           absolute: in the metric's own unit
    min-improvement=0.01                   absolute: better by that much, or it is refused

Each may stand after a metric's name and a colon. Without a name a limit holds for every metric that has none of its own
and, if it is relative, for the training loss too; `loss:` names the training loss alone.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from autotune.errors import UsageError
from autotune.records.quality import DriftLimits, Margin

_LOSS = "loss"
_LIMIT = re.compile(
    r"(?:(?P<form>max-degradation|percent-max-degradation|min-improvement)=)?"
    r"(?P<sign>-?)(?P<number>\d{1,15}(?:\.\d+)?)(?P<unit>%|pp)?",
    re.ASCII,
)
_HINT = "write 0.5% (relative), 0.1pp or max-degradation=0.001 (absolute), or min-improvement=0.01"


def read_drift_limits(texts: Sequence[str], *, name: str = "--max-drift") -> DriftLimits:
    """Return what the texts allow together; the defaults for what they leave out.

    Args:
        texts: each `[METRIC:]LIMIT`.
        name: of the option, as its user knows it.

    Raises:
        UsageError: a text does not parse or is out of range, a name has two limits, or the loss an absolute one.
    """
    margins: dict[str, Margin] = {}
    for text in texts:
        metric, margin = _read_limit(text, f"{name} {text!r}")
        if metric in margins:
            raise UsageError(
                f"{name} {text!r}: {metric or 'every metric'} has a limit already", hint="give each metric one limit"
            )
        if metric == _LOSS and margin.unit != "relative":
            raise UsageError(f"{name} {text!r}: the loss can only have a relative limit", hint="write loss:0.5%")
        margins[metric] = margin
    default = DriftLimits().loss
    usual = margins.pop("", default)
    loss = margins.pop(_LOSS, usual if usual.unit == "relative" else default)
    return DriftLimits(loss=loss, metric=None if usual == loss else usual, metrics=margins)


def require_metrics(limits: DriftLimits, known: Collection[str]) -> None:
    """Make sure that every metric that has a limit of its own is one of the target's.

    Args:
        limits: as read.
        known: names of the target's metrics.

    Raises:
        UsageError: a limit names another one, or an absolute limit finds none to hold for.
    """
    if limits.metric is not None and limits.metric.unit == "absolute" and not known:
        hint = "give the training loss a relative one, such as 0.5%"
        raise UsageError(
            "--max-drift is an absolute limit, and the target has no metric that it could hold for", hint=hint
        )
    for name in limits.metrics:
        if name not in known:
            hint = f"its metrics are {', '.join(known)}" if known else "it has no metric: limit the training loss alone"
            raise UsageError(f"--max-drift names {name!r}, and the target has no such metric", hint=hint)


def _read_limit(text: str, given: str) -> tuple[str, Margin]:
    """Return a metric's name, empty for none, and its margin."""
    metric, colon, limit = (part.strip() for part in text.rpartition(":"))
    if colon and not metric:
        raise UsageError(f"{given} names no metric before the colon", hint="write accuracy:0.5% or 0.5%")
    found = _LIMIT.fullmatch(limit)
    if found is None or (found["form"] and found["unit"]):
        raise UsageError(f"{given} is not a limit", hint=_HINT)
    if not found["form"] and not found["unit"]:
        bare = f"{metric}{colon}{limit.lstrip('-')}"
        raise UsageError(f"{given} is a number without a unit", hint=f"{bare}% or {bare}pp?")
    if found["sign"]:
        raise UsageError(f"{given} is negative", hint="min-improvement=0.01 is how an improvement is required")
    return metric, _read_margin(found, given)


def _read_margin(found: re.Match[str], given: str) -> Margin:
    number = float(found["number"])
    if found["unit"] == "pp":
        return Margin(amount=number / 100.0, unit="absolute")
    if found["form"] == "max-degradation":
        return Margin(amount=number, unit="absolute")
    if found["form"] == "min-improvement":
        return Margin(amount=0.0 - number, unit="absolute")  # of 0, not the negative zero
    if number >= 100.0:
        raise UsageError(f"{given} is out of range", hint="it must be at least 0% and below 100%")
    return Margin(amount=number / 100.0)
