"""Where the configs stand, from their launches so far. Pure.

    score of a launch   log(samples/s) - level of the baseline at that time
    level               mean of the baseline's launches ("anchors"), nearer ones weighing more: exp(-launches apart / 8)
    score of a config   mean over its launches, less what its compilation costs in the run that is planned
    shrunk score        towards the mean of all configs by how much of the spread is noise: the best of many is lucky

Two anchors in a row that differ by more than noise explains mean that the machine has changed in between: what was
launched there is shaky, and levels are not averaged across.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from autotune.measure.confidence import pooled_sd, shrink, spread_variance
from autotune.measure.student_t import student_t_quantile
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.trial import TrialResult
from autotune.search.objective import Judged

PRIOR_SD = 0.03
PRIOR_DEGREES = 2.0
"""What launches of one config are taken to differ by until it is seen, and how many launches that guess is worth."""

ANCHOR_SPACING = 8
"""Launches between two of the baseline, and the reach of each."""

_STEP_CONFIDENCE = 0.999
"""One-sided: so sure it must be that two anchors differ by more than luck."""


@dataclass(frozen=True)
class Entry:
    """One config.

    Attributes:
        config: the settings.
        launches: all of them, in order.
        scores: log speed-up over the baseline at that time, one per timed launch.
        hope: the highest of them, against the slower of the two levels where the machine changed.
        shaky: for each of them, that the machine changed around it.
        feasible: every launch was timed and held every constraint.
        score: mean of the scores that are not shaky, or of all; less the cost of compiling.
        shrunk: the same without the luck of having been chosen.
    """

    config: TrainConfig
    launches: tuple[Judged, ...]
    scores: tuple[float, ...]
    hope: float
    shaky: tuple[bool, ...]
    feasible: bool
    score: float
    shrunk: float = 0.0

    @property
    def key(self) -> str:
        """The settings as text."""
        return self.launches[0].key

    @property
    def sound_launches(self) -> int:
        """Launches that can be compared with the others."""
        return self.shaky.count(False)

    @property
    def sound_scores(self) -> list[float]:
        """Scores of these."""
        return [score for score, bad in zip(self.scores, self.shaky, strict=True) if not bad]


class Ranking:
    """The configs of a search by score.

    Args:
        judged: every launch of the search, in order.
        baseline: the user's own settings.
        probed: log samples per second of the probe's measurement, a launch of the baseline before all others.
        planned_samples: of the final training; None when its length is not known, and one-off costs do not count.
    """

    def __init__(
        self,
        judged: Sequence[Judged],
        baseline: TrainConfig,
        *,
        probed: float | None = None,
        planned_samples: float | None = None,
    ) -> None:
        self._judged = judged
        self._baseline, self._baseline_key = baseline, baseline.model_dump_json()
        self._probed = probed
        self._planned_samples = planned_samples
        self._anchors = [
            (place, one.score.value)
            for place, one in enumerate(judged)
            if one.score.value is not None and one.key == self._baseline_key
        ]
        self._places = [place for place, _ in self._anchors]
        self._steps = self._find_steps()
        self._jumps = self._find_jumps()

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every feasible config, the highest shrunk score first; the baseline is one of them."""
        plain = [one for one in self._all if one.feasible]
        variance = self.noise[0] ** 2
        level = variance / self.level_now()[1] if plain else 0.0
        noises = [level + variance / max(1, one.sound_launches) for one in plain]
        spread = spread_variance([one.score for one in plain], noises)
        middle = statistics.fmean(one.score for one in plain) if plain else 0.0
        found = []
        for one, noise in zip(plain, noises, strict=True):
            shrunk = shrink(one.score, towards=middle, noise_variance=noise, spread_variance=spread)
            # The baseline's score is zero by definition, whatever luck the others had.
            shrunk = 0.0 if one.key == self._baseline_key else shrunk
            found.append(dataclasses.replace(one, shrunk=shrunk))
        return tuple(sorted(found, key=lambda one: -one.shrunk))

    @cached_property
    def noise(self) -> tuple[float, float]:
        """Standard deviation of a launch's log throughput, and its degrees of freedom."""
        return self._pool(self._anchor_pairs())

    @cached_property
    def block_sd(self) -> float:
        """Standard deviation of the log pace of the blocks within a launch; 0 before there are any."""
        groups = []
        for one in self._judged[-4 * ANCHOR_SPACING :]:
            measurement = one.result.measurement
            if measurement is not None:
                groups.append([math.log(block.seconds / block.samples) for block in measurement.blocks])
        return pooled_sd(groups, prior_sd=0.0, prior_degrees=1e-9)[0]

    @property
    def jumps(self) -> int:
        """How many times the machine was seen to change."""
        return sum(self._jumps)

    @property
    def may_have_changed(self) -> bool:
        """The last anchor is far from the one before it: another one tells whether the machine has changed."""
        return bool(self._steps) and self._steps[-1]

    @property
    def anchor_values(self) -> tuple[float, ...]:
        """Log samples per second of each launch of the baseline in the search."""
        return tuple(value for _, value in self._anchors)

    def find(self, config: TrainConfig) -> Entry | None:
        """Return where a config stands; None when it was not tried or failed."""
        key = config.model_dump_json()
        return next((one for one in self.entries if one.key == key), None)

    @cached_property
    def incumbent(self) -> Entry | None:
        """The best that was launched at least twice, or the baseline; None before the baseline was launched."""
        settled = [one for one in self.entries if one.sound_launches >= 2 or one.key == self._baseline_key]
        return max(settled, key=lambda one: one.score, default=None)

    @cached_property
    def challenger(self) -> Entry | None:
        """The best that looks better than the incumbent and was not launched often enough to replace it."""
        bar = self.incumbent.score if self.incumbent else 0.0
        untried = [one for one in self.entries if one.sound_launches < 2 and one.key != self._baseline_key]
        return max((one for one in untried if one.score > bar), key=lambda one: one.score, default=None)

    def simplest_of_best(self) -> Entry | None:
        """Return the config with the fewest changes among those the noise cannot tell from the fastest."""
        if not self.entries:
            return None
        best = max(self.entries, key=lambda one: one.score)
        noise = self.noise[0] / math.sqrt(max(1, best.sound_launches))
        # The best of n equal readings is lucky by about sqrt(2 ln n) standard deviations; another may be unlucky.
        floor = best.score - noise * (1 + math.sqrt(2 * math.log(len(self.entries))))
        near = [one for one in self.entries if one.score >= floor]
        return min(near, key=lambda one: (len(changed_fields(one.config, self._baseline)), -one.score))

    def level(self, place: float) -> tuple[float, float]:
        """Return the baseline's log samples per second at a place in the search, and how many launches it is worth.

        Raises:
            ValueError: the baseline was never launched.
        """
        if not self._anchors:
            raise ValueError("the baseline was never launched")
        first, last = self._same_machine(place)
        weights = [math.exp(-abs(place - where) / ANCHOR_SPACING) for where, _ in self._anchors[first : last + 1]]
        values = [value for _, value in self._anchors[first : last + 1]]
        total = math.fsum(weights)
        mean = math.fsum(w * value for w, value in zip(weights, values, strict=True)) / total
        return mean, total**2 / math.fsum(w * w for w in weights)

    def level_now(self) -> tuple[float, float]:
        """Return the level for a launch to come.

        Raises:
            ValueError: the baseline was never launched.
        """
        return self.level(len(self._judged))

    def score_of(self, judged: Judged) -> float | None:
        """Return the score of one launch; None when it was not timed or there is nothing to compare it with."""
        if judged.score.value is None or not self._anchors:
            return None
        place = next(place for place, one in enumerate(self._judged) if one is judged)
        return judged.score.value - self.level(place)[0]

    @cached_property
    def _all(self) -> list[Entry]:
        launches: dict[str, list[tuple[int, Judged]]] = {}
        for place, one in enumerate(self._judged):
            launches.setdefault(one.key, []).append((place, one))
        entries = (self._enter(key, group) for key, group in launches.items()) if self._anchors else ()
        return [entry for entry in entries if entry is not None]

    def _enter(self, key: str, group: list[tuple[int, Judged]]) -> Entry | None:
        timed = [(place, one.score.value) for place, one in group if one.score.value is not None]
        if not timed:
            return None
        launches = tuple(one for _, one in group)
        scores = tuple(value - self.level(place)[0] for place, value in timed)
        shaky = tuple(self._is_shaky(place) for place, _ in timed)
        sound = [score for score, bad in zip(scores, shaky, strict=True) if not bad] or scores
        return Entry(
            config=launches[0].config,
            launches=launches,
            scores=scores,
            hope=max(value - self._lowest_level(place) for place, value in timed),
            shaky=shaky,
            feasible=all(one.score.feasible for one in launches),
            score=0.0 if key == self._baseline_key else statistics.fmean(sound) - self._compile_cost(launches),
        )

    def _compile_cost(self, launches: Sequence[Judged]) -> float:
        if self._planned_samples is None:
            return 0.0
        return compile_cost([one.result for one in launches], self._planned_samples)

    def _anchor_pairs(self) -> list[list[float]]:
        """Return each two anchors in a row, the probe before them, unless the machine has changed in between."""
        pairs = [[early, late] for (_, early), (_, late) in pairwise(self._anchors)]
        pairs = [pair for pair, jump in zip(pairs, self._jumps, strict=True) if not jump]
        return [[self._probed, self._anchors[0][1]], *pairs] if self._probed is not None and self._anchors else pairs

    def _pool(self, pairs: list[list[float]]) -> tuple[float, float]:
        return pooled_sd([*pairs, *self._repeats], prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)

    @cached_property
    def _repeats(self) -> list[list[float]]:
        """Return the scores of each config that was launched more than once, those that are not shaky."""
        sound = [one.sound_scores for one in self._all if one.key != self._baseline_key]
        return [scores for scores in sound if len(scores) > 1]

    def _find_steps(self) -> list[bool]:
        """Return for each two anchors in a row whether they differ by more than all smaller differences explain."""
        pairs = sorted(([early, late] for (_, early), (_, late) in pairwise(self._anchors)), key=_size)
        usual: list[list[float]] = []
        for pair in pairs:
            noise, degrees = pooled_sd(usual, prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)
            if _size(pair) > student_t_quantile(_STEP_CONFIDENCE, degrees) * math.sqrt(2) * noise:
                break
            usual.append(pair)
        largest = _size(usual[-1]) if usual else -1.0
        return [_size([early, late]) > largest for (_, early), (_, late) in pairwise(self._anchors)]

    def _find_jumps(self) -> list[bool]:
        """Return which steps stayed: the anchor after one is near its end. One that comes back was a launch's luck."""
        values = [value for _, value in self._anchors]
        jumps: list[bool] = []
        outlier = False
        for index, is_step in enumerate(self._steps):
            after = values[index + 2] if index + 2 < len(values) else None
            stays = after is not None and abs(after - values[index + 1]) < abs(after - values[index])
            jumps.append(is_step and stays and not outlier)
            outlier = is_step and after is not None and not stays
        return jumps

    def _is_shaky(self, place: int) -> bool:
        after = bisect_left(self._places, place)
        return 0 < after < len(self._places) and self._places[after] != place and self._jumps[after - 1]

    def _lowest_level(self, place: int) -> float:
        if not self._is_shaky(place):
            return self.level(place)[0]
        after = bisect_left(self._places, place)
        return min(value for _, value in self._anchors[after - 1 : after + 1])

    def _same_machine(self, place: float) -> tuple[int, int]:
        """Return the first and the last anchor between which the machine did not change, around a place."""
        after = min(bisect_left(self._places, place), len(self._places) - 1)
        first = last = after
        if after > 0 and place < self._places[after]:
            first = after - 1  # between two anchors: both count, also where they differ
        while first > 0 and not self._jumps[first - 1]:
            first -= 1
        while last < len(self._jumps) and not self._jumps[last]:
            last += 1
        return first, last


def _size(pair: Sequence[float]) -> float:
    return abs(pair[1] - pair[0])


def compile_cost(launches: Sequence[TrialResult], planned_samples: float) -> float:
    """Return by how much compiling lowers the log throughput of a run of some samples.

    log(1 + compile seconds · samples per second / samples); the first compilation counts, later ones are cached.
    """
    measurements = [one.measurement for one in launches if one.measurement is not None]
    seconds = max((one.compile_seconds for one in measurements), default=0.0)
    rate = statistics.fmean(one.samples_per_second for one in measurements) if measurements else 0.0
    return math.log1p(seconds * rate / planned_samples)
