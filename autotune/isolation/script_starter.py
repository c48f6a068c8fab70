"""Start the trials of scripts: with the script's own interpreter, in a disposable view of its working folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from autotune.errors import UsageError
from autotune.isolation.process import ColdProcess, TrialProcess
from autotune.isolation.sandbox.audit import list_outside
from autotune.isolation.sandbox.view import View, list_written, permits_overlay, prepare_view, remove_view
from autotune.isolation.warm.servers import TEMPORARY, ProcessKind, Servers, Starts
from autotune.records.layout import COLD_FILE, VIEW_FILE
from autotune.records.secrets import hide_secrets, mask_words
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.targets.launch.command import Launch, find_launch
from autotune.targets.script import render_command, script_values

IMPORT_SECONDS = 120.0
"""Longest that importing torch and this package may take."""

_COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_POLL_SECONDS = 0.05
_HIDDEN_WORDS = "AUTOTUNE_HIDDEN_WORDS"
_OWN_TEMPORARY = "AUTOTUNE_TMPDIR"


class ScriptStarter:
    """Starts the trials of scripts, one at a time.

    Args:
        servers: from which they are forked; None for a start that is always cold.
        take: told of each process that looks at an interpreter.
        should_stop: polled while one does.
    """

    def __init__(
        self,
        servers: Servers | None = None,
        take: Callable[[int], None] = lambda _pid: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._take, self._should_stop = take, should_stop
        self._checked: set[str] = set()
        self._overlays: dict[Path, bool] = {}
        self._running: tuple[View, TrialSpec] | None = None
        self._servers = servers or Servers(take, should_stop, Starts(failures=0))
        self._is_warm = self._is_misled = False

    @property
    def is_misled(self) -> bool:
        """Whether the last trial was forked, and its script changed what it should have found when it was started."""
        return self._is_misled

    @property
    def is_warm(self) -> bool:
        """Whether the last trial was forked."""
        return self._is_warm

    def start(
        self, spec: TrialSpec, folder: Path, environment: Mapping[str, str], log: int, *, warm: bool
    ) -> TrialProcess:
        """Start a trial.

        Args:
            spec: of the trial.
            folder: the trial's own.
            environment: added to ours.
            log: where it prints.
            warm: use a server where there is one.

        Raises:
            UsageError: the command cannot be started, or its interpreter cannot import torch or this package.
        """
        launch = find_script(spec)
        seconds = min(IMPORT_SECONDS, spec.limits.time_limit_seconds)
        check_interpreter(
            launch.interpreter, self._checked, seconds=seconds, take=self._take, should_stop=self._should_stop
        )
        work = Path(spec.target.folder)
        scratch = Path(tempfile.gettempdir())
        if work not in self._overlays:
            self._overlays[work] = permits_overlay(work, scratch)
        kind: Literal["overlay", "copy"] = "overlay" if self._overlays[work] else "copy"
        view = prepare_view(work, scratch, kind=kind, kept=(folder, *_list_kept(spec, environment, kind)))
        self._running = view, spec
        (folder / VIEW_FILE).write_text(json.dumps(view.as_arguments()))
        wanted = _describe_process(spec, launch, environment)
        may_fork = warm and launch.launcher_options is None
        forked = self._servers.start(wanted, folder, log) if may_fork else None
        self._is_warm, self._is_misled = forked is not None, False
        return forked or ColdProcess(folder, wanted.environment, log, python=wanted.python, cwd=wanted.cwd)

    def may_blame_warmth(self, result: TrialResult) -> bool:
        """Return whether a result may be a warm start's fault, which one that is cold will show."""
        if self._is_misled:
            return result.status is not TrialStatus.INTERRUPTED
        is_known = _find_part(result.spec) in self._servers.starts.shown
        return self._is_warm and result.status is TrialStatus.CRASHED and not is_known

    def clear_warmth(self, cold: TrialResult) -> None:
        """Take note of how a trial ended that was run once more, cold: if well, nothing is warm any more."""
        if cold.status is TrialStatus.COMPLETED:
            self._servers.forbid()
        elif cold.status is TrialStatus.CRASHED:
            self._servers.starts.shown.add(_find_part(cold.spec))

    def finish(self, result: TrialResult) -> TrialResult:
        """Return the result with the files that the script wrote, and throw them away; no secret stays in its error."""
        if self._running is None:
            return result
        view, spec = self._running
        try:
            written = list_written(view)
        except (OSError, ValueError):
            written = ()  # the script has damaged our notes; the trial counts all the same
        elsewhere = list_outside(view)
        result = result.replace(error=hide_secrets(result.error, _find_command(spec)))
        spec = TrialSpec.model_validate(spec.model_dump())  # as a file would have it: without secrets
        self.discard()
        if (view.kept[0] / COLD_FILE).exists():
            self._is_misled = self._is_warm
            self._servers.forbid()
        elif self._is_warm:
            self._note_warm(result)
        # The trial may have known what is kept, its own folder first of all, by other names.
        captures = result.captures and str(view.kept[0] / Path(result.captures).name)
        return result.replace(spec=spec, captures=captures, written=written, written_elsewhere=elsewhere)

    def _note_warm(self, result: TrialResult) -> None:
        """Take note of how a forked trial ended.

        What ran out of its time cannot be run once more: where nothing has come to its end yet, nothing is warm any
        more.
        """
        shown = self._servers.starts.shown
        if result.status is TrialStatus.COMPLETED:
            shown.add(_find_part(result.spec))
        elif result.status is TrialStatus.TIMED_OUT and not shown:
            self._servers.forbid()

    def discard(self) -> None:
        """Throw away what the script wrote."""
        if self._running is not None:
            remove_view(self._running[0])
            self._running = None


