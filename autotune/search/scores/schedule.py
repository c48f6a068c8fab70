"""Which known config to launch again, before anything new is tried. Pure.

baseline again   every 8 launches or 120 s, when the canary says that the machine has changed, and once more where
                 others had a large part of the CPUs or its time was too short
contender        looks better than the incumbent, and has to do it twice where one launch may be luck; something new
                 comes in between, which may be better still, and five launches before any of it
across a change  near the top, but the machine changed around its launch
top k            every fourth launch goes to whichever of the best five has the fewest, where noise hides who leads;
                 every launch, and more of them, once there is nothing new
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autotune.measure.student_t import student_t_quantile
from autotune.records.config import TrainConfig
from autotune.records.trial import Rival, TrialStatus
from autotune.search.policy import USUAL_POLICY, SearchPolicy
from autotune.search.scores.baseline_level import ANCHOR_SPACING
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Ranking, is_disturbed

_RIVAL_BLOCKS = 8
"""Of the rival's launch, whose mean a candidate's blocks are held against."""


@dataclass(frozen=True)
class Schedule:
    """Decides what is launched again.

    Attributes:
        judged: every launch so far, in order.
        baseline: the user's own settings.
        ranking: made of the same launches.
        session_start: how many of them are of an earlier session; the machine may be another one since.
        policy: its thresholds.
    """

    judged: Sequence[Judged]
    baseline: TrainConfig
    ranking: Ranking
    session_start: int = 0
    policy: SearchPolicy = USUAL_POLICY

    @cached_property
    def _baseline_key(self) -> str:
        return self.baseline.key

    def find_due(self, *, exhausted: bool = False) -> TrainConfig | None:
        """Return the config to launch again; None when something new may be tried.

        Args:
            exhausted: there is nothing new: the best are launched until they have had as many as they may.
        """
        if self._is_anchor_due():
            return self.baseline
        since_repeat = self._launches_since_repeat()
        contender = self.ranking.contender
        if contender is not None and (exhausted or since_repeat >= self.policy.repeat_contender_after):
            return contender.config
        best = [one for one in self.ranking.entries if one.key != self._baseline_key]
        bar = self.ranking.incumbent.score if self.ranking.incumbent else 0.0
        across_change = [one for one in best if one.valid_launches == 0 and one.upper_score > bar]
        if across_change:
            return max(across_change, key=lambda one: one.upper_score).config
        is_turn = since_repeat >= self.policy.repeat_every - 1 and self.ranking.has_rivals()
        if not (exhausted or is_turn):
            return None
        most, ties = self.policy.most_repeats, self.ranking.near_best if exhausted else []
        if len(ties) > 1:  # there is time to tell them apart
            best, most = [one for one in best if one in ties], self.policy.last_repeats
        top_k = [one for one in best[: self.policy.top_k] if one.score > 0 and len(one.launches) < most]
        fewest = min(top_k, key=lambda one: len(one.launches), default=None)
        return None if fewest is None else fewest.config

    def make_rival(self, config: TrainConfig) -> Rival | None:
        """Return what a launch of a config races against; None for the baseline, the incumbent and before there is one.

        The margin is the launch noise that separates two readings of equal configs, at 99.7 %, one-sided: of the
        candidate's own launch, of the baseline's level now and of the incumbent's score.
        """
        incumbent = self.ranking.incumbent
        if incumbent is None or config in (self.baseline, incumbent.config):
            return None
        level, launches = self.ranking.baseline_level.level_now()
        noise, degrees = self.ranking.machine_noise
        speed, known_by = self.ranking.rival
        own = 1.5 / known_by if known_by else 0.0
        block_sd = self.ranking.block_sd
        # The mean of the rival's blocks is off by the same amount at every look, which the boundary does not cover.
        variance = noise**2 * (1 + 1 / launches + own) + block_sd**2 / _RIVAL_BLOCKS
        margin = student_t_quantile(self.policy.racing_confidence, degrees) * math.sqrt(variance)
        return Rival(
            seconds_per_sample=math.exp(-(level + speed)),
            block_sd=block_sd,
            margin=max(margin, self.policy.unseen_margin) if degrees < self.policy.least_racing_degrees else margin,
            canary_seconds=self._canary_at_anchor(),
        )

    def _is_anchor_due(self) -> bool:
        since = self._since_anchor()
        if since is None:
            return True
        if since and since[0].reference is not None:
            return False  # the last launch had the baseline beside it
        if not since and self.ranking.baseline_level.may_have_changed and self.judged[-1].score.value is not None:
            return True
        if not since and not self._is_second_in_a_row():
            last = self.judged[-1].result
            if is_disturbed(last) or last.status is TrialStatus.TIMED_OUT:
                return True
        seconds = math.fsum(one.result.elapsed_seconds for one in since)
        if len(since) >= ANCHOR_SPACING or (since and seconds >= self.policy.anchor_seconds):
            return True
        return len(since) >= self.policy.least_between_anchors and self._has_canary_moved()

    def _is_second_in_a_row(self) -> bool:
        return [one.key for one in self.judged[-2:]] == [self._baseline_key] * 2

    def _since_anchor(self) -> list[Judged] | None:
        """Return the launches since the last of the baseline; None when there was none."""
        since: list[Judged] = []
        for one in reversed(self.judged[self.session_start :]):
            if one.key == self._baseline_key:
                return since
            since.append(one)
        return None

    def _has_canary_moved(self) -> bool:
        then, now = self._canary_at_anchor(), self._read_canary(self.judged[-1])
        return then is not None and now is not None and abs(math.log(now / then)) > self.policy.canary_change

    def _canary_at_anchor(self) -> float | None:
        anchors = (one for one in reversed(self.judged) if one.key == self._baseline_key)
        return next((seconds for one in anchors if (seconds := self._read_canary(one)) is not None), None)

    @staticmethod
    def _read_canary(judged: Judged) -> float | None:
        measurement = judged.result.measurement
        if measurement is None or measurement.canary is None:
            return None
        return measurement.canary.before_seconds  # after it, loader workers may be at work

    def _launches_since_repeat(self) -> int:
        """Return how many launches of something new came since the last one of something known.

        The first few count for none: anything new tells more. The baseline counts as neither: a search that goes on
        begins with it, and is to be the same.
        """
        keys = [one.key for one in self.judged if one.key != self._baseline_key]
        seen: set[str] = set()
        count = 0
        for key in keys:
            count = 0 if key in seen else count + 1
            seen.add(key)
        return count if len(keys) >= self.policy.least_before_repeats else 0
