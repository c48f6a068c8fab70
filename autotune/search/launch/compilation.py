"""What compiling a model will cost: predicted from the operations of a step, corrected by what was seen. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from autotune.records.config import CompileMode, TrainConfig
from autotune.records.facts import TargetFacts
from autotune.records.trial import TrialResult
from autotune.space import needs_compilation

_START_SECONDS = 20.0
_SECONDS_PER_OPERATION = 0.02
_UNKNOWN_SECONDS = 45.0
"""What a first compilation is taken to cost where the operations of a step were not counted and none was seen."""

_FACTORS: dict[CompileMode, float] = {"max-autotune": 2.5, "max-autotune-no-cudagraphs": 2.5}
"""Autotuning times several kernels for each product."""

_CACHED = 0.75
"""Of a compilation: what a second launch is taken to save until one was seen (seen: 67 s, then 4 s)."""


def predict_compilation(config: TrainConfig, facts: TargetFacts, seen: Sequence[TrialResult]) -> float:
    """Return how long the first compilation of a config will take, in seconds; 0 where nothing is compiled.

    Args:
        config: the settings.
        facts: of the target; its operations a step are what is compiled.
        seen: launches so far, whose compilations say by how much the prediction is off.
    """
    if not needs_compilation(config):
        return 0.0
    ratios = [
        one.measurement.compile_seconds / _predict(one.spec.config, facts)
        for one in _first_of_each(seen)
        if one.measurement is not None and one.spec.config is not None
    ]
    correction = statistics.median(ratios) if ratios else 1.0
    return correction * _predict(config, facts)


def predict_again(own: Sequence[TrialResult]) -> float:
    """Return how long one more launch of a config that was compiled before will take, in seconds.

    Only the first launch compiles anew: the others find its work in the search's own cache.
    """
    compiled = own[0].measurement.compile_seconds if own[0].measurement else 0.0
    return max((one.elapsed_seconds for one in own[1:]), default=own[0].elapsed_seconds - _CACHED * compiled)


def _predict(config: TrainConfig, facts: TargetFacts) -> float:
    operations = facts.work.operations_per_step if facts.work is not None else None
    seconds = _UNKNOWN_SECONDS if operations is None else _START_SECONDS + _SECONDS_PER_OPERATION * operations
    return _FACTORS.get(config.compile_mode, 1.0) * seconds


def _first_of_each(seen: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the first launch of each compiled config that was timed: later ones find their kernels in the cache."""
    first: dict[str, TrialResult] = {}
    for one in seen:
        if one.spec.config is not None and needs_compilation(one.spec.config) and one.measurement is not None:
            first.setdefault(one.spec.config.model_dump_json(), one)
    return list(first.values())
