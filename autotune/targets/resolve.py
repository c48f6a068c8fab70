"""Where the target and the settings come from: the argument, else [tool.autotune], else the built-in demo."""

from __future__ import annotations

import difflib
import shlex
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from autotune.errors import UsageError
from autotune.records.reading import is_text, read_bytes
from autotune.records.script import Script
from autotune.records.trial import Target
from autotune.targets.check import check_target
from autotune.targets.script import read_script, script_label

DEMO_TARGET = "autotune.targets.demo:workload"
CONFIG_FILES = ("autotune.toml", "pyproject.toml")
_MOST_BYTES = 1024 * 1024
_LISTS = ("metric_limit", "max_drift", "command")


@dataclass(frozen=True)
class ProjectSettings:
    """The table [tool.autotune] of pyproject.toml, or the whole of autotune.toml; every value as text.

    Attributes:
        target: `file.py:attr` or `package.module:attr`.
        command: of a script instead, its words; one text in the shell's way of quoting or several in the file.
        budget: of a search, e.g. `20m`.
        max_loss_increase: how much higher the training loss may be, e.g. `0.5%`.
        metric_limit: how much worse metrics may get, e.g. `accuracy=0.1pp`; one text or several in the file.
        max_drift: what both were called before; one text or several in the file.
        memory_limit: of a trial, e.g. `16GiB`.
        out: where the profile goes.
        file: that they are of; empty without one.
    """

    target: str | None = None
    command: tuple[str, ...] | None = None
    budget: str | None = None
    max_loss_increase: str | None = None
    metric_limit: tuple[str, ...] | None = None
    max_drift: tuple[str, ...] | None = None
    memory_limit: str | None = None
    out: str | None = None
    file: str = field(default="", compare=False)


@dataclass(frozen=True)
class ResolvedTarget:
    """A target and where it came from.

    Attributes:
        target: what is tuned.
        origin: one of `argument`, `settings`, `search`, `demo`.
    """

    target: Target
    origin: str


def resolve_target(argument: str | Script | None, *, folder: Path, remembered: Target | None = None) -> ResolvedTarget:
    """Return the target: the argument, else the settings', else what the folder's search remembers, else the demo.

    Args:
        argument: as typed, or a script; None when it was left out.
        folder: the working folder.
        remembered: target of the search that was run in this folder; only the final training passes it.

    Raises:
        UsageError: the settings file is not valid, or what is named is not there.
        TargetError: what is named is no workload, as its source shows.
    """
    for name in (str(folder), argument):
        if isinstance(name, str) and not is_text(name):
            raise UsageError(f"the name {name!r} is not UTF-8, or has a NUL in it", hint="rename what it stands for")
    resolved = _choose_target(argument, folder=folder, remembered=remembered)
    if resolved.origin != "demo":
        check_target(resolved.target)
    return resolved


def read_command(settings: ProjectSettings) -> Script | None:
    """Return the script that the settings name; None if they name none.

    Raises:
        UsageError: its command cannot be used as given.
    """
    return None if settings.command is None else read_script(settings.command)


def _choose_target(argument: str | Script | None, *, folder: Path, remembered: Target | None) -> ResolvedTarget:
    settings = ProjectSettings() if isinstance(argument, Script) else read_project_settings(folder)
    for given, origin in ((argument, "argument"), (settings.target or read_command(settings), "settings")):
        if isinstance(given, Script):
            return ResolvedTarget(Target(spec=script_label(given.command), folder=str(folder), script=given), origin)
        if given is not None:
            return ResolvedTarget(Target(spec=given, folder=str(folder)), origin)
    if remembered is not None:
        return ResolvedTarget(remembered, "search")
    return ResolvedTarget(Target(spec=DEMO_TARGET, folder=str(folder)), "demo")


def read_project_settings(folder: Path) -> ProjectSettings:
    """Return the settings of autotune.toml, or of [tool.autotune] in pyproject.toml; empty without either.

    Raises:
        UsageError: a file is not TOML, a key is unknown, or a value is not text (of metric_limit, not a list of texts).
    """
    for name in CONFIG_FILES:
        path = folder / name
        if not path.is_file():
            continue
        table = _read_toml(path)
        if name == "pyproject.toml":
            tool = table.get("tool", {})
            table = tool.get("autotune") if isinstance(tool, dict) else None  # another tool's error is not ours to tell
        if table is not None:
            return _check_settings(table, name=name)
    return ProjectSettings()


def _hint_of(key: str, value: object) -> str:
    if key == "target" and isinstance(value, list):
        return "a script's words are its command: write command = [...]"
    return f'write {key} = "..."'


def _split_command(text: str, *, name: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as reason:
        raise UsageError(f"{name}: command = {text!r}: {reason}", hint="quote its words as in a shell") from None


def _read_toml(path: Path) -> Any:
    try:
        raw = read_bytes(path, max_bytes=_MOST_BYTES)
    except OSError as reason:
        raise UsageError(f"{path}: {reason.strerror or reason}", hint="check its permissions") from None
    if len(raw) > _MOST_BYTES:
        raise UsageError(f"{path.name} is larger than {_MOST_BYTES} bytes", hint=f"mend {path}")
    try:
        return tomllib.loads(raw.decode("utf-8"))
    except RecursionError:
        raise UsageError(f"{path.name} is nested too deeply", hint=f"mend {path}") from None
    except ValueError as reason:  # also of a text that is not UTF-8
        raise UsageError(f"{path.name} is not valid TOML: {reason}", hint=f"mend {path}") from None


def _check_settings(table: Any, *, name: str) -> ProjectSettings:
    known = [one.name for one in fields(ProjectSettings) if one.name != "file"]
    if not isinstance(table, dict):
        raise UsageError(f"{name}: [tool.autotune] is not a table", hint=f"its keys are {', '.join(known)}")
    settings: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"its keys are {', '.join(known)}"
            raise UsageError(f"{name}: [tool.autotune] has the unknown key {key!r}", hint=hint)
        texts = value if key in _LISTS and isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{name}: {key} = {value!r} is not text", hint=_hint_of(key, value))
        if not all(map(is_text, texts)):
            raise UsageError(f"{name}: {key} = {value!r} has a NUL in it", hint=_hint_of(key, value))
        settings[key] = tuple(texts) if key in _LISTS else value
    if isinstance(table.get("command"), str):
        settings["command"] = _split_command(table["command"], name=name)
    if "target" in settings and "command" in settings:
        raise UsageError(f"{name}: both target and command are set", hint="keep one of them")
    target = settings.get("target", "")
    if target.startswith("--") or (" " in target and ":" not in target):
        words = target.removeprefix("--").strip()
        raise UsageError(f"{name}: target = {target!r} is a script's command", hint=f'write command = "{words}"')
    return ProjectSettings(**settings, file=name)
