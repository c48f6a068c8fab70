"""How far a search or a training is, in words. Pure."""

from __future__ import annotations

from autotune.format import count, format_duration, format_figure, format_progress, format_rate
from autotune.records.status import SearchStatus, TrainingStatus
from autotune.sentences.answer import describe_speedup


def describe_search(search: SearchStatus) -> str:
    """Return what a search has done, and its answer as it stands."""
    done = count(sum(search.trials.values()), "launch", "launches")
    profile = search.profile
    if profile is None:
        yet = "your own settings are not measured yet"
        return f"{done}; {yet if search.holder else 'ended before your own settings were measured'}"
    taken = format_duration(profile.one_off.search_seconds)
    if profile.evidence.stop_reason == "running":
        own = "" if search.own_rate is None else f"; your settings: {format_rate(search.own_rate)}"
        return f"{done}; no answer yet{own}"
    return f"{done} in {taken}; {describe_speedup(profile)}"


def describe_training(training: TrainingStatus) -> str:
    """Return how far a training is."""
    if training.step is None:
        return "no step was logged yet"
    share = format_progress(training.step, training.planned_steps)
    parts = [f"step {training.step:,}{f' ({share})' if share else ''}"]
    if training.loss is not None:
        parts.append(f"loss {format_figure(training.loss)}")
    if training.samples_per_second is not None:
        parts.append(format_rate(training.samples_per_second))
    return ", ".join(parts)
