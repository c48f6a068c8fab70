"""Simulated and recorded machines: how much launches and blocks of one and the same training differ.

A launch is a stream of log paces, one per block: 0.0 is the true time of a sample, 0.1 is 10 % slower.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from autotune.records.trial import TrialResult

Machine = Callable[[random.Random], Callable[[], Iterator[float]]]
"""From a random stream to a starter of launches: one search on one machine, whose state lives as long."""

_LEAST_RECORDED = 20
_LEAST_BLOCKS = 3


@dataclass(frozen=True)
class Noise:
    """A simulated machine; every figure is the standard deviation of a logarithm unless it says otherwise.

    Attributes:
        launch: between launches.
        block: between the blocks of a launch.
        drift: step of the machine's speed from launch to launch, a random walk.
        slow_launches: share of the launches that come out slower by `slowdown`.
        slowdown: log factor of these.
        spikes: share of the blocks that take `spike` longer.
        spike: log factor of these.
    """

    launch: float
    block: float
    drift: float = 0.0
    slow_launches: float = 0.0
    slowdown: float = 0.0
    spikes: float = 0.0
    spike: float = 0.0

    def __call__(self, rng: random.Random) -> Callable[[], Iterator[float]]:
        """Begin a search: return what starts its launches."""
        walk = 0.0

        def start() -> Iterator[float]:
            nonlocal walk
            walk += rng.gauss(0.0, self.drift)
            slow = self.slowdown if rng.random() < self.slow_launches else 0.0
            offset = walk + slow + rng.gauss(0.0, self.launch)
            return self._run(rng, offset)

        return start

    def _run(self, rng: random.Random, offset: float) -> Iterator[float]:
        while True:
            spike = self.spike if rng.random() < self.spikes else 0.0
            yield offset + spike + rng.gauss(0.0, self.block)


MACHINES: dict[str, Noise] = {
    "quiet": Noise(launch=0.01, block=0.01),
    "spiky": Noise(launch=0.01, block=0.01, spikes=0.03, spike=0.7),
    "drifting": Noise(launch=0.02, block=0.02, drift=0.02),
    "noisy": Noise(launch=0.05, block=0.03),
    "loaded": Noise(launch=0.10, block=0.08, slow_launches=0.15, slowdown=0.5),
}
"""From a machine of one's own to a shared one under load, where launches of one setting differ by up to 2x."""


class Recorded:
    """Launches of one and the same training as a real machine ran them, in the order in which it ran them.

    A search begins at a random one and goes on with its successors, the first following the last. Neighbours are
    alike, by what else the machine did then: that is what pairs take out, and drawing them apart would put it back.

    Args:
        launches: log seconds per sample of the blocks of each launch, in the order they ran.

    Raises:
        ValueError: fewer than 20 launches of at least 3 blocks.
    """

    def __init__(self, launches: Iterable[Sequence[float]]) -> None:
        usable = [list(blocks) for blocks in launches if len(blocks) >= _LEAST_BLOCKS]
        if len(usable) < _LEAST_RECORDED:
            raise ValueError(f"{len(usable)} launches of {_LEAST_BLOCKS} blocks are too few: give {_LEAST_RECORDED}")
        middle = statistics.median(statistics.fmean(blocks) for blocks in usable)
        self._launches = [[pace - middle for pace in blocks] for blocks in usable]

    def __call__(self, rng: random.Random) -> Callable[[], Iterator[float]]:
        """Begin a search: return what starts its launches."""
        places = count(rng.randrange(len(self._launches)))

        def start() -> Iterator[float]:
            blocks = self._launches[next(places) % len(self._launches)]
            first = rng.randrange(len(blocks))
            return (blocks[(first + step) % len(blocks)] for step in count())

        return start


def read_paces(results: Iterable[TrialResult]) -> list[list[float]]:
    """Return the log seconds per sample of the blocks of each timed launch that was not ended early."""
    return [
        [math.log(block.seconds / block.samples) for block in result.measurement.blocks]
        for result in results
        if result.measurement is not None and result.measurement.ended_by != "racing"
    ]
