"""Racing on simulated blocks: how often luck alone stops a trial, and how soon a slower one is stopped."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from autotune.measure.racing import is_clearly_slower, racing_boundary

BLOCKS, BLOCK_SD = 48, 0.03
PATHS = 20_000
ALL = np.arange(1, BLOCKS + 1)
UNIT_BOUNDARIES = np.array([racing_boundary(k, 1.0) for k in range(1, 2001)])


@pytest.mark.parametrize(
    ("looks", "sd", "risk", "rho", "expected"),
    [
        (1, 1.0, 0.05, 8.0, 6.525812),  # k + rho = 9; 9 / (4 * 0.0025 * 8) + 1 = 113.5; sqrt(9 ln 113.5)
        (2, 0.03, 0.01, 8.0, 0.269124),  # 10 / (4 * 0.0001 * 8) + 1 = 3126; 0.03 sqrt(10 ln 3126)
        (48, 1.0, 0.2, 1.5, 16.248979),  # 49.5 / (4 * 0.04 * 1.5) + 1 = 207.25; sqrt(49.5 ln 207.25)
        (2000, 0.03, 0.05, 8.0, 4.278801),  # 2008 / (4 * 0.0025 * 8) + 1 = 25101; 0.03 sqrt(2008 ln 25101)
        (7, 0.0, 0.05, 8.0, 0.0),
    ],
)
def test_boundary_is_the_formula_worked_by_hand(
    looks: int, sd: float, risk: float, rho: float, expected: float
) -> None:
    assert racing_boundary(looks, sd, risk=risk, rho=rho) == pytest.approx(expected, rel=1e-5)


def test_usual_risk_and_rho_are_five_percent_and_eight() -> None:
    assert racing_boundary(7, 0.03) == racing_boundary(7, 0.03, risk=0.05, rho=8.0)


@pytest.mark.parametrize("risk", [0.01, 0.05, 0.2, 0.5, 0.9])
def test_boundary_costs_at_most_2_percent_of_the_risk_against_the_exact_mixture(risk: float) -> None:
    """The mixture 2 sqrt(rho / (k + rho)) exp(z² / 2) Phi(z), z = sum / sqrt(k + rho), reaches 1 / risk of its own."""
    worst = 0.0
    for looks in (1, 2, 5, 10, 20, 50, 100, 1000, 10**5, 10**8):
        z = racing_boundary(looks, 1.0, risk=risk) / math.sqrt(looks + 8)
        mixture = 2 * math.sqrt(8 / (looks + 8)) * math.exp(z * z / 2) * 0.5 * math.erfc(-z / math.sqrt(2))
        worst = max(worst, 1 / mixture)
    assert worst <= 1.02 * risk


def test_unit_normal_sums_cross_the_boundary_less_often_than_the_risk_over_2000_looks() -> None:
    rng, crossed = np.random.default_rng(1), 0
    for _ in range(20):
        sums = rng.standard_normal((1000, 2000), dtype=np.float32).cumsum(axis=1)
        crossed += int((sums > UNIT_BOUNDARIES).any(axis=1).sum())
    print(f"crossed within 2,000 looks: {crossed / PATHS:.2%} (risk 5 %)")
    assert 0.02 < crossed / PATHS < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"looks": 0}, "looks is 0"),
        ({"sd": -0.1}, "sd is -0.1"),
        ({"sd": math.nan}, "sd is nan"),
        ({"risk": 0.0}, "risk is 0.0"),
        ({"risk": 1.0}, "risk is 1.0"),
        ({"rho": 0.0}, "rho is 0.0"),
        ({"rho": math.inf}, "rho is inf"),
    ],
)
def test_boundary_refuses(changes: dict[str, float], message: str) -> None:
    arguments = {"looks": 1, "sd": 1.0, "risk": 0.05, "rho": 8.0} | changes
    looks, sd = int(arguments.pop("looks")), arguments.pop("sd")
    with pytest.raises(ValueError, match=message):
        racing_boundary(looks, sd, **arguments)


@pytest.mark.parametrize(
    ("log_ratios", "block_sd", "margin", "stopped"),
    [
        ([], 0.03, 0.0, False),
        ([0.0], 0.03, 0.0, False),
        ([-1.0] * 20, 0.03, 0.0, False),
        ([0.27], 0.03, 0.0, False),  # 0.03 * sqrt(2) * 6.5258 = 0.27687
        ([0.28], 0.03, 0.0, True),
        ([0.37], 0.03, 0.1, False),
        ([0.38], 0.03, 0.1, True),
        ([0.0] * 10, 0.0, 0.0, False),  # as fast is not slower
        ([0.01, 0.01], 0.0, 0.0, True),  # noise-free, and 1 % slower
        ([0.01, 0.01], 0.0, 0.01, False),
        ([0.5], 0.5, 0.0, False),
        ([0.41, 0.41], 0.5, 0.0, True),  # two blocks over log(1.5) = 0.4055, whatever the noise
        ([0.41, 0.40], 0.5, 0.0, False),
        ([0.41, 0.41], 0.5, 0.1, False),
        ([0.51, 0.51], 0.5, 0.1, True),
        ([0.2, 0.2], 0.01, 0.0, True),
        ([0.4, 0.0], 0.01, 0.0, False),  # its own sd, 0.28, is the larger
    ],
)
def test_clearly_slower(log_ratios: list[float], block_sd: float, margin: float, stopped: bool) -> None:
    assert is_clearly_slower(log_ratios, block_sd=block_sd, margin=margin) is stopped


@pytest.mark.parametrize(
    ("log_ratios", "block_sd", "margin"),
    [
        ([math.nan], 0.03, 0.0),
        ([math.inf], 0.03, 0.0),
        ([0.1], -0.01, 0.0),
        ([0.1], 0.03, -0.1),
        ([0.1], math.nan, 0.0),
    ],
)
def test_clearly_slower_refuses(log_ratios: list[float], block_sd: float, margin: float) -> None:
    with pytest.raises(ValueError, match=r"finite|negative"):
        is_clearly_slower(log_ratios, block_sd=block_sd, margin=margin)


def test_the_vectorised_rule_of_these_tests_is_the_rule() -> None:
    logs = _race(np.random.default_rng(2), slower=0.08, launch_sd=0.05, paths=60)
    for margin in (0.0, 0.05):
        for path, stop in zip(logs, _find_stops(logs, margin=margin), strict=True):
            asked = [is_clearly_slower(path[:k].tolist(), block_sd=BLOCK_SD, margin=margin) for k in ALL]
            assert stop == (asked.index(True) + 1 if True in asked else 0)


@pytest.mark.parametrize(("rival_blocks", "limit"), [(1, 0.02), (math.inf, 0.02), (48, 0.02), (24, 0.02)])
def test_identical_configs_are_stopped_less_than_twice_in_100(rival_blocks: float, limit: float) -> None:
    """`rival_blocks` 1: a fresh block of the rival for each; more: the mean of that many, the same for all looks."""
    stops = _find_stops(_race(np.random.default_rng(3), rival_blocks=rival_blocks))
    print(f"false stops, rival of {rival_blocks} blocks: {(stops > 0).mean():.2%}")
    assert (stops > 0).mean() < limit


def test_a_rival_known_from_8_blocks_needs_a_margin() -> None:
    """Its error is the same at every look, so it adds up like an offset: the boundary alone does not cover it."""
    logs = _race(np.random.default_rng(4), rival_blocks=8)
    bare, forgiving = ((_find_stops(logs, margin=margin) > 0).mean() for margin in (0.0, BLOCK_SD))
    print(f"false stops, rival of 8 blocks: {bare:.2%}, with a margin of one block sd {forgiving:.2%}")
    assert bare > 0.05
    assert forgiving < 0.01


@pytest.mark.parametrize(("slower", "soon"), [(0.05, 11.0), (0.10, 5.0), (0.20, 2.7), (0.40, 1.2)])
def test_a_slower_config_is_stopped_soon(slower: float, soon: float) -> None:
    stops = _find_stops(_race(np.random.default_rng(5), slower=slower, rival_blocks=24, paths=5000))
    print(f"{slower:+.0%} slower: stopped {(stops > 0).mean():.1%}, after {stops[stops > 0].mean():.1f} blocks")
    assert (stops > 0).mean() > 0.99
    assert stops[stops > 0].mean() < soon


@pytest.mark.parametrize("launch_sd", [0.01, 0.03, 0.05, 0.10])
def test_margin_of_2_33_root_2_launch_sd_covers_the_luck_of_two_launches(launch_sd: float) -> None:
    logs = _race(np.random.default_rng(6), launch_sd=launch_sd, rival_blocks=24)
    stopped = (_find_stops(logs, margin=2.33 * math.sqrt(2) * launch_sd) > 0).mean()
    print(f"false stops, launch sd {launch_sd:.0%}, margin 2.33 sqrt(2) sd: {stopped:.2%}")
    assert stopped < 0.015


@pytest.mark.parametrize("launch_sd", [0.03, 0.05, 0.10])
def test_margin_of_twice_the_launch_sd_does_not_cover_the_luck_of_two_launches(launch_sd: float) -> None:
    logs = _race(np.random.default_rng(7), launch_sd=launch_sd, rival_blocks=24)
    stopped = (_find_stops(logs, margin=2 * launch_sd) > 0).mean()
    print(f"false stops, launch sd {launch_sd:.0%}, margin 2 sd: {stopped:.2%}")
    assert stopped > 0.015


def _race(
    rng: np.random.Generator,
    *,
    slower: float = 0.0,
    launch_sd: float = 0.0,
    rival_blocks: float = 1,
    paths: int = PATHS,
) -> NDArray[np.float64]:
    """Log ratios [paths, blocks]: each side has block noise, and one offset of its launch."""
    logs = math.log1p(slower) + rng.normal(0.0, BLOCK_SD, (paths, BLOCKS))
    columns = BLOCKS if rival_blocks == 1 else 1
    logs -= rng.normal(0.0, BLOCK_SD / math.sqrt(rival_blocks), (paths, columns))
    return logs + rng.normal(0.0, launch_sd, (paths, 1)) - rng.normal(0.0, launch_sd, (paths, 1))


def _find_stops(logs: NDArray[np.float64], *, margin: float = 0.0) -> NDArray[np.int64]:
    """Return the first look [paths] at which `is_clearly_slower` would say so, or 0."""
    sums = logs.cumsum(axis=1)
    squares = (logs**2).cumsum(axis=1) - sums**2 / ALL
    own_sd = np.sqrt(np.maximum(squares, 0.0) / np.maximum(ALL - 1, 1))
    boundary = UNIT_BOUNDARIES[:BLOCKS] * math.sqrt(2) * np.maximum(BLOCK_SD, own_sd)
    far_slower = (np.minimum.accumulate(logs, axis=1) > math.log(1.5) + margin) & (ALL >= 2)
    stopped = (sums - ALL * margin > boundary) | far_slower
    return np.where(stopped.any(axis=1), stopped.argmax(axis=1) + 1, 0)
