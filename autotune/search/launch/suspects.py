"""Which values have made launches fail: refused where nothing else can be why, else tried one at a time. Pure.

launch failed     its values that never worked anywhere are suspects; where it drifted, those that are not exact; none
                  where the user's settings ran out of time likewise
one suspect       guilty: no config has it again
several           those that launches with the same error share, or whose type the error names, where there are any;
                  no config has two of them, until each has worked or failed without the others
none              the combination is at fault: no config has all of it again
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.records.script import Numerics
from autotune.records.trial import TrialResult, TrialStatus
from autotune.sentences.settings import name_value
from autotune.sentences.trials import name_status
from autotune.space import BATCH_KNOBS, classify_changes

_FAILED = frozenset(
    {
        TrialStatus.TIMED_OUT,
        TrialStatus.TOO_SLOW,
        TrialStatus.CRASHED,
        TrialStatus.UNSUPPORTED,
        TrialStatus.DIVERGED,
        TrialStatus.DRIFTED,
        TrialStatus.OUT_OF_MEMORY,
    }
)
_MEMORY_KNOBS = frozenset({"micro_batch_size", "precision", "activation_checkpointing"})
"""With another value of these a config may fit where one without it did not."""

_KINDS = frozenset({"compile_mode", "num_workers"})
"""Where one value hangs, any other than the baseline's does, unless it was seen to work."""

_BROKEN = frozenset({TrialStatus.CRASHED, TrialStatus.UNSUPPORTED})
_MILDEST = frozenset({"compile_mode=default"})
"""What these do every other value does too, and more: where one of them crashes, so does the rest of its knob."""

_UNTOLD = ("no-result", "crash-exit", "crash-signal", "server-died")
"""Causes of which an error says nothing: it is the same of whatever it was."""

_OF_MACHINE = re.compile(r"No space left on device|ConnectionError|HTTP|Name or service|Temporary failure")
"""In errors that any launch may meet, whatever its settings: they blame nobody.

`ConnectionResetError` is none of them: a loader's own workers meet it."""

_NAMED = {
    "precision=bf16": re.compile("bfloat16", re.IGNORECASE),
    "precision=fp16": re.compile(r"\bHalf\b|\bfloat16\b"),
}
"""Values whose type an error may name, as `not implemented for 'BFloat16'` does."""

Values = frozenset[str]
"""Changes of the baseline, each as `name=value`."""


Ended = tuple[TrainConfig, TrialStatus]
"""A launch, and how it ended."""

_Launch = tuple[TrainConfig, TrialStatus, str]
"""The same, with its error, which of other workers' is not known."""


