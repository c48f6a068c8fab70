"""What a search folder remembers beside its trials, and the presets it may begin with."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError, field_validator

from autotune.records.codec import SCHEMA_VERSION, Record, explain_misfit
from autotune.records.config import Allowed, KnobValue, LearningRateRule, TrainConfig, is_user_knob, with_knobs
from autotune.records.facts import ModelFacts
from autotune.records.given import GivenRecord
from autotune.records.measurement import Interval, NonNegative
from autotune.records.objective import Objective, usual_objective
from autotune.records.probe import ProbeReport, RuledOut
from autotune.records.profile import SearchVerdict
from autotune.records.quality import DriftLimits, QualityCheck
from autotune.records.trial import GradientPlan, Target, TrialResult

Printable = Annotated[str, Field(max_length=400, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""Text of somebody else's file, without what a terminal would obey."""


class PlannedRun(GivenRecord):
    """How long the final training is going to be."""

    amount: Annotated[float, Field(gt=0)]
    """In the unit."""
    unit: Literal["seconds", "epochs", "samples"]
    """seconds: with the user's own settings."""


class Preset(GivenRecord):
    """A named set of knob values; what it leaves out stays the baseline's."""

    hint_to_mend: ClassVar[str] = "mend it; autotune presets --json shows how one is written"
    """What to do about a file of it that does not parse."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    name: Printable
    """What it is called."""
    description: Printable
    """What it is for."""
    settings: dict[Printable, Printable | int | float | bool]
    """Values by knob, the workload's own as `user_knobs.NAME`."""

    def apply_to(self, config: TrainConfig) -> TrainConfig:
        """Return a config with these values."""
        return with_knobs(config, self.settings)

    @field_validator("settings")
    @classmethod
    def _check_settings(cls, settings: dict[str, KnobValue]) -> dict[str, KnobValue]:
        try:
            TrainConfig.model_validate({name: value for name, value in settings.items() if not is_user_knob(name)})
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "extra_forbidden":
                raise ValueError(explain_misfit(error, TrainConfig)) from None
            name = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{name} is {first['input']!r}: {first['msg']}") from None
        return settings


class SearchState(Record):
    """What a search was asked to do; a resumed one keeps it."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    target: Target
    """What is tuned."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that train together in each trial."""
    seed: int
    """Of proposals, initial weights and data order."""
    max_drift: DriftLimits
    """How much worse the training loss and each metric may get."""
    memory_limit_bytes: Annotated[int, Field(gt=0)] | None
    """Of a trial; None for the machine's own limit."""
    planned_run: PlannedRun | None = None
    """Length of the final training; None where it was not given."""
    objective: Objective = Field(
        default_factory=lambda known: usual_objective(is_length_known=known.get("planned_run") is not None)
    )
    """What is made best; in an older file it follows from the length."""
    only: tuple[str, ...] = ()
    """The knobs to vary, every other one stays as it is; empty for all."""
    exclude: tuple[str, ...] = ()
    """Knobs that are not varied."""
    allowed: tuple[Allowed, ...] = ()
    """Changes of what is learned that the user allows."""
    learning_rate_rule: LearningRateRule = "none"
    """For effective batches other than the user's own."""
    presets: tuple[Preset, ...] = ()
    """The user's own, tried first."""
    measure_seconds: Annotated[float, Field(gt=0)]
    """Wall time of the measured blocks of one launch, the same for every trial of the search."""
    budget_seconds: Annotated[float, Field(gt=0)] | None = None
    """Deadline of its first session; None in an older file."""
    uses_history: bool = False
    """It may begin with what earlier searches have read."""


class KeptProbe(Record):
    """A probe that belongs to no search yet, with all that it depends on."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    made_at: float
    """When it was done, in seconds since 1970."""
    target: Target
    """What was probed."""
    environment: dict[str, str]
    """Digests of the variables it ran under, and the CPUs it could run on."""
    report: ProbeReport
    """What was found."""
    trial: TrialResult
    """The trial behind it."""


class KnownEffect(Record):
    """What a search has read of one change, or what another one may make of that."""

    knob: str
    """Field name; the workload's own as `user_knobs.NAME`."""
    value: KnobValue | None
    """That was tried in place of the baseline's."""
    log_speedup: float
    """Natural logarithm of what it alone brings."""
    log_sd: NonNegative
    """Standard deviation of the same."""
    failed: bool = False
    """It made launches fail, or learned something else; what it would bring was not read then."""


