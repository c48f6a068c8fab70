"""The changes of an answer, one by one: what goes together, and the answer without it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autotune.records.config import TrainConfig, changed_fields
from autotune.records.script import Numerics
from autotune.space import classify_changes, revert_knobs


@dataclass(frozen=True)
class Change:
    """One change of an answer.

    Attributes:
        names: knobs that change back together.
        without: the answer without it.
        numerics: the strongest class among them.
    """

    names: tuple[str, ...]
    without: TrainConfig
    numerics: Numerics


def list_changes(config: TrainConfig, baseline: TrainConfig, special: Mapping[str, Numerics]) -> list[Change]:
    """Return the changes that some settings make to the baseline, each with the settings without it.

    What means nothing without another goes with it: no prefetching without workers. The batch is one change.

    Args:
        config: the settings.
        baseline: the user's own.
        special: knobs whose class on this target is not the table's.
    """
    classes = classify_changes(config, baseline, special)
    found: dict[str, Change] = {}
    for name in changed_fields(config, baseline):
        without = revert_knobs(config, baseline, [name])
        names = changed_fields(config, without)
        order: tuple[Numerics, ...] = ("exact", "rounding", "semantic")
        strongest = max((classes[one] for one in names), key=order.index)
        found.setdefault(without.key, Change((name, *(one for one in names if one != name)), without, strongest))
    return list(found.values())


def make_alone(change: Change, config: TrainConfig, baseline: TrainConfig) -> TrainConfig:
    """Return the baseline with nothing but a change of some settings."""
    others = [name for name in changed_fields(config, baseline) if name not in change.names]
    return revert_knobs(config, baseline, others)
