"""Does a profile fit the target it is used for? Asked before anything is trained; a misfit is a ProfileError.

Anybody may have written a profile. That its label and fingerprint are the target's says nothing about the rest of it:
what it sets must be what a search of this target could have found.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from autotune.errors import ProfileError
from autotune.knobs import LARGER_BATCHES
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob
from autotune.records.profile import Profile
from autotune.records.script import Script
from autotune.records.secrets import mask_words
from autotune.records.trial import Target
from autotune.space import scale_learning_rate
from autotune.targets.launch.command import find_launch
from autotune.targets.script import own_values, render_command
from autotune.targets.source.length import differ_in_length_alone
from autotune.targets.workload import LoadedWorkload
from autotune.train.settings.differences import printable

FOUND_BY_PROBE = ("num_threads", "optimizer_implementation", "matmul_precision", "cudnn_benchmark")
"""What a probe writes into a baseline where the user left it to PyTorch: another machine's is none of ours."""

_AGAIN = "search again for this target"


def require_same_workload(profile: Profile, loaded: LoadedWorkload) -> None:
    """Make sure that a profile was measured on a workload, by its fingerprint or else by its label.

    Raises:
        ProfileError: it was not.
    """
    if loaded.fingerprint != profile.target.fingerprint and loaded.label != profile.target.label:
        raise ProfileError(
            f"the profile was measured on {printable(profile.target.label)}, and this is {loaded.label}",
            hint="name the target it belongs to, or search again for this one",
        )


def require_same_script(profile: Profile, target: Target, fingerprint: str | None) -> None:
    """Make sure that a profile was measured on a script: as it is, with the same words, or with the same file.

    Args:
        profile: as read.
        target: the script.
        fingerprint: of the script as it is now.

    Raises:
        ProfileError: it was not.
        UsageError: the command cannot be started.
    """
    label, script = profile.target.label, target.script
    assert script is not None
    if fingerprint == profile.target.fingerprint or label == target.spec:
        return
    measured = _split_label(label)
    name = find_launch(render_command(script, own_values(script)), folder=Path(target.folder)).name
    if name not in measured:
        raise ProfileError(
            f"the profile was measured on {printable(label)}, and this is {target.spec}",
            hint="name the script it belongs to, or search again for this one",
        )


def find_same_words(profile: Profile, script: Script) -> Sequence[str]:
    """Return the words of a search where a script differs from them in how long it trains alone, else its own.

    Args:
        profile: of the search.
        script: as it is to be trained.
    """
    searched = _split_label(profile.target.label)
    return searched if differ_in_length_alone(searched, mask_words(script.command)) else script.command


def _split_label(label: str) -> list[str]:
    try:
        return shlex.split(label)
    except ValueError:  # it may be anybody's
        return []


def check_batch(profile: Profile) -> str | None:
    """Make sure that the effective batch is the user's own, or one that the user allowed the search; say which.

    Returns:
        What is to be said of another effective batch, in a sentence; None where it is the user's own.

    Raises:
        ProfileError: it is another one, or the learning rate is not what the rule makes of it.
    """
    config, baseline = profile.config, profile.baseline_config
    own, wanted = baseline.effective_batch_size, config.effective_batch_size
    larger = LARGER_BATCHES if "batch" in profile.allowed else ()
    if wanted not in (own, *(factor * own for factor in larger)):
        raise ProfileError(
            f"the profile trains with an effective batch of {wanted:,} samples instead of {own:,}, which its search "
            f"was not allowed",
            hint=f"{_AGAIN}, with --tune-batch-size if another training is what you want",
        )
    rule = profile.learning_rate_rule
    scale = baseline.learning_rate_scale * scale_learning_rate(wanted / own, rule)
    if not math.isclose(config.learning_rate_scale, scale):
        raise ProfileError(
            f"the profile multiplies learning rates by {config.learning_rate_scale:g}, and for its batch and its "
            f"learning rate rule {rule!r} that is {scale:g}",
            hint=_AGAIN,
        )
    if wanted == own:
        return None
    rates = f"learning rates are multiplied by {scale:.3g}" if scale != 1.0 else "learning rates stay as they are"
    return (
        f"the effective batch is {wanted:,} samples instead of your own {own:,}, and {rates}: "
        "the search was allowed to, and this is another training"
    )


def check_own_settings(profile: Profile, own: TrainConfig) -> None:
    """Make sure that what a profile takes for a workload's own settings is what they are.

    Args:
        profile: that was measured on this state of the workload, on a machine like this one.
        own: the workload's settings.

    Raises:
        ProfileError: it takes them for something else.
    """
    found = {name: get_knob(own, name) for name in FOUND_BY_PROBE if get_knob(own, name)}
    left = {name: get_knob(profile.baseline_config, name) for name in FOUND_BY_PROBE}
    expected = own.replace(**(left | found))
    for name in changed_fields(profile.baseline_config, expected):
        raise _explain_own(name, get_knob(profile.baseline_config, name), get_knob(expected, name))


def check_script_settings(profile: Profile, script: Script, *, is_same: bool) -> None:
    """Make sure that a profile's values for a script's placeholders are ones that the command has.

    Args:
        profile: as read.
        script: the command, and the knobs that go with it where they are known.
        is_same: the profile was measured on this command and this state of its files.

    Raises:
        ProfileError: one is not, or the learning rate is scaled, which no script can be told.
    """
    config, baseline = profile.config, profile.baseline_config
    if baseline.learning_rate_scale != 1.0 or config.learning_rate_scale != 1.0:
        raise ProfileError("the profile scales the learning rate, which a script cannot be told", hint=_AGAIN)
    for name, value in own_values(script).items():
        told = get_knob(baseline, name if name in TrainConfig.model_fields else f"user_knobs.{name}")
        if told != value:
            raise _explain_own(name, told, value)
    choices = {knob.name: knob.values for knob in script.knobs}
    for name, value in (*config.user_knobs.items(), *baseline.user_knobs.items()):
        if value not in choices.get(name, () if is_same else (value,)):
            raise ProfileError(
                f"the profile sets {name[:80]!r} to {str(value)[:80]!r}, which is no value of a knob of the command",
                hint="use the command of the search, or search again for this one",
            )


def _explain_own(name: str, told: KnobValue | None, value: KnobValue | None) -> ProfileError:
    return ProfileError(
        f"the profile takes {printable(name)}={printable(str(told))} for your own setting, and it is {value}",
        hint=_AGAIN,
    )
