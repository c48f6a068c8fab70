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
from autotune.search.launch.budget import CLOSING_SECONDS
from autotune.search.launch.launcher import Launcher
from autotune.search.scores.objective import Limits

MOST_SHARE = 0.5
"""Of the budget: kept back for the proof of one leader."""

_SHORT_CHECK_SHARE = 0.15
_CHANCE = 2.0
_CHECK_SHARE, _GENEROUS, _LITTLE_MORE, _LEAST_CHECK_SECONDS = 0.15, 2.0, 1.4, 3.0
"""Of the budget, and of what is needed at least: a loss check that is given more only trains for longer."""

_SPARE = 1.3
"""Of the rounds that the gain asks for: the search's reading flatters the best of many."""
_SPARE_BUDGET = 1.1
"""Of the least budget: what is told where the one given is too small."""


@dataclass(frozen=True)
class Reserve:
    """Computes what is kept back.

    Attributes:
        launcher: knows what launches take.
        needed_seconds: returns what showing that a config learns as well takes from now on; of None, what it takes
            for any that rounds.
        count_pairs: returns how many pairs prove what the search saw of a config.
    """

    launcher: Launcher
    needed_seconds: Callable[[TrainConfig | None], float]
    count_pairs: Callable[[TrainConfig], int]

    def least_seconds(self, config: TrainConfig | None = None) -> float:
        """Return what the cheapest proof takes: of a config, or of any where none is given."""
        check = self.needed_seconds(config)
        if config is None:
            # What is exact needs next to nothing: where time is short, only that can be proven.
            check = min(check, _SHORT_CHECK_SHARE * self.launcher.budget.seconds)
        return check + self.least_rounds_seconds(config)

    def least_rounds_seconds(self, config: TrainConfig | None = None) -> float:
        """Return what the least rounds take that can claim anything."""
        return LEAST_ROUNDS * self._round_seconds(config)

    def seconds_for(self, leader: TrainConfig | None) -> float:
        """Return what is kept back for a leader; None for no leader yet."""
        if leader is None:
            return self.least_seconds()
        budget, least = self.launcher.budget, self.least_seconds(leader)
        most = MOST_SHARE * budget.seconds
        if self.is_provable(leader):
            return max(least, min(self._wanted_seconds(leader), most))
        # What can hardly be proven keeps as little as may be from whatever else may come to lead.
        return least if least <= min(most, budget.remaining_seconds) else self.least_seconds()

    def is_provable(self, leader: TrainConfig) -> bool:
        """Return whether a leader has a chance: its least proof fits what remains, and what it asks for the budget."""
        budget = self.launcher.budget
        has_chance = self._wanted_seconds(leader) <= _CHANCE * MOST_SHARE * budget.seconds
        return has_chance and self.least_seconds(leader) <= budget.remaining_seconds

    def _wanted_seconds(self, leader: TrainConfig) -> float:
        # What is not used goes back to exploring; what is missing cannot be had again.
        pairs = math.ceil(_SPARE * self.count_pairs(leader))
        return self.needed_seconds(leader) + pairs * self._round_seconds(leader)

    def check_seconds(self, leader: TrainConfig) -> float:
        """Return how long the loss check of a leader may take: what it needs and some, so that its rounds fit too."""
        launcher, needed = self.launcher, self.needed_seconds(leader)
        most = launcher.budget.remaining_seconds - self.least_rounds_seconds(leader)
        usual = launcher.budget.remaining_seconds - (self.seconds_for(leader) - needed)
        generous = max(_GENEROUS * needed, _CHECK_SHARE * launcher.budget.seconds)
        return min(most, max(_LITTLE_MORE * needed, _LEAST_CHECK_SECONDS, min(usual, generous)))

    def _round_seconds(self, config: TrainConfig | None) -> float:
        base = self.launcher.predict_seconds(self.launcher.baseline)
        other = base if config is None else self.launcher.predict_seconds(config)
        return math.fsum((base, other))


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


def require_time(launcher: Launcher, reserve: Reserve, probed: TrialResult) -> None:
    """Refuse a budget that cannot hold the baseline, one candidate and the cheapest proof of it.

    Raises:
        UsageError: it is too small.
    """
    launch = launcher.predict_seconds(launcher.baseline)
    needed = 2 * launch + reserve.least_seconds()
    if needed > launcher.budget.remaining_seconds:
        least = _SPARE_BUDGET * (needed + probed.elapsed_seconds + CLOSING_SECONDS)
        asked = format_duration(launcher.budget.seconds)
        raise UsageError(
            f"--budget {asked} is too small for this target: one launch takes {launch:.1f} s",
            hint=f"give at least {format_duration(math.ceil(least / 10) * 10)}, and several times that to find much",
        )
