"""With which settings a training runs: a profile's, a preset's or the target's own; and what is not as it was measured.

    profile ── same target, data, machine, versions? ──▶ its settings as they are
            └─ else: its changes put onto the target's own settings of today ──▶ `reverify`, or `--skip-verification`

A profile is data: its label and fingerprints are compared and shown, never followed.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass

from autotune.engine.allocator import launch_environment
from autotune.errors import MachineError, UsageError
from autotune.machine.hardware import read_hardware
from autotune.presets import find_preset
from autotune.records.config import TrainConfig, changed_fields, get_knob, with_knobs
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.profile import Profile
from autotune.records.trial import Target
from autotune.space import BATCH_KNOBS, canonical, revert_knobs
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.targets.workload import LoadedWorkload
from autotune.train.settings.differences import find_differences, is_measured_here, printable
from autotune.train.settings.presets import fit_preset
from autotune.train.settings.profile_check import (
    check_batch,
    check_own_settings,
    check_script_settings,
    find_same_words,
    require_same_script,
    require_same_workload,
)

FindFacts = Callable[[], TargetFacts]
"""Returns what a probe knows of the target on this machine; called for a preset only."""


@dataclass(frozen=True)
class Settings:
    """With which settings a training is to be run.

    Attributes:
        config: the settings.
        baseline_config: the target's own, to fall back to.
        origin: `profile`, `preset NAME` or `baseline`.
        profile: that they come from; None for another origin.
        promised_samples_per_second: measured for these settings on this machine; None when it was not.
        differences: what is not as it was when the profile was measured, one sentence each.
        training_loaders: which of a script's loaders they are for, by description.
    """

    config: TrainConfig
    baseline_config: TrainConfig
    origin: str
    profile: Profile | None
    promised_samples_per_second: float | None
    differences: tuple[str, ...]
    training_loaders: tuple[str, ...] = ()

    @property
    def needs_reverification(self) -> bool:
        """There is something to verify: other settings than the target's own, measured under other circumstances."""
        return bool(self.differences) and self.config != self.baseline_config

    def fall_back(self) -> Settings:
        """Return the target's own settings, where a profile's are not to be trusted."""
        return dataclasses.replace(
            self, config=self.baseline_config, origin="baseline", promised_samples_per_second=None
        )


def _look_at_process(loaded: LoadedWorkload) -> tuple[TrainConfig, str]:
    """Return a workload's own settings with what its module has switched on, and the type of device it trains on."""
    # torch is of no other use to the parent of a script
    from autotune.engine.device import choose_device
    from autotune.engine.kernels import keep_switches

    return keep_switches(loaded.baseline), choose_device("auto").type


def choose_settings(
    loaded: LoadedWorkload,
    *,
    profile: Profile | None,
    preset: str | None,
    data_fingerprint: str | None,
    find_facts: FindFacts,
    note: Callable[[str], None],
) -> Settings:
    """Return the settings for a workload; call it before anything changes PyTorch's global state.

    Args:
        loaded: the workload.
        profile: whose settings to use; None without one.
        preset: whose settings to use, by name; None without one.
        data_fingerprint: of its data set, see `mark_data`.
        find_facts: see there.
        note: told what the user should know, one sentence at a time.

    Raises:
        UsageError: both a profile and a preset are given.
        ProfileError: the profile was measured on another target or does not fit it, or there is no such preset.
    """
    _refuse_both(profile, preset)
    own, device = _look_at_process(loaded)
    if preset is not None:
        return _apply_preset(preset, lambda: find_facts().replace(baseline=own), note)
    if profile is None:
        return Settings(own, own, "baseline", None, None, ())
    require_same_workload(profile, loaded)
    is_same = loaded.fingerprint == profile.target.fingerprint
    if is_same:
        loaded.find_choices(profile.config)
    batch = check_batch(profile)
    differences = find_differences(
        profile,
        target_fingerprint=loaded.fingerprint,
        data_fingerprint=data_fingerprint,
        device=device,
    )
    baseline, config = profile.baseline_config, profile.config
    if is_same and is_measured_here(profile):
        check_own_settings(profile, own)
    else:
        baseline = own
        config, more = _move_changes(profile, baseline, loaded)
        differences += more
    settings = Settings(config, baseline, "profile", profile, None, differences)
    if batch is not None and config.effective_batch_size != baseline.effective_batch_size:
        note(batch)
    return _announce(settings, profile, loaded.fingerprint, note)


