"""How many pairs a look at a candidate has, fixed from the noise and the gain that the search saw."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from autotune.measure.confidence import NO_PILOT, Pilot
from autotune.records.config import TrainConfig
from autotune.records.trial import SAMPLES_PATIENCE
from autotune.search.finals.claim import CLAIM_RISK, THRESHOLD, Bar, find_claim
from autotune.search.finals.finalist import LEAST_ROUNDS, MOST_ROUNDS, rounds_needed
from autotune.search.finals.risk import LEAST_SHARE, Pair, RiskPurse
from autotune.search.finals.rounds import FinalsPlan
from autotune.search.launch.budget import Budget
from autotune.search.launch.length import find_measured_seconds, list_timings
from autotune.search.launch.turns import fit_together
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY, SearchPolicy
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD
from autotune.search.scores.ranking import Ranking

_LEAST_DEGREES = 4
"""Of freedom of the noise, those of the pairs among them."""
_LEAST_DOUBTFUL = 1.5
"""Degrees of freedom that are known doubtfully; fewer are worth less than the half of the risk that they take."""


def plan_finals(
    log: SearchLog,
    budget: Budget,
    candidates: list[TrainConfig],
    *,
    look: RiskPurse | None = None,
    seconds: float | None = None,
) -> FinalsPlan:
    """Return the next look of the finals: the pairs that prove what the search saw, or all that fit.

    Args:
        log: of the search.
        budget: the deadline.
        candidates: in the order they are to be tested.
        look: the search's purse, which knows of earlier looks; None for a search with a single one.
        seconds: that it may take; None for all the time left.
    """
    purse, first, policy = look or RiskPurse(), candidates[0], log.problem.policy
    left = budget.remaining_seconds
    pairs = purse.pairs_of(first)
    kept, round_seconds = len(pairs), price_pair(log, first, pairs)
    fitting = min(MOST_ROUNDS, int((left if seconds is None else min(left, seconds)) / round_seconds))
    if purse.share_for(first) < LEAST_SHARE:
        fitting = 0
    total, noise = _plan_pairs(log, first, purse)
    most = math.ceil(policy.second_look * total) - kept
    rounds = min(fitting, total - kept)
    reserve = min(fitting, most) - rounds
    if reserve < policy.least_second_look * rounds:
        # The clock ends a look: a round that only a price leaves out would be a second one, at a smaller share.
        spare = policy.spare_time if seconds is None and kept + fitting >= LEAST_ROUNDS else 1.0
        rounds, reserve = min(MOST_ROUNDS, math.ceil(spare * fitting), most), 0
    return FinalsPlan(
        finalists=list(candidates),
        rounds=rounds,
        pair_sd=noise.sd,
        round_seconds=round_seconds,
        samples=count_samples(log, first),
        reserve=reserve,
        kept=kept,
        pilot=noise.pilot,
        purse=purse,
    )


def plan_more(log: SearchLog, budget: Budget, winner: TrainConfig, look: RiskPurse) -> FinalsPlan | None:
    """Return a look with more pairs of what is proven, as many as bring the claim near the gain or fit.

    None where they would not be twice as many as there are, or where memory is what counts.

    Args:
        log: of the search.
        budget: the deadline.
        winner: of the finals so far.
        look: the search's purse.
    """
    if find_claim(log.problem.objective).saving or look.share_for(winner) < LEAST_SHARE:
        return None
    pairs = look.pairs_of(winner)
    kept, round_seconds = len(pairs), price_pair(log, winner, pairs)
    total, noise = _plan_more_pairs(log, winner, look)
    rounds = min(total - kept, int(budget.remaining_seconds / round_seconds))
    if rounds < kept:
        return None
    return FinalsPlan(
        [winner], rounds, noise.sd, round_seconds, count_samples(log, winner), kept=kept, pilot=noise.pilot, purse=look
    )


def pairs_to_prove(log: SearchLog, candidate: TrainConfig, look: RiskPurse | None = None) -> int:
    """Return how many pairs, kept ones included, prove with 80 % what the search saw of a candidate.

    Never fewer than the smallest number that can claim anything, nor than half as many again as are kept. What the
    kept ones showed plays no part: the share of a look holds for a number that does not depend on it.

    Args:
        log: of the search.
        candidate: to be proven.
        look: the search's purse; None for a first look.
    """
    return _plan_pairs(log, candidate, look or RiskPurse())[0]


def price_pair(log: SearchLog, candidate: TrainConfig | None, pairs: Sequence[Pair] = ()) -> float:
    """Return how long a pair of the finals takes, in seconds.

    Both measure all of their samples, where launches before ended as soon as they were precise enough.

    Args:
        log: of the search.
        candidate: of the pair, beside the user's settings; None for any that compiles nothing.
        pairs: that were run of it, which say so.
    """
    if pairs:
        return statistics.median(_find_seconds(log, pair) for pair in pairs)
    expected, own = log.prices.pair_seconds(candidate), list_timings(log, log.problem.baseline)
    launched = list_timings(log, candidate) if candidate is not None and own else []
    both = [(measured, one.reference or own[0][1]) for one, measured in launched]
    samples = count_samples(log, candidate) if both else 0
    most = SAMPLES_PATIENCE * find_measured_seconds(log)
    more = [math.fsum(min(samples / side.samples_per_second, most) - side.seconds for side in pair) for pair in both]
    return expected + max(0.0, statistics.median(more) if more else 0.0)


def _find_seconds(log: SearchLog, pair: Pair) -> float:
    """Return how long a pair took: in turns both started at a time."""
    sides = (pair.candidate.elapsed_seconds, pair.baseline.elapsed_seconds)
    return max(sides) if _are_in_turns(log, pair.candidate.spec.config or log.problem.baseline) else math.fsum(sides)


@dataclass(frozen=True)
class PairNoise:
    """What the noise of a pair is taken for before the first one.

    Attributes:
        sd: standard deviation of its log ratio, as the search has seen it.
        pilot: what of it counts as known.
        is_guess: it is planned as if nothing of it were known.
    """

    sd: float
    pilot: Pilot = NO_PILOT
    is_guess: bool = False

    @property
    def degrees(self) -> float:
        """Of freedom, that it is planned with."""
        return 0.0 if self.is_guess else self.pilot.degrees

    def share_of(self, share: float) -> float:
        """Return what a plan has of a share of the risk: half of it, where the pairs are judged with and without it."""
        return share / 2 if self.pilot.is_doubtful else share


def _plan_more_pairs(log: SearchLog, winner: TrainConfig, purse: RiskPurse) -> tuple[int, PairNoise]:
    """Return how many pairs claim most of what the search saw of a winner, and with which of the noises."""
    entry, fewest = log.ranking.find(winner), 2 * max(LEAST_ROUNDS, len(purse.pairs_of(winner)))
    gain = max(entry.speed if entry else 0.0, math.log(THRESHOLD))
    bar = Bar(math.exp(log.problem.policy.claimed_share * gain), CLAIM_RISK)
    return choose_noise(
        list_pair_noises(log, winner),
        lambda one: rounds_needed(
            one.sd,
            gain,
            fewest=fewest,
            most=max(fewest, MOST_ROUNDS),
            risk_share=one.share_of(max(LEAST_SHARE, purse.share_for(winner))),
            pilot_degrees=one.degrees,
            bars=(bar,),
        ),
    )


def _plan_pairs(log: SearchLog, candidate: TrainConfig, purse: RiskPurse) -> tuple[int, PairNoise]:
    """Return how many pairs prove a candidate, and with which of the noises that it may have: the one of fewest."""
    ranking, claim = log.ranking, find_claim(log.problem.objective)
    entry, kept = ranking.find(candidate), len(purse.pairs_of(candidate))
    # Shrinking pulls a small gain up where most others are large; the smaller figure asks for more rounds.
    gain = max(min(entry.score, ranking.shrunk_score(entry)) if entry else 0.0, math.log(THRESHOLD))
    share = max(LEAST_SHARE, purse.share_for(candidate))
    count = partial(rounds_needed, most=kept + MOST_ROUNDS)
    speed = ranking.estimate_speed(entry) if entry and claim.saving else gain
    rounds, noise = choose_noise(
        list_pair_noises(log, candidate),
        lambda one: count(
            one.sd,
            speed,
            fewest=kept + max(_find_fewest(one), kept // 2),
            bars=claim.speed,
            risk_share=one.share_of(share),
            pilot_degrees=one.degrees,
        ),
    )
    if claim.saving:
        fewest = kept + max(LEAST_ROUNDS, kept // 2)
        noise_of_memory = math.sqrt(2) * ranking.score_noise[0]
        needed = count(noise_of_memory, gain, fewest=fewest, bars=claim.saving, risk_share=share)
        rounds = max(rounds, needed)
    return rounds, noise


def _find_fewest(noise: PairNoise) -> int:
    """Return the fewest pairs that may be planned: enough to find out about a noise of which next to nothing is known.

    With two degrees of freedom the quantile of the second bar is 29 standard errors, with three 13, with four 8. Where
    what is known is doubtful, what the pairs themselves say is to have a chance as well.
    """
    return max(LEAST_ROUNDS + noise.pilot.is_doubtful, _LEAST_DEGREES + 1 - int(noise.degrees))


def choose_noise(noises: Sequence[PairNoise], count: Callable[[PairNoise], int]) -> tuple[int, PairNoise]:
    """Return the fewest pairs that prove something, and the noise they are planned with; of equals the first."""
    planned = [count(one) for one in noises]
    rounds = min(planned)
    return rounds, noises[planned.index(rounds)]


def list_pair_noises(log: SearchLog, candidate: TrainConfig) -> list[PairNoise]:
    """Return what the noise of a pair may be taken for, the safest first.

    Pairs in turns differ by less than launches one after the other; by how much less, only they themselves tell. So
    where nothing was timed in turns yet, what is known of launches alone is doubtful: they are judged with it and
    without it, and planned as the one of the two needs that needs fewer; of few degrees it is not counted.

    Args:
        log: of the search.
        candidate: of the pair, beside the user's settings.
    """
    ranking, policy = log.ranking, log.problem.policy
    in_turns = _are_in_turns(log, candidate)
    if in_turns and ranking.is_in_turns:
        return [PairNoise(ranking.noise[0], find_pilot(ranking, policy))]
    sd, pilot = math.sqrt(2) * ranking.machine_noise[0], find_pilot(ranking, policy, alone=True)
    if not in_turns:
        return [PairNoise(sd, pilot)]
    if pilot.degrees < _LEAST_DOUBTFUL:
        return [PairNoise(sd), PairNoise(policy.noise_in_turns * sd)]
    doubtful = dataclasses.replace(pilot, is_doubtful=True)
    return [PairNoise(sd, doubtful), PairNoise(policy.noise_in_turns * sd, doubtful, is_guess=True)]


def _are_in_turns(log: SearchLog, candidate: TrainConfig) -> bool:
    return log.takes_turns and fit_together(log, log.problem.baseline, candidate)


def find_pilot(ranking: Ranking, policy: SearchPolicy = USUAL_POLICY, *, alone: bool = False) -> Pilot:
    """Return what a search's repeats say of the noise of a pair; what it took for granted before is left out.

    Args:
        ranking: of the search's launches.
        policy: how much of what they say counts.
        alone: of two launches one after the other, whatever was timed in turns.
    """
    sd, degrees = ranking.machine_noise if alone else ranking.noise
    launches = 1 if ranking.is_in_turns and not alone else 2
    seen = degrees - PRIOR_DEGREES
    if seen <= 0.0:
        return NO_PILOT
    variance = max(0.0, sd * sd * degrees - PRIOR_SD * PRIOR_SD * PRIOR_DEGREES) / seen
    return Pilot(math.sqrt(launches * variance), min(policy.most_pilot_degrees, policy.pilot_share * seen))


def count_samples(log: SearchLog, candidate: TrainConfig | None = None) -> int:
    """Return how many samples a launch of the finals measures: as many as the search found enough for the baseline.

    Where its launches are to be longer than at first, as many as the baseline takes in that time. What makes the blocks
    of a candidate differ that is timed in turns makes those of the baseline differ as well, and is none of the pair's
    noise.

    Args:
        log: of the search.
        candidate: of the pairs, beside the user's settings; None for any.
    """
    in_turns = candidate is None or _are_in_turns(log, candidate)
    seconds = find_measured_seconds(log, None if in_turns else candidate)
    own = [one for _, one in list_timings(log, log.problem.baseline)]
    enough = statistics.median_high([one.samples for one in own])
    if seconds <= log.problem.state.measure_seconds:
        return enough
    return max(enough, math.ceil(seconds * statistics.median([one.samples_per_second for one in own])))
