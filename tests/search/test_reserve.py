"""What is kept back to prove a leader: what its proof needs, not a share."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from simulated import BASELINE, LAUNCH_SECONDS, Machine, make_judged, open_search

from autotune.records import TrainConfig
from autotune.search.finals.finalist import LEAST_ROUNDS
from autotune.search.finals.prover import Prover
from autotune.search.finals.reserve import Reserve
from autotune.search.finals.risk import RiskPurse
from autotune.search.policy import USUAL_POLICY

LEADER = BASELINE.replace(host_allocator="glibc-tuned")
ROUND = 2 * LAUNCH_SECONDS


def make_reserve(*, check: float = 10.0, training: float = 0.0, pairs: int = 5, budget: float = 600.0) -> Reserve:
    search = open_search(Machine(), budget=budget)
    search.log.add_judged(make_judged(BASELINE, 0.0), make_judged(LEADER, 0.3))

    def needed(config: TrainConfig | None) -> float:
        return check

    return Reserve(search.log, search.budget, needed, lambda _config: check + training, lambda _config: pairs)


def test_while_nothing_leads_only_the_least_is_kept():
    assert make_reserve().seconds_for(None) == pytest.approx(10.0 + LEAST_ROUNDS * ROUND)


def test_a_short_search_keeps_what_an_exact_setting_needs():
    """Where checking anything that rounds would take most of the budget, what needs no such check can still win."""
    assert make_reserve(check=500.0, budget=100.0).seconds_for(None) == pytest.approx(15.0 + LEAST_ROUNDS * ROUND)


def test_a_leader_keeps_its_check_and_its_rounds_and_some():
    reserve = make_reserve(check=0.0, pairs=10)
    assert 10 * ROUND < reserve.seconds_for(LEADER) <= 14 * ROUND
    assert make_reserve(check=30.0, pairs=10).seconds_for(LEADER) == reserve.seconds_for(LEADER) + 30.0


def test_what_may_have_to_be_trained_keeps_time_for_that_too():
    reserve = make_reserve(training=20.0)
    assert reserve.seconds_for(LEADER) == make_reserve().seconds_for(LEADER) + 20.0
    assert reserve.check_seconds(LEADER) >= 30.0
    assert reserve.seconds_for(None) == make_reserve().seconds_for(None)
    short = make_reserve(training=20.0, pairs=3, budget=30.0 + LEAST_ROUNDS * ROUND)
    assert not short.is_provable(LEADER)  # a second is kept for the end
    assert make_reserve(pairs=3, budget=30.0 + LEAST_ROUNDS * ROUND).is_provable(LEADER)


@pytest.mark.parametrize(("baseline", "looked_at"), [(-2.3, []), (0.0, [LEADER])])
def test_what_leads_a_baseline_that_was_slow_once_is_not_screened(baseline: float, looked_at: list[TrainConfig]):
    """What the probe's reading is not beaten by is no leader before the baseline was launched again."""
    search, seen = open_search(Machine(), budget=600.0), []

    class Check:
        def find_early_part(self, config: TrainConfig) -> TrainConfig:
            return config

        def look_at(self, config: TrainConfig, *, seconds: float, most_seconds: float | None = None) -> None:
            seen.append(config)

        def choose(self, candidates: Sequence[TrainConfig], **_limits: object) -> list[TrainConfig]:
            return []

    search.log.add_judged(make_judged(BASELINE, baseline), make_judged(LEADER, baseline + 0.3))
    reserve = Reserve(search.log, search.budget, lambda _config: 10.0, lambda _config: 10.0, lambda _config: 5)
    Prover(search.log, search.starter, Check(), RiskPurse(), reserve).look_at(LEADER)
    assert seen == looked_at


def test_what_can_hardly_be_proven_keeps_no_more_than_if_nothing_led():
    reserve = make_reserve(pairs=10_000)
    assert not reserve.is_provable(LEADER)
    assert reserve.seconds_for(LEADER) == reserve.least_seconds(LEADER)
    assert not make_reserve(check=600.0).is_provable(LEADER)
    some = make_reserve(pairs=60)  # 468 s of 600
    assert some.is_provable(LEADER)
    assert some.seconds_for(LEADER) == USUAL_POLICY.most_reserve_share * 600.0
    assert make_reserve().is_provable(LEADER)
