"""Where the configs stand, from their launches so far. Pure.

speed of a launch   log(samples/s) - level of the baseline at that time
level               mean of the baseline's launches ("anchors"), nearer ones weighing more: exp(-launches apart / 8)
speed of a config   mean over its launches, less what its compilation costs in the run that is planned
score               what the search makes best: the speed, or the log of the memory saved by what is not slower
shrunk score        towards the mean of all configs by how much of the spread is noise: the best of many is lucky
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from autotune.measure.confidence import pooled_sd, quiet_sd, shrink, spread_variance
from autotune.measure.student_t import student_t_quantile
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.measurement import DISTURBED_SHARE
from autotune.records.trial import TrialResult, TrialStatus
from autotune.search.scores.baseline_level import ANCHOR_SPACING, PRIOR_DEGREES, PRIOR_SD, BaselineLevel
from autotune.search.scores.objective import Judged
from autotune.space import find_code, needs_compilation

_SETTLED_CONFIDENCE = 0.995
_MEDIAN_SQUARE = 0.455
"""Of a standard normal variable."""
_LEAST_TOLD = 6
"""Estimates that say by how much they are off."""

PEAK_SD = 0.01
"""Of the log peak of a launch, until it is seen: usual on a host; on a GPU it is next to nothing."""


@dataclass(frozen=True)
class Entry:
    """One config.

    Attributes:
        config: the settings.
        launches: all of them, in order.
        speeds: log speed-up over the baseline at that time, one per timed launch.
        upper_score: the highest that its score may be, against the slower of two levels where the machine changed.
        across_change: for each of them, that the machine changed around it.
        feasible: every launch was timed and held every constraint.
        speed: mean of those that are valid, or of all; less the cost of compiling.
        score: log of what it gains by the objective.
        changes: knobs that are not the baseline's.
    """

    config: TrainConfig
    launches: tuple[Judged, ...]
    speeds: tuple[float, ...]
    upper_score: float
    across_change: tuple[bool, ...]
    feasible: bool
    speed: float
    score: float
    changes: int

    @property
    def key(self) -> str:
        """The settings as text."""
        return self.launches[0].key

    @property
    def valid_launches(self) -> int:
        """Launches that can be compared with the others."""
        return self.across_change.count(False)

    @property
    def valid_speeds(self) -> list[float]:
        """Speeds of these."""
        return [speed for speed, bad in zip(self.speeds, self.across_change, strict=True) if not bad]

    @property
    def peaks(self) -> list[int]:
        """Peak memory of each timed launch, in bytes."""
        return _list_peaks(self.launches)


class Ranking:
    """The configs of a search by score.

    Args:
        judged: every launch of the search, in order.
        baseline: the user's own settings.
        planned_samples: that bear what is paid once; None where one-off costs do not count.
        is_refused: the drift gate has refused a change that a config makes.
        estimates: log speed-up of configs by key, by all launches together; without one, their own count.
        least_change_gain: that each change of the leader has to be worth.
        least_speed: log speed-up that whatever saves memory has to keep; None where the speed is what is made best.
        before: of the same search when it had fewer launches: what these have not moved is taken from there.

    Attributes:
        baseline_level: the baseline's launches among them.
    """

    def __init__(
        self,
        judged: Sequence[Judged],
        baseline: TrainConfig,
        *,
        planned_samples: float | None = None,
        is_refused: Callable[[TrainConfig], bool] = lambda _config: False,
        estimates: Mapping[str, float] = MappingProxyType({}),
        least_change_gain: float = 0.01,
        least_speed: float | None = None,
        before: Ranking | None = None,
    ) -> None:
        self._estimates, self._least_change_gain = estimates, least_change_gain
        self._judged, self._is_refused, self._before = judged, is_refused, before
        self._baseline, self._baseline_key = baseline, baseline.key
        self._planned_samples = planned_samples
        self._least_speed = least_speed
        launched = [(place, one) for place, one in enumerate(judged) if one.key == self._baseline_key]
        quiet = [(place, one) for place, one in launched if not is_disturbed(one.result)]
        # What others took from one launch says nothing of the machine at another, unless they never leave it alone.
        anchors = [(place, one.score.value) for place, one in quiet or launched]
        anchors += [(place, one.reference) for place, one in enumerate(judged) if one.key != self._baseline_key]
        self.baseline_level = BaselineLevel(
            sorted((place, value) for place, value in anchors if value is not None), len(judged)
        )

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Every config that may win, the highest shrunk score first; the baseline is one of them."""
        scores = self._shrunk_scores
        able = (one for one in self.measured if self.keeps_up(one))
        return tuple(sorted(able, key=lambda one: -scores[one.key]))

    def estimate_speed(self, entry: Entry) -> float:
        """Return the log speed-up of an entry by all launches together, as far as a model has it, else by its own."""
        return 0.0 if entry.key == self._baseline_key else self._believed.get(entry.key, entry.speed)

    def keeps_up(self, entry: Entry) -> bool:
        """Return whether an entry is fast enough to win by what it saves; always, where speed is what counts."""
        return self._least_speed is None or self.estimate_speed(entry) >= self._least_speed

    def shrunk_score(self, entry: Entry) -> float:
        """Return the score of an entry without the luck of having been chosen."""
        return self._shrunk_scores[entry.key]

    @cached_property
    def measured(self) -> list[Entry]:
        """Every config that was timed, held every constraint and is not refused, those that are too slow among them."""
        return [
            one for one in self._all.values() if one is not None and one.feasible and not self._is_refused(one.config)
        ]

    @cached_property
    def _shrunk_scores(self) -> dict[str, float]:
        plain = self.measured
        if not plain:
            return {}
        variance = self.score_noise[0] ** 2
        level = 0.0 if self.is_in_turns else variance / self.baseline_level.level_now()[1]
        noises = [level + variance / max(1, one.valid_launches) for one in plain]
        spread = spread_variance([one.score for one in plain], noises)
        middle = statistics.fmean(one.score for one in plain)
        found = {
            one.key: shrink(one.score, towards=middle, noise_variance=noise, spread_variance=spread)
            for one, noise in zip(plain, noises, strict=True)
        }
        # The baseline's score is zero by definition, whatever luck the others had.
        return found | ({self._baseline_key: 0.0} if self._baseline_key in found else {})

    @cached_property
    def noise(self) -> tuple[float, float]:
        """Standard deviation of a speed, and its degrees of freedom.

        Of a launch's log throughput; of a pair's log ratio where launches are timed in turns with the baseline.
        """
        if self.is_in_turns:
            return quiet_sd(self._repeats, prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)
        return pooled_sd(
            [*self.baseline_level.quiet_pairs(), *self._repeats], prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES
        )

    @cached_property
    def is_in_turns(self) -> bool:
        """Most launches that are not the baseline's were timed in turns with it."""
        others = [one.result.reference is not None for one in self._judged if one.key != self._baseline_key]
        return 2 * sum(others) > len(others)

    @cached_property
    def machine_noise(self) -> tuple[float, float]:
        """Standard deviation of the log throughput of a launch that is alone, and its degrees of freedom."""
        if not self.is_in_turns:
            return self.noise
        return pooled_sd(self.baseline_level.quiet_pairs(), prior_sd=PRIOR_SD, prior_degrees=PRIOR_DEGREES)

    @cached_property
    def score_noise(self) -> tuple[float, float]:
        """The same of what is made best."""
        if self._least_speed is None:
            return self.noise
        repeats = (one.peaks for one in self._all.values() if one is not None)
        logs = [[math.log(peak) for peak in peaks] for peaks in repeats]
        return pooled_sd(logs, prior_sd=PEAK_SD, prior_degrees=PRIOR_DEGREES)

    @property
    def rival(self) -> tuple[float, float]:
        """Log speed-up that a launch has to keep up with, and by how many launches that is known; 0: by definition."""
        incumbent = self.incumbent
        if self._least_speed is not None or incumbent is None:
            return self._least_speed or 0.0, 0.0
        launches = 0.0 if incumbent.key == self._baseline_key else max(1, incumbent.valid_launches)
        return max(0.0, self.shrunk_score(incumbent)), launches

    @cached_property
    def block_sd(self) -> float:
        """Standard deviation of the log pace of the blocks within a launch; 0 before there are any."""
        groups = []
        for one in self._judged[-4 * ANCHOR_SPACING :]:
            measurement = one.result.measurement
            if measurement is not None:
                groups.append([math.log(block.seconds / block.samples) for block in measurement.blocks])
        return pooled_sd(groups, prior_sd=0.0, prior_degrees=1e-9)[0]

    def find(self, config: TrainConfig) -> Entry | None:
        """Return where a config stands; None when it was not tried or failed."""
        key = config.key
        return next((one for one in self.measured if one.key == key), None)

    @cached_property
    def incumbent(self) -> Entry | None:
        """The best that was launched at least twice, or the baseline; None before the baseline was launched.

        One launch is enough for a lead that the luck of two launches explains in less than 0.5 %.
        """
        repeated = [one for one in self.entries if one.valid_launches >= 2 or one.key == self._baseline_key]
        best = max(repeated, key=lambda one: one.score, default=None)
        once = max((one for one in self.entries if one.valid_launches == 1), key=lambda one: one.score, default=None)
        if best is not None and once is not None and once.score - best.score > self._luck:
            return once
        return best

    @cached_property
    def contender(self) -> Entry | None:
        """The best that looks better than the incumbent and was not launched often enough to replace it."""
        incumbent = self.incumbent
        bar = incumbent.score if incumbent else 0.0
        untried = [one for one in self.entries if one.valid_launches < 2 and one.key != self._baseline_key]
        return max((one for one in untried if one.score > bar), key=lambda one: one.score, default=None)

    @cached_property
    def _luck(self) -> float:
        """What one launch may lead another of the same config by, at 99.5 %, one-sided."""
        sd, degrees = self.score_noise
        return student_t_quantile(_SETTLED_CONFIDENCE, degrees) * math.sqrt(2) * sd

    def has_rivals(self) -> bool:
        """Return whether the noise cannot tell the best from another: only then do repeats change the answer."""
        scores = sorted((one.score for one in self.entries), reverse=True)
        return len(scores) > 1 and scores[0] - scores[1] < 2 * math.sqrt(2) * self.score_noise[0]

    @cached_property
    def leader(self) -> Entry | None:
        """The config that is taken for the best by all launches, less what its changes have to be worth.

        One launch is lucky or not; what others say of its changes is known too, where a model of them says so.
        """
        return max(self.entries, key=self._worth, default=None)

    def may_be_better(self, one: Entry) -> bool:
        """Return whether a config was launched less often than the leader, and may be ahead of it for all that."""
        leader = self.leader
        if leader is None or one.valid_launches >= leader.valid_launches:
            return False
        luck = self.score_noise[0] * math.sqrt(1 / max(1, one.valid_launches) + 1 / leader.valid_launches)
        return self._worth(leader) - self._worth(one) < luck

    @cached_property
    def _believed(self) -> dict[str, float]:
        """The estimates, moved towards each config's own launches by how much of their distance is no noise.

        Where changes do not add up, no sum of them is near what was read. The median tells: of an outlier it is free.
        """
        known = [(one, self._estimates[one.key]) for one in self.measured if one.key in self._estimates]
        if len(known) < _LEAST_TOLD:
            return dict(self._estimates)
        variance = self.noise[0] ** 2
        seen = statistics.median((one.speed - told) ** 2 for one, told in known) / _MEDIAN_SQUARE
        excess = max(0.0, seen - variance)
        return {
            one.key: told + (one.speed - told) * excess / (excess + variance / max(1, one.valid_launches))
            for one, told in known
        }

    def _worth(self, one: Entry) -> float:
        if one.key == self._baseline_key:
            return 0.0
        shrunk = self._shrunk_scores[one.key]
        estimate = shrunk if self._least_speed is not None else self._believed.get(one.key, shrunk)
        return estimate - self._least_change_gain * one.changes

    @cached_property
    def near_best(self) -> list[Entry]:
        """The configs that the noise cannot tell from the best, that one among them."""
        if not self.entries:
            return []
        best = max(self.entries, key=lambda one: one.score)
        noise = self.score_noise[0] / math.sqrt(max(1, best.valid_launches))
        # The best of n equal readings is lucky by about sqrt(2 ln n) standard deviations; another may be unlucky.
        floor = best.score - noise * (1 + math.sqrt(2 * math.log(len(self.entries))))
        return [one for one in self.entries if one.score >= floor]

    def score_of(self, judged: Judged) -> float | None:
        """Return the score of one launch; None when it was not timed or there is nothing to compare it with."""
        speed, measurement = self.speed_of(judged), judged.result.measurement
        if self._least_speed is None or speed is None:
            return speed
        return None if measurement is None else self._save([measurement.peak_memory.used_bytes])

    def speed_of(self, judged: Judged) -> float | None:
        """Return the log speed-up of one launch; None when it was not timed or there is nothing to compare it with."""
        if judged.score.value is None or not self.baseline_level:
            return None
        place = next(place for place in reversed(range(len(self._judged))) if self._judged[place] is judged)
        cost = 0.0 if judged.key == self._baseline_key else self._extra_cost([judged])
        level = self.baseline_level.level(place)[0] if judged.reference is None else judged.reference
        return judged.score.value - level - cost

    @cached_property
    def _all(self) -> dict[str, Entry | None]:
        """Every config that was launched by its key; None for one that was not timed."""
        before, self._before = self._before, None
        known = 0 if before is None else len(before._judged)
        if before is None or any(self._moves_levels(one) for one in self._judged[known:]):
            before, known = None, 0  # the levels have moved
        if not self.baseline_level:
            return {}
        moved: dict[str, list[tuple[int, Judged]]] = {one.key: [] for one in self._list_moved(self._judged[known:])}
        for place, one in enumerate(self._judged):
            if one.key in moved:
                moved[one.key].append((place, one))
        entries = {} if before is None else before._all
        return entries | {key: self._enter(key, group) for key, group in moved.items()}

    def _list_moved(self, new: Sequence[Judged]) -> Sequence[Judged]:
        """Return launches of all configs that new ones say something of."""
        if self._planned_samples is None:
            return new
        codes = {find_code(one.config) for one in new}
        return [one for one in self._judged if find_code(one.config) in codes]

    def _moves_levels(self, one: Judged) -> bool:
        is_charged = self._planned_samples is not None and needs_compilation(self._baseline)
        is_alike = is_charged and find_code(one.config) == find_code(self._baseline)
        return one.key == self._baseline_key or one.reference is not None or is_alike

    def _enter(self, key: str, group: list[tuple[int, Judged]]) -> Entry | None:
        measured = [(place, one) for place, one in group if one.score.status is not TrialStatus.TOO_SLOW]
        timed = [(place, one.score.value, one.reference) for place, one in measured if one.score.value is not None]
        if not timed:
            return None
        launches, level = tuple(one for _, one in group), self.baseline_level
        speeds = tuple(value - (level.level(place)[0] if own is None else own) for place, value, own in timed)
        across_change = tuple(own is None and level.is_across_change(place) for place, _, own in timed)
        valid = [speed for speed, bad in zip(speeds, across_change, strict=True) if not bad]
        # Where every launch was made around a change, nothing may lead for it: the faster level is the one to beat.
        valid = valid or [value - level.highest_level(place) for place, value, _ in timed]
        speed = 0.0 if key == self._baseline_key else statistics.fmean(valid) - self._extra_cost(launches)
        upper = max(value - (level.lowest_level(place) if own is None else own) for place, value, own in timed)
        saved = self._save(_list_peaks(launches)) if self._least_speed is not None else None
        return Entry(
            config=launches[0].config,
            launches=launches,
            speeds=speeds,
            upper_score=upper if saved is None else saved,
            across_change=across_change,
            feasible=all(one.score.feasible for one in launches),
            speed=speed,
            score=speed if saved is None else saved,
            changes=len(changed_fields(launches[0].config, self._baseline)),
        )

    def _save(self, peaks: Sequence[int]) -> float:
        """Return the log of the baseline's largest peak over that of some launches."""
        return math.log(self._baseline_peak / max(peaks))

    @cached_property
    def _baseline_peak(self) -> int:
        return max(_list_peaks([one for one in self._judged if one.key == self._baseline_key]))

    def _extra_cost(self, launches: Sequence[Judged]) -> float:
        """Return what compiling costs beyond what it costs the baseline."""
        if self._planned_samples is None:
            return 0.0
        longest = self._compiled.get(find_code(launches[0].config), 0.0)
        return compile_cost([one.result for one in launches], longest, self._planned_samples) - self._baseline_cost

    @cached_property
    def _baseline_cost(self) -> float:
        launches = [one.result for one in self._judged if one.key == self._baseline_key]
        longest = self._compiled.get(find_code(self._baseline), 0.0)
        return 0.0 if self._planned_samples is None else compile_cost(launches, longest, self._planned_samples)

    @cached_property
    def _compiled(self) -> dict[tuple[str, ...], float]:
        """Seconds of the longest compilation of each code, whichever config was the first to need it."""
        longest: dict[tuple[str, ...], float] = {}
        for one in self._judged:
            if needs_compilation(one.config):
                code = find_code(one.config)
                longest[code] = max(longest.get(code, 0.0), find_compile_seconds([one.result]))
        return longest

    @cached_property
    def _repeats(self) -> list[list[float]]:
        """Return the speeds of each config that was launched more than once, those that are valid."""
        valid = [one.valid_speeds for one in self._all.values() if one is not None and one.key != self._baseline_key]
        return [speeds for speeds in valid if len(speeds) > 1]


