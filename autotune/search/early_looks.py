"""Looks of the drift gate while the search goes on: their time is taken off what is kept for the drift checks."""

from __future__ import annotations

from autotune.records.config import TrainConfig
from autotune.search.drift_stage import DriftStage
from autotune.search.launcher import Launcher

_EARLY_SHARE = 0.6
"""Of the time kept for the drift checks: the most that one look may take."""


def look_early(launcher: Launcher, stage: DriftStage, config: TrainConfig) -> None:
    """Look at a promising config."""
    budget, began = launcher.budget, launcher.budget.now()
    stage.look_at(config, seconds=_EARLY_SHARE * budget.drift_share * budget.seconds)
    launcher.lend_drift_time(budget.now() - began)
