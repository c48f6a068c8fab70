"""Which configs may be worth proving: faster than what is proven, and not settled yet. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.records.config import TrainConfig
from autotune.records.quality import is_passed
from autotune.search.answer.profile import Findings
from autotune.search.explore.stage import LEAST_GAIN
from autotune.search.scores.ranking import Ranking

_WORTH_ANOTHER = math.log(1.02)
"""What a config has to be ahead of the proven winner by: finals cost time, and a share of the risk."""

_SURE_LAUNCHES = 3
"""Of the baseline: fewer do not tell a slow one from a machine that has become faster."""


@dataclass(frozen=True)
class Candidates:
    """What the search may still prove, as it stands.

    Attributes:
        ranking: of the search's trials.
        baseline: the user's own settings.
        findings: the checks and the finals so far.
        settled: configs that failed in the finals, or were shown to gain nothing.
    """

    ranking: Ranking
    baseline: TrainConfig
    findings: Findings
    settled: Sequence[TrainConfig]

    def ranked(self) -> list[TrainConfig]:
        """Return the configs that beat the baseline, and what is proven already, the most promising first.

        First the simplest of those the noise cannot tell from the fastest, then the fastest.
        """
        bar, baseline_key = self._bar(), self.baseline.key
        faster = [one for one in self.ranking.entries if one.score > bar and one.key != baseline_key]
        simplest = self.ranking.simplest_of_best
        if simplest is not None and simplest in faster:
            faster = [simplest, *(one for one in faster if one is not simplest)]
        # Compared by their keys: a search of a thousand trials asks this after each of them.
        ended = [config for config, checks in self.findings.checks if not is_passed(checks)]
        keys = {config.key for config in (*self.settled, *ended)}
        return [one.config for one in faster if one.key not in keys]

    def may_win(self, config: TrainConfig) -> bool:
        """Return whether a config was shown to learn as well and is still promising."""
        entry = self.ranking.find(config)
        promises = entry is None or entry.score > self._bar()
        return promises and is_passed(self.findings.checks_of(config)) and config not in self.settled

    def is_doubtful(self, config: TrainConfig) -> bool:
        """Return whether a config leads only because the baseline was slower than the probe had found it, once."""
        entry, report = self.ranking.find(config), self.findings.report
        values = [one.score.value for one in entry.launches if one.score.value is not None] if entry else []
        beats_probe = max(values, default=-math.inf) > math.log(report.measurement.samples_per_second) + LEAST_GAIN
        return not beats_probe and len(self.ranking.anchors) < _SURE_LAUNCHES

    def _bar(self) -> float:
        """Return the log speed-up to beat: the proven winner's, as the search saw it."""
        winner = self.findings.finals.winner if self.findings.finals else None
        if winner is None or winner.ratio is None:
            return LEAST_GAIN
        entry = self.ranking.find(winner.config)
        return _WORTH_ANOTHER + max(entry.score if entry else 0.0, math.log(winner.ratio.estimate))
