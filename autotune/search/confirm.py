"""The finals of a search: how many rounds, fixed from the noise and the gain it saw, and running them in its time.

All that time is left for is a reserve: what the search saw is the best of many, and the machine may get noisier.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.records.config import TrainConfig
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.budget import FINALS_SHARE
from autotune.search.finals import MOST_ROUNDS, SHARE_OF_A_LOOK, THRESHOLD, FinalsOutcome, rounds_needed, run_finals
from autotune.search.launcher import Launcher
from autotune.search.ranking import compile_cost

GOOD_ROUNDS = 6
"""Fewer are run only where there is no time for more."""

_LEAST_RESERVE = 0.5
"""Of the rounds planned."""

_FULL_PATIENCE = 4.0
_LONGER = 1.5
"""Another search with the budget that was not enough would be another throw of the dice."""


@dataclass(frozen=True)
class FinalsPlan:
    """What is fixed before the first pair.

    Attributes:
        finalists: who takes part.
        rounds: of all of them and the baseline.
        pair_sd: standard deviation of the log ratio of a pair, as the search saw it.
        round_seconds: expected time of one round.
        samples: measured in each launch.
        reserve: further rounds, for where those planned leave it open.
    """

    finalists: list[TrainConfig]
    rounds: int
    pair_sd: float
    round_seconds: float
    samples: int
    reserve: int = 0


def plan_finals(launcher: Launcher, candidates: list[TrainConfig]) -> FinalsPlan:
    """Return the finals that fit the time left: candidates are dropped from the end before rounds are."""
    finalists = list(candidates)
    base = launcher.predict_seconds(launcher.baseline)
    while True:
        seconds = base + sum(launcher.predict_seconds(config) for config in finalists)
        affordable = int(launcher.budget.remaining_seconds / seconds)
        if affordable >= GOOD_ROUNDS or len(finalists) == 1:
            break
        finalists = finalists[:-1]
    ranking = launcher.ranking()
    first = ranking.find(finalists[0])
    pair_sd = math.sqrt(2) * ranking.noise[0]
    most = min(MOST_ROUNDS, affordable)
    # Shrinking pulls a small gain up where most others are large; the smaller figure asks for more rounds.
    gain = max(min(first.score, first.shrunk) if first else 0.0, math.log(THRESHOLD))
    # What the search saw may flatter: a quarter of what the budget affords is used in any case, so that more buys more.
    fewest = max(min(GOOD_ROUNDS, most), affordable // 4)
    rounds = rounds_needed(pair_sd, gain, most=most, fewest=fewest) if most >= 2 else most
    # A second look takes half of the risk from the first: a few rounds more are not worth that.
    reserve = most - rounds if most - rounds >= _LEAST_RESERVE * rounds else 0
    own = [one.result.measurement for one in launcher.judged if one.config == launcher.baseline]
    # As much as the search found enough: time is better spent on more launches than on longer ones.
    samples = statistics.median_high([one.samples for one in own if one is not None])
    return FinalsPlan(finalists, rounds, pair_sd, seconds, samples, reserve)


def confirm(launcher: Launcher, plan: FinalsPlan) -> FinalsOutcome:
    """Run the finals as planned; they end early when the time is up or the user stops."""

    def launch(config: TrainConfig) -> TrialResult | None:
        expected = launcher.predict_seconds(config)
        remaining = launcher.budget.remaining_seconds
        if launcher.should_stop() or remaining < expected:
            return None
        full = _FULL_PATIENCE * expected + 10
        result = launcher.launch(
            config, "final", min(remaining, full), ends_with_stage=remaining < full, measure_samples=plan.samples
        )
        return None if result.status is TrialStatus.INTERRUPTED else result

    def cost(config: TrainConfig, finals: Sequence[TrialResult]) -> float:
        key = config.model_dump_json()
        # Faster samples, of which more are needed: what counts is the net figure, by the upper end.
        more = math.log(launcher.samples_ratios.get(key, 1.0))
        if launcher.planned_samples is None:
            return more
        searched = [one.result for one in launcher.judged if one.key == key]
        return more + compile_cost([*searched, *finals], launcher.planned_samples)

    return run_finals(
        plan.finalists,
        launcher.baseline,
        launch,
        rounds=plan.rounds,
        reserve=plan.reserve,
        seed=launcher.state.seed,
        pair_sd=plan.pair_sd,
        cost=cost,
    )


def budget_for(log_speedup: float, *, pair_sd: float, pair_seconds: float, budget_seconds: float) -> float | None:
    """Return the longer budget whose finals would prove a speed-up with a probability of 80 %, in seconds.

    None where that takes more rounds than finals ever have: the machine is too noisy for it.

    Args:
        log_speedup: the gain to prove; must exceed the threshold of a claim.
        pair_sd: standard deviation of a pair's log ratio.
        pair_seconds: time of one pair.
        budget_seconds: of this search.

    Raises:
        ValueError: the gain does not exceed the threshold.
    """
    if log_speedup <= math.log(THRESHOLD):
        raise ValueError(f"log_speedup is {log_speedup}: no budget proves what is not above {THRESHOLD}")
    # A longer search has a reserve, whose look has its share of the risks alone.
    pairs = rounds_needed(pair_sd, log_speedup, most=MOST_ROUNDS + 1, fewest=2, risk_share=SHARE_OF_A_LOOK)
    return None if pairs > MOST_ROUNDS else max(_LONGER * budget_seconds, pairs * pair_seconds / FINALS_SHARE)
