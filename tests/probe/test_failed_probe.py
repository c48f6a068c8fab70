"""How a probe is told that could not time the training with its own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_factory import make_result, make_target

from autotune.errors import AutotuneError, TargetError, UsageError
from autotune.probe.run import probe_target
from autotune.records.trial import TrialLimits, TrialResult, TrialSpec, TrialStatus
from autotune.search.store.folder import keep_log

LOG = Path(".autotune/probe-log.txt")


def probe(limit_seconds: float, **result: Any) -> AutotuneError:
    """Return the error of a probe whose trial ends in this way."""

    def run(spec: TrialSpec) -> TrialResult:
        return make_result(spec, measurement=None, **result)

    with pytest.raises(AutotuneError) as caught:
        probe_target(
            make_target(), run, limits=TrialLimits(time_limit_seconds=limit_seconds), find_log=lambda _number: LOG
        )
    return caught.value


def test_a_budget_that_left_it_no_time_is_too_small() -> None:
    error = probe(8.0, status=TrialStatus.TIMED_OUT, cause="timeout", error="not done after 8 s")
    assert isinstance(error, UsageError)
    assert error.message.startswith("--budget is too small here: toy.py:workload did not get through its first steps")
    assert error.hint == f"give --budget 10m, or make the start of the training faster (log: {LOG})"


def test_a_training_that_takes_longer_than_any_probe_is_at_fault_itself() -> None:
    error = probe(300.0, status=TrialStatus.TIMED_OUT, cause="timeout", error="not done after 300 s")
    assert isinstance(error, TargetError)
    assert "not done after 300 s" in error.message
    assert str(LOG) in error.hint


def test_the_log_of_a_training_that_fails_is_named() -> None:
    error = probe(8.0, status=TrialStatus.CRASHED, cause="target", error="it ended", hint="why?")
    assert (type(error), error.message, error.hint) == (TargetError, "it ended", f"why? (log: {LOG})")


def test_the_log_outlives_the_probe(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("stacks")
    assert keep_log(tmp_path, log) == LOG
    log.unlink()
    assert (tmp_path / LOG).read_text() == "stacks"
    assert keep_log(tmp_path, log) is None


def test_a_log_that_cannot_be_kept_is_not_named(tmp_path: Path) -> None:
    (tmp_path / ".autotune").write_text("")
    (tmp_path / "log.txt").write_text("stacks")
    assert keep_log(tmp_path, tmp_path / "log.txt") is None
