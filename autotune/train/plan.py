"""What a run is going to be: a `RunPlan` from a profile, a preset or the target's own settings, or an earlier one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.distributed.place import Place
from autotune.errors import UsageError
from autotune.format import count
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.config import TrainConfig, spread_config
from autotune.records.profile import Profile, ProfileTarget
from autotune.records.quality import DriftLimits, Margin
from autotune.records.run import Reverification, RunPlan
from autotune.records.trial import Target
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.deadline import Deadline
from autotune.train.options import TrainingCallbacks, TrainingOptions
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.runs.folder import require_same_plan
from autotune.train.settings.candidate import load_profile
from autotune.train.settings.choice import Settings, choose_settings
from autotune.train.settings.presets import find_facts
from autotune.train.settings.reverify import ReverifyOptions, reverify_in_processes


@dataclass(frozen=True)
class RunRequest:
    """A new run or one to go on with, before its plan is made.

    Attributes:
        work: the working folder.
        loaded: the workload.
        target: as it was resolved.
        options: how to train.
        callbacks: who is told.
        sources: global generators that the samples draw from.
        data: fingerprint of the samples; None where they have none.
        deadline: when it has to be over.
        policy: the training's thresholds.
        place: this process among those of the training, which it leads; None for the only one.
        notes: what is to be told once the settings are in force.
    """

    work: Path
    loaded: LoadedWorkload
    target: Target
    options: TrainingOptions
    callbacks: TrainingCallbacks
    sources: tuple[str, ...]
    data: str | None
    deadline: Deadline
    policy: TrainPolicy = TRAIN_POLICY
    place: Place | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def note(self) -> Callable[[str], None]:
        """Takes what is to be told, one sentence at a time."""
        return self.notes.append

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return 1 if self.place is None else self.place.size

    @property
    def profile_target(self) -> ProfileTarget:
        """The target and its fingerprints, as they are now."""
        return ProfileTarget(label=self.loaded.label, fingerprint=self.loaded.fingerprint, data_fingerprint=self.data)


def make_plan(request: RunRequest, profile: Profile | None) -> RunPlan:
    """Return the plan of a new run; a profile from elsewhere is compared with the target's own settings first.

    Raises:
        ProfileError: the profile was measured on another target, or there is no such preset.
        UsageError: the target cannot be used as given.
    """
    settings = _choose(request, profile)
    wanted, verified = settings.config if profile is None else profile.config, request.options.reverification
    if settings.needs_reverification and not request.options.trust:
        _require_one_node(request)
        verified = verified or _reverify(request, settings)
        settings = settings if verified.trusted else settings.fall_back()
    size, before = request.world_size, settings.config
    config, baseline = (spread_config(one, size) for one in (before, settings.baseline_config))
    measured = 1 if profile is None else profile.world_size
    if measured not in (1, size):
        request.note(f"the settings were measured with {measured} processes: with {size} nothing is claimed for them")
    _require_same_learning(request, before, config)
    options, evidence = request.options, None if profile is None else profile.evidence
    epochs = 1 if options.steps is None and options.epochs is None else options.epochs
    return RunPlan(
        target=request.profile_target,
        asked_config=wanted,
        config=config,
        baseline_config=baseline,
        origin=settings.origin,
        promised_samples_per_second=settings.promised_samples_per_second if size == measured else None,
        promised_noise=evidence.noise.launch_sd if evidence is not None and evidence.noise is not None else None,
        flops_utilization=_find_flops_utilization(settings) if size == measured == 1 else None,
        world_size=size,
        loss_band=None if evidence is None else evidence.loss_band,
        drift_limit=_find_drift_limit(profile),
        accepted=() if profile is None else tuple(one for check in profile.quality for one in check.fidelity),
        reverification=verified,
        machine=_name_machine(),
        seed=options.seed or 0,
        steps=options.steps,
        epochs=epochs,
    )


def resume_plan(request: RunRequest, before: RunPlan, path: Path) -> RunPlan:
    """Return the plan of a run that goes on: as it was started, but for its length.

    Raises:
        ProfileError: target, data, settings or seed are others, or the run's settings do not fit the target.
    """
    options = request.options
    profile = load_profile(options, request.work, request.note)
    wanted = before.asked_config
    if profile is not None:
        wanted = profile.config
    elif options.preset is not None and before.origin != f"preset {options.preset}":
        wanted = _choose(request, None).config
    seed = before.seed if options.seed is None else options.seed
    require_same_plan(before, before.replace(target=request.profile_target, asked_config=wanted, seed=seed), path)
    for config in (before.config, before.baseline_config, *(one.config for one in before.step_downs)):
        request.loaded.find_choices(config)
    if before.machine not in ("", _name_machine()):
        request.note("the run was started on another machine or with another torch: it goes on, but not bit for bit")
    if before.world_size != request.world_size:
        before = _spread_plan(request, before)
    if options.steps is None and options.epochs is None:
        return before
    return before.replace(steps=options.steps, epochs=options.epochs)


def _spread_plan(request: RunRequest, before: RunPlan) -> RunPlan:
    """Return the plan of a run that goes on with another number of processes.

    Raises:
        UsageError: the effective batch cannot be divided by it, or they would learn something else.
    """
    size, old = request.world_size, before.world_size

    def spread(config: TrainConfig) -> TrainConfig:
        return spread_config(config, size, before=old)

    _require_same_learning(request, before.current_config, spread(before.current_config))
    request.note(f"the run goes on with {count(size, 'process', 'processes')} instead of {old}: not bit for bit")
    return before.replace(
        config=spread(before.config),
        baseline_config=spread(before.baseline_config),
        promised_samples_per_second=None,
        flops_utilization=None,
        step_downs=tuple(one.replace(config=spread(one.config)) for one in before.step_downs),
        world_size=size,
    )


def _require_same_learning(request: RunRequest, before: TrainConfig, after: TrainConfig) -> None:
    if request.world_size == 1:
        return
    from autotune.train.ranks.sameness import require_same_learning

    require_same_learning(
        request.loaded,
        before,
        after,
        world_size=request.world_size,
        sources=request.sources,
        note=request.note,
    )


def _choose(request: RunRequest, profile: Profile | None) -> Settings:
    callbacks = request.callbacks
    return choose_settings(
        request.loaded,
        profile=profile,
        preset=request.options.preset,
        data_fingerprint=request.data,
        find_facts=lambda: find_facts(
            request.target,
            fingerprint=request.loaded.fingerprint,
            should_stop=callbacks.should_stop,
            say=callbacks.say,
        ),
        note=request.note,
    )


def _require_one_node(request: RunRequest) -> None:
    """Make sure that settings from elsewhere can be compared with the target's own.

    Raises:
        UsageError: they would have to be launched on several nodes.
    """
    if request.place is not None and request.place.nodes > 1:
        raise UsageError(
            "the profile was measured elsewhere, and across nodes it is not compared with your own settings",
            hint="search on one of these nodes, or take it as it is with --skip-verification",
        )


def _reverify(request: RunRequest, settings: Settings) -> Reverification:
    policy, left = request.policy, request.deadline.seconds_left
    if left is not None:
        policy = replace(policy, verify_seconds=min(policy.verify_seconds, policy.verify_share * left))
    frame = ReverifyOptions(
        should_stop=request.callbacks.should_stop,
        say=request.callbacks.say,
        random_sources=request.sources,
        world_size=request.world_size,
        policy=policy,
    )
    return reverify_in_processes(settings, request.target, frame)


def _find_drift_limit(profile: Profile | None) -> Margin:
    """Return how much worse the training loss was allowed to get in the search."""
    limit = None if profile is None else profile.evidence.loss_limit
    return limit or DriftLimits().loss


def _find_flops_utilization(settings: Settings) -> float | None:
    evidence = None if settings.profile is None else settings.profile.evidence
    if evidence is None or settings.differences or settings.config != (settings.profile and settings.profile.config):
        return None
    flops, peak = evidence.flops_per_sample, evidence.peak_flops_per_second
    return flops / peak if flops and peak else None


def _name_machine() -> str:
    return f"{read_hardware().fingerprint} {read_software().fingerprint}"
