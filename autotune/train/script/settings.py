"""The settings that a script is trained with, and how they are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.records.trial import Target
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.train.options import TrainingOptions
from autotune.train.settings.candidate import load_profile
from autotune.train.settings.choice import Settings, choose_script_settings
from autotune.train.settings.presets import find_facts
from autotune.train.settings.reverify import ReverifyOptions, reverify_in_processes


def choose_settings(
    target: Target,
    options: TrainingOptions,
    work: Path,
    *,
    warn: Callable[[str], None],
    say: Callable[[str], None],
    should_stop: Callable[[], bool],
) -> Settings:
    """Return the settings to train a script with; those of a profile from elsewhere are compared with its own first.

    Args:
        target: the script.
        options: the profile or the preset that is asked for.
        work: working folder.
        warn: told what the user should know.
        say: told what goes on.
        should_stop: polled; True ends a probe or a comparison.

    Raises:
        ProfileError: the profile cannot be used.
        UsageError: an option cannot be used as given.
    """
    fingerprint = fingerprint_target(target)
    settings = choose_script_settings(
        target,
        profile=load_profile(options, work, warn),
        preset=options.preset,
        find_facts=lambda: find_facts(target, fingerprint=fingerprint, should_stop=should_stop, say=say),
        note=warn,
    )
    if not settings.needs_reverification or options.trust:
        return settings
    verified = reverify_in_processes(settings, target, ReverifyOptions(should_stop=should_stop, say=say))
    return settings if verified.trusted else settings.fall_back()
