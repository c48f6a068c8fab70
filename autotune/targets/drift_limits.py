"""Read how much worse than the baseline's the training loss and each metric may get.

    --max-loss-increase 0.5%              relative: a share of the baseline's own loss
    --metric-limit 0.5%                   the same of every metric that has none of its own
    --metric-limit accuracy=0.1pp         absolute: in the metric's own unit; also max-degradation=0.001
    --metric-limit min-improvement=0.01   absolute: better by that much, or it is refused

`--max-drift [METRIC:]LIMIT` is what both were called before. There, a relative limit without a name holds for the loss
and for every metric, and `loss:` names the training loss alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import UsageError
from autotune.records.quality import DriftLimits, Margin

_LOSS = "loss"
_METRICS = "\0"
"""Stands for every metric that has no limit of its own: no name has it."""
_NAMES = {"": "every metric", _METRICS: "every metric"}
_FORMS = r"max-degradation|percent-max-degradation|min-improvement"
_LIMIT = re.compile(rf"(?:(?P<form>{_FORMS})=)?(?P<sign>-?)(?P<number>\d{{1,15}}(?:\.\d+)?)(?P<unit>%|pp)?", re.ASCII)
_NAMED = re.compile(rf"(?P<metric>.*?)=(?P<limit>(?:(?:{_FORMS})=)?[^=]*)", re.ASCII | re.DOTALL)
_HINT = "write 0.5% (relative), 0.1pp or max-degradation=0.001 (absolute), or min-improvement=0.01"
_LOSS_HINT = "write 0.5%, a share of your own settings' loss"


def name_option(field: str) -> str:
    """Return the option of the command line that a limit is given by."""
    return f"--{field.replace('_', '-')}"


@dataclass(frozen=True)
class GivenLimits:
    """Limits as texts.

    Attributes:
        loss: of the training loss.
        metrics: each `[METRIC=]LIMIT`.
        older: each `[METRIC:]LIMIT`, as `--max-drift` takes them.
        name: returns what the user calls `max_loss_increase`, `metric_limit` and `max_drift`.
    """

    loss: str | None = None
    metrics: Sequence[str] = ()
    older: Sequence[str] = ()
    name: Callable[[str], str] = name_option

    def read(self) -> dict[str, Margin]:
        """Return the margins by the metric that they are for.

        Raises:
            UsageError: a text does not parse or is out of range, a name has two limits, or the loss an absolute one.
        """
        margins: dict[str, Margin] = {}
        for metric, margin, given in self._list():
            if metric in margins:
                who = _NAMES.get(metric, metric)
                raise UsageError(f"{given}: {who} has a limit already", hint="give each metric one limit")
            margins[metric] = margin
        return margins

    def _list(self) -> Iterator[tuple[str, Margin, str]]:
        if self.loss is not None:
            given = f"{self.name('max_loss_increase')} {self.loss!r}"
            yield _LOSS, _require_relative(_read_limit(self.loss.strip(), given, of_loss=True), given, "0.5%"), given
        for text in self.metrics:
            given = f"{self.name('metric_limit')} {text!r}"
            metric, limit = _split_metric(text)
            if metric == "":
                raise UsageError(f"{given} names no metric", hint="write accuracy=0.5%, or 0.5% for all of them")
            if metric == _LOSS:
                hint = f"write {self.name('max_loss_increase')} {limit}"
                raise UsageError(f"{given}: the loss is no metric", hint=hint)
            yield metric, _read_limit(limit, given, before="" if metric == _METRICS else f"{metric}="), given
        for text in self.older:
            given = f"{self.name('max_drift')} {text!r}"
            metric, colon, limit = (part.strip() for part in text.rpartition(":"))
            if colon and not metric:
                raise UsageError(f"{given} names no metric before the colon", hint="write accuracy:0.5% or 0.5%")
            margin = _read_limit(limit, given, before=f"{metric}{colon}")
            yield metric, _require_relative(margin, given, "loss:0.5%") if metric == _LOSS else margin, given


def join_limits(margins: Mapping[str, Margin]) -> DriftLimits:
    """Return what margins allow together; the defaults for what they leave out."""
    default = DriftLimits().loss
    both = margins.get("", default)
    loss = margins.get(_LOSS, both if both.unit == "relative" else default)
    usual = margins.get(_METRICS, both)
    own = {name: margin for name, margin in margins.items() if name not in ("", _LOSS, _METRICS)}
    return DriftLimits(loss=loss, metric=None if usual == loss else usual, metrics=own)


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
        raise UsageError("an absolute limit is given, and the training has no metric that it could hold for", hint=hint)
    for name in limits.metrics:
        if name not in known:
            hint = f"its metrics are {', '.join(known)}" if known else "it has no metric: limit the training loss alone"
            raise UsageError(f"a limit is given for {name!r}, and the training has no metric of that name", hint=hint)


def _split_metric(text: str) -> tuple[str, str]:
    """Return a metric's name, or what stands for all of them, and its limit."""
    if _LIMIT.fullmatch(text.strip()) is not None or "=" not in text:
        return _METRICS, text.strip()
    found = _NAMED.fullmatch(text)
    return (found["metric"].strip(), found["limit"].strip()) if found else (_METRICS, text.strip())


def _require_relative(margin: Margin, given: str, example: str) -> Margin:
    if margin.unit != "relative":
        raise UsageError(f"{given}: the loss can only have a relative limit", hint=f"write {example}")
    return margin


def _read_limit(limit: str, given: str, *, before: str = "", of_loss: bool = False) -> Margin:
    found = _LIMIT.fullmatch(limit)
    if found is None or (found["form"] and found["unit"]):
        name, sign, last = limit.rpartition("=" if of_loss and "=" in limit else ":")
        option = f"{name_option('metric_limit')} " if of_loss else ""
        meant = f"write {option}{name}={last}" if sign and not before and _LIMIT.fullmatch(last) else None
        raise UsageError(f"{given} is not a limit", hint=meant or (_LOSS_HINT if of_loss else _HINT))
    if not found["form"] and not found["unit"]:
        bare = f"{before}{limit.lstrip('-')}"
        also = "" if of_loss else f" or {bare}pp"
        raise UsageError(f"{given} is a number without a unit", hint=f"{bare}%{also}?")
    if found["sign"]:
        better = "min-improvement=0.01 is how an improvement is required"
        strict = "0% is the strictest" if of_loss else better
        raise UsageError(f"{given} is negative", hint=strict)
    return _read_margin(found, given)


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
