"""How the user's settings start, by their launches so far: what the first steps of another launch are held against.

launches of the baseline ── longest first step, pace of the next two, rate ──▶ Pace of a launch to come
"""

from __future__ import annotations

from collections.abc import Sequence

from autotune.records.config import TrainConfig
from autotune.records.measurement import Measurement
from autotune.records.trial import Pace
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import find_compile_seconds
from autotune.space import needs_compilation

LEAST_COMPILE_SECONDS = 120.0
"""A compilation that takes less is nothing unusual on a busy machine."""

_COMPILE_PATIENCE = 4.0
_UNSEEN_COMPILE_SECONDS = 180.0
"""Until one was seen in the search."""
_EXPECTED_PATIENCE = 1.5
"""Times what a compilation is priced at: it was started knowingly."""
_SHORTEST_SECONDS = 1e-4


def make_pace(
    config: TrainConfig, baseline: TrainConfig, judged: Sequence[Judged], compile_seconds: float = 0.0
) -> Pace | None:
    """Return the pace that a launch of a config is held to; None while the user's settings were not timed.

    Args:
        config: to be launched.
        baseline: the user's own settings.
        judged: the search's launches so far.
        compile_seconds: that its first compilation is expected to take.
    """
    key = baseline.key
    seen = [one.result.measurement for one in judged if one.key == key]
    theirs = [one for one in seen if one is not None and one.first_step_seconds is not None]
    if not theirs:
        return None
    # Where a step has more samples it takes longer; one of fewer sets up just as much.
    larger = max(1.0, config.effective_batch_size / baseline.effective_batch_size)
    return Pace(
        first_step_seconds=larger * max(_SHORTEST_SECONDS, *(one.first_step_seconds or 0.0 for one in theirs)),
        samples_per_second=max(one.samples_per_second for one in theirs),
        warmup_ratio=max(map(_find_warmup_ratio, theirs)),
        compile_seconds=_allow_compilation(config, theirs, judged, compile_seconds),
    )


def _find_warmup_ratio(measurement: Measurement) -> float:
    """Return how many times as long as the timed steps the second and third took, both without the wait for data."""
    if not measurement.warmup_step_seconds:
        return 1.0
    settled = measurement.seconds_per_step * (1.0 - measurement.data_wait_fraction)
    return max(1.0, min(measurement.warmup_step_seconds) / max(settled, _SHORTEST_SECONDS))


def _allow_compilation(
    config: TrainConfig, theirs: Sequence[Measurement], judged: Sequence[Judged], expected: float
) -> float | None:
    """Return how long a step that compiles may take; None where nothing does, not even the training by itself."""
    tries_kernels = config.cudnn_benchmark  # in its first step, as a compiler does
    if not (tries_kernels or needs_compilation(config) or any(one.compile_seconds for one in theirs)):
        return None
    longest = find_compile_seconds(one.result for one in judged)
    usual = max(LEAST_COMPILE_SECONDS, _COMPILE_PATIENCE * longest) if longest else _UNSEEN_COMPILE_SECONDS
    return max(usual, _EXPECTED_PATIENCE * expected)