class Suspects:
    """The values that are refused or suspected after the launches so far.

    Args:
        results: launches of the search in order, those of earlier sessions among them.
        baseline: the user's own settings.
        numerics: class of the knobs whose class on this target is not the table's.
        elsewhere: how launches of other workers ended, where they share the study.
    """

    def __init__(
        self,
        results: Iterable[TrialResult],
        baseline: TrainConfig,
        numerics: Mapping[str, Numerics] | None = None,
        *,
        elsewhere: Iterable[Ended] = (),
    ) -> None:
        self._baseline, self._numerics = baseline, numerics
        own = (
            (one.spec.config, one.status, "" if one.cause in _UNTOLD else one.error)
            for one in results
            if one.spec.config is not None and not (one.cause == "user-error" and _OF_MACHINE.search(one.error))
        )
        launches = [*own, *((config, status, "") for config, status in elsewhere)]
        self.working: Values = frozenset[str]().union(
            *(self._values(config) for config, status, _ in launches if status is TrialStatus.COMPLETED),
            *(
                self._values(config) - self._inexact(config)
                for config, status, _ in launches
                if status is TrialStatus.DRIFTED
            ),
        )
        """Values that were in a launch that came to its end."""
        self._failed = self._list_failed(launches)
        found = [(self._find_suspects(*one), one[1]) for one in self._failed]
        self.guilty: dict[str, TrialStatus] = {
            next(iter(suspects)): status
            for suspects, status in found
            if len(suspects) == 1 and status is not TrialStatus.OUT_OF_MEMORY
        }
        """Values that alone can be why a launch failed, and how it did."""
        self._hopeless = {
            name
            for value, status in self.guilty.items()
            if ((name := _knob_of(value)) in _KINDS and status is TrialStatus.TIMED_OUT)
            or (value in _MILDEST and status in _BROKEN)
        }
        self._open: Values = frozenset[str]().union(*(suspects for suspects, _ in found if len(suspects) > 1))

    def is_blocked(self, config: TrainConfig) -> bool:
        """Return whether a config has a guilty value, two suspects, or all of a combination that failed."""
        values = self._values(config)
        if values & self.guilty.keys() or len(values & self._open) > 1:
            return True
        if any(_knob_of(value) in self._hopeless for value in values - self.working):
            return True
        return any(failed <= values and not self._eases(values - failed, status) for failed, status, _ in self._failed)

    def list_blocked(self, free: Iterable[str]) -> list[Values]:
        """Return combinations of which no config has all, in a space where some knobs vary: most of what is blocked.

        A few are conditions on values of the baseline: what has run out of memory is blocked where nothing spares any.

        Args:
            free: names of the knobs that vary.
        """
        own = {name: f"{name}={get_knob(self._baseline, name)}" for name in _MEMORY_KNOBS.intersection(free)}
        failed = [
            values | (_keep_unnamed(own, values) if status is TrialStatus.OUT_OF_MEMORY else frozenset())
            for values, status, _ in self._failed
        ]
        pairs = [
            frozenset(pair) for pair in itertools.combinations(sorted(self._open), 2) if len({*map(_knob_of, pair)}) > 1
        ]
        return [*(frozenset({value}) for value in self.guilty), *pairs, *failed]

    def _find_suspects(self, values: Values, status: TrialStatus, error: str) -> Values:
        """Return which changes of a launch that failed may be why: none of what has worked elsewhere."""
        suspects = values - self.working
        if status not in _BROKEN or not error:
            return suspects
        for others, _, told in self._failed:
            if told == error and others & suspects:  # it has failed likewise, so for the same reason
                suspects &= others
        named = frozenset(one for one, words in _NAMED.items() if one in suspects and words.search(error))
        # A compiler, and an attention kernel, name the types of what they were at work on, whatever is wrong.
        has_other = any(_knob_of(one) in ("compile_mode", "attention_backend") for one in suspects)
        return named if named and not has_other else suspects

    def _list_failed(self, launches: Sequence[_Launch]) -> list[tuple[Values, TrialStatus, str]]:
        """Return the changes of each launch that failed, of which one or more may be why, how it did, and its error."""
        blamed = _FAILED - _find_excused(launches, self._baseline)
        failed = [
            (self._inexact(config) if status is TrialStatus.DRIFTED else self._values(config), status, error)
            for config, status, error in launches
            if status in blamed
        ]
        return [one for one in failed if one[0]]

    def _eases(self, added: Values, status: TrialStatus) -> bool:
        saves = any(_knob_of(value) in _MEMORY_KNOBS for value in added)
        return status is TrialStatus.OUT_OF_MEMORY and saves

    def _inexact(self, config: TrainConfig) -> Values:
        """Return the changes of a config that may change what is learned."""
        kinds = classify_changes(config, self._baseline, self._numerics)
        exact = {f"{name}={get_knob(config, name)}" for name, kind in kinds.items() if kind == "exact"}
        return self._values(config) - exact

    def _values(self, config: TrainConfig | None) -> Values:
        if config is None:
            return frozenset()
        names = changed_fields(config, self._baseline)
        # How the batch is split is one change of several fields.
        return frozenset(
            f"{name}={get_knob(config, name)}"
            for name in names
            if name not in BATCH_KNOBS or name == "micro_batch_size" or "micro_batch_size" not in names
        )


def _find_excused(launches: Iterable[_Launch], baseline: TrainConfig) -> frozenset[TrialStatus]:
    """Return what no change is blamed for: running out of time, where the user's settings did and never ended."""
    own = {status for config, status, _ in launches if config == baseline}
    return frozenset({TrialStatus.TIMED_OUT}) & own if TrialStatus.COMPLETED not in own else frozenset()


def _keep_unnamed(own: Mapping[str, str], values: Values) -> Values:
    """Return the baseline's values of the knobs that some values are not of."""
    named = {*map(_knob_of, values)}
    return frozenset(value for name, value in own.items() if name not in named)


def _knob_of(value: str) -> str:
    return value.partition("=")[0]


def describe_guilty(suspects: Suspects) -> Sequence[str]:
    """Return a sentence for each value that was given up after it made a launch fail."""
    return [
        f"{name_value(value)} was given up after one launch: {name_status(status)}"
        for value, status in sorted(suspects.guilty.items())
    ]
