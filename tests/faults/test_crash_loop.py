"""Kills at random moments, each followed by a resume: `crash_loop.py` with fewer kills than by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from crash_loop import run_loop

pytestmark = pytest.mark.slow

KILLS = {"search": 15, "script": 10, "train": 15}


@pytest.mark.fault(
    "20",
    injected="SIGKILL at random moments of a search, resumed each time",
    outcome="every finished trial is kept as it was, best.json is valid all the time, nothing is left behind",
)
@pytest.mark.fault("F8", injected="what these kills leave behind", outcome="swept by the command that follows")
def test_a_search_survives_kills_at_random_moments(tmp_path: Path) -> None:
    tally = run_loop("search", KILLS["search"], 0, tmp_path)
    assert tally.faults == []
    assert tally.kills == KILLS["search"]
    assert tally.reads > 100
    assert tally.trials > 10


@pytest.mark.fault(
    "20", injected="SIGKILL at random moments of a search of a script, resumed each time", outcome="the same"
)
def test_a_search_of_a_script_survives_kills_at_random_moments(tmp_path: Path) -> None:
    tally = run_loop("script", KILLS["script"], 0, tmp_path)
    assert tally.faults == []
    assert tally.kills == KILLS["script"]
    assert tally.trials > 5


@pytest.mark.fault(
    "20",
    injected="SIGKILL at random moments of a training, to its parent, its child or both, resumed each time",
    outcome="weights and losses end bit for bit as without",
)
def test_a_training_survives_kills_at_random_moments(tmp_path: Path) -> None:
    tally = run_loop("train", KILLS["train"], 0, tmp_path)
    assert tally.faults == []
    assert tally.kills == KILLS["train"]
    assert tally.finished >= 1
