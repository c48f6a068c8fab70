"""Start the trials of scripts: with the script's own interpreter, in a disposable view of its working folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from autotune.errors import UsageError
from autotune.records.trial import TrialResult, TrialSpec
from autotune.targets.launch import Launch, find_launch
from autotune.targets.script import render_command
from autotune.trial.files import VIEW_FILE
from autotune.trial.process import ColdProcess
from autotune.trial.scripted import script_values
from autotune.trial.view import View, list_written, permits_overlay, prepare_view, remove_view
from autotune.trial.writes import list_outside

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_IMPORT_SECONDS = 120


class ScriptStarter:
    """Starts the trials of scripts, one at a time."""

    def __init__(self) -> None:
        self._checked: set[str] = set()
        self._overlays: dict[Path, bool] = {}
        self._running: tuple[View, TrialSpec] | None = None

    def start(self, spec: TrialSpec, folder: Path, environment: Mapping[str, str], log: int) -> ColdProcess:
        """Start a trial.

        Args:
            spec: of the trial.
            folder: the trial's own.
            environment: added to ours.
            log: where it prints.

        Raises:
            UsageError: the command cannot be started, or its interpreter cannot import torch or this package.
        """
        launch = find_script(spec)
        check_interpreter(launch.interpreter, self._checked)
        work = Path(spec.target.folder)
        scratch = Path(tempfile.gettempdir())
        if work not in self._overlays:
            self._overlays[work] = permits_overlay(work, scratch)
        kind: Literal["overlay", "copy"] = "overlay" if self._overlays[work] else "copy"
        view = prepare_view(work, scratch, kind=kind, kept=(folder, *_list_kept(spec, environment, kind)))
        self._running = view, spec
        (folder / VIEW_FILE).write_text(json.dumps(view.as_arguments()))
        return ColdProcess(
            folder,
            # Without a fixed hash seed, sets of strings have another order in each process.
            {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"), **environment},
            log,
            python=(launch.interpreter, *launch.interpreter_options),
            cwd=str(work),
        )

    def finish(self, result: TrialResult) -> TrialResult:
        """Return the result with the files that the script wrote, and throw them away."""
        if self._running is None:
            return result
        view, spec = self._running
        try:
            written = list_written(view)
        except (OSError, ValueError):
            written = ()  # the script has damaged our notes; the trial counts all the same
        elsewhere = list_outside(view)
        self.discard()
        # The trial may have known what is kept, its own folder first of all, by other names.
        captures = result.captures and str(view.kept[0] / Path(result.captures).name)
        return result.replace(spec=spec, captures=captures, written=written, written_elsewhere=elsewhere)

    def discard(self) -> None:
        """Throw away what the script wrote."""
        if self._running is not None:
            remove_view(self._running[0])
            self._running = None


def _list_kept(spec: TrialSpec, environment: Mapping[str, str], kind: Literal["overlay", "copy"]) -> Iterator[Path]:
    """Yield the folders beside its own that a trial writes to, or that it may find empty otherwise."""
    cache = environment.get(_COMPILER_CACHE)
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        yield Path(cache)
    # A copy leaves these where they are; in an overlay the script may have removed them before they are read.
    if kind == "overlay" and spec.fidelity is not None and spec.fidelity.weights is not None:
        yield Path(spec.fidelity.weights).parent


def find_script(spec: TrialSpec) -> Launch:
    """Return how a trial's script is started.

    Raises:
        UsageError: the command cannot be started.
    """
    script = spec.target.script
    assert script is not None
    words = render_command(script, script_values(script, spec.config))
    return find_launch(words, folder=Path(spec.target.folder))


def check_interpreter(interpreter: str, checked: set[str]) -> None:
    """Make sure that an interpreter which is not ours has what a trial needs.

    Args:
        interpreter: its path.
        checked: those known to be good; it is added.

    Raises:
        UsageError: it cannot import torch or this package.
    """
    if interpreter in checked or interpreter == sys.executable:
        return
    for name, package in (("torch", "torch"), ("autotune.trial.rank", "autotune-torch")):
        command = [interpreter, "-P", "-c", f"import {name}"]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False, stdin=subprocess.DEVNULL
            )
            said = "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
        if said:
            raise UsageError(
                f"{interpreter} cannot import {name.partition('.')[0]}: {said[:200]}",
                hint=f"install it there: {interpreter} -m pip install {package}",
            )
    checked.add(interpreter)
