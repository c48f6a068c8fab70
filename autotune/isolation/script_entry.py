"""Start of a script's trial: into its view of the working folder, then the script itself, or torchrun with it.

torchrun starts `python -m autotune.isolation.script_entry FOLDER STARTED LAUNCHER` for each process of the training.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from autotune.isolation.channel.progress import open_progress
from autotune.isolation.prepare import exit_at_once, own_record, prepare_process
from autotune.isolation.sandbox.audit import watch_writes
from autotune.isolation.sandbox.seeds import DrawnSeeds
from autotune.isolation.sandbox.view import View, enter_view
from autotune.isolation.script_starter import enter_temporary_folder, find_script, forget_hidden, unpack_hidden
from autotune.lifeline import die_with_parent
from autotune.machine.cgroups import count_between, read_oom_kills
from autotune.records.codec import read_record, write_record
from autotune.records.layout import COLD_FILE, LOST_STATUS, RESULT_FILE, SPEC_FILE, VIEW_FILE
from autotune.records.trial import TrialResult, TrialSpec
from autotune.runs.run_script import LineWatch, call_after_import, forget_imports, run_script
from autotune.targets.launch.command import Launch

_TORCH = ("TORCH", "PYTORCH")
_TORCHS_OWN = ("TORCHINDUCTOR_CACHE_DIR",)
"""Set by torch itself when it compiles."""
_OF_OTHERS = (
    "LD_LIBRARY_PATH",
    "QT_",
    "OPENCV_",
    "TOKENIZERS_",
    "TRANSFORMERS_",
    "HF_",
    "WANDB_",
    "TF_",
    "KERAS_",
    "MPL",
)
"""Read when a process starts, as the first one, or by other libraries than torch: OpenCV sets the first when loaded."""

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from autotune.runs.script import ScriptTrial


def start_script(folder: Path, *, started: float) -> NoReturn:
    """Run the trial of a script whose spec is in a folder.

    Args:
        folder: the trial's own folder.
        started: `time.monotonic()` when the process was started.
    """
    prepare_process()
    sys.dont_write_bytecode = True
    spec = unpack_hidden(read_record(folder / SPEC_FILE, TrialSpec))
    view = _read_view(folder)
    enter_view(view)
    folder, spec = view.locate_kept(folder), _relocate(spec, view)
    launch = find_script(spec)
    if launch.launcher_options is None:
        watch_writes(view, own=folder)
        run_rank(spec, launch, folder, started=started)
    os.environ["PYTHONSAFEPATH"] = "1"
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_launcher

    kills_before = read_oom_kills()
    words = ["-m", "autotune.isolation.script_entry", str(folder), str(started), str(os.getpid())]
    try:
        run_launcher([*launch.launcher_options, *words])
    except ChildFailedError as error:
        traceback.print_exc()
        kills = count_between(kills_before, read_oom_kills())
        _explain_death(spec, folder, error, started=started, oom_kills=kills)
    exit_at_once(1)  # every process ended before the leading one had a result


def _explain_death(
    spec: TrialSpec, folder: Path, error: ChildFailedError, *, started: float, oom_kills: int | None
) -> None:
    """Leave a result that names the process whose end has ended the others, where none of them could leave one.

    Args:
        spec: of the trial.
        folder: the trial's own.
        error: of torchrun's agent.
        started: `time.monotonic()` when the trial was started.
        oom_kills: kills for want of memory that the kernel counted meanwhile.
    """
    if (folder / RESULT_FILE).exists():
        return
    from autotune.isolation.causes import explain_exit

    ends = {rank: failure.exitcode for rank, failure in error.failures.items()}
    own = {rank: status for rank, status in ends.items() if status not in (LOST_STATUS, -signal.SIGTERM)}
    rank = min(own or ends, key=lambda one: (ends[one] > 0, one))  # a signal before an exit status of its own
    outcome, cause, text = explain_exit(ends[rank], log_tail=None, oom_kills=oom_kills)
    sentence = f"process {rank} {'was ' if ends[rank] < 0 else ''}{text}"
    elapsed = time.monotonic() - started
    with own_record():
        write_record(
            folder / RESULT_FILE,
            TrialResult(spec=spec, status=outcome, cause=cause, error=sentence, elapsed_seconds=elapsed),
        )


def run_rank(spec: TrialSpec, launch: Launch, folder: Path, *, started: float) -> NoReturn:
    """Run one process of the training in this one.

    Args:
        spec: of the trial.
        launch: how its script is started.
        folder: the trial's own.
        started: `time.monotonic()` when the trial was started.
    """
    forget_hidden()
    enter_temporary_folder()
    found = _Found(folder)
    hung: list[ScriptTrial] = []
    heard = [""]
    progress = open_progress(folder)  # before any of the script runs

    def disconnect() -> None:
        from autotune.runs.script import ScriptTrial

        trial = ScriptTrial(
            spec, folder, started=started, last_line=heard[0], progress=progress, on_begin=found.compare_settings
        )
        hung.append(trial)
        trial.install()

    def hear(line: str) -> None:
        if hung:
            hung[0].heard(line)
        else:
            heard[0] = line.strip() or heard[0]

    sys.stdout, sys.stderr = LineWatch(sys.stdout, hear), LineWatch(sys.stderr, hear)
    inject_seed(spec.seeds[0])
    error: BaseException | None = None
    status = 0
    try:
        status = run_script(launch, on_torch=disconnect, before_torch=found.compare)
    except BaseException as raised:
        traceback.print_exc()
        error = raised
    if not hung:
        forget_imports()
        disconnect()
    hung[0].ended(error, status)


class _Found:
    """What this process found when it was started, as libraries read it when they are loaded; says if it was changed.

    Args:
        folder: the trial's own.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment, self._cpus = _read_environment(), _read_cpus()

    def compare(self) -> None:
        """Compare all of it, before torch is imported."""
        self._tell(self._environment == _read_environment() and self._cpus == _read_cpus())

    def compare_settings(self) -> None:
        """Compare what torch reads later, when it first trains or compiles: in a server it has read that as well."""
        self._tell(_find_settings(self._environment) == _find_settings(os.environ))

    def _tell(self, is_same: bool) -> None:
        if not is_same:
            (self._folder / COLD_FILE).touch()


