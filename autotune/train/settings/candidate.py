"""The profile that a training starts from, read; on request with the settings of its unproven candidate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autotune.errors import ProfileError, UsageError
from autotune.format import format_factor
from autotune.records.profile import Profile
from autotune.train.options import TrainingOptions
from autotune.train.settings.differences import printable


def load_profile(options: TrainingOptions, work: Path, note: Callable[[str], None]) -> Profile | None:
    """Return the profile that is asked for; None where none is.

    Args:
        options: of the training.
        work: what its path is relative to.
        note: told what the user should know, one sentence at a time.

    Raises:
        UsageError: `--use-candidate` is given with a preset.
        ProfileError: the profile cannot be read, or has no candidate that may be used.
    """
    if options.profile is None:
        if options.use_candidate:
            raise UsageError("--use-candidate is given, and a preset has no candidate", hint="give a profile")
        return None
    given = options.profile
    profile, name = (given, "the profile") if isinstance(given, Profile) else (Profile.load(work / given), str(given))
    return take_candidate(profile, name, note) if options.use_candidate else profile


def take_candidate(profile: Profile, name: str, note: Callable[[str], None]) -> Profile:
    """Return a profile with the settings of its candidate, which is not proven faster but learns as well.

    Args:
        profile: as read.
        name: of its file, for the user.
        note: told what is known of the candidate.

    Raises:
        ProfileError: it has none, or the candidate's loss checks were not passed.
    """
    candidate = profile.candidate
    if candidate is None:
        hint = "leave --use-candidate out: " + (
            "its settings are proven" if profile.verdict == "improved" else "or search again with a larger --budget"
        )
        raise ProfileError(f"{name} has no unproven candidate to use", hint=hint)
    if not candidate.passed_checks:
        raise ProfileError(
            f"the candidate of {name} may not be used: it was not shown to learn as well "
            f"({printable(candidate.reason)})",
            hint="leave --use-candidate out, or go on with `autotune search --resume`",
        )
    about = "" if candidate.speedup_estimate is None else f" (about {format_factor(candidate.speedup_estimate)})"
    note(f"the settings are the candidate's, not proven faster{about}: {printable(candidate.reason)}")
    # The arithmetic's rate is of the profile's own settings, which are the baseline's.
    evidence = profile.evidence.replace(peak_flops_per_second=None)
    return profile.replace(config=candidate.config, evidence=evidence)
