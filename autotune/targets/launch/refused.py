"""Programs and words that autotune does not start: shells, job launchers, environment tools, shell operators."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

from autotune.errors import UsageError

LAUNCHER_MODULES = {
    "torch.distributed.launch": "write torchrun ... train.py instead: it takes the same options",
    "deepspeed.launcher.launch": "write deepspeed ... train.py, or torchrun ... train.py instead",
}
"""Modules that start other programs, each with what to write in its place."""

_SHELL = ("a shell", "no shell is involved: write the command it ends up running, {rest}")
_BUILTIN = ("a command of the shell", "do that before you start autotune, then write {rest}")
_PREFIX = ("a program that starts another", "put it before autotune itself, or leave it out: write {rest}")
_ENVIRONMENT = ("an environment tool", "activate the environment first, then write {rest}")
_LAUNCHER = ("a launcher of its own", "write {rest}, or torchrun ... for several processes on this machine")
_CLUSTER = ("a launcher of jobs", "autotune tunes one machine: start it inside the job, and write {rest}")
_NOTEBOOK = ("an interactive program", "save the code as a file, and write {rest}")
_REFUSED = {
    **dict.fromkeys(("bash", "sh", "zsh", "dash", "ash", "ksh", "fish", "csh", "tcsh"), _SHELL),
    **dict.fromkeys((".", "source", "cd", "export", "set", "unset", "exec", "eval", "ulimit", "module"), _BUILTIN),
    **dict.fromkeys(("sudo", "doas", "nohup", "time", "nice", "ionice", "chrt", "timeout"), _PREFIX),
    **dict.fromkeys(("taskset", "numactl", "stdbuf", "setsid", "xargs", "watch", "tmux", "screen"), _PREFIX),
    "env": ("a program that starts another", "export the variables before you start autotune, then write {rest}"),
    **dict.fromkeys(("uv", "uvx", "poetry", "pipenv", "pdm", "hatch", "rye", "pixi", "pipx"), _ENVIRONMENT),
    **dict.fromkeys(("conda", "mamba", "micromamba"), _ENVIRONMENT),
    "horovodrun": _LAUNCHER,
    **dict.fromkeys(("mpirun", "mpiexec", "srun", "sbatch", "qsub"), _CLUSTER),
    **dict.fromkeys(("jupyter", "ipython", "ipython3"), _NOTEBOOK),
}
"""By name: what it is, and what to do instead."""

_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\+?=.*", re.DOTALL)
_OPERATOR = re.compile(r"&&|\|\||\|&|;;|[0-9&]?>>|[0-9&]>|[0-9]?>&[0-9]|<<<?")
_PERHAPS_OPERATOR = frozenset({"|", ";", "&", ">", "<"})
_PYTHON_OR_SCRIPT = re.compile(r"(?:.*/)?(?:python[0-9.]*t?|torchrun|[^/\s]+\.py)")
_LONGEST_SUGGESTION = 80


def refuse_other_launchers(command: Sequence[str]) -> None:
    """Refuse a command whose first word is a shell, a launcher, or a variable set for one command.

    Raises:
        UsageError: it is; names what to write instead.
    """
    program = command[0]
    rest = _suggest_rest(command)
    if _ASSIGNMENT.fullmatch(program):
        name, _, value = program.partition("=")
        shown = shlex.quote(value) if value.isprintable() else "..."
        raise UsageError(
            f"{program!r} sets a variable and is no program",
            hint=f"export {name}={shown} before you start autotune, then write {rest}",
        )
    what, instead = _REFUSED.get(PurePath(program).name or program, ("", ""))
    if what:
        raise UsageError(f"{program!r} is {what}, and autotune starts Python itself", hint=instead.format(rest=rest))


def refuse_shell_words(command: Sequence[str]) -> None:
    """Refuse operators of a shell; `|` and the like right after a flag are taken for its value.

    Raises:
        UsageError: there is one.
    """
    for index, word in enumerate(command):
        follows_flag = index > 0 and re.fullmatch(r"--?[A-Za-z_][^=]*", command[index - 1])
        if _OPERATOR.fullmatch(word) or (word in _PERHAPS_OPERATOR and not follows_flag):
            raise UsageError(
                f"the command has the shell's {word!r}, and no shell is involved",
                hint="give the one command that trains; autotune keeps what it prints",
            )


def _suggest_rest(command: Sequence[str]) -> str:
    for index, word in enumerate(command[1:], start=1):
        if _PYTHON_OR_SCRIPT.fullmatch(word):
            rest = shlex.join([*(["python"] if word.endswith(".py") else []), *command[index:]])
            return rest if len(rest) <= _LONGEST_SUGGESTION and rest.isprintable() else "python train.py ..."
    return "python train.py ..."


def refuse_notebook(name: str) -> None:
    """Refuse a notebook, which Python does not run.

    Raises:
        UsageError: the name is one's.
    """
    if name.endswith(".ipynb"):
        raise UsageError(
            f"{name!r} is a notebook, not a script",
            hint=f"jupyter nbconvert --to script {shlex.quote(name)} makes one of it: {PurePath(name).stem}.py",
        )
