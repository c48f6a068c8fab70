"""How many pairs prove a gain, and how often nothing is called faster: the finals alone, on drawn pairs.

    python benchmarks/pairs.py --searches 2000 --false 20000
    python benchmarks/pairs.py --searches 0 --history 20000
    python benchmarks/pairs.py --searches 0 --turns 20000

Every decision is that of `run_finals`; only the launches are drawn: normal, or with spikes in 15 % of them. The search
before them has seen the noise with some degrees of freedom, and shows it as it would: chi-square.
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autotune.measure.confidence import NO_PILOT, Pilot
from autotune.records.config import TrainConfig
from autotune.records.measurement import Block, Measurement, PeakMemory
from autotune.records.trial import Target, TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.finals.claim import FASTER, THRESHOLD
from autotune.search.finals.finalist import LEAST_ROUNDS, Figure, rounds_needed
from autotune.search.finals.plan import PairNoise, choose_noise
from autotune.search.finals.risk import SHARE_OF_A_LOOK
from autotune.search.finals.rounds import Terms, run_finals
from autotune.search.policy import USUAL_POLICY
from autotune.search.scores.baseline_level import PRIOR_DEGREES, PRIOR_SD

BASELINE = TrainConfig(micro_batch_size=32)
CANDIDATE = BASELINE.replace(num_workers=2)
DEGREES = (4, 8, 12)
"""Of freedom that a search has seen of the noise of a launch: two minutes, seven, twenty."""

_SPIKES, _SPIKE = 0.15, 0.5
_SPEC = TrialSpec(
    number=0,
    purpose="final",
    target=Target(spec="drawn", folder="/"),
    config=BASELINE,
    limits=TrialLimits(time_limit_seconds=60),
)


@dataclass(frozen=True)
class Case:
    """One cell.

    Attributes:
        launch_sd: between launches, of the log rate.
        speedup: the truth.
        pairs: in the only look.
        degrees: of the noise that the search has seen; 0 for none.
        spiky: 15 % of the launches are 1.65x slower.
        past_noise: of the launches that the pilot is of, as a share of today's.
    """

    launch_sd: float
    speedup: float
    pairs: int
    degrees: int
    spiky: bool = False
    past_noise: float = 1.0


def count_claims(case: Case, searches: int) -> int:
    """Return in how many searches the finals claimed something."""
    return sum(_claims(case, random.Random(seed)) for seed in range(searches))


def _claims(case: Case, rng: random.Random) -> bool:
    def draw() -> float:
        return rng.gauss(0.0, case.launch_sd) - _SPIKE * (case.spiky and rng.random() < _SPIKES)

    def launch(config: TrainConfig) -> TrialResult:
        rate = 1000.0 * math.exp(draw()) * (case.speedup if config == CANDIDATE else 1.0)
        return _make_result(config, rate)

    terms = Terms(share=SHARE_OF_A_LOOK, pilot=_see_noise(draw, case.degrees, case.past_noise))
    outcome = run_finals([CANDIDATE], BASELINE, launch, rounds=case.pairs, seed=rng.randrange(2**32), terms=terms)
    return outcome.winner is not None


def _see_noise(draw: Callable[[], float], degrees: int, scale: float) -> Pilot:
    """Return what pairs of launches of one setting say: a degree of freedom each, of which half count."""
    if not degrees:
        return NO_PILOT
    squares = sum((draw() - draw()) ** 2 for _ in range(degrees))
    return Pilot(scale * math.sqrt(squares / degrees), min(6.0, degrees / 2))


def _claims_in_turns(case: Case, turns: float, rng: random.Random, *, is_chosen: bool) -> bool:
    """Return whether pairs in turns claim something, planned by a search whose launches were alone.

    Args:
        case: its pairs are the most there is time for; the search saw the gain as the best of eight such launches.
        turns: noise of a pair in turns, as a share of one of two launches in a row.
        rng: draws.
        is_chosen: the noise is chosen as it is now, with what is known of launches alone and without it; it was taken
            for the unknown one always.
    """
    seen = _see_noise(lambda: rng.gauss(0.0, case.launch_sd), case.degrees, 1.0)
    squares = case.degrees * seen.sd**2 / 2 + PRIOR_DEGREES * PRIOR_SD**2
    sd, doubtful = math.sqrt(2 * squares / (case.degrees + PRIOR_DEGREES)), replace(seen, is_doubtful=True)
    unknown = PairNoise(USUAL_POLICY.noise_in_turns * sd)
    either = [PairNoise(sd, doubtful), replace(unknown, pilot=doubtful, is_guess=True)]
    gain = math.log(case.speedup)
    read = max(math.log(THRESHOLD), gain + max(rng.gauss(0.0, case.launch_sd) for _ in range(8)))

    def count(noise: PairNoise) -> int:
        share, fewest = noise.share_of(SHARE_OF_A_LOOK), LEAST_ROUNDS + noise.pilot.is_doubtful
        return rounds_needed(noise.sd, read, fewest=fewest, most=60, risk_share=share, pilot_degrees=noise.degrees)

    rounds, noise = choose_noise(either if is_chosen else [unknown], count)
    pair_sd = turns * math.sqrt(2) * case.launch_sd
    logs = [rng.gauss(gain, pair_sd) for _ in range(min(rounds, case.pairs))]
    return Figure(logs, FASTER.speed, noise.pilot).is_shown(SHARE_OF_A_LOOK)


def _print_turns(searches: int) -> None:
    print("pairs in turns after launches alone, 5 at most: share that claim; before: their noise is never known")
    print("launch sd  degrees   noise in turns   nothing: before   now   1.3x: before   now   1.8x: before   now")
    for launch_sd, degrees, turns in itertools.product((0.03, 0.10), (1, 3, 6), (0.25, 0.5, 1.0)):
        row = f"{launch_sd:>8.0%}{degrees:>9}{turns:>17.2f}"
        for speedup, many in ((1.0, searches), (1.3, searches // 40), (1.8, searches // 40)):
            case = Case(launch_sd, speedup, 5, degrees)
            for is_chosen in (False, True):
                claims = sum(
                    _claims_in_turns(case, turns, random.Random(seed), is_chosen=is_chosen) for seed in range(many)
                )
                row += f"{claims / many:>13.3%}" if speedup == 1.0 else f"{claims / many:>10.2f}"
        print(row, flush=True)


def _make_result(config: TrainConfig, rate: float) -> TrialResult:
    measurement = Measurement(
        blocks=(Block(optimizer_steps=1, samples=1000, seconds=1000.0 / rate),),
        step_seconds=(),
        data_wait_seconds=0.0,
        steady=True,
        warmup_steps=1,
        warmup_seconds=0.0,
        compile_seconds=0.0,
        peak_memory=PeakMemory(host_bytes=1),
    )
    spec = _SPEC.replace(config=config)
    return TrialResult(spec=spec, status=TrialStatus.COMPLETED, elapsed_seconds=1.0, measurement=measurement)


def _print_power(searches: int) -> None:
    print("power: share of searches that claim a true gain, by degrees of the noise seen before")
    print("launch sd   true  pairs" + "".join(f"{degrees:>8}" for degrees in (0, *DEGREES)))
    cells: Sequence[tuple[float, float, Sequence[int]]] = (
        (0.05, 1.2, (3, 4, 5, 6, 8, 9)),
        (0.10, 1.2, (8, 12, 16)),
        (0.05, 2.0, (3, 4)),
        (0.10, 2.0, (3, 4, 5)),
    )
    for launch_sd, speedup, numbers in cells:
        for pairs in numbers:
            found = [
                count_claims(Case(launch_sd, speedup, pairs, degrees), searches) / searches for degrees in (0, *DEGREES)
            ]
            print(f"{launch_sd:>8.0%}{speedup:>8.2f}x{pairs:>6}" + "".join(f"{share:>8.2f}" for share in found))


def _print_false(searches: int) -> None:
    print("false claims: nothing is faster, share of searches that claim")
    print("launch sd  noise   pairs" + "".join(f"{degrees:>9}" for degrees in DEGREES))
    for launch_sd, spiky in ((0.01, True), (0.05, False), (0.10, False), (0.10, True)):
        for pairs in (3, 5, 9):
            found = [
                count_claims(Case(launch_sd, 1.0, pairs, degrees, spiky), searches) / searches for degrees in DEGREES
            ]
            noise = "spiky" if spiky else "normal"
            print(f"{launch_sd:>8.0%}  {noise:>7}{pairs:>7}" + "".join(f"{share:>9.3%}" for share in found), flush=True)


def _print_history(searches: int) -> None:
    print("false claims if the noise of earlier searches (6 degrees) were the pilot, by its share of today's noise")
    shares, numbers = (1.0, 0.8, 0.6, 0.5, 0.3), (3, 4, 5)
    print("noise   pairs" + "".join(f"{share:>9.1f}" for share in shares))
    for spiky in (False, True):
        for pairs in numbers:
            cases = [Case(0.05, 1.0, pairs, 12, spiky, past_noise=share) for share in shares]
            found = [count_claims(case, searches) / searches for case in cases]
            noise = "spiky" if spiky else "normal"
            print(f"{noise:>6}{pairs:>7}" + "".join(f"{share:>9.3%}" for share in found), flush=True)


def main() -> None:
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--searches", type=int, default=1000, help="a cell of the power table; 0 for none")
    parser.add_argument("--false", type=int, default=0, help="a cell of the table of false claims; 0 for none")
    parser.add_argument("--history", type=int, default=0, help="a cell of false claims by a past noise; 0 for none")
    parser.add_argument("--turns", type=int, default=0, help="a cell of pairs in turns; 0 for none")
    asked = parser.parse_args()
    if asked.searches:
        _print_power(asked.searches)
    if asked.false:
        _print_false(asked.false)
    if asked.history:
        _print_history(asked.history)
    if asked.turns:
        _print_turns(asked.turns)


if __name__ == "__main__":
    main()
