"""The risk of a search: set aside before each look, never more than there is, and free again after a proof."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from simulated import BASELINE, make_judged, make_placebos

from autotune.measure.confidence import Pilot
from autotune.measure.student_t import student_t_quantile
from autotune.records.config import TrainConfig
from autotune.records.finals import FinalsRecord
from autotune.search.finals.claim import FALSE_RISK
from autotune.search.finals.risk import Pair, RiskPurse
from autotune.search.store.folder import SearchFolder

ONE, TWO, THREE = make_placebos(3)
PILOT = Pilot(0.05, 3.0)


def add_pair(purse: RiskPurse, number: int = 0) -> None:
    candidate, baseline = make_judged(ONE, 0.1).result, make_judged(BASELINE, 0.0).result
    candidate = candidate.replace(spec=candidate.spec.replace(number=number))
    purse.add(Pair(candidate, baseline.replace(spec=baseline.spec.replace(number=number + 1))))


def look(purse: RiskPurse, candidate: TrainConfig, *, proven: bool = False) -> float:
    share = purse.begin(candidate, PILOT)
    add_pair(purse, 2 * len(purse.looks))
    purse.end(proven=proven)
    return share


def test_the_shares_of_a_candidate_never_pass_one() -> None:
    purse = RiskPurse()
    shares = [look(purse, ONE) for _ in range(12)]
    assert shares[:3] == pytest.approx([0.6, 0.24, 0.096])
    assert math.fsum(shares) < 1.0


def test_who_is_picked_among_those_with_pairs_has_its_part_of_the_share() -> None:
    purse = RiskPurse()
    assert [look(purse, ONE), look(purse, TWO)] == pytest.approx([0.6, 0.24])
    assert purse.share_for(ONE) == pytest.approx(0.096 / 2)
    assert purse.share_for(THREE) == pytest.approx(0.096)


def test_what_was_spent_on_a_proven_candidate_is_free_again() -> None:
    purse = RiskPurse()
    look(purse, ONE)
    look(purse, TWO)
    look(purse, TWO, proven=True)
    assert purse.share_for(THREE) == pytest.approx(0.6 * (1 - 0.6))
    assert purse.share_for(ONE) == pytest.approx(0.6 * (1 - 0.6))


def test_a_look_is_written_before_its_first_pair_and_counts_if_it_never_ends() -> None:
    saved: list[FinalsRecord] = []
    purse = RiskPurse(save=saved.append)
    purse.begin(ONE, PILOT)
    assert [one.share for one in saved[-1].looks] == [0.6]
    add_pair(purse)
    again = RiskPurse(saved[-1])
    assert again.share_for(ONE) == pytest.approx(0.24)


def test_a_look_that_saw_nothing_has_risked_nothing() -> None:
    saved: list[FinalsRecord] = []
    purse = RiskPurse(save=saved.append)
    purse.begin(ONE, PILOT)
    purse.end(proven=False)
    assert purse.looks == saved[-1].looks == ()
    assert purse.share_for(ONE) == 0.6


def test_a_search_folder_keeps_it(tmp_path: Path) -> None:
    folder = SearchFolder(tmp_path)
    assert folder.read_finals() is None
    purse = RiskPurse(machine="here", save=folder.write_finals)
    look(purse, ONE)
    before = folder.read_finals()
    assert before is not None
    pair = purse.pairs_of(ONE)[0]
    again = RiskPurse(before, results=[pair.baseline, pair.candidate], machine="here")
    assert again.pairs_of(ONE) == [pair]
    assert pair.candidate_first
    assert again.looks == purse.looks
    # A trial that is gone takes its pair with it, and none of the risk back.
    assert RiskPurse(before, results=[pair.baseline], machine="here").pairs_of(ONE) == []


@pytest.mark.parametrize("degrees", [0, 4, 12])
def test_five_looks_at_pairs_that_pile_up_claim_in_less_than_a_thousandth(degrees: int) -> None:
    rng, searches = np.random.default_rng(degrees), 100_000
    pairs = rng.normal(0.0, 0.1, (searches, 48))
    seen = 0.1**2 * rng.chisquare(max(1, degrees), searches) / max(1, degrees)
    claimed, purse, half = np.zeros(searches, dtype=bool), RiskPurse(), degrees / 2
    for count in (3, 6, 12, 24, 48):
        share = look(purse, ONE)
        mean, variance = pairs[:, :count].mean(axis=1), pairs[:, :count].var(axis=1, ddof=1)
        pooled = (half * seen + (count - 1) * variance) / (half + count - 1)
        pooled = np.where(variance > 4 * seen, variance, pooled)
        freedom = np.where((variance > 4 * seen) | (half == 0), count - 1, count - 1 + half)
        quantiles = {n: student_t_quantile(1 - share * FALSE_RISK, n) for n in set(freedom.tolist())}
        claimed |= mean > np.vectorize(quantiles.get)(freedom) * np.sqrt(pooled / count)
    print(f"{degrees} degrees seen: {claimed.mean():.4%} claimed")
    assert claimed.mean() <= FALSE_RISK
