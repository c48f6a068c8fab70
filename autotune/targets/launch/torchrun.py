"""Split torchrun's options from the script it starts, without importing torch."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autotune.errors import UsageError

WITH_VALUE = (
    "--nnodes",
    "--nproc-per-node",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--max-restarts",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
    "--log-line-prefix-template",
    "--print-completion",
)
WITHOUT_VALUE = ("--standalone", "--module", "--no-python", "--run-path", "--virtual-local-rank")
SHORT = {"-m": "--module", "-r": "--redirects", "-t": "--tee"}
"""Options of torch.distributed.run; a `_` may stand for each inner `-`. A test compares them with the installed one."""

_REFUSED = {
    "--no-python": "autotune runs the script with python: leave the option out and name a Python file",
    "--run-path": "leave the option out: the script is run as a file",
}
_ONE_NODE = ("1", "1:1")
_KNOWN = WITH_VALUE + WITHOUT_VALUE


@dataclass(frozen=True)
class Torchrun:
    """What follows `torchrun`, taken apart.

    Attributes:
        options: its own, as typed, without `-m`.
        kind: whether `name` is a file or a module.
        name: of the script.
        arguments: what the script is given.
    """

    options: tuple[str, ...]
    kind: Literal["file", "module"]
    name: str
    arguments: tuple[str, ...]


def split_torchrun(words: Sequence[str]) -> Torchrun:
    """Take apart what follows `torchrun`.

    Raises:
        UsageError: an option is unknown, refused or without its value, more than one node is asked for,
            or there is no script.
    """
    options: list[str] = []
    kind: Literal["file", "module"] = "file"
    index = 0
    while index < len(words) and words[index].startswith("-"):
        word = words[index]
        index += 1
        if word == "--":
            break
        name, value = _split_option(word)
        if name in _REFUSED:
            raise UsageError(f"torchrun's option {word!r} is not supported", hint=_REFUSED[name])
        if name == "--module":
            kind = "module"
            continue
        options.append(word)
        if value is None and name in WITH_VALUE:
            if index == len(words) or words[index].startswith("-"):
                raise UsageError(f"torchrun's option {word!r} needs a value", hint=f"write {name}=VALUE")
            value = words[index]
            options.append(value)
            index += 1
        if name == "--nnodes" and value not in _ONE_NODE:
            raise UsageError(
                f"torchrun's {name} {value!r} is more than this machine", hint="autotune tunes one machine"
            )
    if index == len(words):
        raise UsageError("torchrun is given no script", hint="write torchrun --nproc-per-node 2 train.py ...")
    return Torchrun(tuple(options), kind, words[index], tuple(words[index + 1 :]))


def _split_option(word: str) -> tuple[str, str | None]:
    """Return an option's name in full, with `-` inside, and the value joined to it."""
    if not word.startswith("--"):
        name, joined = SHORT.get(word[:2]), word[2:] or None
        if name is None or (joined and name not in WITH_VALUE):
            raise _unknown(word, word)
        return name, joined
    typed, equals, value = word.partition("=")
    name = typed.replace("_", "-")
    if name in WITHOUT_VALUE and equals:
        raise UsageError(f"torchrun's option {word!r} takes no value", hint=f"write {name} alone")
    is_short_for_known = any(known.startswith(name) for known in _KNOWN)
    if name not in _KNOWN and (is_short_for_known or not equals):
        raise _unknown(word, name)
    return name, value if equals else None


def _unknown(word: str, name: str) -> UsageError:
    near = [known for known in _KNOWN if known.startswith(name)] or difflib.get_close_matches(name, _KNOWN, n=1)
    hint = (
        f"write it in full: {' or '.join(near)}" if near else "if torchrun has it and it takes a value: --option=VALUE"
    )
    return UsageError(f"torchrun's option {word!r} is not one that autotune knows", hint=hint)
