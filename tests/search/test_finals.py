from __future__ import annotations

import random
from collections import Counter

import pytest
from simulated import BASELINE, Machine

from autotune.records import Target, TrainConfig, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.finals import THRESHOLD, run_finals

FAST = BASELINE.replace(precision="bf16")
FAST_AND_MORE = FAST.replace(num_workers=2)
OTHER = BASELINE.replace(optimizer_implementation="fused")


def launcher(machine: Machine, order: list[TrainConfig] | None = None):
    def launch(config: TrainConfig) -> TrialResult:
        if order is not None:
            order.append(config)
        spec = TrialSpec(
            number=len(machine.specs),
            purpose="final",
            target=Target(spec="toy.py:workload", folder="/"),
            config=config,
            limits=TrialLimits(time_limit_seconds=60),
        )
        return machine(spec)

    return launch


def test_a_gain_is_proven_by_its_lower_end():
    outcome = run_finals([FAST], BASELINE, launcher(Machine()), rounds=6, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST
    assert outcome.winner.ratio is not None
    assert THRESHOLD < outcome.winner.ratio.low < 1.5
    assert outcome.winner.ratio.confidence_level == pytest.approx(0.98)
    assert len(outcome.winner.rates) == len(outcome.baseline.rates) == 6


def test_two_candidates_share_the_risk():
    outcome = run_finals([FAST, OTHER], BASELINE, launcher(Machine()), rounds=6, seed=0)
    assert [one.ratio.confidence_level for one in outcome.candidates if one.ratio] == pytest.approx([0.99, 0.99])


def test_every_round_holds_every_arm_and_no_arm_is_always_first():
    order: list[TrainConfig] = []
    run_finals([FAST, OTHER], BASELINE, launcher(Machine(), order), rounds=8, seed=3)
    rounds = [order[i : i + 3] for i in range(0, 24, 3)]
    assert all({c.to_json() for c in arms} == {c.to_json() for c in (BASELINE, FAST, OTHER)} for arms in rounds)
    # Each drawn order is followed by its reverse, so whoever was first is last next time.
    assert all(first == second[::-1] for first, second in zip(rounds[::2], rounds[1::2], strict=True))
    assert len(Counter(arms[0].to_json() for arms in rounds)) > 1


def test_the_simpler_of_two_that_cannot_be_told_apart_wins():
    outcome = run_finals([FAST_AND_MORE, FAST], BASELINE, launcher(Machine(noise=0.02)), rounds=8, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST


def test_the_faster_wins_when_it_is_clearly_faster():
    def speed(config: TrainConfig) -> float:
        return 1.5 if config.num_workers else (1.3 if config.precision == "bf16" else 1.0)

    outcome = run_finals([FAST_AND_MORE, FAST], BASELINE, launcher(Machine(speed=speed)), rounds=8, seed=0)
    assert outcome.winner is not None
    assert outcome.winner.config == FAST_AND_MORE


def test_a_candidate_that_fails_once_is_out_and_the_others_go_on():
    def fate(config: TrainConfig) -> TrialStatus:
        return TrialStatus.CRASHED if config == OTHER else TrialStatus.COMPLETED

    outcome = run_finals([OTHER, FAST], BASELINE, launcher(Machine(fate=fate)), rounds=6, seed=0)
    assert outcome.candidates[0].failure == "crashed: planted"
    assert outcome.winner is not None
    assert outcome.winner.config == FAST


def test_an_unfinished_round_does_not_count():
    machine = Machine()
    launch = launcher(machine)
    outcome = run_finals([FAST], BASELINE, lambda c: launch(c) if len(machine.specs) < 7 else None, rounds=6, seed=0)
    assert len(outcome.baseline.rates) == len(outcome.candidates[0].rates) == 3


def test_one_round_proves_nothing():
    outcome = run_finals([FAST], BASELINE, launcher(Machine(noise=0)), rounds=1, seed=0)
    assert outcome.winner is None
    assert outcome.candidates[0].ratio is None


def test_identical_arms_are_claimed_faster_in_less_than_one_search_of_a_hundred():
    equal = random.Random(1)
    claims = 0
    for seed in range(1000):
        machine = Machine(speed=lambda _c: 1.0, noise=equal.choice([0.01, 0.03, 0.08]), seed=seed)
        claims += run_finals([FAST, OTHER], BASELINE, launcher(machine), rounds=6, seed=seed).winner is not None
    assert claims < 10
