"""Is a config exact here? The losses of the search's own launches tell, and cost nothing. Pure.

Every launch of a search trains from the same seed over the same data. Where the losses of a config's launches are the
baseline's bit for bit, it had the same batches and took the same steps as far as they went: one rounding that differs
turns up in the losses a few steps later. That settles it for what computes the same by construction; for what may round
it is a sign alone, as its roundings may differ further on, at other weights.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune.drift.compare.losses import check_losses
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.quality import Margin, QualityCheck
from autotune.records.trial import LossCurve, TrialResult
from autotune.search.log import SearchLog, list_changes
from autotune.sentences.settings import name_value
from autotune.space import classify_changes, revert_knobs

LEAST_EQUAL_STEPS = 4
"""Fewer equal losses are no evidence: the first is computed before anything is learned."""

_FIRST_STEPS = 3
_ROUNDING = 1e-4
_FEW_DIGITS_ROUNDING = 1e-2
"""Of a loss, relative: what rounding makes of the first ones, in fp32 and where there are fewer digits."""


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


def does_repeat(baseline: TrainConfig, launches: Sequence[TrialResult]) -> bool:
    """Return whether launches of a user's settings begin with the same losses, but for rounding, as far as is known.

    They do not where batches or weights are others each time in spite of the seed: where processes of the script's own
    make its batches and whoever is first comes first, or where it seeds itself by the clock.

    Args:
        baseline: the settings.
        launches: timing trials of the search.
    """
    curves = _list_curves(baseline, launches)
    has_digits = baseline.precision == "fp32" and baseline.matmul_precision == "highest"
    tolerance = _ROUNDING if has_digits else _FEW_DIGITS_ROUNDING
    scale = max((abs(loss) for curve in curves[:1] for loss in curve.losses if loss is not None), default=0.0)
    return all(
        one is None or other is None or math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance * scale)
        for curve in curves[1:]
        if curve.seed == curves[0].seed
        for one, other in zip(curve.losses[:_FIRST_STEPS], curves[0].losses[:_FIRST_STEPS], strict=False)
    )


class EqualLosses:
    """What the launches of one search show to lose nothing; a question is answered once until there is another launch.

    Args:
        log: of the search.
    """

    def __init__(self, log: SearchLog) -> None:
        self._log, self._baseline = log, log.problem.baseline
        self._numerics = log.problem.report.target.numerics
        self._beside: list[TrialResult] = []
        self._launches = 0
        self._launched: dict[str, list[TrialResult]] = {}
        self._repeats: bool | None = None
        self._found: dict[tuple[str, str], QualityCheck | None] = {}
        self._losing_nothing: list[tuple[frozenset[str], QualityCheck]] | None = None

    def add(self, trained: TrialResult) -> None:
        """Take up a training beside the launches, from their seed over their data."""
        self._beside.append(trained)

    def has_losses_of(self, config: TrainConfig) -> bool:
        """Return whether a config was launched, or trained beside."""
        return config.key in self._take_launches()

    def may_be_shown(self, config: TrainConfig) -> bool:
        """Return whether a training beside may show that a config loses nothing: it and its like have not failed to."""
        beside = [one.spec.config for one in self._beside if one.spec.config is not None]
        return not self.has_losses_of(config) and all(self.find(one) is not None for one in beside)

    def find(self, config: TrainConfig, beside: TrainConfig | None = None) -> QualityCheck | None:
        """Return the check that a config's launches had the losses of others, bit for bit; as `find_equal_losses`.

        Args:
            config: the settings.
            beside: the others; None for the user's own settings.
        """
        launched, other = self._take_launches(), beside or self._baseline
        keys = (config.key, other.key)
        if keys not in self._found:
            launches = [one for key in dict.fromkeys(keys) for one in launched.get(key, ())]
            margin = self._log.problem.state.max_drift.loss
            self._found[keys] = find_equal_losses(config, other, launches, margin=margin)
        return self._found[keys]

    def repeats(self) -> bool:
        """Return whether launches of the user's own settings begin alike: else nothing compared step by step tells."""
        launched = self._take_launches()
        if self._repeats is None:
            self._repeats = does_repeat(self._baseline, launched.get(self._baseline.key, ()))
        return self._repeats

    def show(self, changes: frozenset[str]) -> QualityCheck | None:
        """Return the check that exact changes, each `name=value`, lose nothing, whatever they were launched with.

        That is where losses are the same, bit for bit, with them and without all that is exact; None elsewhere. Of the
        other changes that a config may have it tells nothing.
        """
        launched = self._take_launches()
        if self._losing_nothing is None:
            configs = [one.spec.config for one, *_ in launched.values()]
            found = ((self._list_changes(one), self._find_without_exact(one)) for one in configs if one is not None)
            self._losing_nothing = [(seen, check) for seen, check in found if check is not None]
        equal = next((check for seen, check in self._losing_nothing if changes <= seen), None)
        if equal is None:
            return None
        names = ", ".join(sorted(map(name_value, changes)))
        reason = f"launches with and without {names} have the same losses, bit for bit"
        return equal.replace(test="equal-launches", difference=None, reason=reason)

    def _take_launches(self) -> Mapping[str, Sequence[TrialResult]]:
        """Return what was launched, and trained beside, by the settings' keys."""
        launches = len(self._log.judged) + len(self._beside)
        if self._launches != launches:
            self._found, self._losing_nothing, self._repeats = {}, None, None
            self._launches, self._launched = launches, {}
            for one in (*(judged.result for judged in self._log.judged), *self._beside):
                if one.spec.config is not None:
                    self._launched.setdefault(one.spec.config.key, []).append(one)
        return self._launched

    def _find_without_exact(self, config: TrainConfig) -> QualityCheck | None:
        classes = classify_changes(config, self._baseline, self._numerics)
        exact = [name for name, kind in classes.items() if kind == "exact"]
        return self.find(config, revert_knobs(config, self._baseline, exact)) if exact else None

    def _list_changes(self, config: TrainConfig) -> frozenset[str]:
        return list_changes(config, self._baseline, changed_fields(config, self._baseline))


def _list_curves(config: TrainConfig, launches: Sequence[TrialResult]) -> Sequence[LossCurve]:
    return [launch.curves[0] for launch in launches if launch.spec.config == config and launch.curves]


def _agree(ours: LossCurve, theirs: LossCurve) -> bool:
    steps = min(len(ours.losses), len(theirs.losses))
    return ours.seed == theirs.seed and ours.losses[:steps] == theirs.losses[:steps]


def _cut(curve: LossCurve, steps: int) -> LossCurve:
    return curve.replace(losses=curve.losses[:steps], samples=round(curve.samples * steps / len(curve.losses)))
