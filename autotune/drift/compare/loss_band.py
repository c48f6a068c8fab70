"""Is the training loss where the baseline's was after as many samples? Curves in, a `LossBand` out; then a watch.

    d_sb = (block b of seed s - mean of block b) / mean of block b     seed_sd: of a seed's mean d, block_sd: around it
    alarm when  sum(d) - k · margin > racing_boundary(k, sd)           margin = allowed + t · seed_sd · sqrt(1 + 1/S)

A training differs from the mean of S seeds by a seed's own luck, all along; the margin forgives that. What is left is
the noise of its blocks, which the boundary forgives at every look together (Howard et al. 2021).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autotune.measure.confidence import standard_deviation, sum_of_squares
from autotune.measure.racing import racing_boundary
from autotune.measure.student_t import student_t_quantile
from autotune.records.quality import LossBand
from autotune.records.trial import LossCurve

BLOCKS = 16
"""Of a curve; each is then a few steps or more, and its mean about normal."""
FEWEST_SEEDS = 3
"""Two tell next to nothing about how much seeds differ."""
RISK = 0.005
"""Of a false alarm in a whole training: so much for the luck of its seed, and so much for the noise of its blocks."""

_FEWEST_BLOCKS = 4
_INFLATION, _MOST_INFLATIONS = 1.2, 40
_WHOLE = 0.9  # share of a block that must have been seen for its mean to count


@dataclass(frozen=True)
class Rise:
    """A training loss that is shown to be too high.

    Attributes:
        found: what was seen, part of a sentence.
        clean_step: optimizer steps up to which the training was clean, for all that is seen.
        begun_step: optimizer steps after which the loss was seen to rise.
    """

    found: str
    clean_step: int
    begun_step: int


def step_back(begun: int, shown: int) -> int:
    """Return up to which step a training was clean whose loss was seen to rise between two steps.

    A mistake is older than its loss is high: as long again as it took to show.
    """
    return max(0, 2 * begun - shown)


def calibrate_band(curves: Sequence[LossCurve]) -> LossBand | None:
    """Return where the baseline's loss went, from one curve of each seed.

    The noise is made as large as it takes for each seed to stay inside the band of all others: the blocks of a seed
    that is ahead are ahead together, which their spread alone does not show.

    Returns:
        None for fewer than 3 curves that are finite, for fewer than 4 steps, or for a loss that is not positive, of
        which nothing can be a share.
    """
    losses = [[loss for loss in curve.losses if loss is not None] for curve in curves]
    whole = [found for found, curve in zip(losses, curves, strict=True) if len(found) == len(curve.losses)]
    steps = min(map(len, whole), default=0)
    if len(whole) < FEWEST_SEEDS or steps < _FEWEST_BLOCKS:
        return None
    size = max(1, steps // BLOCKS)
    blocks = [[statistics.fmean(one[at : at + size]) for at in range(0, steps - size + 1, size)] for one in whole]
    means = [statistics.fmean(block) for block in zip(*blocks, strict=True)]
    if min(means) <= 0.0:
        return None
    deviations = [[loss / mean - 1.0 for loss, mean in zip(one, means, strict=True)] for one in blocks]
    degrees = (len(blocks) - 1) * (len(means) - 1)
    samples_per_step = min(curve.samples / len(curve.losses) for curve in curves if curve.losses)
    band = LossBand(
        samples_per_block=max(1, round(size * samples_per_step)),
        means=tuple(means),
        seed_sd=standard_deviation([statistics.fmean(one) for one in deviations]),
        block_sd=math.sqrt(math.fsum(map(sum_of_squares, deviations)) / degrees),
        seeds=len(blocks),
    )
    return _widen(band, blocks)


def _widen(band: LossBand, blocks: Sequence[Sequence[float]]) -> LossBand:
    for _ in range(_MOST_INFLATIONS):
        if not any(_leaves_band(band, blocks, seed) for seed in range(len(blocks))):
            break
        band = band.replace(block_sd=band.block_sd * _INFLATION)
    return band


def _leaves_band(band: LossBand, blocks: Sequence[Sequence[float]], seed: int) -> bool:
    others = [one for number, one in enumerate(blocks) if number != seed]
    means = tuple(statistics.fmean(block) for block in zip(*others, strict=True))
    watch = BandWatch(band.replace(means=means, seeds=max(2, band.seeds - 1)), allowed=0.0)
    return any(watch.judge(loss, step=0) is not None for loss in blocks[seed])


@dataclass
class BandWatch:
    """Holds a training's losses against the band, block by block, up to the last sample that it was calibrated for.

    Attributes:
        band: the baseline's.
        allowed: share by which the loss may be higher.
        block: the band's block that comes next; the other attributes are sums of it and of all before.
    """

    band: LossBand
    allowed: float
    block: int = 0
    excess: float = 0.0
    looks: int = 0
    least: float = 0.0
    clean_step: int = 0
    losses: list[float] = field(default_factory=list)
    seen_samples: float = 0.0

    @property
    def margin(self) -> float:
        """What all blocks together may be higher by, as a share."""
        luck = student_t_quantile(1.0 - RISK, self.band.seeds - 1) * self.band.seed_sd
        return self.allowed + luck * math.sqrt(1.0 + 1.0 / self.band.seeds)

    @property
    def is_over(self) -> bool:
        """The training is past the last sample of the band."""
        return self.block >= len(self.band.means)

    def record(self, losses: Sequence[float], *, step: int, samples: int, since: int) -> Rise | None:
        """Take the losses of the last steps.

        Args:
            losses: finite, one for each step.
            step: optimizer steps after the last of them.
            samples: trained on by then.
            since: samples trained on before the first of them.
        """
        each = (samples - since) / max(1, len(losses))
        for number, loss in enumerate(losses):
            if self.is_over:
                return None
            position = since + number * each
            if position >= (self.block + 1) * self.band.samples_per_block:
                rise = self._end_block(step=step - len(losses) + number)
                self.block = int(position // self.band.samples_per_block)
                if rise is not None:
                    return rise
            self.losses.append(loss)
            self.seen_samples += each
        return None

    def judge(self, loss: float, *, step: int) -> Rise | None:
        """Take the mean of the next block, which ends after a step."""
        band = self.band
        self.excess += loss / band.means[self.block] - 1.0 - self.margin
        self.looks += 1
        self.block += 1
        if self.excess <= self.least:
            self.least, self.clean_step = self.excess, step
        noise = band.block_sd * math.sqrt(1.0 + 1.0 / band.seeds)
        if self.excess <= racing_boundary(self.looks, noise, risk=RISK):
            return None
        higher = 100.0 * (self.excess / self.looks + self.margin)
        found = (
            f"the training loss is {higher:.2g} % above the baseline's over {self.looks} blocks of "
            f"{band.samples_per_block:,} samples (seeds differ by {100.0 * band.seed_sd:.2g} %)"
        )
        return Rise(found, step_back(self.clean_step, step), self.clean_step)

    def capture(self) -> dict[str, Any]:
        """Return the state as numbers and lists."""
        return {name: value for name, value in vars(self).items() if name not in ("band", "allowed")}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a captured state."""
        vars(self).update(state, losses=list(state["losses"]))

    def _end_block(self, *, step: int) -> Rise | None:
        is_whole = self.seen_samples >= _WHOLE * self.band.samples_per_block
        mean = statistics.fmean(self.losses) if self.losses else 0.0
        self.losses, self.seen_samples = [], 0.0
        if not is_whole:
            return None
        return self.judge(mean, step=step)
