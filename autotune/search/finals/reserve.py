"""What a search keeps back of its budget to prove its leader, and the least that it must have been given at all.

nothing leads    the cheapest loss check of this target, and the least rounds that can claim anything
a leader         its own loss check, and the rounds that its gain asks for at the noise seen;
                 no more than half of the budget, and where even that is hopeless, as if nothing led
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from autotune.errors import NothingFeasibleError, UsageError
from autotune.format import format_bytes, format_duration
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.records.trial import TrialResult
from autotune.search.finals.finalist import LEAST_ROUNDS
from autotune.search.finals.plan import price_pair
from autotune.search.launch.budget import CLOSING_SECONDS, Budget
from autotune.search.log import SearchLog
from autotune.search.policy import SearchPolicy
from autotune.search.scores.objective import Limits


@dataclass(frozen=True)
class Reserve:
    """Computes what is kept back.

    Attributes:
        log: of the search, by which launches are priced.
        budget: the deadline.
        needed_seconds: returns what showing that a config learns as well takes from now on; of None, what it takes
            for any that rounds.
        expect_seconds: returns what it will hardly take more than.
        count_pairs: returns how many pairs prove what the search saw of a config.
    """

    log: SearchLog
    budget: Budget
    needed_seconds: Callable[[TrainConfig | None], float]
    expect_seconds: Callable[[TrainConfig], float]
    count_pairs: Callable[[TrainConfig], int]

    def least_seconds(self, config: TrainConfig | None = None) -> float:
        """Return what the cheapest proof takes: of a config, or of any where none is given."""
        check = self.needed_seconds(config)
        if config is None:
            # What is exact needs next to nothing: where time is short, only that can be proven.
            check = min(check, self._policy.short_check_share * self.budget.seconds)
        return check + self.least_rounds_seconds(config)

    def least_rounds_seconds(self, config: TrainConfig | None = None) -> float:
        """Return what the least rounds take that can claim anything."""
        return LEAST_ROUNDS * self.round_seconds(config)

    def seconds_for(self, leader: TrainConfig | None) -> float:
        """Return what is kept back for a leader; None for no leader yet."""
        if leader is None:
            return self.least_seconds()
        least, most = self.least_seconds(leader), self._policy.most_reserve_share * self.budget.seconds
        if self.is_provable(leader):
            return max(least, min(self._wanted_seconds(leader), most))
        # What can hardly be proven keeps as little as may be from whatever else may come to lead.
        return least if least <= min(most, self.budget.remaining_seconds) else self.least_seconds()

    def is_provable(self, leader: TrainConfig) -> bool:
        """Return whether a leader has a chance: its proof fits what remains, and what it asks for the budget."""
        policy = self._policy
        most = policy.hopeless_reserve * policy.most_reserve_share * self.budget.seconds
        expected = self.expect_seconds(leader) + self.least_rounds_seconds(leader)
        return self._wanted_seconds(leader) <= most and expected <= self.budget.remaining_seconds

    def _wanted_seconds(self, leader: TrainConfig) -> float:
        # What is not used goes back to exploring; what is missing cannot be had again.
        pairs = math.ceil(self._policy.spare_rounds * self.count_pairs(leader))
        return self.expect_seconds(leader) + pairs * self.round_seconds(leader)

    def check_seconds(self, leader: TrainConfig) -> float:
        """Return how long the loss check of a leader may take: what it needs and some, so that its rounds fit too."""
        policy, budget, needed = self._policy, self.budget, self.expect_seconds(leader)
        least = max(needed, policy.least_check * self.needed_seconds(leader), policy.least_check_seconds)
        most = budget.remaining_seconds - self.least_rounds_seconds(leader)
        usual = budget.remaining_seconds - (self.seconds_for(leader) - needed)
        generous = max(policy.generous_check * needed, policy.check_share * budget.seconds)
        return min(most, max(least, min(usual, generous)))

    def round_seconds(self, config: TrainConfig | None) -> float:
        """Return what a pair of launches takes, one of a config and one of the baseline."""
        return price_pair(self.log, config)

    @property
    def _policy(self) -> SearchPolicy:
        return self.log.problem.policy


def require_memory(report: ProbeReport, limits: Limits) -> None:
    """Refuse a limit on the memory that the user's own settings break.

    Raises:
        NothingFeasibleError: they use more.
    """
    peak = report.measurement.peak_memory
    pairs = ((peak.device_bytes, limits.device_memory_bytes), (peak.host_bytes, limits.host_memory_bytes))
    for used, limit in pairs:
        if used is not None and limit is not None and used > limit:
            raise NothingFeasibleError(
                f"your own settings use {format_bytes(used)}, more than the {format_bytes(limit)} allowed",
                hint="raise --memory-limit, or give the baseline a smaller micro batch and more accumulation",
            )


def require_time(reserve: Reserve, probed: TrialResult) -> None:
    """Refuse a budget that cannot hold the baseline, one candidate and the cheapest proof of it.

    Raises:
        UsageError: it is too small.
    """
    problem, budget = reserve.log.problem, reserve.budget
    launch = reserve.log.prices.launch_seconds(problem.baseline)
    needed = 2 * launch + reserve.least_seconds()
    if needed > budget.remaining_seconds:
        least = problem.policy.spare_budget * (needed + probed.elapsed_seconds + CLOSING_SECONDS)
        least = max(least, budget.seconds + 1.0)  # what was given has just been too little
        asked = format_duration(budget.seconds)
        raise UsageError(
            f"--budget {asked} is too small for this target: one launch takes {launch:.1f} s",
            hint=f"give at least {format_duration(math.ceil(least / 10) * 10)}, and several times that to find much",
        )