def choose_script_settings(
    target: Target,
    *,
    profile: Profile | None,
    preset: str | None,
    find_facts: FindFacts,
    note: Callable[[str], None],
) -> Settings:
    """Return the settings for a script; of its own (`origin` is `baseline`) none is to be applied at all.

    Args:
        target: the script.
        profile: whose settings to use; None without one.
        preset: whose settings to use, by name; None without one.
        find_facts: see there.
        note: told what the user should know, one sentence at a time.

    Raises:
        UsageError: both a profile and a preset are given, or the command cannot be started.
        ProfileError: the profile was measured on another script or does not fit it, or there is no such preset.
    """
    _refuse_both(profile, preset)
    if preset is not None:
        return _apply_preset(preset, find_facts, note)
    if profile is None:
        return Settings(TrainConfig(), TrainConfig(), "baseline", None, None, ())
    assert target.script is not None
    fingerprint = fingerprint_target(target, command=find_same_words(profile, target.script))
    require_same_script(profile, target, fingerprint)
    check_script_settings(profile, target.script, is_same=fingerprint == profile.target.fingerprint)
    batch = check_batch(profile)
    if batch is not None:
        note(batch)
    has_other_words = fingerprint != profile.target.fingerprint and target.spec != profile.target.label
    known = None if has_other_words else fingerprint
    differences = find_differences(profile, target_fingerprint=known, data_fingerprint=None)
    if has_other_words:
        searched = printable(profile.target.label)
        differences += (f"the search was of '{searched}': what the words that differ change was not measured",)
    # Only what differs between the two is applied to a script, so the rest may be another machine's.
    loaders = profile.target.training_loaders
    config, baseline = profile.config, profile.baseline_config
    settings = Settings(config, baseline, "profile", profile, None, differences, training_loaders=loaders)
    return _announce(settings, profile, fingerprint, note)


def check_environment(config: TrainConfig, hardware: HardwareInfo, note: Callable[[str], None]) -> None:
    """Tell when the process was not started with the environment the settings need.

    Raises:
        MachineError: the settings need a library this machine does not have.
    """
    missing = find_missing_environment(config, hardware)
    if missing:
        shown = " ".join(f"{name}={value}" for name, value in missing.items())
        note(f"the allocator settings have no effect unless Python is started with {shown}")


def find_environment(config: TrainConfig, hardware: HardwareInfo) -> dict[str, str]:
    """Return the variables that the settings need before their process starts.

    Raises:
        MachineError: the settings need a library this machine does not have.
    """
    try:
        return launch_environment(config, hardware.host_allocators)
    except ValueError as error:
        raise MachineError(str(error), hint="install it, or search again on this machine") from None


def find_missing_environment(config: TrainConfig, hardware: HardwareInfo) -> dict[str, str]:
    """Return those of `find_environment` that this process was started without; errors as there."""
    needed = find_environment(config, hardware)
    return {name: value for name, value in needed.items() if os.environ.get(name) != value}


def _refuse_both(profile: Profile | None, preset: str | None) -> None:
    if profile is not None and preset is not None:
        raise UsageError("both --profile and --preset are given", hint="choose one")


def _apply_preset(name: str, find_facts: FindFacts, note: Callable[[str], None]) -> Settings:
    preset = find_preset(name)  # an unknown name is told before the probe
    facts = find_facts()
    fitted = fit_preset(preset, facts)
    changes = _list_changes(fitted.config, facts.baseline) or "nothing"
    note(f"preset {preset.name} sets {changes}; not measured here: `autotune search` would tell whether it is faster")
    if fitted.left_out:
        note(f"left out of preset {preset.name}: {', '.join(fitted.left_out)}")
    loaders = facts.training_loaders
    return Settings(fitted.config, facts.baseline, f"preset {name}", None, None, (), training_loaders=loaders)


def _announce(settings: Settings, profile: Profile, fingerprint: str | None, note: Callable[[str], None]) -> Settings:
    """Tell the differences, and return the settings with what was promised, if it was for these and for this machine.

    Args:
        settings: from the profile.
        profile: as read.
        fingerprint: of the target as it is now.
        note: told each difference.
    """
    for sentence in settings.differences:
        note(sentence)
    evidence = profile.evidence
    is_user_knob = profile.config == profile.baseline_config
    promised = evidence.baseline_samples_per_second if is_user_knob else evidence.samples_per_second
    is_for_these = settings.config == profile.config and fingerprint == profile.target.fingerprint
    if not is_for_these or profile.hardware.fingerprint != read_hardware().fingerprint:
        promised = None
    return dataclasses.replace(settings, promised_samples_per_second=promised)


def _move_changes(
    profile: Profile, baseline: TrainConfig, loaded: LoadedWorkload
) -> tuple[TrainConfig, tuple[str, ...]]:
    """Return a profile's changes on top of another baseline, and what could not be moved, one sentence each.

    Args:
        profile: whose settings are a change to its own baseline.
        baseline: the target's own settings of today.
        loaded: the workload.
    """
    changed, problems = set(changed_fields(profile.config, profile.baseline_config)), []
    if changed & BATCH_KNOBS:  # they make one change together
        changed |= BATCH_KNOBS
    config = baseline
    for name in sorted(changed):
        value, own = get_knob(profile.config, name), name.removeprefix("user_knobs.")
        if own != name and value not in loaded.knobs.get(own, ()):
            problems.append(
                f"your own knob {printable(own)} stays as it is: it cannot have the profile's value any more"
            )
            continue
        config = with_knobs(config, {name: value})
    effective, before = baseline.effective_batch_size, profile.baseline_config.effective_batch_size
    if effective != before:
        config = revert_knobs(config, baseline, BATCH_KNOBS)
        problems.append(f"your own effective batch is {effective} samples now, {before} when the profile was measured")
    return canonical(config, baseline), tuple(problems)


def _list_changes(config: TrainConfig, baseline: TrainConfig) -> str:
    return ", ".join(f"{name}={get_knob(config, name)}" for name in changed_fields(config, baseline))
