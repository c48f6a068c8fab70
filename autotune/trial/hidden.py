"""The words of a script's command that no file holds: a trial's process has them in its environment when it starts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from autotune.records.secrets import mask_words
from autotune.records.trial import TrialSpec

_VARIABLE = "AUTOTUNE_HIDDEN_WORDS"


def pack_hidden(command: Sequence[str]) -> dict[str, str]:
    """Return what the environment of a trial needs to know the words that its spec has masked."""
    masked = mask_words(command)
    hidden = {index: word for index, word in enumerate(command) if word != masked[index]}
    return {_VARIABLE: json.dumps(hidden)} if hidden else {}


def unpack_hidden(spec: TrialSpec) -> TrialSpec:
    """Return the spec of a trial, read from its file, with the words that this process was given."""
    script = spec.target.script
    hidden = json.loads(os.environ.get(_VARIABLE, "{}"))
    if script is None or not hidden:
        return spec
    command = tuple(hidden.get(str(index), word) for index, word in enumerate(script.command))
    return spec.replace(target=spec.target.replace(script=script.replace(command=command)))


def forget_hidden() -> None:
    """Take the words out of the environment: what the script starts is given them by the script, or not at all."""
    os.environ.pop(_VARIABLE, None)
