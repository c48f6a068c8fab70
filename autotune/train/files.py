"""The names of the files in a run folder."""

from __future__ import annotations

PLAN_FILE = "run.json"
"""A `RunPlan`: written at the start, and again at each step down."""

SUMMARY_FILE = "summary.json"
"""A `TrainingSummary`: written when a training ends or is stopped."""
