"""How long a sampler thinks before a proposal, by the trials that it knows.

    python benchmarks/proposals.py                                 after 10, 100 and 1000 trials, ours and Optuna's
    python benchmarks/proposals.py --samplers ours tpe --trials 10 100 1000

The space is a large one: eight knobs, 20,736 configs. Trials read what their changes bring together, with noise of 3 %.
Median of five proposals in milliseconds: only to be compared with the others of the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution

from autotune.search.explore.additive import NOTHING_KNOWN
from autotune.search.explore.sampler import LogAdditiveSampler

NOISE = 0.03
PROPOSALS = 5
VALUES = {
    **dict.fromkeys(("workers", "threads", "precision", "allocator"), 4),
    **dict.fromkeys(("batch", "attention", "optimizer", "checkpointing"), 3),
}
SPACE: dict[str, BaseDistribution] = {name: CategoricalDistribution(range(most)) for name, most in VALUES.items()}
BASELINE = dict.fromkeys(SPACE, 0)

SAMPLERS: dict[str, Callable[[], optuna.samplers.BaseSampler]] = {
    "ours": lambda: LogAdditiveSampler(SPACE, BASELINE, prior=NOTHING_KNOWN),
    "tpe": lambda: optuna.samplers.TPESampler(multivariate=True, seed=0),
    "gp": lambda: optuna.samplers.GPSampler(seed=0),
    "random": lambda: optuna.samplers.RandomSampler(seed=0),
}


def main() -> None:
    """Read the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", nargs="*", choices=SAMPLERS, default=[*SAMPLERS])
    parser.add_argument("--trials", type=int, nargs="*", default=[10, 100, 1000])
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{'sampler':<10}" + "".join(f"{count:>10} trials" for count in arguments.trials))
    for name in arguments.samplers:
        print(f"{name:<10}", end="")
        for count in arguments.trials:
            print(f"{1e3 * time_proposal(SAMPLERS[name](), count):>14.0f} ms", end="", flush=True)
        print()


def time_proposal(sampler: optuna.samplers.BaseSampler, known: int) -> float:
    """Return the median seconds of a proposal with so many trials known."""
    rng = random.Random(0)
    gains = {(name, value): rng.gauss(0.0, 0.1) for name, most in VALUES.items() for value in range(1, most)}

    def read(params: dict[str, int]) -> float:
        return sum(gains.get(change, 0.0) for change in params.items()) + rng.gauss(0.0, NOISE)

    study = optuna.create_study(direction="maximize", sampler=sampler)
    others = ({name: rng.randrange(most) for name, most in VALUES.items()} for _ in range(known - 1))
    study.add_trials(
        [optuna.create_trial(params=one, distributions=SPACE, value=read(one)) for one in (BASELINE, *others)]
    )
    study.tell(study.ask(SPACE), 0.0)  # the first reads what is known
    seconds = []
    for _ in range(PROPOSALS):
        began = time.perf_counter()
        trial = study.ask(SPACE)
        seconds.append(time.perf_counter() - began)
        study.tell(trial, read(trial.params))
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
