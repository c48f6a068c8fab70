"""`Profile`: the saved answer (best.json). It is data: nothing in it is ever imported, executed or followed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from autotune.errors import ProfileError
from autotune.records.codec import SCHEMA_VERSION, Record, read_record, write_record
from autotune.records.config import Allowed, LearningRateRule, TrainConfig
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.measurement import Interference, Interval, NonNegative, PeakMemory
from autotune.records.objective import Objective, usual_objective
from autotune.records.quality import LossBand, Margin, QualityCheck
from autotune.records.reading import is_preset

MAX_PROFILE_BYTES = 1024 * 1024
WORKLOAD_PLACE = re.compile(r"((?:(?!\.py\s|\s-).)+\.py|[\w.]+):[^\W\d][\w.]*")
"""How a workload is named: by its file or module, and its name there."""
_OLD_BASELINE_METHOD = "the baseline itself"

SearchVerdict = Literal["improved", "keep", "inconclusive", "not-tested"]
StopReason = Literal["budget", "exhausted", "bound", "interrupted", "running"]


class ProfileTarget(Record):
    """Which target a profile was measured on: a label and a fingerprint, compared but never followed."""

    label: str
    """The target as the user named it."""
    fingerprint: str
    """Twelve hex digits over the target's code, of a workload marked `m-`."""
    training_loaders: tuple[str, ...] = ()
    """Which of a script's loaders its loader settings are for, by description."""
    data_fingerprint: str | None = None
    """`SAMPLES:DIGEST`, twelve hex digits over some of the samples; None where they cannot be told, as of a script."""
    device: Literal["cpu", "cuda"] | None = None
    """Where it was measured; None in profiles of before it was kept."""
    launched_processes: Annotated[int, Field(ge=1)] = 1
    """Processes that a script's own launcher starts; each has settings and batch of its own."""

    @property
    def is_script(self) -> bool:
        """It is a script's command; a workload is named by its place, or has a mark where it was found."""
        return not self.fingerprint.startswith("m-") and not WORKLOAD_PLACE.fullmatch(self.label)


class OneOffCosts(Record):
    """What is paid once."""

    compile_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Compilation of the winner beyond its first steady step."""
    startup_seconds: Annotated[float, Field(ge=0)] = 0.0
    """From the start of the process to the first step, in the proof: forked, for the most part (`isolation.warm`)."""
    search_seconds: Annotated[float, Field(ge=0)] = 0.0
    """The search itself."""
    planned_samples: Annotated[float, Field(gt=0)] | None = None
    """Length of the final training; None where it was not given."""
    planned_seconds: Annotated[float, Field(gt=0)] | None = None
    """The same with the user's own settings, where it was given as a time."""
    aside_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of that time that is no training, as validation, and gets no faster."""
    break_even_samples: NonNegative | None = None
    """Samples after which the compilation is paid back, at the lower end of the speed-up; None without a gain."""
    search_break_even_samples: NonNegative | None = None
    """Samples after which the search is paid back too."""


class Confirmation(Record):
    """The paired launches that the answer rests on: each pair is two fresh processes, baseline and candidate."""

    pairs_planned: Annotated[int, Field(ge=1)]
    """Fixed before the first pair, from what the search saw."""
    pairs_reserved: Annotated[int, Field(ge=0)] = 0
    """Fixed then too: run only where those planned left it open, which a second look then tells."""
    log_ratios: tuple[float, ...]
    """Candidate over baseline of each finished pair, natural logarithm."""
    candidate_first: tuple[bool, ...] = ()
    """For each pair, whether the candidate ran before the baseline."""
    interval: Interval | None = None
    """Two-sided 95 % interval of the speed-up; None where the pairs are too few for one."""
    hodges_lehmann: Annotated[float, Field(gt=0)]
    """Median of the pairwise means, as a ratio; outside the interval a few outliers decide, and nothing is claimed."""
    expected_speedup: float | None = None
    """What the search saw, chosen as the best of many."""
    shrunk_speedup: float | None = None
    """The same without the luck of having been chosen (empirical Bayes)."""
    smallest_detectable: Annotated[float, Field(ge=1)] | None = None
    """Speed-up that these pairs would have proven with a probability of 80 %; None where they are too few."""
    wanted_speedup: Annotated[float, Field(ge=1)] | None = None
    """Speed-up that `budget_needed_seconds` is for; None when nothing is left to prove."""
    budget_needed_seconds: NonNegative | None = None
    """Budget that would prove it with a probability of 80 % at this noise; None where no budget does."""
    extra_seconds_needed: NonNegative | None = None
    """Time for the pairs still to come, when `search --resume` goes on with those that there are; None as above."""
    futile: bool = False
    """Ended early: with less than 10 % probability would more pairs have proven anything."""


class Candidate(Record):
    """A candidate that is not proven faster: what is known of it, and why it is not the answer."""

    config: TrainConfig
    """Its settings."""
    speedup_estimate: Annotated[float, Field(gt=0)] | None = None
    """Best guess of its speed-up: of the finals where there were any, else of the search; None when not timed."""
    memory: PeakMemory | None = None
    """Peak of its launches; None when it was not timed, and in an older file."""
    pairs: Annotated[int, Field(ge=0)] = 0
    """Pairs of the finals that it has."""
    passed_checks: bool = False
    """Its drift checks, which are in the profile's `quality`, were made and all of them passed."""
    reason: str
    """Why it is not the answer, e.g. `the finals could not show a gain`."""


