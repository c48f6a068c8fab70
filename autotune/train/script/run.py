"""The final training of a script: its own command, run to its end with the settings installed around it.

    settings, command ── prepare_script_run ──▶ ScriptRun ── start(config) ──▶ the process of one attempt

Checkpoints, logs and resuming are the script's own affair.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autotune.engine.allocator import describe_exchange, launch_environment
from autotune.errors import ProfileError, UsageError
from autotune.isolation.script_starter import check_interpreter
from autotune.machine.hardware import read_hardware
from autotune.records.config import KnobValue, TrainConfig, changed_fields
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.script import Script
from autotune.records.training_process import ScriptPlan
from autotune.records.trial import Target
from autotune.targets.launch.command import Launch, find_launch
from autotune.targets.script import own_values, placeholder_names, render_command, script_values
from autotune.targets.source.fingerprint import fingerprint_target
from autotune.train.options import TrainingOptions
from autotune.train.recovery.attempts import Start
from autotune.train.recovery.steps_down import AdjustableKnobs, script_knobs
from autotune.train.settings.choice import Settings, find_environment

_ENTRY, _LAUNCHER = "autotune.train.script.entry", "autotune.train.script.launcher"

_OF_WORKLOADS = {
    "--steps": "how long a script trains is its own affair",
    "--epochs": "how long a script trains is its own affair",
    "--max-time": "when a script stops is its own affair",
    "--run-dir": "a script writes where it wants to, and its record goes to runs/",
    "--resume": "a script goes on from its own checkpoints, or does not",
    "--seed": "a script sets its own seeds",
    "--checkpoint-every": "a script writes its own checkpoints",
    "--keep-checkpoints": "a script keeps its own checkpoints",
    "--log": "a script writes its own logs",
}


@dataclass(frozen=True)
class ScriptRun:
    """A script that was checked and can be started.

    Attributes:
        target: the script.
        fingerprint: of the script as it is now.
        config: the settings to begin with.
        baseline_config: its own.
        origin: where the settings come from.
        profile: that they come from; None for another origin.
        promised_samples_per_second: that were measured for them; None when they were not.
        training_loaders: which of its loaders they are for, by description.
    """

    target: Target
    fingerprint: str
    config: TrainConfig
    baseline_config: TrainConfig
    origin: str
    profile: Profile | None
    promised_samples_per_second: float | None
    training_loaders: tuple[str, ...]

    @property
    def script(self) -> Script:
        """Its command."""
        assert self.target.script is not None
        return self.target.script

    @property
    def knows_settings(self) -> bool:
        """What it is run with is known: of its own settings nobody has told, without a profile or a probe."""
        return self.profile is not None or self.origin != "baseline"

    @property
    def adjustable_knobs(self) -> AdjustableKnobs:
        """What a step down can change about it."""
        flags = frozenset(self.values(self.config)) & TrainConfig.model_fields.keys()
        return script_knobs(flags, knows_loaders=bool(self.training_loaders))

    @property
    def profile_target(self) -> ProfileTarget:
        """It and its fingerprint, as they are now."""
        return ProfileTarget(
            label=self.target.spec, fingerprint=self.fingerprint, training_loaders=self.training_loaders
        )

    def values(self, config: TrainConfig) -> dict[str, KnobValue]:
        """Return what the placeholders of its command stand for under a config."""
        if self.knows_settings:
            return script_values(self.script, config)
        # Of its own settings only those are known that the command names.
        own = own_values(self.script)
        return own | {name: value for name, value in script_values(self.script, config).items() if name in own}

    @property
    def exchanged_malloc(self) -> str | None:
        """What becomes of the user's own malloc library, in a sentence; None where it stays or there is none."""
        return describe_exchange(launch_environment(self.config, read_hardware().host_allocators))

    def find_launch(self, config: TrainConfig) -> Launch:
        """Return how it is started under a config.

        Raises:
            UsageError: the command cannot be started.
        """
        return find_launch(render_command(self.script, self.values(config)), folder=Path(self.target.folder))

    def list_changed(self, config: TrainConfig) -> list[str]:
        """Return the knobs that hooks set, because no flag of the script's does."""
        return sorted(set(changed_fields(config, self.baseline_config)) - placeholder_names(self.script))

    def start(self, config: TrainConfig, *, progress: Path, as_json: bool) -> Start:
        """Return how to start its process under a config.

        Args:
            config: the settings.
            progress: folder for the progress files of its processes.
            as_json: what it prints on standard output goes to standard error.

        Raises:
            UsageError: the command cannot be started.
            MachineError: the settings need a library this machine does not have.
        """
        launch = self.find_launch(config)
        plan = ScriptPlan(
            config=config,
            changed=tuple(self.list_changed(config)),
            training_loaders=self.training_loaders,
            promised_samples_per_second=self.promised_samples_per_second,
            as_json=as_json,
            progress_folder=str(progress.resolve()),
            kind=launch.kind,
            name=launch.name,
            interpreter_options=launch.interpreter_options,
            launcher_options=launch.launcher_options,
            passes_local_rank=launch.passes_local_rank,
        )
        entry = _ENTRY if launch.launcher_options is None else _LAUNCHER
        environment = {**os.environ, **dict(launch.environment), **find_environment(config, read_hardware())}
        words = (launch.interpreter, *launch.interpreter_options, "-P", "-m", entry, plan.model_dump_json())
        return Start((*words, *launch.arguments), environment, Path(self.target.folder))


