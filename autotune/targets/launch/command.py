"""Find how a script is started: which python, with which options, which file or module, and by torchrun or not.

Words in, `Launch` out. Nothing is run and no shell is asked.

    python -u train.py --lr 1       ->  python, ("-u",), file train.py, ("--lr", "1")
    ./train.py, a console script    ->  the python its first line names, then as above
    torchrun --standalone train.py  ->  the python its first line names, and torchrun's own options apart
    accelerate launch, deepspeed    ->  the same python, or torchrun, with the variables that they set
"""

from __future__ import annotations

import os
import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from autotune.errors import UsageError
from autotune.targets.launch.accelerate import split_accelerate
from autotune.targets.launch.deepspeed import split_deepspeed
from autotune.targets.launch.interpreter import find_interpreter
from autotune.targets.launch.refused import (
    LAUNCHER_MODULES,
    refuse_notebook,
    refuse_other_launchers,
    refuse_shell_words,
)
from autotune.targets.launch.torchrun import Torchrun, split_torchrun

_WITHOUT_VALUE = frozenset("uOBEsSIPvqbdx")
_WITH_VALUE = frozenset("XWm")
_LONG_WITH_VALUE = "--check-hash-based-pycs"
_FILE_HINT = "put it in a file and write python train.py ..."
_FILES = {name: name for name in ("torchrun", "accelerate", "accelerate-launch", "deepspeed")}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "accelerate.commands.accelerate_cli": "accelerate",
    "accelerate.commands.launch": "accelerate-launch",
    "deepspeed.launcher.runner": "deepspeed",
}
"""Launchers that are unwrapped, as files and as modules."""

_MODULE = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)*")


@dataclass(frozen=True)
class Launch:
    """A command taken apart.

    Attributes:
        interpreter: absolute path of the python, symbolic links kept: a virtual environment's python is one.
        interpreter_options: its options, `-m` excluded, e.g. `("-u", "-X", "dev")`.
        kind: whether `name` is a file or a module.
        name: the file as typed, relative to the working folder (absolute if it was found on PATH); or the module.
        arguments: what the script is given.
        launcher_options: torchrun's own, `-m` excluded; None when torchrun does not start it.
        environment: variables that its launcher sets.
        passes_local_rank: each process is given `--local_rank=K` before its other arguments.
    """

    interpreter: str
    interpreter_options: tuple[str, ...]
    kind: Literal["file", "module"]
    name: str
    arguments: tuple[str, ...]
    launcher_options: tuple[str, ...] | None = None
    environment: tuple[tuple[str, str], ...] = ()
    passes_local_rank: bool = False


def find_launch(command: Sequence[str], *, folder: Path, path: str | None = None) -> Launch:
    """Take a command apart.

    Args:
        command: words, placeholders filled in.
        folder: the working folder; relative paths are relative to it.
        path: folders to look for programs in, as in PATH, which is the default.

    Raises:
        UsageError: a program or file is missing, or the command is not one Python program on this machine.
    """
    if not command:
        raise UsageError("there is no command to start", hint="write python train.py ...")
    refuse_other_launchers(command)
    refuse_shell_words(command)
    folder = folder.absolute()
    interpreter, words = find_interpreter(
        command, folder=folder, path=os.environ.get("PATH", os.defpath) if path is None else path
    )
    options, module, words = _split_options(words)
    kind, name, arguments = _read_name(module, words)
    if kind == "module" and name in LAUNCHER_MODULES:
        raise UsageError(f"-m {name} is not supported", hint=LAUNCHER_MODULES[name])
    launch = _unwrap(Launch(interpreter, options, kind, name, arguments), folder)
    _check_name(launch.kind, launch.name, folder=folder)
    return launch