def _read_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}


def _read_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _find_settings(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(_TORCH) and name not in _TORCHS_OWN}


def inject_seed(seed: int) -> None:
    """Seed every generator as soon as there is one, for a script that sets no seed itself."""
    drawn = DrawnSeeds(seed)
    random.seed(seed)
    drawn.serve_random()

    def seed_numpy() -> None:
        import numpy as np

        np.random.seed(seed)
        drawn.serve_numpy(np)

    def seed_torch() -> None:
        import torch

        torch.manual_seed(seed)

    call_after_import("numpy", seed_numpy)
    call_after_import("torch", seed_torch)


def _relocate(spec: TrialSpec, view: View) -> TrialSpec:
    """Return a spec whose files are where the view shows them."""
    plan = spec.fidelity
    if plan is None or plan.weights is None:
        return spec
    return spec.replace(fidelity=plan.replace(weights=str(view.locate_kept(Path(plan.weights)))))


def _read_view(folder: Path) -> View:
    return View.from_arguments(json.loads((folder / VIEW_FILE).read_text()))


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    os.environ.pop("PYTHONSAFEPATH", None)
    prepare_process()
    sys.dont_write_bytecode = True
    own = Path(sys.argv[1])
    around = _read_view(own)
    found = _relocate(unpack_hidden(read_record(own / SPEC_FILE, TrialSpec)), around)
    watch_writes(around, own=own)
    run_rank(found, find_script(found), own, started=float(sys.argv[2]))
