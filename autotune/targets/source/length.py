"""Whether two commands differ in how long they train alone: their steps are the same then."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

LENGTH_OPTIONS = frozenset(
    {
        *("epochs", "num_epochs", "n_epochs", "nepochs", "max_epochs", "num_train_epochs", "total_epochs"),
        *("iterations", "num_iterations", "max_iterations", "iters", "num_iters", "n_iters", "max_iters", "niter"),
        *("max_steps", "max_train_steps", "total_steps", "train_steps", "num_train_steps"),
    }
)
"""Options, however their words are joined, that say how long to train. A bare `steps` may be those of one sequence."""


def differ_in_length_alone(one: Sequence[str], other: Sequence[str]) -> bool:
    """Return whether two commands are the same but for how long they train.

    Args:
        one: words of a command.
        other: of another.
    """
    return [*one] != [*other] and [*_leave_lengths(one)] == [*_leave_lengths(other)]


def _leave_lengths(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command but those that say how long to train: without, that is the script's own default."""
    is_value = False
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        if is_value:
            is_value = False
            continue
        name, equals, value = word.partition("=")
        is_length = name.lstrip("-").rpartition(".")[2].replace("-", "_").lower() in LENGTH_OPTIONS
        is_value = is_length and not equals and word.startswith("-") and _is_number(following)
        if not is_value and not (is_length and _is_number(value)):
            yield word


def _is_number(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