def _unwrap(launch: Launch, folder: Path) -> Launch:
    """Return how the script is started that a launcher starts; as it is, where there is no launcher."""
    launcher = _MODULES.get(launch.name) if launch.kind == "module" else _FILES.get(Path(launch.name).name)
    words = launch.arguments
    if launcher == "torchrun":
        return _start_by_torchrun(launch, split_torchrun(words))
    if launcher == "accelerate":
        if words[:1] != ("launch",):
            raise UsageError(
                f"accelerate {words[0] if words else ''} trains nothing".replace("  ", " "),
                hint="write accelerate launch ... train.py ...",
            )
        launcher, words = "accelerate-launch", words[1:]
    if launcher == "accelerate-launch":
        start = split_accelerate(words, folder=folder)
        known = replace(launch, environment=tuple(start.environment.items()))
        return _start_by_torchrun(known, start.script, is_alone=not start.script.options)
    if launcher == "deepspeed":
        deepspeed = split_deepspeed(words)
        known = replace(
            launch,
            interpreter_options=(*launch.interpreter_options, "-u"),
            environment=tuple(deepspeed.environment.items()),
            passes_local_rank=deepspeed.passes_local_rank,
        )
        return _start_by_torchrun(known, deepspeed.script)
    return launch


def _start_by_torchrun(launch: Launch, script: Torchrun, *, is_alone: bool = False) -> Launch:
    return replace(
        launch,
        kind=script.kind,
        name=script.name,
        arguments=script.arguments,
        launcher_options=None if is_alone else script.options,
    )


def _split_options(given: Sequence[str]) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Return python's options, the module that `-m` names, and the words after that."""
    options: list[str] = []
    words = deque(given)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.popleft()
        if word == "--":
            break
        flags, letter, joined = ("", "-", "") if word == _LONG_WITH_VALUE else _split_short(word)
        if letter is None:
            options.append(word)
            continue
        if not joined and not words:
            raise UsageError(f"python's option {word!r} needs a value", hint="write python -u -m package.train ...")
        value = joined or words.popleft()
        if letter == "m":
            return (*options, *([f"-{flags}"] if flags else [])), value, tuple(words)
        options += [word] if joined else [word, value]
    return tuple(options), None, tuple(words)


def _split_short(word: str) -> tuple[str, str | None, str]:
    """Return a short option's letters without value, the letter with one, and what is joined to that: `-uXdev`."""
    for position, letter in enumerate(word[1:], start=1):
        if letter in _WITH_VALUE:
            return word[1:position], letter, word[position + 1 :]
        if letter not in _WITHOUT_VALUE:
            break
    else:
        return word[1:], None, ""
    if letter == "c":
        raise UsageError(
            f"python's option {word!r} runs code typed on the command line",
            hint=_FILE_HINT,
        )
    if letter == "i":
        raise UsageError(f"python's option {word!r} waits for typing at the end", hint="leave -i out")
    raise UsageError(
        f"python's option {word!r} is not one that autotune knows",
        hint=f"it knows {' '.join('-' + known for known in sorted(_WITHOUT_VALUE | _WITH_VALUE))}",
    )


def _read_name(module: str | None, words: Sequence[str]) -> tuple[Literal["file", "module"], str, tuple[str, ...]]:
    if module is not None:
        return "module", module, tuple(words)
    if not words:
        raise UsageError("python is given no script", hint="write python train.py ... or python -m package.train ...")
    if words[0] == "-":
        raise UsageError("python is given '-', code to read from its input", hint=_FILE_HINT)
    return "file", words[0], tuple(words[1:])


def _check_name(kind: Literal["file", "module"], name: str, *, folder: Path) -> None:
    refuse_notebook(name)
    file = folder / name
    if kind == "module":
        if name.endswith(".py") or not _MODULE.fullmatch(name):
            raise UsageError(
                f"-m {name!r} is not the name of a module",
                hint=f"write {shlex.quote(name)} without -m" if os.path.isfile(file) else "write -m package.train",
            )
    elif os.path.isdir(file):
        raise UsageError(f"script {name!r} is a folder", hint="name the file in it, or write -m package")
    elif not os.path.isfile(file):
        raise UsageError(f"there is no script {name!r}", hint=f"it is looked up in {folder}")
