"""Is a config exact here? The losses of the search's own launches tell, and cost nothing. Pure.

Every launch of a search trains from the same seed over the same data. Where the losses of a config's launches are the
baseline's bit for bit, it had the same batches and took the same steps as far as they went: one rounding that differs
turns up in the losses a few steps later. That settles it for what computes the same by construction; for what may round
it is a sign alone, as its roundings may differ further on, at other weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.drift.compare.losses import check_losses
from autotune.records.config import TrainConfig
from autotune.records.quality import Margin, QualityCheck
from autotune.records.trial import LossCurve, TrialResult
from autotune.search.scores.objective import Judged

LEAST_EQUAL_STEPS = 4
"""Fewer equal losses are no evidence: the first is computed before anything is learned."""


def find_equal_losses(
    config: TrainConfig, baseline: TrainConfig, launches: Sequence[TrialResult], *, margin: Margin
) -> QualityCheck | None:
    """Return the check that a config's launches learned what the baseline's did, bit for bit; None where they do not.

    None as well where the baseline does not repeat itself, where either has no launch with losses, where all losses are
    the same, and for fewer than 4 of them.

    Args:
        config: the settings.
        baseline: the user's own, or others that are to have lost as much.
        launches: timing trials of the search.
        margin: largest relative worsening of the loss allowed, told in the check.
    """
    ours, theirs = ([*_list_curves(one, launches)] for one in (config, baseline))
    if not ours or not theirs:
        return None
    longest = max(theirs, key=lambda curve: len(curve.losses))
    if not all(_agree(curve, longest) for curve in (*ours, *theirs)):
        return None
    told = max(ours, key=lambda curve: len(curve.losses))
    steps = min(len(told.losses), len(longest.losses))
    if steps < LEAST_EQUAL_STEPS or len({*told.losses[:steps]}) < LEAST_EQUAL_STEPS:
        return None
    check = check_losses([_cut(told, steps)], [_cut(longest, steps)], margin=margin, exact=True)
    if check.test != "exact-losses":
        return None
    reason = f"all {steps} losses of its launches in the search equal the baseline's bit for bit"
    return check.replace(reason=reason)


class EqualLosses:
    """Answers as `find_equal_losses` for the launches of a search, each question once until there is another launch.

    Args:
        margin: as of `find_equal_losses`.
    """

    def __init__(self, *, margin: Margin) -> None:
        self._margin = margin
        self._launches = 0
        self._found: dict[tuple[str, str], QualityCheck | None] = {}

    def find(self, config: TrainConfig, baseline: TrainConfig, judged: Sequence[Judged]) -> QualityCheck | None:
        """Return the check of a config.

        Args:
            config: the settings.
            baseline: others that are to have lost as much: the user's own, or those without some change.
            judged: every launch of the search so far.
        """
        if self._launches != len(judged):
            self._launches, self._found = len(judged), {}
        keys = (config.key, baseline.key)
        if keys not in self._found:
            launches = [one.result for one in judged if one.key in keys]
            self._found[keys] = find_equal_losses(config, baseline, launches, margin=self._margin)
        return self._found[keys]


def _list_curves(config: TrainConfig, launches: Sequence[TrialResult]) -> Sequence[LossCurve]:
    return [launch.curves[0] for launch in launches if launch.spec.config == config and launch.curves]


def _agree(ours: LossCurve, theirs: LossCurve) -> bool:
    steps = min(len(ours.losses), len(theirs.losses))
    return ours.seed == theirs.seed and ours.losses[:steps] == theirs.losses[:steps]


def _cut(curve: LossCurve, steps: int) -> LossCurve:
    return curve.replace(losses=curve.losses[:steps], samples=round(curve.samples * steps / len(curve.losses)))