class PastSearch(Record):
    """What is remembered of a search: what it was of, what it answered, what each change brought."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    ended_at: float
    """Seconds since 1970."""
    label: str
    """Of the target, secrets left out."""
    folder: str
    """Digest of the working folder's path."""
    fingerprint: str
    """Of the target."""
    hardware: str
    """Fingerprint of the machine."""
    software: str
    """Fingerprint of the versions."""
    device: Literal["cpu", "cuda"]
    """Where it trained."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that trained together."""
    model: ModelFacts
    """By which relatives are told."""
    baseline: TrainConfig
    """The user's own settings."""
    objective: Objective = Objective.THROUGHPUT
    """What it made best."""
    verdict: SearchVerdict
    """Of the search."""
    config: TrainConfig
    """That it answered."""
    speedup: Interval | None = None
    """Of the answer."""
    effects: tuple[KnownEffect, ...] = ()
    """Of every change that was launched."""


class Recalled(Record):
    """What a search begins with from earlier ones; kept, so that it goes on with the same when it is resumed."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    sentence: str = ""
    """Where it is from, for the user; empty where there was nothing."""
    effects: tuple[KnownEffect, ...] = ()
    """As far as they can be relied on here."""


class CheckedConfig(Record):
    """A config whose loss check came to a verdict."""

    config: TrainConfig
    """The settings."""
    checks: tuple[QualityCheck, ...]
    """In the order they were made."""


class Screens(Record):
    """What the loss checks of a search have shown so far: one that is resumed goes on with it."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    refused: tuple[tuple[str, ...], ...] = ()
    """Changes, each as `name=value`, that may not be made together."""
    seen: tuple[str, ...] = ()
    """Changes that were looked at early, whatever that has shown."""
    looked_after: int = -1
    """Number of the last trial before the latest such look that came to its end; -1 before the first one."""
    plan: GradientPlan | None = None
    """How much of the gradients is looked at; None before that was fixed."""
    doubted: tuple[tuple[str, ...], ...] = ()
    """Changes, each as `name=value`, that wait for a look in float64 there was no time for."""
    reference_seconds: float = 0.0
    """That this look takes, as far as is known."""
    told: tuple[tuple[str, ...], ...] = ()
    """Changes, each as `name=value`, that gradients have shown to learn the same."""
    untold: tuple[tuple[str, ...], ...] = ()
    """The same of which no gradients have, alone or with other changes."""
    must_train: bool = False
    """Gradients alone decide no more: trainings did where they could not."""
    checked: tuple[CheckedConfig, ...] = ()
    """Configs that passed or failed; what was left open is among `refused`."""
    notes: tuple[str, ...] = ()
    """What was told of refusals."""


class ExpectedLaunch(Record):
    """One launch of a search, as it is expected."""

    config: TrainConfig
    """The settings."""
    speedup: float
    """Expected over the user's own settings: the probe's reading, else what is usual."""
    seconds: float
    """That it takes, a first compilation included."""


class SearchForecast(Record):
    """What a search would do, by what is expected before it: its launches until the first proof, and that proof."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    label: str
    """Of the target."""
    budget_seconds: float
    """Deadline of the whole search."""
    baseline_config: TrainConfig
    """The user's own settings."""
    choices: dict[str, tuple[KnobValue, ...]]
    """Values that are varied, by knob."""
    ruled_out: tuple[RuledOut, ...]
    """Values that are not."""
    launches: tuple[ExpectedLaunch, ...]
    """In the order in which they would be made, if each read what is expected."""
    leader: TrainConfig | None
    """The one that would be proven; None where nothing is expected to gain."""
    check_seconds: float
    """What its loss check takes at least."""
    pairs: int
    """Launches of it, and as many of the user's own settings, that prove it."""
    pairs_seconds: float
    """What these take."""
