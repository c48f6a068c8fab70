"""What the stages of a search leave to be said, once, at its end."""

from __future__ import annotations

import math

from autotune.format import count, format_factor, format_percent
from autotune.probe.run import describe_written
from autotune.records.quality import is_passed
from autotune.records.trial import TrialStatus
from autotune.search.answer.profile import Findings
from autotune.search.explore.stage import LEAST_GAIN
from autotune.search.launch.launcher import Launcher
from autotune.search.launch.suspects import describe_guilty
from autotune.sentences.settings import describe_changes


def describe_ending(launcher: Launcher, findings: Findings) -> list[str]:
    """Return a sentence for everything that the stages have not told themselves."""
    notes = [
        *describe_written(launcher.written, launcher.written_elsewhere),
        *describe_guilty(launcher.suspects()),
        *_describe_screened_out(launcher),
    ]
    if launcher.hopeless:
        notes.append(
            f"{count(len(launcher.hopeless), 'config')} left out: by what the probe measured they would not fit "
            "into memory or /dev/shm"
        )
    if findings.finals is None and not launcher.should_stop():
        notes.append(_explain_no_finals(launcher, findings))
    return notes


def _explain_no_finals(launcher: Launcher, findings: Findings) -> str:
    faster = [one for one in launcher.ranking().entries if one.score > LEAST_GAIN]
    if any(is_passed(checks) for _, checks in findings.checks):
        return "there was no time for the finals, so nothing is claimed"
    if findings.checks:
        return "no faster candidate was shown to learn as well as your settings"
    if faster:
        return "there was no time for the loss checks, so nothing is claimed"
    if any(one.config != launcher.baseline and one.score.value is not None for one in launcher.judged):
        return "nothing that was tried beat your settings"
    return "nothing but your own settings could be measured"


def _describe_screened_out(launcher: Launcher) -> list[str]:
    """Tell of what would have been the fastest, and learned something else within a few steps."""
    ranking, limits = launcher.ranking(), launcher.limits()
    drifted = [one for one in launcher.judged if one.score.status is TrialStatus.DRIFTED]
    fastest = max(drifted, key=lambda one: ranking.score_of(one) or -math.inf, default=None)
    score = None if fastest is None else ranking.score_of(fastest)
    if fastest is None or score is None or score <= max(LEAST_GAIN, *(one.score for one in ranking.entries)):
        return []
    worse = format_percent(fastest.score.constraints["drift"] + limits.screen_drift)
    ratio = format_factor(math.exp(score))
    return [
        f"{describe_changes(fastest.config, launcher.baseline)} ran at {ratio} and was left out: "
        f"its training loss is worse by {worse} within its first steps"
    ]
