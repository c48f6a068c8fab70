"""The final training of a script: its own command, run to its end with the profile's settings hung on it.

Profile and command in; the words to execute out. Checkpoints, logs and resuming are the script's own affair.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from autotune.errors import ProfileError, UsageError
from autotune.probe.machine.hardware import read_hardware
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.profile import Profile
from autotune.records.trial import Target
from autotune.targets.fingerprint import fingerprint_target
from autotune.targets.launch import Launch, find_launch
from autotune.targets.script import placeholder_names, render_command
from autotune.train.run import check_environment, check_machine
from autotune.trial.scripted import script_values
from autotune.trial.scripts import check_interpreter

ENTRY = "autotune.train.scripted"


def prepare_script_run(
    profile: Profile, target: Target, *, as_json: bool, note: Callable[[str], None]
) -> tuple[str, ...]:
    """Check a profile against a script and return the words to execute in the target's folder.

    Raises:
        ProfileError: it was measured on another script, or sets what the command has no placeholder for.
        UsageError: the command cannot be started.
        MachineError: the settings need a library this machine does not have.
    """
    script, folder = target.script, Path(target.folder)
    assert script is not None
    values = script_values(script, profile.config)
    words = render_command(script, values)
    launch = find_launch(words, folder=folder)
    _check_target(profile, target, launch, note)
    check_machine(profile, note)
    check_environment(profile.config, read_hardware(), note)
    names = placeholder_names(script)
    _check_placeholders(profile.config, profile.baseline_config, names)
    check_interpreter(launch.interpreter, set())
    plan = {
        "config": profile.config.model_dump(mode="json"),
        "changed": sorted(set(changed_fields(profile.config, profile.baseline_config)) - names),
        "training_loaders": list(profile.target.training_loaders),
        "promised": profile.evidence.samples_per_second,
        "json": as_json,
        "kind": launch.kind,
        "name": launch.name,
        "interpreter_options": list(launch.interpreter_options),
    }
    start = (launch.interpreter, *launch.interpreter_options, "-P", "-m")
    launcher = () if launch.launcher_options is None else ("torch.distributed.run", *launch.launcher_options, "-m")
    return (*start, *launcher, ENTRY, json.dumps(plan), *launch.arguments)


def _check_target(profile: Profile, target: Target, launch: Launch, note: Callable[[str], None]) -> None:
    if profile.target.fingerprint == fingerprint_target(target):
        return
    if profile.target.label == target.spec:
        note("the script has changed since the search: the speed-up and the drift check may no longer hold")
        return
    try:
        measured = shlex.split(profile.target.label)
    except ValueError:
        measured = []
    if launch.name not in measured:
        shown = "".join(character for character in profile.target.label if character.isprintable())[:80]
        raise ProfileError(
            f"the profile was measured on {shown}, and this is {target.spec}",
            hint="name the script it belongs to, or search again for this one",
        )
    note("the command is not the one that was measured: what other flags change was not tested")


def _check_placeholders(config: TrainConfig, baseline: TrainConfig, names: frozenset[str]) -> None:
    own = {"micro_batch_size", "gradient_accumulation_steps"}
    needed = [name.removeprefix("user_knobs.") for name in changed_fields(config, baseline)]
    needed = [name for name in needed if name in own or name not in TrainConfig.model_fields]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ProfileError(
            f"the profile sets {missing[0]}, and the command has no {{{missing[0]}}}",
            hint="use the command of the search, placeholders and all",
        )


def execute(words: tuple[str, ...], folder: Path) -> NoReturn:
    """Become the script's process.

    Raises:
        UsageError: the interpreter cannot be started.
    """
    os.chdir(folder)
    try:
        os.execv(words[0], words)
    except OSError as error:
        raise UsageError(f"{words[0]} cannot be started: {error.strerror}", hint="check the command") from None
