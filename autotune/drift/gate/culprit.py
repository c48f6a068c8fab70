"""Which of a candidate's changes made it fail the drift gate: leave one out, and see whether the rest passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autotune.knobs import DATA_KNOBS
from autotune.records.config import TrainConfig, changed_fields, is_user_knob
from autotune.records.facts import TargetFacts
from autotune.records.quality import QualityCheck
from autotune.records.script import Numerics
from autotune.search.log import list_changes
from autotune.search.scores.ranking import Entry
from autotune.sentences.loss_check import find_failed
from autotune.space import BATCH_KNOBS, classify_changes, revert_knobs

_SUSPECTS = ("precision", "compile_mode", "matmul_precision", "attention_backend", "activation_checkpointing")
"""The first to be left out; own knobs come before them."""

_STANDS_OUT = 2.0
"""Times smaller that the bias gets without the change."""
_TELLING_BIAS = 1e-3
"""Of the gradients; below it any two of them differ by chance."""


class Screens(Protocol):
    """A gate, as far as blame needs it."""

    @property
    def facts(self) -> TargetFacts:
        """What the probe found."""
        ...

    def screen(self, config: TrainConfig) -> tuple[QualityCheck, ...] | None:
        """Return the cheap tests of a config; None when there was no time for them."""
        ...


@dataclass(frozen=True)
class Blame:
    """Who is guilty.

    Attributes:
        knobs: whose change is to be dropped.
        rest: the candidate without it; None when nothing is left, or when the rest was not shown to be any better.
    """

    knobs: tuple[str, ...]
    rest: TrainConfig | None


def find_culprit(gate: Screens, config: TrainConfig, checks: Sequence[QualityCheck]) -> Blame:
    """Return which change is to be dropped, found by leaving out one after the other.

    What changes the training itself is guilty first. Else the change without which the gradients are closest to the
    baseline's; where the candidate failed on its gradients, the rest has to pass.

    Args:
        gate: screens what is left.
        config: the candidate.
        checks: that it failed.
    """
    facts = gate.facts
    baseline = facts.baseline
    classes = classify_changes(config, baseline, facts.numerics)
    found = find_failed(checks)
    failed = found.test
    certain = _find_certain(found, classes)
    if certain:
        return Blame(certain, _rest(config, baseline, certain))
    groups = _group([name for name, kind in classes.items() if kind != "exact"])
    if len(groups) < 2:
        names = groups[0] if groups else tuple(classes)
        return Blame(names, _rest(config, baseline, names))
    passing: list[tuple[tuple[str, ...], float]] = []
    for names in groups:
        screened = gate.screen(revert_knobs(config, baseline, names))
        if screened is None:
            break
        if all(check.verdict != "inferior" for check in screened):
            passing.append((names, _severity(screened)))
            if failed in ("gradients", "schedule") or _is_cleared(screened, checks):
                break  # without it the rest passes, or moves no gradient: that is the one
    if not passing:
        return Blame(tuple(name for names in groups for name in names), None)
    # Where only trainings show it, the one that moves the gradients most; if none stands out, the first suspect.
    clearest, severity = min(passing, key=lambda one: one[1])
    stands_out = _severity(checks) > max(_TELLING_BIAS, _STANDS_OUT * severity)
    guilty = clearest if stands_out else passing[0][0]
    return Blame(guilty, _rest(config, baseline, guilty))


def _find_certain(found: QualityCheck, classes: Mapping[str, Numerics]) -> tuple[str, ...]:
    """Return the changes that a check can only have failed for; empty where that is not plain."""
    if found.test == "tape":
        return tuple(name for name in classes if name in DATA_KNOBS) or tuple(filter(is_user_knob, classes))
    if found.metric == "skipped steps" and "precision" in classes:  # gradients know nothing of a loss scaler's
        return ("precision",)
    if found.test == "additivity":
        return tuple(name for name in classes if name in BATCH_KNOBS)
    return tuple(name for name, kind in classes.items() if kind == "semantic")


def promises(
    entries: Sequence[Entry], baseline: TrainConfig, config: TrainConfig, rest: TrainConfig, *, least_gain: float
) -> bool:
    """Return whether what is left of a refused config may still be faster, by what the search has measured.

    Args:
        entries: every config that was measured, the refused ones among them.
        baseline: the user's own settings.
        config: that was refused.
        rest: of it, without the guilty change.
        least_gain: log speed-up that is worth following.
    """
    scores = {entry.key: entry.score for entry in entries}
    left = scores.get(rest.key)
    if left is not None:
        return left > least_gain
    whole, kept = (list_changes(one, baseline, changed_fields(one, baseline)) for one in (config, rest))
    guilty = whole - kept
    without = [
        entry.score
        for entry in entries
        if guilty <= (made := list_changes(entry.config, baseline, changed_fields(entry.config, baseline)))
        and not kept <= made
    ]
    # Where the guilty change was as fast without the others, they add nothing.
    return scores.get(config.key, math.inf) - max(without, default=0.0) > least_gain


def _rest(config: TrainConfig, baseline: TrainConfig, names: Sequence[str]) -> TrainConfig | None:
    rest = revert_knobs(config, baseline, names)
    return rest if changed_fields(rest, baseline) else None


def _group(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the changes one by one, the most suspicious first; those of the batch go together."""
    batch = tuple(name for name in names if name in BATCH_KNOBS)
    alone = [name for name in names if name not in BATCH_KNOBS]
    order = {name: place for place, name in enumerate(_SUSPECTS, start=1)}
    alone.sort(key=lambda name: 0 if is_user_knob(name) else order.get(name, len(order) + 1))
    return [*((name,) for name in alone), *([batch] if batch else [])]


def _is_cleared(rest: Sequence[QualityCheck], whole: Sequence[QualityCheck]) -> bool:
    """Return whether what is left moves the gradients by no more than any two differ by, and the whole clearly does."""
    is_compared = any(one.bias is not None for check in rest for one in check.fidelity)
    clearest = max(_TELLING_BIAS, _STANDS_OUT * _severity(rest))
    return is_compared and _severity(rest) <= _TELLING_BIAS and clearest < _severity(whole)


def _severity(checks: Sequence[QualityCheck]) -> float:
    ends = [one.bias.estimate for check in checks for one in check.fidelity if one.bias is not None]
    return max(ends, default=0.0)
