"""What the stages of a search leave to be said, once, at its end."""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.format import count, format_budget, format_duration, format_percent
from autotune.probe.run import describe_written
from autotune.records.config import TrainConfig, get_knob
from autotune.records.objective import Objective
from autotune.records.quality import is_passed
from autotune.records.search import Preset
from autotune.records.trial import TrialStatus
from autotune.search.finals.candidates import Candidates
from autotune.search.finals.finalist import FinalsOutcome
from autotune.search.finals.more_time import LONGER
from autotune.search.launch.suspects import describe_guilty
from autotune.search.log import SearchLog
from autotune.sentences.objective import describe_gain
from autotune.sentences.settings import describe_changes
from autotune.space import SearchSpace


def describe_ending(log: SearchLog, *, is_stopped: bool, elsewhere: str = "") -> list[str]:
    """Return a sentence for everything that the stages have not told themselves.

    Args:
        log: of the search.
        is_stopped: the user ended it.
        elsewhere: where the finals are held, if that is another worker.
    """
    notes = [
        *describe_written(log.written, log.written_elsewhere),
        *describe_guilty(log.find_suspects(count_overdue=not is_stopped)),
        *_describe_screened_out(log),
    ]
    if log.hopeless:
        notes.append(
            f"{count(len(log.hopeless), 'config')} left out: by what the probe measured they would not fit "
            "into memory or /dev/shm"
        )
    if log.finals is None and not is_stopped:
        notes.append(elsewhere or _explain_no_finals(log))
    if log.finals is not None and not is_stopped:
        notes.append(_describe_unchecked(log, log.finals))
    return [note for note in notes if note]


def _explain_no_finals(log: SearchLog) -> str:
    better = [one for one in log.ranking.entries if one.score > log.problem.policy.least_gain]
    if any(is_passed(checks) for _, checks in log.checks):
        return "there was no time for the finals, so nothing is claimed"
    if log.checks:
        return "no better candidate was shown to learn as well as your settings"
    if better:
        return "there was no time for the loss checks, so nothing is claimed"
    if any(one.config != log.problem.baseline and one.score.value is not None for one in log.judged):
        return ""  # the verdict says it
    return "nothing but your own settings could be measured"


def _describe_unchecked(log: SearchLog, finals: FinalsOutcome) -> str:
    """Tell of what was faster in the search than all that the finals had, and had no loss check and no finals."""
    problem, ranking = log.problem, log.ranking
    fastest = next((one for one in Candidates(log).ranked() if not log.checks_of(one)), None)
    entry = None if fastest is None else ranking.find(fastest)
    proven = [one for one in (ranking.find(candidate.config) for candidate in finals.candidates) if one is not None]
    bar = problem.policy.worth_another + max((one.score for one in proven), default=0.0)
    if fastest is None or entry is None or entry.score <= bar:
        return ""
    changes = describe_changes(fastest, problem.baseline)
    verb = "needs" if problem.objective is Objective.MEMORY else "ran at"
    return (
        f"{changes} {verb} {describe_gain(problem.objective, math.exp(entry.score))} in the search; there was no time "
        "for its proof: more of it may (--resume --budget)"
    )


def _describe_screened_out(log: SearchLog) -> list[str]:
    """Tell of what would have been the best, and learned something else within a few steps."""
    problem, ranking = log.problem, log.ranking
    drifted = [one for one in log.judged if one.score.status is TrialStatus.DRIFTED and one.config != problem.baseline]
    bar = max([problem.policy.least_gain, *(one.score for one in ranking.entries)])
    fastest = max(drifted, key=lambda one: ranking.score_of(one) or -math.inf, default=None)
    score = None if fastest is None else ranking.score_of(fastest)
    if fastest is None or score is None or score <= bar:
        return []
    worse = format_percent(fastest.score.constraints["drift"] + problem.limits.screen_drift)
    changes = describe_changes(fastest.config, problem.baseline)
    gain = describe_gain(problem.objective, math.exp(score))
    ran = "needs" if problem.objective is Objective.MEMORY else "ran at"
    lost = f"its training loss is worse by at least {worse} within its first steps"
    return [f"{changes} {ran} {gain} and was left out: {lost}"]


def describe_untried(
    log: SearchLog, proof_seconds: Callable[[TrainConfig], float], *, budget_seconds: float
) -> list[str]:
    """Tell of each precision that was never launched and has a long loss check, and of a budget for it.

    Args:
        log: of the search.
        proof_seconds: returns what showing that a config learns the same will take, once it was launched.
        budget_seconds: that it had.
    """
    problem = log.problem
    policy, own = problem.policy, problem.baseline.precision
    launched = {own, *(one.config.precision for one in log.judged)}
    found = []
    for value in problem.space.choices.get("precision", ()):
        config = problem.space.complete({"precision": value})
        seconds = 0.0 if value in launched or log.is_refused(config) else proof_seconds(config)
        if policy.most_proof_share * budget_seconds < seconds < math.inf:
            enough = max(LONGER * budget_seconds, seconds / policy.fitting_proof_share)
            found.append(
                f"precision={value} was not tried; showing that it learns the same would take about "
                f"{format_duration(seconds)} here; --budget {format_budget(enough)} has time for it"
            )
    return found


def describe_left_out(preset: Preset, space: SearchSpace) -> list[str]:
    """Return what a search has to leave out of a preset of the user's, one sentence for each setting."""
    kept = space.keep(preset.apply_to(space.baseline))
    return [
        f"{preset.name}: {name}={value} was left out: {space.explain_left_out(name, value)}"
        for name, value in preset.settings.items()
        if get_knob(kept, name) != value
    ]
