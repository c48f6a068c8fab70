"""A compilation that does not end is given up by its own deadline, long before the trial's."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_spec, make_target

from autotune.records import TrainConfig, TrialStatus
from autotune.runs import script as script_module
from autotune.runs.script import ScriptTrial
from autotune.targets.script import read_script


@pytest.mark.parametrize(("mode", "gives_up"), [("default", True), ("off", False)])
@pytest.mark.fault(
    "45", injected="a compilation that does not end", outcome="compile-timeout long before the trial's own"
)
def test_a_compilation_has_a_deadline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Any, gives_up: bool
) -> None:
    target = make_target("python train.py", tmp_path, script=read_script(["python", "train.py"]))
    config = TrainConfig(compile_mode=mode)
    spec = make_spec(config, number=0, target=target, baseline=TrainConfig(), time_limit_seconds=100.0)
    trial, outcomes, fired = ScriptTrial(spec, tmp_path, started=0.0), [], threading.Event()

    def fail(outcome: Any) -> None:
        outcomes.append(outcome)
        fired.set()

    monkeypatch.setattr(script_module, "COMPILE_SECONDS", 0.01)
    monkeypatch.setattr(trial, "fail", fail)
    trial._watch_compilation()
    assert fired.wait(30.0 if gives_up else 0.2) is gives_up
    if gives_up:
        assert outcomes[0][:2] == (TrialStatus.TIMED_OUT, "compile-timeout")
