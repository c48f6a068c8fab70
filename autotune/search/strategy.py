"""What to try next: the user's presets and own knobs, the shipped presets, one knob at a time from the best, then TPE.

One-knob moves come in the order of the probe's advice, so that a short search spends its time where the probe saw
something to win; what needs a compilation comes last, unless the user's preset asks for it, and only when the time left
can pay for it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from autotune.knobs import KNOBS
from autotune.presets import load_presets
from autotune.records.config import TrainConfig, changed_fields, get_knob, is_own
from autotune.records.probe import ProbeReport
from autotune.records.search import Preset
from autotune.space import SearchSpace, needs_compilation

COMPILE_SECONDS = 45.0
"""What a first compilation is taken to cost until one was seen."""

_PAIRS = (
    # bf16 makes matrix products faster and may make fused attention slower: together they can win where each loses.
    {"precision": "bf16", "attention_backend": "math"},
    {"precision": "bf16", "optimizer_implementation": "fused"},
)


class SuggestFrom(Protocol):
    """The fixed plan, as `suggest`."""

    def __call__(
        self,
        space: SearchSpace,
        report: ProbeReport,
        incumbent: TrainConfig,
        tried: Sequence[TrainConfig],
        seconds_left: float,
        *,
        presets: Sequence[Preset] = (),
    ) -> TrainConfig | None:
        """Return the next config; None when it is used up."""
        ...


def suggest(
    space: SearchSpace,
    report: ProbeReport,
    incumbent: TrainConfig,
    tried: Sequence[TrainConfig],
    seconds_left: float,
    *,
    presets: Sequence[Preset] = (),
) -> TrainConfig | None:
    """Return the next config of the fixed plan that was not tried and can be paid for; None when it is used up.

    Args:
        space: what may be varied.
        report: whose advice orders the knobs.
        incumbent: the best config so far.
        tried: configs that were run.
        seconds_left: for the search.
        presets: of the user's own.
    """
    for config in _plan(space, report, incumbent, presets):
        if config not in tried and (not needs_compilation(config) or seconds_left >= COMPILE_SECONDS):
            return config
    return None


def describe_left_out(preset: Preset, space: SearchSpace) -> list[str]:
    """Return what a search has to leave out of a preset of the user's, one sentence for each setting."""
    kept = space.keep(preset.apply_to(space.baseline))
    return [
        f"{preset.name}: {name}={value} was left out: {space.explain_left_out(name, value)}"
        for name, value in preset.settings.items()
        if get_knob(kept, name) != value
    ]


def _plan(
    space: SearchSpace, report: ProbeReport, incumbent: TrainConfig, own: Sequence[Preset]
) -> Iterator[TrainConfig]:
    yield from (space.keep(preset.apply_to(space.baseline)) for preset in own)
    # What users put into a knob of their own is what they take for the bottleneck; everything else goes on top of it.
    names = [name for name in space.choices if is_own(name)]
    base = space.baseline.replace(user_knobs=incumbent.user_knobs)
    yield from (_move(space, base, name, value) for name in names for value in space.choices[name])
    presets = [space.keep(preset.apply_to(base)) for preset in load_presets()]
    yield from (config for config in presets if not needs_compilation(config))
    for pair in _PAIRS:
        if all(value in space.choices.get(name, ()) for name, value in pair.items()):
            yield space.keep(base.replace(**pair))
    moves = [_move(space, incumbent, name, value) for name in _order(space, report) for value in space.choices[name]]
    # What adds a change comes first; taking one back can only make the winner simpler.
    size = len(changed_fields(incumbent, space.baseline))
    moves.sort(key=lambda config: len(changed_fields(config, space.baseline)) < size)
    yield from (config for config in moves if not needs_compilation(config) or needs_compilation(incumbent))
    yield from (config for config in [*moves, *presets] if needs_compilation(config))


def _order(space: SearchSpace, report: ProbeReport) -> list[str]:
    advised = [advice.knob for advice in report.advice if advice.knob in space.choices]
    table = [knob.field for knob in KNOBS if knob.field in space.choices]
    own = [name for name in space.choices if is_own(name)]
    return list(dict.fromkeys([*advised, *table, *own]))


def _move(space: SearchSpace, config: TrainConfig, name: str, value: object) -> TrainConfig:
    values = {field: get_knob(config, field) for field in space.choices}
    return space.complete({**values, name: value})  # type: ignore[dict-item]