def _list_peaks(launches: Sequence[Judged]) -> list[int]:
    measured = (one.result.measurement for one in launches)
    return [one.peak_memory.used_bytes for one in measured if one is not None]


def is_disturbed(result: TrialResult) -> bool:
    """Return whether others had a large part of the CPUs during a launch: on average over its blocks."""
    return result.measurement is not None and result.measurement.taken_fraction > DISTURBED_SHARE


def compile_cost(launches: Sequence[TrialResult], longest: float, planned_samples: float) -> float:
    """Return by how much compiling lowers the log throughput of a run of some samples.

    log(1 + compile seconds · samples per second / samples)

    Args:
        launches: of the config.
        longest: compilation in seconds, of any config that runs the same code: the others have found it cached.
        planned_samples: of the run.
    """
    measurements = [one.measurement for one in launches if one.measurement is not None]
    seconds = max(longest, find_compile_seconds(launches))
    rate = statistics.fmean(one.samples_per_second for one in measurements) if measurements else 0.0
    return math.log1p(seconds * rate / planned_samples)


def list_alike(config: TrainConfig, judged: Sequence[Judged]) -> list[TrialResult]:
    """Return the launches that ran a config's compiled code, its own and others'; its own where nothing is compiled."""
    if not needs_compilation(config):
        key = config.key
        return [one.result for one in judged if one.key == key]
    code = find_code(config)
    return [one.result for one in judged if find_code(one.config) == code]


def find_compile_seconds(launches: Iterable[TrialResult]) -> float:
    """Return how long the longest of some compilations took; 0 without any."""
    measured = (one.measurement for one in launches)
    return max((one.compile_seconds for one in measured if one is not None), default=0.0)
