"""What a probe answers: the verdict, the advice, the troubles, and the reports that hold them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from autotune.records.ceilings import Ceilings
from autotune.records.codec import SCHEMA_VERSION, Record
from autotune.records.config import KnobValue
from autotune.records.facts import MemoryMode, TargetFacts
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.measurement import Measurement, NonNegative

Limit = Literal["input", "launch", "bandwidth", "compute", "communication", "unknown", "unreliable"]
"""What binds a step; `unreliable` where the machine was too busy, or the figures contradict each other."""


class Verdict(Record):
    """Which limit binds a step."""

    limit: Limit
    """The binding limit."""
    sentence: str
    """The verdict for people, with its evidence in numbers."""
    evidence: tuple[str, ...] = ()
    """What it rests on, one figure a sentence, the strongest first."""
    speedup_ceiling: float | None = None
    """No speed-up above this is possible on this machine for this model; None when not computable or not reliable."""
    ceiling_reason: str = ""
    """What sets that bound, or why there is none, in one sentence; may be empty without one."""


class GainRange(Record):
    """Speed-up of a whole step to expect of one change, as a factor; above 1 is faster."""

    low: Annotated[float, Field(gt=0)]
    """Cautious."""
    high: Annotated[float, Field(gt=0)]
    """Hopeful: the change does all it can do to the share of a step it acts on."""


class Advice(Record):
    """One knob worth trying."""

    knob: str
    """Field name."""
    reason: str
    """Why, with a number where there is one."""
    gain: GainRange | None = None
    """What to expect; None when the evidence does not say."""


class Issue(Record):
    """Something that slows this training or endangers it, and that is no knob."""

    name: str
    """Short name, e.g. `swap`, `shared-memory`, `thermal`, `host-syncs`."""
    sentence: str
    """What was seen, with its number."""
    remedy: str
    """What to do."""


class RuledOut(Record):
    """One value of a knob that is not tried."""

    knob: str
    """Field name."""
    value: KnobValue | None
    """The value; None for every value but the baseline's."""
    reason: str
    """Why, in one sentence."""


class Caution(Record):
    """One value of a knob that nothing measured speaks for or against."""

    knob: str
    """Field name."""
    value: KnobValue
    """The value."""
    reason: str
    """What is not known, and how it is tried, in one sentence."""


class MachineReport(Record):
    """What a machine can do, without a target."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    hardware: HardwareInfo
    """The machine."""
    software: SoftwareInfo
    """The versions."""
    ceilings: Ceilings
    """Its measured limits."""
    ceilings_age_seconds: NonNegative = 0.0
    """How long ago they were measured."""
    troubles: tuple[Issue, ...] = ()
    """What is wrong with it."""
    elapsed_seconds: NonNegative = 0.0
    """Wall time of the probe."""


class ProbeReport(Record):
    """Record out of `autotune probe`, record in of the search."""

    schema_version: Annotated[int, Field(ge=1, le=SCHEMA_VERSION)] = SCHEMA_VERSION
    """Version of this file."""
    hardware: HardwareInfo
    """The machine."""
    software: SoftwareInfo
    """The versions."""
    target: TargetFacts
    """The target."""
    measurement: Measurement
    """The baseline, measured end to end."""
    verdict: Verdict
    """Which limit binds."""
    advice: tuple[Advice, ...] = ()
    """Knobs worth trying, best first."""
    ruled_out: tuple[RuledOut, ...] = ()
    """What will not be tried, and why."""
    cautions: tuple[Caution, ...] = ()
    """What is tried alone and late, and why."""
    troubles: tuple[Issue, ...] = ()
    """What is wrong with the machine or the training, and is no knob."""
    ceilings_age_seconds: NonNegative = 0.0
    """How long ago the machine's limits were measured."""
    elapsed_seconds: float = 0.0
    """Wall time of the probe."""

    @property
    def memory_modes(self) -> tuple[MemoryMode, ...]:
        """Modes whose memory is of interest: the baseline's, and those whose precision is not ruled out."""
        refused = {out.value for out in self.ruled_out if out.knob == "precision"}
        modes = () if self.target.memory is None else self.target.memory.modes
        return tuple(mode for mode in modes if mode == modes[0] or mode.precision not in refused)

    def __repr__(self) -> str:
        """Return the verdict: the whole of it would be pages."""
        return f"<ProbeReport {self.verdict.sentence}>"
