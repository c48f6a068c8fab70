"""Find the python that runs a command: named in it, or by the first line of the program that it names."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath

from autotune.errors import UsageError

_PYTHON = re.compile(r"python(?:[0-9]+(?:\.[0-9]+)*)?[dt]*")
_LONGEST_FIRST_LINES = 4096
_EXEC = "'''exec' "
_ENVIRONMENT_HINT = "activate its environment, or write the whole path of its python before train.py"


def find_interpreter(command: Sequence[str], *, folder: Path, path: str) -> tuple[str, tuple[str, ...]]:
    """Return the absolute path of the python that a command runs, and the words it is given.

    Args:
        command: words; the first is a python or a Python program.
        folder: the working folder, absolute.
        path: folders to look for programs in, as in PATH.

    Raises:
        UsageError: there is no such program, or it is not a Python program.
    """
    program, *arguments = command
    if _is_python(program):
        return _find_program(program, folder=folder, path=path), tuple(arguments)
    is_script = program.endswith(".py") and os.path.isfile(folder / program)
    if is_script or ("/" in program and _is_python_file(folder / program)):
        file, name = folder / program, program
    else:
        name = _find_program(program, folder=folder, path=path)
        file, name = Path(name), program if "/" in program else name
    words = read_first_line(file)
    if not words or not _is_python(words[0]):
        raise _not_python(program, words, is_script=is_script)
    try:
        interpreter = _find_program(words[0], folder=folder, path=path)
    except UsageError as reason:
        raise UsageError(f"{program!r} names its python in its first line: {reason}", hint=reason.hint) from None
    return interpreter, (*words[1:], name, *arguments)


def read_first_line(file: Path) -> tuple[str, ...]:
    """Return the program that a file's `#!` line names, and that program's options; empty without such a line.

    `/usr/bin/env` is looked through, and so is `/bin/sh` where it only starts a python with a long path, as pip does:

        #!/bin/sh
        '''exec' "/a long path/python" "$0" "$@"
    """
    try:
        with file.open("rb") as stream:
            first, second, *_ = (*stream.read(_LONGEST_FIRST_LINES).split(b"\n", maxsplit=2), b"", b"")
    except OSError as reason:
        raise UsageError(f"{str(file)!r} cannot be read: {reason.strerror}", hint="check its permissions") from None
    if not first.startswith(b"#!"):
        return ()
    program, *options = os.fsdecode(first[2:]).strip().split(maxsplit=1) or [""]
    if PurePath(program).name == "sh" and os.fsdecode(second).startswith(_EXEC):
        words = _split_quoted(os.fsdecode(second).removeprefix(_EXEC))
        return words[:-2] if words[-2:] == ("$0", "$@") else words
    if PurePath(program).name == "env" and options:
        return _split_quoted(re.sub(r"^(?:-S|--split-string=?)\s*", "", options[0]))
    return (program, *options)


def _is_python(word: str) -> bool:
    return _PYTHON.fullmatch(PurePath(word).name) is not None


def _is_python_file(file: Path) -> bool:
    if not os.path.isfile(file):
        return False
    words = read_first_line(file)
    return bool(words) and _is_python(words[0])


def _split_quoted(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError:
        return (text,)


def _find_program(program: str, *, folder: Path, path: str) -> str:
    if "/" in program:
        file = folder / program
        if os.path.isdir(file):
            raise UsageError(f"{program!r} is a folder", hint="write python train.py ...")
        if not os.path.isfile(file):
            raise UsageError(f"there is no program {program!r}", hint=f"it is looked up in {folder}")
        if not os.access(file, os.X_OK):
            raise UsageError(f"{program!r} is not executable", hint=f"chmod +x {shlex.quote(program)}")
        return str(file)
    folders = [str(folder / entry) for entry in path.split(os.pathsep)] if path else []
    found = shutil.which(program, path=os.pathsep.join(folders))
    if found is not None:
        return found
    blocked = next((place for place in folders if os.path.isfile(Path(place, program))), None)
    if blocked is not None:
        raise UsageError(f"{program!r} in {blocked} is not executable", hint=_ENVIRONMENT_HINT)
    if " " in program and program.isprintable():
        raise UsageError(f"{program!r} is one word", hint=f"write it without the quotes: {program}")
    if program.endswith(".py"):
        raise UsageError(f"there is no script {program!r}", hint=f"it is looked up in {folder} and on PATH")
    if os.path.isfile(folder / program):
        raise UsageError(f"there is no program {program!r} on PATH", hint=f"write python {program} or ./{program}")
    raise UsageError(f"there is no program {program!r} on PATH", hint=_ENVIRONMENT_HINT)


def _not_python(program: str, words: Sequence[str], *, is_script: bool) -> UsageError:
    if is_script:
        first_line = f"names {words[0]!r}, which is no python" if words else "names no python"
        return UsageError(
            f"script {program!r}: its first line {first_line}", hint=f"write python {shlex.quote(program)} ..."
        )
    runs = f"it is run by {words[0]!r}" if words else "it has no #! line"
    return UsageError(
        f"{program!r} is not a Python program: {runs}", hint="write the python train.py ... that it ends up running"
    )
