"""A search for the loggers: one run, whose steps are the trials, and the answer at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.records.config import TrainConfig, list_settings
from autotune.records.profile import Profile
from autotune.records.trial import TrialResult
from autotune.search.progress import SearchProgress, SearchReporter
from autotune.sentences.settings import describe_changes

if TYPE_CHECKING:
    from autotune.loggers import LoggerName
    from autotune.loggers.point_log import PointLog, Value
    from autotune.records.probe import ProbeReport


class LoggedSearch(SearchReporter):
    """Hands what happens on to another reporter, and its figures to loggers.

    Args:
        names: of the loggers.
        inner: the other reporter.
        warn: told when a logger cannot be written any more.
    """

    def __init__(self, names: Sequence[LoggerName], inner: SearchReporter, warn: Callable[[str], None]) -> None:
        self._names, self._inner, self._warn = names, inner, warn
        self._folder: Path | None = None
        self._baseline: TrainConfig | None = None
        self._own_in_proof: float | None = None  # a pair is compared with its own launch
        self._logs: list[PointLog] = []
        for name in ("stage_started", "told", "trial_started", "polled"):
            setattr(self, name, getattr(inner, name))

    def opened(self, folder: Path) -> None:
        """Remember the search's folder."""
        self._folder = folder
        self._inner.opened(folder)

    def probed(self, report: ProbeReport) -> None:
        """Open the loggers: from here on there is something to write."""
        from autotune.loggers import find_logger

        self._inner.probed(report)
        assert self._folder is not None
        self._baseline = report.target.baseline
        config: dict[str, Value] = {"target": report.target.label, "limit": report.verdict.limit}
        config |= {f"config/{name}": value for name, value in list_settings(self._baseline)}
        for name in self._names:
            self._logs.append(find_logger(name)(self._folder, config=config, warn=self._warn, is_search=True))

    def trial_finished(self, progress: SearchProgress, result: TrialResult) -> None:
        """Write a trial's settings and what came of it."""
        self._inner.trial_finished(progress, result)
        if self._baseline is not None:
            is_final = result.spec.purpose == "final"
            if is_final and result.spec.config == self._baseline and result.measurement is not None:
                self._own_in_proof = result.measurement.samples_per_second
            rate = (self._own_in_proof if is_final else None) or progress.baseline_samples_per_second
            points = list_figures(result, self._baseline, rate)
            for log in self._logs:
                log.write(result.spec.number, points)

    def finish(self, profile: Profile) -> None:
        """Write the answer."""
        for log in self._logs:
            log.finish(list_answer(profile))

    def close(self) -> None:
        """Close the loggers."""
        for log in self._logs:
            log.close()


def list_figures(result: TrialResult, baseline: TrainConfig, baseline_rate: float | None) -> dict[str, Value]:
    """Return what is logged of a trial, by name.

    Args:
        result: of the trial.
        baseline: the user's own settings.
        baseline_rate: of the baseline in samples per second, where none ran in turns with it; None before it is known.
    """
    config, measurement = result.spec.config, result.measurement
    found: dict[str, Value] = {
        "trial/purpose": result.spec.purpose,
        "trial/status": str(result.status),
        "trial/changes": describe_changes(config, baseline) if config is not None else "",
        "trial/seconds": result.elapsed_seconds,
        "trial/error": result.error or None,
    }
    if measurement is not None:
        rate, beside = measurement.samples_per_second, result.reference
        own = baseline_rate if beside is None else beside.samples_per_second
        found |= {
            "trial/samples_per_second": rate,
            "trial/speedup": rate / own if own else None,
            "trial/memory_bytes": measurement.peak_memory.used_bytes,
        }
    settings = [] if config is None else list_settings(config)
    return found | {f"config/{name}": value for name, value in settings}


def list_answer(profile: Profile) -> dict[str, Value]:
    """Return what is logged of a search's answer, by name."""
    speedup, evidence = profile.speedup, profile.evidence
    found: dict[str, Value] = {
        "answer/verdict": profile.verdict,
        "answer/changes": describe_changes(profile.config, profile.baseline_config),
        "answer/before_samples_per_second": evidence.baseline_samples_per_second,
        "answer/samples_per_second": evidence.samples_per_second,
        "answer/pairs": evidence.pairs,
    }
    if speedup is not None:
        found |= {"answer/speedup": speedup.estimate, "answer/low": speedup.low, "answer/high": speedup.high}
    if profile.memory_ratio is not None:
        found |= {"answer/memory_ratio": profile.memory_ratio.estimate}
    return found | {f"config/{name}": value for name, value in list_settings(profile.config)}


@contextmanager
def logged(
    names: Sequence[LoggerName], inner: SearchReporter, warn: Callable[[str], None]
) -> Iterator[tuple[SearchReporter, Callable[[Profile], None]]]:
    """Yield the reporter of a search, and what its answer is handed to."""
    if not names:
        yield inner, lambda _profile: None
        return
    search = LoggedSearch(names, inner, warn)
    try:
        yield search, search.finish
    finally:
        search.close()
