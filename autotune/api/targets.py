"""The target as Python names it: a text, a list of words, a `Script`, or a workload that a module holds by a name."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

from autotune.arguments import shorten
from autotune.errors import UsageError
from autotune.records.profile import WORKLOAD_PLACE
from autotune.records.script import Script
from autotune.targets.load import refuse_call_of_target
from autotune.targets.resolve import DEMO_TARGET
from autotune.targets.script import read_script
from autotune.targets.workload import DOCS_PART, REQUIRED

_DEMO = "demo"
_WAYS = 'give "train.py:workload", a workload, or a script\'s command: ["python", "train.py"]'


def name_target(target: object, folder: Path) -> str | Script | None:
    """Return a target as a probe, a search and a training take it.

    Args:
        target: `file.py:attr` or `package.module:attr`; a workload that a module holds by a name; a script's command as
            a text or as a list of words; `demo`; None for that of [tool.autotune], else the built-in demo.
        folder: the working folder.

    Raises:
        UsageError: it is none of these, or the target's own module asks while it is imported.
    """
    refuse_call_of_target()
    if target is None or isinstance(target, Script):
        return target
    if isinstance(target, str | os.PathLike):
        text = os.fspath(target)
        if isinstance(text, str):
            return _read_text(text)
    if isinstance(target, list | tuple):
        return read_script(_read_words(target))
    _require_workload(target)
    for module in [*sys.modules.values()]:
        for name, value in [*vars(module).items()] if isinstance(module, ModuleType) else []:
            if value is target:
                return f"{_locate(module, folder)}:{name}"
    raise UsageError(
        f"the target is a {type(target).__name__} that no module holds by a name",
        hint="bind it at the top of a file: trials import it from there; or give file.py:attr",
    )


def _read_text(text: str) -> str | Script:
    if text == _DEMO:
        return DEMO_TARGET
    if " " not in text.strip() or ":" in text.split(maxsplit=1)[0] or WORKLOAD_PLACE.fullmatch(text.strip()):
        return text
    try:
        words = shlex.split(text.strip().removeprefix("-- "))
    except ValueError as reason:
        raise UsageError(f"the command {text!r}: {reason}", hint="quote its words as in a shell") from None
    return read_script(words)


def _read_words(words: list[object] | tuple[object, ...]) -> list[str]:
    for word in words:
        if isinstance(word, bool) or not isinstance(word, str | int | float | os.PathLike):
            raise UsageError(f"a word of the command is {shorten(word)}", hint='write ["python", "train.py"]')
    return [str(word) for word in words]


def _require_workload(target: object) -> None:
    if isinstance(target, type):
        raise UsageError(f"the target is the class {target.__name__}", hint=f"give an instance: {target.__name__}()")
    missing = [name for name in REQUIRED if not callable(getattr(target, name, None))]
    if len(missing) == len(REQUIRED):
        raise UsageError(f"the target is {shorten(target)}: no training", hint=_WAYS)
    if missing:
        named = ", ".join(f"{name}()" for name in missing)
        raise UsageError(
            f"the target is a {type(target).__name__} without {named}",
            hint=f"a workload has the methods {', '.join(REQUIRED)}; see {DOCS_PART}",
        )


def _locate(module: ModuleType, folder: Path) -> str:
    """Return where a module is imported from: its name, of the one that runs its file."""
    file = getattr(module, "__file__", None)
    if module.__name__ != "__main__":
        return module.__name__
    if file is None:
        raise UsageError(
            "the target is defined in a session or a notebook, which no trial can import",
            hint="write it to a file and import it from there; in a notebook %%writefile train.py does",
        )
    return os.path.relpath(file, folder)


def find_folder(folder: object) -> Path:
    """Return the working folder; None stands for the current one.

    Raises:
        UsageError: it is no folder.
    """
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise UsageError(f"folder is {shorten(folder)}", hint="give a path")
    path = Path(os.fsdecode(folder)) if folder is not None else Path.cwd()
    if not path.is_dir():
        raise UsageError(f"there is no folder {str(path)!r}", hint="make it, or give another folder=")
    return path