class ParetoPoint(Record):
    """Measured settings that no other measured ones beat in both throughput and memory."""

    config: TrainConfig
    """The settings."""
    speedup: Annotated[float, Field(gt=0)]
    """Over the user's own settings, as the search read it: not proven."""
    memory: PeakMemory
    """Peak of its launches."""
    presets: tuple[str, ...] = ()
    """Presets that these settings are, as far as they apply."""


class NotTested(Record):
    """Why nothing but the user's own settings could be measured."""

    outcomes: dict[str, int] = {}
    """Candidates that were started, by how they ended; `interrupted` ran into the end of the time left."""
    left_out: Annotated[int, Field(ge=0)] = 0
    """Candidates that were not started: by what the probe measured they cannot run here."""
    settings: tuple[str, ...] = ()
    """Knobs none of whose other values was ever started."""
    settings_known: Annotated[int, Field(ge=0)] = 0
    """Knobs that there were to try."""
    budget_needed_seconds: NonNegative | None = None
    """Budget that would try them; None where no budget does, as there is nothing to try."""


GUESSED_DEGREES = 2.0
"""Of freedom, of a noise that is guessed: with no more of them nothing was seen of it."""


class MachineNoise(Record):
    """How much this machine's figures vary, and why."""

    launch_sd: NonNegative
    """Standard deviation of the log throughput of launches of one config; a guess of 3 % until it is seen."""
    degrees_of_freedom: NonNegative
    """What it rests on, `GUESSED_DEGREES` of them for the guess."""
    block_sd: NonNegative
    """Standard deviation of the log pace of the blocks of one launch."""
    baseline_range: Annotated[float, Field(ge=1)] = 1.0
    """Fastest over slowest launch of the baseline in the search."""
    machine_changes: Annotated[int, Field(ge=0)] = 0
    """Times that the baseline's level jumped by more than noise explains."""
    launches: Annotated[int, Field(ge=0)] = 0
    """Launches that were timed, or found to be hopelessly slow in their first steps."""
    not_steady: Annotated[int, Field(ge=0)] = 0
    """Of these, how many had not settled when their warm-up was over."""
    raced: Annotated[int, Field(ge=0)] = 0
    """Of these, how many were ended early as clearly slower."""
    blocks: Annotated[int, Field(ge=0)] = 0
    """Timed blocks."""
    disturbed: Annotated[int, Field(ge=0)] = 0
    """Of these, how many are marked: stolen CPU time, a CPU quota, a hot GPU, a compilation. All of them count."""
    interference: Interference | None = None
    """Mean over the blocks."""


class Evidence(Record):
    """What the answer rests on, in short; the whole of it is in the search folder."""

    pairs: Annotated[int, Field(ge=0)] = 0
    """Fresh-process pairs of baseline and winner."""
    baseline_samples_per_second: NonNegative | None = None
    """Mean over the baseline's launches."""
    samples_per_second: NonNegative | None = None
    """Mean over the winner's launches in the finals."""
    launch_noise_fraction: float | None = None
    """Standard deviation of the log ratio of one pair; None with fewer than two pairs."""
    confirmation: Confirmation | None = None
    """The finals of the candidate; None before there are two pairs."""
    noise: MachineNoise | None = None
    """Of the machine; None before the search."""
    flops_per_sample: NonNegative | None = None
    """Floating-point operations of forward and backward pass; None when they were not counted."""
    peak_flops_per_second: NonNegative | None = None
    """This machine's measured matrix product rate in the winner's arithmetic; None when it was not measured."""
    loss_limit: Margin | None = None
    """How much worse the training loss was allowed to get."""
    loss_band: LossBand | None = None
    """Where the baseline's training loss went; None when no seeds of it were trained."""
    measured_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the time used that was spent inside measured blocks."""
    drift_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Share of the time used that the drift gate took."""
    trials: dict[str, int] = {}
    """Trials by status."""
    not_tested: NotTested | None = None
    """Of a search that could measure nothing but the user's own settings; None for any other."""
    stop_reason: StopReason = "running"
    """Why the search ended."""
    notes: tuple[str, ...] = ()
    """What the user should know, one sentence each."""


