"""Search and finals together, over many seeds: how often nothing is called something, and something is found."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from record_factory import make_check
from simulated import BASELINE, Machine, all_equal, explore_placebos, number_of

from autotune.drift.policy import USUAL_LOSS_CHECK
from autotune.records import TrainConfig
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.plan import plan_finals
from autotune.search.finals.stage import confirm
from autotune.search.policy import USUAL_POLICY

BUDGET = 110.0


def search(machine: Machine) -> FinalsOutcome | None:
    """Explore placebos and take the best to the finals; None where nothing looked faster."""
    search = explore_placebos(machine, budget=BUDGET)
    ranking = search.log.ranking
    ranked = sorted(ranking.entries, key=lambda one: -one.score)
    faster = [one.config for one in ranked if one.score > USUAL_POLICY.least_gain and one.config != BASELINE]
    if not faster:
        return None
    finalists = faster[: USUAL_LOSS_CHECK.most_finalists]
    for config in finalists:
        search.log.add_checks(config, (make_check(),))
    return confirm(search.log, search.starter, plan_finals(search.log, search.budget, finalists))


def jitter(seed: int) -> Callable[[float], float]:
    """Return a machine's speed that goes its own way: a slow walk of some percent a minute."""
    rng = random.Random(seed)
    walk = [1.0]
    for _ in range(200):
        walk.append(walk[-1] * (1 + rng.gauss(0, 0.01)))
    return lambda now: walk[min(int(now), 200)]


@pytest.mark.slow_cases("steady-0.03", "wandering-0.01")
@pytest.mark.parametrize("sd", [0.01, 0.03, 0.10])
@pytest.mark.parametrize("wanders", [False, True], ids=["steady", "wandering"])
def test_where_nothing_is_faster_nothing_is_claimed(sd, wanders):
    claims = finals = 0
    for seed in range(20):
        drift = jitter(seed) if wanders else lambda _now: 1.0
        machine = Machine(speed=all_equal, noise=sd, block_noise=0.02, blocks=4, seed=seed, drift=drift)
        outcome = search(machine)
        finals += outcome is not None
        claims += outcome is not None and outcome.winner is not None
    assert claims == 0
    assert finals > 12  # the best of many looked faster, so there was something to refuse


def test_a_true_gain_of_a_half_is_nearly_always_claimed():
    def speed(config: TrainConfig) -> float:
        return 1.5 if number_of(config) == 7 else 1.0

    claims = covered = 0
    for seed in range(40):
        outcome = search(Machine(speed=speed, noise=0.03, block_noise=0.02, blocks=4, seed=seed))
        winner = outcome.winner if outcome else None
        if winner is None or winner.ratio is None:
            continue
        assert number_of(winner.config) == 7
        claims += 1
        covered += winner.ratio.low <= 1.5
    assert claims > 0.9 * 40
    assert covered >= 0.95 * claims
