"""Which knobs to try first, and why. Records in, ranked `Advice` out; pure.

A knob is named only when the space has another value for it here. A reason states what was measured; what it may gain
is a range, by Amdahl's law over the share of a step that the knob acts on. First come those with the largest mean gain.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from autotune.knobs import KNOBS, Facts
from autotune.probe.analysis.advice.case import Case, Finding, limit_gain, rank_gain
from autotune.probe.analysis.advice.compute import (
    advise_attention,
    advise_compilation,
    advise_cudnn,
    advise_host_allocator,
    advise_matmul_precision,
    advise_memory_format,
    advise_optimizer,
    advise_precision,
)
from autotune.probe.analysis.advice.data import (
    advise_non_blocking,
    advise_persistence,
    advise_pinning,
    advise_prefetch,
    advise_threads,
    advise_workers,
)
from autotune.probe.analysis.advice.memory import advise_checkpointing, advise_micro_batch
from autotune.probe.analysis.bounds import bound_speedup
from autotune.probe.analysis.figures import derive_figures
from autotune.probe.analysis.pipeline import COMPUTE_KNOBS, compute_knobs_gain_nothing, plan_pipeline
from autotune.records.config import get_knob
from autotune.records.facts import TargetFacts
from autotune.records.hardware import HardwareInfo
from autotune.records.measurement import Measurement
from autotune.records.probe import Advice, Limit


def advise(facts: TargetFacts, measurement: Measurement, hardware: HardwareInfo, *, limit: Limit) -> tuple[Advice, ...]:
    """Return the knobs worth trying, best first.

    Args:
        facts: what the probe found about the target.
        measurement: the baseline, timed end to end.
        hardware: the machine.
        limit: what binds a step.
    """
    table = Facts(target=facts, hardware=hardware)
    figures = derive_figures(facts, measurement)
    case = Case(
        facts=facts,
        measurement=measurement,
        hardware=hardware,
        figures=figures,
        plan=plan_pipeline(facts, measurement, hardware),
        limit=limit,
        offered={knob.field: knob.choices(table)[0] for knob in KNOBS},
    )
    ceiling = bound_speedup(facts, figures, hardware)[0] or math.inf
    useless = COMPUTE_KNOBS if compute_knobs_gain_nothing(facts, measurement, hardware) else frozenset()
    found: list[Advice] = []
    for name, adviser in _ADVISERS.items():
        if name in useless or set(case.offered[name]) <= {get_knob(case.baseline, name)}:
            continue
        finding = adviser(case)
        if finding is not None:
            most = min(ceiling, case.loader_speedup if name in COMPUTE_KNOBS else math.inf)
            reason, gain = finding[0], None if finding[1] is None else limit_gain(finding[1], most)
            if gain is None or gain.high >= case.policy.least_gain:
                found.append(Advice(knob=name, reason=reason, gain=gain))
    return tuple(sorted(found, key=lambda advice: -rank_gain(advice.gain)))


_ADVISERS: dict[str, Callable[[Case], Finding]] = {
    "num_workers": advise_workers,
    "prefetch_factor": advise_prefetch,
    "pin_memory": advise_pinning,
    "non_blocking": advise_non_blocking,
    "precision": advise_precision,
    "matmul_precision": advise_matmul_precision,
    "compile_mode": advise_compilation,
    "optimizer_implementation": advise_optimizer,
    "memory_format": advise_memory_format,
    "host_allocator": advise_host_allocator,
    "attention_backend": advise_attention,
    "cudnn_benchmark": advise_cudnn,
    "micro_batch_size": advise_micro_batch,
    "activation_checkpointing": advise_checkpointing,
    "num_threads": advise_threads,
    "persistent_workers": advise_persistence,
}