class Profile(Record):
    """Record out of the search: the settings to train with and why they can be trusted."""

    hint_to_mend: ClassVar[str] = "mend it, or let autotune search write it again"
    """What to do about a file of it that does not parse."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    verdict: SearchVerdict
    """improved: `config` is proven faster and not worse. With the others it is the baseline: keep: others were
    measured and did not win; inconclusive: one may be faster, which is not proven; not-tested: nothing but the
    baseline could be measured."""
    config: TrainConfig
    """The settings to train with."""
    baseline_config: TrainConfig
    """The user's own settings."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """Processes that trained together when it was measured; they share out the effective batch of both settings."""
    allowed: tuple[Allowed, ...] = ()
    """Changes of what is learned that the user allowed the search: without them the effective batch is the user's."""
    learning_rate_rule: LearningRateRule = "none"
    """What another effective batch did to the learning rate."""
    speedup: Interval | None = None
    """Ratio of the measured candidate's speed to the baseline's, from paired fresh processes; claimed by its low end.
    None where it is not known: no candidate came to the finals, or too few pairs were finished."""
    memory_ratio: Interval | None = None
    """The same of the peak memory, claimed by its high end; None where memory was not what the search made small."""
    quality: tuple[QualityCheck, ...] = ()
    """Drift checks of the candidate."""
    candidate_config: TrainConfig | None = None
    """The fastest candidate that was measured in the finals or checked for drift, also when it was not accepted."""
    candidate: Candidate | None = None
    """What is known of it where it is not proven faster; None for a winner, without one, and in an older file."""
    memory: PeakMemory | None = None
    """Peak memory of `config`."""
    baseline_memory: PeakMemory | None = None
    """Peak memory of the user's own settings; None in an older file."""
    pareto: tuple[ParetoPoint, ...] = ()
    """Throughput against memory among all that was launched and not refused, the fastest first."""
    one_off: OneOffCosts = OneOffCosts()
    """What is paid once."""
    objective: Objective = Field(default_factory=lambda known: _find_usual_objective(known.get("one_off")))
    """What the search made best: improved says that this was. With time-to-finish the speed-up is that of the whole
    planned run, compilation included; with memory it is the speed that the settings keep."""
    target: ProfileTarget
    """What was tuned."""
    hardware: HardwareInfo
    """Where."""
    software: SoftwareInfo
    """With which versions."""
    evidence: Evidence = Evidence()
    """What it rests on."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")] | None = None
    """Day on which the search last wrote it, UTC; None in an older file."""

    @field_validator("speedup")
    @classmethod
    def _leave_out_none(cls, speedup: Interval | None) -> Interval | None:
        # An older file gave the baseline over itself, exactly 1 to 1, where nothing was known.
        return None if speedup is not None and speedup.method == _OLD_BASELINE_METHOD else speedup

    @model_validator(mode="after")
    def _has_what_it_claims(self) -> Self:
        if self.verdict == "improved" and self.speedup is None:
            raise ValueError("improved, and no speed-up is given")
        if self.verdict == "improved" and self.objective is Objective.MEMORY and self.memory_ratio is None:
            raise ValueError("improved in memory, and no ratio of the memory is given")
        if self.verdict == "improved" and self.config == self.baseline_config:
            raise ValueError("improved, and config is the same as baseline_config")
        return self

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a profile as data.

        Raises:
            ProfileError: missing, too large, not JSON, a newer schema, a preset, or a field that does not fit.
        """
        if is_preset(Path(path)):
            hint = f"autotune search --preset {path} measures it, autotune train --preset {path} takes it as it is"
            raise ProfileError(f"{path} is a preset, not the answer of a search", hint=hint)
        if not os.path.lexists(path):
            hint = "autotune search writes one; give its name if it is elsewhere"
            raise ProfileError(f"there is no answer {path}", hint=hint)
        return read_record(Path(path), cls, max_bytes=MAX_PROFILE_BYTES)

    def save(self, path: str | Path) -> None:
        """Write the profile atomically.

        Raises:
            OSError: the folder cannot be written.
        """
        write_record(Path(path), self)


def _find_usual_objective(costs: OneOffCosts | None) -> Objective:
    return usual_objective(is_length_known=costs is not None and costs.planned_samples is not None)
