"""Start the trials of scripts: with the script's own interpreter, in a disposable view of its working folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import UsageError
from autotune.records.secrets import hide_secrets
from autotune.records.trial import TrialResult, TrialSpec
from autotune.targets.launch import Launch, find_launch
from autotune.targets.script import render_command
from autotune.trial.files import VIEW_FILE
from autotune.trial.hidden import pack_hidden
from autotune.trial.process import ColdProcess
from autotune.trial.scripted import script_values
from autotune.trial.view import View, list_written, permits_overlay, prepare_view, remove_view
from autotune.trial.writes import list_outside

_IMPORT_SECONDS = 120


class ScriptStarter:
    """Starts the trials of scripts, one at a time."""

    def __init__(self) -> None:
        self._checked: set[str] = set()
        self._overlays: dict[Path, bool] = {}
        self._view: View | None = None
        self._command: tuple[str, ...] = ()

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
        self._command = () if spec.target.script is None else spec.target.script.command
        check_interpreter(launch.interpreter, self._checked)
        work = Path(spec.target.folder)
        scratch = Path(tempfile.gettempdir())
        if work not in self._overlays:
            self._overlays[work] = permits_overlay(work, scratch)
        self._view = prepare_view(work, scratch, kind="overlay" if self._overlays[work] else "copy", kept=(folder,))
        (folder / VIEW_FILE).write_text(json.dumps(self._view.as_arguments()))
        return ColdProcess(
            folder,
            # Without a fixed hash seed, sets of strings have another order in each process.
            {
                "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
                **environment,
                **pack_hidden(self._command),
            },
            log,
            python=(launch.interpreter, *launch.interpreter_options),
            cwd=str(work),
        )

    def finish(self, result: TrialResult) -> TrialResult:
        """Return the result with the files that the script wrote, and throw them away; no secret stays in its error."""
        if self._view is None:
            return result
        result = result.replace(error=hide_secrets(result.error, self._command))
        written, elsewhere = list_written(self._view), list_outside(self._view)
        self.discard()
        return result.replace(written=written, written_elsewhere=elsewhere)

    def discard(self) -> None:
        """Throw away what the script wrote."""
        if self._view is not None:
            remove_view(self._view)
            self._view = None


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
