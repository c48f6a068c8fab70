"""How a search ended: its verdict, the candidate that is not proven, and what was not tried. Pure.

proven in the finals                             improved
pairs that rule out a gain, or nothing leads     keep, if anything but the baseline was measured
something leads, or its pairs leave it open      inconclusive
nothing but the baseline was measured            not-tested
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from autotune.format import count, format_rate
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.measurement import PeakMemory
from autotune.records.profile import Candidate, NotTested, SearchVerdict
from autotune.records.quality import QualityCheck, is_passed
from autotune.records.trial import TrialStatus
from autotune.search.finals.finalist import Finalist, FinalsOutcome
from autotune.search.finals.more_time import LONGER
from autotune.search.scores.objective import Judged
from autotune.search.scores.ranking import Entry, Ranking
from autotune.sentences.loss_check import find_failed

TELLING_GAP = 1.5
"""A probe and the first launch of the same settings that differ by more are told of."""

_SEARCH_SHARE = 0.4
"""Of a budget: what is left to try things in, the probe, the checks and the finals taken off."""

_MOST_REASON = 200


@dataclass(frozen=True)
class Effort:
    """What a search had to try, and what it got to.

    Attributes:
        judged: its launches.
        baseline: the user's own settings.
        knobs: there were to try.
        left_out: candidates that were not started, as they cannot run here.
        interrupted: launches that were cut by the end of the time left, or by the user; not among `judged`.
        launch_seconds: that one launch takes; None when it is not known.
        probe_seconds: that the probe took.
        budget_seconds: of the search.
    """

    judged: Sequence[Judged]
    baseline: TrainConfig
    knobs: tuple[str, ...] = ()
    left_out: int = 0
    interrupted: int = 0
    launch_seconds: float | None = None
    probe_seconds: float = 0.0
    budget_seconds: float = 0.0

    @property
    def others(self) -> list[Judged]:
        """Launches of anything but the baseline."""
        return [one for one in self.judged if one.config != self.baseline]

    @property
    def has_measured(self) -> bool:
        """Something but the baseline was timed, or seen to be too slow."""
        return any(one.score.value is not None for one in self.others)

    def describe_untested(self) -> NotTested:
        """Return what came of the candidates that were started, what was not tried, and the budget that would."""
        tried = {name for one in self.others for name in changed_fields(one.config, self.baseline)}
        untried = tuple(sorted(set(self.knobs) - tried))
        outcomes = Counter(one.score.status.value for one in self.others)
        if self.interrupted:
            outcomes[TrialStatus.INTERRUPTED.value] += self.interrupted
        return NotTested(
            outcomes=dict(outcomes),
            left_out=self.left_out,
            settings=untried,
            settings_known=len(self.knobs),
            budget_needed_seconds=self._find_budget(len(untried) + self.interrupted),
        )

    def _find_budget(self, launches: int) -> float | None:
        if not launches or self.launch_seconds is None:
            return None
        # One launch each, and the baseline's own beside them.
        needed = self.probe_seconds + (launches + 1) * self.launch_seconds / _SEARCH_SHARE
        return max(LONGER * self.budget_seconds, needed)


def find_shown(finals: FinalsOutcome | None) -> Finalist | None:
    """Return the winner of the finals, else the best that took part, however few its pairs; None without one."""
    if finals is None:
        return None
    begun = next((one for one in finals.candidates if one.rates and not one.failure), None)
    return finals.winner or finals.best or begun


def find_leader(
    ranking: Ranking, baseline: TrainConfig, finals: FinalsOutcome | None, *, least_gain: float
) -> TrainConfig | None:
    """Return the config that the search saw as the best; None where none was better, or those failed in finals.

    Args:
        ranking: of the search's trials.
        baseline: the user's own settings.
        finals: of the search; None before they were held.
        least_gain: that a config has to have to lead, as a logarithm.
    """
    failed = [one.config for one in finals.candidates if one.failure] if finals else []
    leading = [
        one for one in ranking.entries if one.score > least_gain and one.config != baseline and one.config not in failed
    ]
    return max(leading, key=lambda one: one.score).config if leading else None


def find_untested(
    ranking: Ranking, baseline: TrainConfig, finals: FinalsOutcome, *, least_gain: float
) -> TrainConfig | None:
    """Return what the search saw as clearly better, and that no pair of the finals was spent on; None without one.

    Args:
        ranking: of the search's trials.
        baseline: the user's own settings.
        finals: of the search.
        least_gain: that it has more of, as a logarithm, whatever the luck of its launches.
    """
    noise, tested = ranking.score_noise[0], {baseline.key, *(one.config.key for one in finals.candidates)}

    def at_least(one: Entry) -> float:
        return min(ranking.shrunk_score(one), one.score - 2 * noise / math.sqrt(max(1, one.valid_launches)))

    clear = [one for one in ranking.entries if one.key not in tested and at_least(one) > least_gain]
    return max(clear, key=at_least).config if clear else None


def find_checked(
    checks: Sequence[tuple[TrainConfig, tuple[QualityCheck, ...]]], judged: Sequence[Judged], ranking: Ranking
) -> TrainConfig | None:
    """Return the fastest config that passed its drift checks, else the fastest that did not; None without checks."""
    scores = {one.key: score for one in judged if (score := ranking.score_of(one)) is not None}

    def rank(checked: tuple[TrainConfig, tuple[QualityCheck, ...]]) -> tuple[bool, float]:
        return is_passed(checked[1]), scores.get(checked[0].key, -math.inf)

    return max(checks, key=rank)[0] if checks else None


def judge(shown: Finalist | None, *, is_proven: bool, leader: TrainConfig | None, effort: Effort) -> SearchVerdict:
    """Return the verdict.

    Args:
        shown: the finalist that the answer is about; None without finals.
        is_proven: it is the winner.
        leader: what the search saw as the best.
        effort: what was tried.
    """
    if is_proven:
        return "improved"
    if shown is not None:
        return "keep" if shown.ratio is not None and shown.outcome == "no gain" else "inconclusive"
    if leader is not None:
        return "inconclusive"
    return "keep" if effort.has_measured else "not-tested"


def describe_candidate(
    config: TrainConfig,
    checks: tuple[QualityCheck, ...],
    shown: Finalist | None,
    expected: float | None,
    memory: PeakMemory | None = None,
    failure: str = "",
) -> Candidate:
    """Return what is known of a candidate that is not proven better.

    Args:
        config: its settings.
        checks: of its drift.
        shown: it in the finals; None when it did not take part.
        expected: log speed-up that the search saw; None when it was not timed.
        memory: its peak; None likewise.
        failure: of it in the finals; empty where there was none.
    """
    logs = shown.log_ratios if shown is not None else []
    estimate = fmean(logs) if logs else expected
    return Candidate(
        config=config,
        speedup_estimate=None if estimate is None else math.exp(estimate),
        memory=memory,
        pairs=len(shown.rates) if shown is not None else 0,
        passed_checks=is_passed(checks),
        reason=_explain(checks, shown, failure),
    )


def _explain(checks: tuple[QualityCheck, ...], shown: Finalist | None, failure: str) -> str:
    if failure:
        return f"it failed in the proof: {failure}"[:_MOST_REASON]
    if checks and not is_passed(checks):
        return f"its loss check was not passed: {find_failed(checks).reason}"[:_MOST_REASON]
    if shown is None:
        return "there was no time for its finals" if checks else "there was no time for its loss check"
    pairs = count(len(shown.rates), "pair")
    if shown.ratio is None:
        return f"{pairs} of the finals could be finished, which is too few to tell"
    if shown.claim.saving:
        found = "rule out that" if shown.outcome == "no gain" else "left open whether"
        return f"{pairs} {found} it both saves memory and is as fast"
    return f"{pairs} showed no gain" if shown.outcome == "no gain" else f"{pairs} left open whether it is faster"


def describe_probe_gap(effort: Effort, probed: float) -> str | None:
    """Return that the first launch of the user's settings ran at another pace than the probe; None where it did not.

    Args:
        effort: with the search's launches.
        probed: samples per second that the probe read.
    """
    own = (one.result.measurement for one in effort.judged if one.config == effort.baseline)
    first = next((one.samples_per_second for one in own if one is not None), None)
    if first is None or 1 / TELLING_GAP <= first / probed <= TELLING_GAP:
        return None
    return (
        f"the probe read {format_rate(probed)} of your settings, the search's first launch "
        f"{format_rate(first, unit='')}: the machine's speed has changed in between, and the probe's figures are of "
        "then"
    )
