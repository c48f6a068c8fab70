"""Names and layout of what is kept on disk. Both sides of every file take its name from here; needs nothing of ours.

.autotune/                             in the working folder
lock, holder.json, kept-probe.json, probe.json, probe-log.txt
<target>-<date>/                     one search
search.json, probe.json, recalled.json, screens.json, finals.json, best.json, seal, study.db, worker
trials/0007/                       spec.json, result.json, log.txt; a probe's partial.json; a script's view.json, ...
explanation/                       explanation.json, trials/: launches made to explain the answer
runs/<target>-001/                     one training
lock, run.json or script.json, metrics.jsonl, summary.json, next.json, model.safetensors
checkpoints/step-00000120/           state.pt, manifest.json; of a sharded model .metadata, __0_0.distcp, ...
"""

from __future__ import annotations

from pathlib import Path

STATE_FOLDER = ".autotune"
"""Of a working folder: its searches, and the last probe."""
RUNS_FOLDER = "runs"
"""Of a working folder: its trainings."""
LOCK_FILE = "lock"
"""Held by whoever writes in the folder; the kernel lets go of it when that process dies."""

PROBE_FILE = "probe.json"
"""A `ProbeReport`, of a search or of a probe that belongs to none."""
PROBE_LOG_FILE = "probe-log.txt"
"""What the process of a probe has printed that belongs to no search, where it failed."""
KEPT_PROBE_FILE = "kept-probe.json"
"""A `KeptProbe`: the last probe, and for what it holds."""
RECALLED_FILE = "recalled.json"
"""A `Recalled`: what the search begins with from earlier ones."""
SCREENS_FILE = "screens.json"
"""A `Screens`: what its loss checks have shown."""
FINALS_FILE = "finals.json"
"""A `FinalsRecord`."""
WORKER_FILE = "worker"
"""By what the other workers of a shared study know a search."""
EXPLANATION_FOLDER = "explanation"
"""Of a search: what was launched afterwards, to tell what each change of its answer is worth."""
EXPLANATION_FILE = "explanation.json"
"""An `Explanation`."""
COMPILER_CACHE = "inductor"
"""TorchInductor's cache, one for all trials of a search."""

TRIALS_FOLDER = "trials"
"""Of a search: a folder for each trial."""
SPEC_FILE = "spec.json"
"""A `TrialSpec`: written by the supervisor before the trial's process starts."""
RESULT_FILE = "result.json"
"""A `TrialResult`: moved into place whole when the trial has ended."""
PARTIAL_FILE = "partial.json"
"""A `TrialResult` too: what a probe knew before it tried what may end its process."""
LOG_FILE = "log.txt"
"""All that the trial's processes have printed."""
VIEW_FILE = "view.json"
"""How a script's trial sees its working folder."""
COLD_FILE = "starts-cold"
"""Empty: the script changes its process before it imports torch, so that nothing may be imported beforehand."""
RECORD_FAILED_STATUS = 74
"""Exit status of a trial whose own record could not be written (EX_IOERR of sysexits.h)."""
LOST_STATUS = 76
"""Exit status of one of several processes of a trial that has lost another one (EX_PROTOCOL)."""
RECORD_FAILED = "the trial's record could not be written: "
"""Begins the line that such a trial prints last."""

PLAN_FILE = "run.json"
"""A `RunPlan`: written at the start of a training, and again at each step down."""
SCRIPT_FILE = "script.json"
"""A `RunPlan` too, of a script's training: nothing in it can be resumed from here."""
NEXT_FILE = "next.json"
"""A `Profile` with safer settings, made when a script fails after its first step: to start it again with."""
SUMMARY_FILE = "summary.json"
"""A `TrainingSummary`: written when a training ends or is stopped."""
WEIGHTS_FILE = "model.safetensors"
"""The best weights of a finished training, or the last ones without a metric; only where safetensors is installed."""
METRICS_FILE = "metrics.jsonl"
"""One line for each look at the training loss, and for each evaluation."""
CHECKPOINTS_FOLDER = "checkpoints"
"""Where the checkpoints are in a run folder."""
MANIFEST_FILE = "manifest.json"
"""A `CheckpointManifest`: the last file of a checkpoint, so that one without it is no checkpoint."""


def show_log(search: Path, number: int) -> Path:
    """Return the file of what a trial has printed, as seen from the working folder.

    Args:
        search: its folder.
        number: of the trial.
    """
    return Path(STATE_FOLDER) / search.name / TRIALS_FOLDER / trial_name(number) / LOG_FILE


def trial_name(number: int) -> str:
    """Return the name of a trial's folder."""
    return f"{number:04d}"