def _find_part(spec: TrialSpec) -> tuple[str, str]:
    return spec.purpose, spec.config.key if spec.config else ""


def find_kind(spec: TrialSpec, environment: Mapping[str, str]) -> ProcessKind | None:
    """Return how a script's process is started; None where that is a launcher's to do, or nobody's.

    Args:
        spec: of its trial.
        environment: added to ours.
    """
    try:
        launch = find_script(spec)
    except UsageError:
        return None  # it is told when it is started
    return None if launch.launcher_options is not None else _describe_process(spec, launch, environment)


def _describe_process(spec: TrialSpec, launch: Launch, environment: Mapping[str, str]) -> ProcessKind:
    work = Path(spec.target.folder)
    added = {
        # Without a fixed hash seed, sets of strings have another order in each process.
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0"),
        **dict(launch.environment),
        **{name: value for name, value in environment.items() if name != TEMPORARY},
        **pack_hidden(_find_command(spec)),
    }
    return ProcessKind(
        python=(launch.interpreter, *launch.interpreter_options),
        settings=tuple(sorted(added.items())),
        cwd=str(work),
        beside=(work / launch.name).parent if launch.kind == "file" else work,
        temporary=tuple((_OWN_TEMPORARY, value) for name, value in environment.items() if name == TEMPORARY),
    )


def _list_kept(spec: TrialSpec, environment: Mapping[str, str], kind: Literal["overlay", "copy"]) -> Iterator[Path]:
    """Yield the folders beside its own that a trial writes to, or that it may find empty otherwise."""
    cache = environment.get(_COMPILER_CACHE)
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
        yield Path(cache)
    # A copy leaves these where they are; in an overlay the script may have removed them before they are read.
    if kind == "overlay" and spec.fidelity is not None and spec.fidelity.weights is not None:
        yield Path(spec.fidelity.weights).parent


def _find_command(spec: TrialSpec) -> tuple[str, ...]:
    return () if spec.target.script is None else spec.target.script.command


def find_script(spec: TrialSpec) -> Launch:
    """Return how a trial's script is started.

    Raises:
        UsageError: the command cannot be started.
    """
    script = spec.target.script
    assert script is not None
    words = render_command(script, script_values(script, spec.config))
    return find_launch(words, folder=Path(spec.target.folder))


def check_interpreter(
    interpreter: str,
    checked: set[str],
    *,
    seconds: float = IMPORT_SECONDS,
    take: Callable[[int], None] = lambda _pid: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Make sure that an interpreter which is not ours has what a trial needs.

    Args:
        interpreter: its path.
        checked: those known to be good; it is added.
        seconds: that the look may take.
        take: told of each process that is started.
        should_stop: polled; True ends the look.

    Raises:
        UsageError: it cannot import torch or this package, or the user stopped it.
    """
    if interpreter in checked or _is_ours(interpreter):
        return
    until = time.monotonic() + seconds
    for name, package in (("torch", "torch"), ("autotune.isolation.script_entry", "autotune-torch")):
        said = _try_import(interpreter, name, until, take, should_stop)
        if said:
            raise UsageError(
                f"{interpreter} cannot import {name.partition('.')[0]}: {said[:200]}",
                hint=f"install it there: {interpreter} -m pip install {package}",
            )
    checked.add(interpreter)


def _is_ours(interpreter: str) -> bool:
    """Return whether an interpreter is the one that runs this, under any name in its folder."""
    theirs, ours = Path(interpreter), Path(sys.executable)
    try:
        return theirs.parent.samefile(ours.parent) and theirs.samefile(ours)
    except OSError:
        return False


def _try_import(
    interpreter: str, name: str, until: float, take: Callable[[int], None], should_stop: Callable[[], bool]
) -> str:
    """Return what an interpreter said that cannot import something; empty when it can."""
    try:
        process = subprocess.Popen(
            [interpreter, "-P", "-c", f"import {name}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return str(error)
    take(process.pid)
    with process:
        while True:
            try:
                _, printed = process.communicate(timeout=_POLL_SECONDS)
                return "" if process.returncode == 0 else (printed.strip().splitlines() or ["it printed nothing"])[-1]
            except subprocess.TimeoutExpired:
                if should_stop() or time.monotonic() >= until:
                    process.kill()
                    return "stopped" if should_stop() else "it was not done in time"


def pack_hidden(command: Sequence[str]) -> dict[str, str]:
    """Return what the environment of a trial needs to know the words that its spec has masked."""
    masked = mask_words(command)
    hidden = {index: word for index, word in enumerate(command) if word != masked[index]}
    return {_HIDDEN_WORDS: json.dumps(hidden)} if hidden else {}


def unpack_hidden(spec: TrialSpec) -> TrialSpec:
    """Return the spec of a trial, read from its file, with the words that this process was given."""
    script = spec.target.script
    hidden = json.loads(os.environ.get(_HIDDEN_WORDS, "{}"))
    if script is None or not hidden:
        return spec
    command = tuple(hidden.get(str(index), word) for index, word in enumerate(script.command))
    return spec.replace(target=spec.target.replace(script=script.replace(command=command)))


def enter_temporary_folder() -> None:
    """From here on temporary files go to the trials' own folder; the view was made with the user's."""
    folder = os.environ.pop(_OWN_TEMPORARY, None)
    if folder is not None:
        os.environ[TEMPORARY] = folder
        tempfile.tempdir = None


def forget_hidden() -> None:
    """Take the words out of the environment: what the script starts is given them by the script, or not at all."""
    os.environ.pop(_HIDDEN_WORDS, None)
