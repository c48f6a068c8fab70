"""What flows between the stages: frozen, strict values. Importing them imports no torch."""

from autotune.records.ceilings import Ceilings, MatmulRate
from autotune.records.codec import SCHEMA_VERSION, Record, parse_record, read_record, write_record
from autotune.records.config import TrainConfig, changed_fields, get_knob, with_knobs
from autotune.records.facts import (
    DataFacts,
    MemoryFacts,
    MemoryMode,
    ModelFacts,
    OptimizerFacts,
    StepPhases,
    StepWork,
    TargetFacts,
)
from autotune.records.hardware import GpuInfo, HardwareInfo, SoftwareInfo
from autotune.records.measurement import Block, Interval, Measurement, PeakMemory
from autotune.records.probe import Advice, Caution, GainRange, Issue, MachineReport, ProbeReport, RuledOut, Verdict
from autotune.records.profile import Candidate, Evidence, NotTested, OneOffCosts, Profile, ProfileTarget
from autotune.records.quality import DriftLimits, Margin, QualityCheck
from autotune.records.trial import LossCurve, Target, TrialLimits, TrialResult, TrialSpec, TrialStatus

__all__ = [
    "SCHEMA_VERSION",
    "Advice",
    "Block",
    "Candidate",
    "Caution",
    "Ceilings",
    "DataFacts",
    "DriftLimits",
    "Evidence",
    "GainRange",
    "GpuInfo",
    "HardwareInfo",
    "Interval",
    "Issue",
    "LossCurve",
    "MachineReport",
    "Margin",
    "MatmulRate",
    "Measurement",
    "MemoryFacts",
    "MemoryMode",
    "ModelFacts",
    "NotTested",
    "OneOffCosts",
    "OptimizerFacts",
    "PeakMemory",
    "ProbeReport",
    "Profile",
    "ProfileTarget",
    "QualityCheck",
    "Record",
    "RuledOut",
    "SoftwareInfo",
    "StepPhases",
    "StepWork",
    "Target",
    "TargetFacts",
    "TrainConfig",
    "TrialLimits",
    "TrialResult",
    "TrialSpec",
    "TrialStatus",
    "Verdict",
    "changed_fields",
    "get_knob",
    "parse_record",
    "read_record",
    "with_knobs",
    "write_record",
]
