"""The names of the files in a run folder."""

from __future__ import annotations

PLAN_FILE = "run.json"
"""A `RunPlan`: written at the start, and again at each step down."""

SCRIPT_FILE = "script.json"
"""A `RunPlan` too, of a script's training: nothing in it can be resumed from here."""

SUMMARY_FILE = "summary.json"
"""A `TrainingSummary`: written when a training ends or is stopped."""

METRICS_FILE = "metrics.jsonl"
"""One line for each look at the training loss, and for each evaluation."""

CHECKPOINTS_FOLDER = "checkpoints"
"""Where the checkpoints are in a run folder."""

MANIFEST_FILE = "manifest.json"
"""A `CheckpointManifest`: the last file of a checkpoint, so that one without it is no checkpoint."""