def list_workload_options(options: TrainingOptions) -> dict[str, object]:
    """Return what was asked for that only a workload's training has, by option; None or False for what was not."""
    default = TrainingOptions()
    return {
        "--steps": options.steps,
        "--epochs": options.epochs,
        "--max-time": options.max_time_seconds,
        "--run-dir": options.out,
        "--resume": options.resume,
        "--seed": options.seed,
        "--checkpoint-every": options.checkpoint_seconds != default.checkpoint_seconds,
        "--keep-checkpoints": options.checkpoints_kept != default.checkpoints_kept,
    }


def refuse_workload_options(given: Mapping[str, object], target: Target) -> None:
    """Make sure that no option is given that only a script's own command can set.

    Args:
        given: what was typed, by option; None or False for what was not.
        target: the script.

    Raises:
        UsageError: there is one; says why.
    """
    for option, reason in _OF_WORKLOADS.items():
        typed = given.get(option)
        if typed is not None and typed is not False:
            raise UsageError(
                f"{option} is for a workload, and the target is a script: {reason}",
                hint=f"give {target.spec} its own flag for it",
            )


def prepare_script_run(settings: Settings, target: Target) -> ScriptRun:
    """Check settings against a script and return what can be started.

    Args:
        settings: of a profile, a preset or, with the origin `baseline`, none at all.
        target: the script.

    Raises:
        ProfileError: they set what the command has no placeholder for.
        UsageError: the command cannot be started.
        MachineError: the settings need a library this machine does not have.
    """
    script = target.script
    assert script is not None
    config, baseline = settings.config, settings.baseline_config
    if settings.origin == "baseline" and settings.profile is None:
        config = baseline = _fill_in_own(script, config)
    run = ScriptRun(
        target=target,
        fingerprint=fingerprint_target(target) or "",
        config=config,
        baseline_config=baseline,
        origin=settings.origin,
        profile=settings.profile,
        promised_samples_per_second=settings.promised_samples_per_second,
        training_loaders=settings.training_loaders,
    )
    launch = run.find_launch(config)
    _require_placeholders(run)
    find_environment(config, read_hardware())  # what it lacks is told before anything is started
    check_interpreter(launch.interpreter, set())
    return run


def _fill_in_own(script: Script, config: TrainConfig) -> TrainConfig:
    """Return a config with the values that a script's command itself has in its placeholders."""
    own = own_values(script)
    fields = {name: value for name, value in own.items() if name in TrainConfig.model_fields}
    return config.replace(**fields, user_knobs={name: value for name, value in own.items() if name not in fields})


def _require_placeholders(run: ScriptRun) -> None:
    own, names = {"micro_batch_size", "gradient_accumulation_steps"}, placeholder_names(run.script)
    needed = [name.removeprefix("user_knobs.") for name in changed_fields(run.config, run.baseline_config)]
    needed = [name for name in needed if name in own or name not in TrainConfig.model_fields]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ProfileError(
            f"the profile sets {missing[0]}, and the command has no {{{missing[0]}}}",
            hint="use the command of the search, placeholders and all",
        )
