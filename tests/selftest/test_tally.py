from __future__ import annotations

import pytest
from scipy import stats

from autotune.records.selftest import Outcome
from autotune.selftest.tally import count_outcomes, exceeds_rate, upper_rate


def outcome(**planted: object) -> Outcome:
    return Outcome(**({"truth": 1.05, "noise": "quiet", "verdict": "keep"} | planted))  # type: ignore[arg-type]


def test_the_upper_rate_is_clopper_and_pearsons() -> None:
    counts = [(events, trials) for trials in (1, 2, 20, 60, 300, 10_000) for events in (0, 1, 2, 7) if events < trials]
    found = {(events, trials): upper_rate(events, trials) for events, trials in counts}
    exact = {(events, trials): stats.beta.ppf(0.95, events + 1, trials - events) for events, trials in counts}
    assert found == pytest.approx(exact, rel=1e-6)
    assert [trials for trials in (1, 2, 7) if upper_rate(trials, trials) != 1.0] == []


def test_no_event_in_sixty_trials_is_the_rule_of_three() -> None:
    assert upper_rate(0, 60) == pytest.approx(1 - 0.05 ** (1 / 60), rel=1e-9)
    assert upper_rate(0, 60) == pytest.approx(3 / 60, rel=0.03)


@pytest.mark.parametrize(("events", "trials"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_counts_are_refused(events: int, trials: int) -> None:
    with pytest.raises(ValueError, match="there must be at least as many trials"):
        upper_rate(events, trials)


@pytest.mark.parametrize(
    ("events", "trials", "rate"), [(0, 60, 0.001), (1, 60, 0.001), (2, 60, 0.001), (30, 2000, 0.01)]
)
def test_a_rate_is_exceeded_when_the_binomial_test_says_so(events: int, trials: int, rate: float) -> None:
    expected = events > 0 and stats.binomtest(events, trials, rate, alternative="greater").pvalue < 0.01
    assert exceeds_rate(events, trials, rate) == expected


def test_outcomes_are_counted_by_truth_and_machine() -> None:
    claimed = {"verdict": "improved", "pairs": 6, "estimate": 1.06, "interval_low": 1.04, "interval_high": 1.08}
    tallies = count_outcomes(
        [
            outcome(launches=10, raced=1, measured_fraction=0.5),
            outcome(**claimed, low=1.03, launches=20, measured_fraction=0.7),
            outcome(**(claimed | {"interval_low": 1.06}), low=1.055),
            outcome(noise="noisy"),
            outcome(truth=1.0),
        ]
    )
    assert [(one.truth, one.noise, one.runs) for one in tallies] == [
        (1.05, "quiet", 3),
        (1.05, "noisy", 1),
        (1.0, "quiet", 1),
    ]
    quiet = tallies[0]
    assert (quiet.claims, quiet.overclaims, quiet.with_finals, quiet.covered) == (2, 1, 2, 1)
    assert (quiet.launches, quiet.raced) == (30, 1)
    assert quiet.measured_fraction == pytest.approx(0.6)
    assert quiet.worst_false_rate == pytest.approx(upper_rate(1, 3))


def test_a_claim_of_no_more_than_the_truth_is_no_overclaim() -> None:
    (tally,) = count_outcomes(
        [outcome(verdict="improved", low=1.05, interval_low=1.04, interval_high=1.2, estimate=1.1)]
    )
    assert (tally.claims, tally.overclaims, tally.covered) == (1, 0, 1)
