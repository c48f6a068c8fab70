"""Which searches share one study: those whose speed-ups are of the same thing on machines alike."""

from __future__ import annotations

import hashlib
import json

from autotune.records.objective import Objective
from autotune.search.problem import SearchProblem

_DIGITS = 12


def name_study(problem: SearchProblem) -> str:
    """Return the name of the study that a search is part of.

    It is the same where target, data, baseline, machine, versions, processes that train together and what may be
    varied are the same, and what was asked that decides what is best. Seed and budget may differ.
    """
    report, state = problem.report, problem.state
    target, software = report.target, report.software
    is_timed = state.objective is Objective.TIME_TO_FINISH  # else the length of the training decides nothing
    parts: list[object] = [
        [target.label, target.fingerprint, target.data.fingerprint, target.device, target.baseline.model_dump()],
        [report.hardware.fingerprint, software.fingerprint, software.autotune],
        {name: list(values) for name, values in problem.space.choices.items()},
        [state.max_drift.model_dump(), state.memory_limit_bytes, state.allowed, state.learning_rate_rule],
        None if state.planned_run is None or not is_timed else state.planned_run.model_dump(),
    ]
    parts += [state.objective.value] if state.objective is Objective.MEMORY else []
    parts += [] if target.world_size == 1 else [target.world_size]
    return f"autotune-{hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_DIGITS]}"
