"""Which configs may be worth proving: faster than what is proven, and not settled yet. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autotune.records.config import TrainConfig
from autotune.records.quality import is_passed
from autotune.search.log import SearchLog


@dataclass(frozen=True)
class Candidates:
    """The configs that a search may still prove, as it stands.

    Attributes:
        log: of the search.
    """

    log: SearchLog

    def ranked(self) -> list[TrainConfig]:
        """Return the configs that beat the baseline, and what is proven already, the most promising first.

        First the leader, then by what their own launches read.
        """
        log, bar, baseline_key = self.log, self._bar(), self.log.problem.baseline.key
        faster = [one for one in log.ranking.entries if one.score > bar and one.key != baseline_key]
        leader = log.ranking.leader
        if leader is not None and leader in faster:
            faster = [leader, *(one for one in faster if one is not leader)]
        # Compared by their keys: a search of a thousand trials asks this after each of them.
        ended = [config for config, checks in log.checks if not is_passed(checks)]
        keys = {config.key for config in (*log.settled, *ended)}
        return [one.config for one in faster if one.key not in keys]

    def may_win(self, config: TrainConfig) -> bool:
        """Return whether a config was shown to learn as well and is still promising."""
        log, entry = self.log, self.log.ranking.find(config)
        promises = entry is None or (entry.score > self._bar() and log.ranking.keeps_up(entry))
        is_out = config in log.settled or log.is_refused(config)
        return promises and is_passed(log.checks_of(config)) and not is_out

    def is_doubtful(self, config: TrainConfig) -> bool:
        """Return whether a config leads only because the baseline was slower than the probe had found it, once."""
        problem, ranking = self.log.problem, self.log.ranking
        entry, probed = ranking.find(config), problem.report.measurement.samples_per_second
        values = [one.score.value for one in entry.launches if one.score.value is not None] if entry else []
        beats_probe = max(values, default=-math.inf) > math.log(probed) + problem.policy.least_speed
        return not beats_probe and len(ranking.baseline_level) < problem.policy.sure_launches

    def _bar(self) -> float:
        """Return the gain to beat: the proven winner's, as the search saw it."""
        log, policy = self.log, self.log.problem.policy
        winner = log.finals.winner if log.finals else None
        if winner is None or winner.gain is None:
            return policy.least_gain
        entry = log.ranking.find(winner.config)
        return policy.worth_another + max(entry.score if entry else 0.0, winner.gain)
