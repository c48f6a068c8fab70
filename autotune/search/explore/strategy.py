"""What to try next: one change at a time by what it promises for its time, then bundles of what has won. Pure.

    own presets and knobs   what users bring is what they take for the bottleneck
    single changes          on top of the best so far, by expected gain over price: what is cheap to prove comes first
    pairs, presets          of values that have won alone or that the probe advises
    unproven values         whose arithmetic was not measured: alone, last

Every config is priced before it is proposed: its launch, its compilation, what proving its loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autotune.presets import load_presets
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob, is_user_knob, with_knobs
from autotune.records.probe import ProbeReport
from autotune.records.search import Preset
from autotune.space import SearchSpace, needs_compilation, numerics_of

_PAIRS: tuple[dict[str, KnobValue], ...] = (
    # bf16 makes matrix products faster and may make fused attention slower: together they can win where each loses.
    {"precision": "bf16", "attention_backend": "math"},
    {"precision": "bf16", "optimizer_implementation": "fused"},
)

_HOPES = {
    "host_allocator": 0.30,
    "num_workers": 0.10,
    "memory_format": 0.25,
    "optimizer_implementation": 0.08,
    "compile_mode": 0.30,
    "device_allocator": 0.05,
    "attention_backend": 0.08,
    "cudnn_benchmark": 0.08,
    "allow_tf32": 0.20,
    "precision": 0.10,
    "micro_batch_size": 0.05,
    "num_threads": 0.05,
    "prefetch_factor": 0.03,
    "persistent_workers": 0.03,
    "pin_memory": 0.05,
    "non_blocking": 0.03,
}
"""Log gain that a change may well bring where the probe does not say: about the mean and one standard deviation of what
single changes brought on public training scripts, 2 CPU cores. What only saves memory has none."""

_UNNAMED = 0.4
"""Of a knob's hope, where the probe saw no reason for it."""

_LOST = 0.15
"""Of a value's hope, once it or one before it in the same order has cost speed."""
_CLEAR_LOSS = -0.02
_LEAST_WIN = 0.005

_CHEAP = frozenset({"host_allocator", "num_workers", "memory_format", "optimizer_implementation"})
"""They cost next to nothing to prove and often pay: all are tried alone before any bundle."""

_LATER_VALUE = 0.7
"""Of a knob's hope, for each of its values that comes before."""

_PROVING = 1.5
"""Of a launch: what a change that rounds costs more than an exact one until its loss is proven."""

MOST_COMPILE_SHARE = 0.2
"""Of the budget: a compilation that takes more is not tried early."""


@dataclass(frozen=True)
class Situation:
    """What a proposal is made from.

    Attributes:
        space: what may be varied.
        report: of the probe; its advice says what to expect.
        incumbent: the best config so far.
        tried: configs that need not be proposed: they were run, are refused, cannot run, or cost too much now.
        presets: of the user's own.
        effects: the largest log gain seen of each change, as `name=value`.
        price: seconds that a launch of a config will take.
        budget_seconds: of the whole search.
    """

    space: SearchSpace
    report: ProbeReport
    incumbent: TrainConfig
    tried: Sequence[TrainConfig] = ()
    presets: Sequence[Preset] = ()
    effects: Mapping[str, float] = field(default_factory=dict)
    price: Callable[[TrainConfig], float] = lambda _config: 1.0
    budget_seconds: float = math.inf


Suggest = Callable[[Situation], TrainConfig | None]
"""The fixed plan, as `suggest`."""


def suggest(situation: Situation) -> TrainConfig | None:
    """Return the next config of the plan that was not tried; None when it is used up."""
    return next((config for config in _plan(situation) if config not in situation.tried), None)


def describe_left_out(preset: Preset, space: SearchSpace) -> list[str]:
    """Return what a search has to leave out of a preset of the user's, one sentence for each setting."""
    kept = space.keep(preset.apply_to(space.baseline))
    return [
        f"{preset.name}: {name}={value} was left out: {space.explain_left_out(name, value)}"
        for name, value in preset.settings.items()
        if get_knob(kept, name) != value
    ]


def _plan(now: Situation) -> Iterator[TrainConfig]:
    space = now.space
    yield from (space.keep(preset.apply_to(space.baseline)) for preset in now.presets)
    # What users put into a knob of their own is what they take for the bottleneck; everything else goes on top of it.
    base = space.baseline.replace(user_knobs=now.incumbent.user_knobs)
    yield from (config for name in space.choices if is_user_knob(name) for config in _own_moves(now, base, name))
    moves = _rank_moves(now)
    cheap = [move for move in moves if move.knob in _CHEAP]
    # By value for time; but no bundle before what is cheap was tried, and nothing dear before half of it was.
    merged = _merge(cheap, [move for move in moves if move.knob not in _CHEAP])
    until = 1 + max((place for place, move in enumerate(merged) if move.knob in _CHEAP), default=-1)
    yield from (move.config for move in merged[:until])
    yield from _pairs(now, base)
    yield from (move.config for move in merged[until:])
    yield from _presets(now, base)
    yield from _take_back(now)
    yield from (_move(space, now.incumbent, name, value) for name, value in sorted(space.unproven, key=str))


def _own_moves(now: Situation, base: TrainConfig, name: str) -> Iterator[TrainConfig]:
    """Return the base with each value of a knob that was not launched on it; it may have thousands."""
    launched = {get_knob(config, name) for config in now.tried if set(changed_fields(config, base)) <= {name}}
    yield from (_move(now.space, base, name, value) for value in now.space.choices[name] if value not in launched)


@dataclass(frozen=True)
class _Move:
    """One change of the incumbent: the config, the knob, and its hoped log gain for a second."""

    config: TrainConfig
    knob: str
    worth: float


def _rank_moves(now: Situation) -> list[_Move]:
    """Return the single changes of the incumbent that may pay, the best for their time first."""
    hopes = _hopes(now.report)
    # What is learnt on top of a compiled incumbent is learnt as well, and for less, before compiling.
    plain = _move(now.space, now.incumbent, "compile_mode", now.space.baseline.compile_mode)
    moves = []
    for name, values in now.space.choices.items():
        hope = hopes.get(name, 0.0)
        for value in _order_values(now, name, values):
            if hope <= 0.0 or is_user_knob(name) or (name, value) in now.space.unproven:
                continue
            is_loss = now.effects.get(f"{name}={value}", 0.0) < _CLEAR_LOSS
            hope *= _LOST if is_loss else 1.0
            for base in (plain, now.incumbent):
                config = _move(now.space, base, name, value)
                if _is_affordable(now, config) and not (is_loss and needs_compilation(config)):
                    moves.append(_Move(config, name, hope / (now.price(config) * _proving(now, config))))
            hope *= _LATER_VALUE
    moves += _share_cpus(now, plain, hopes["num_workers"])
    return sorted(moves, key=lambda move: -move.worth)


def _is_affordable(now: Situation, config: TrainConfig) -> bool:
    return not needs_compilation(config) or now.price(config) <= MOST_COMPILE_SHARE * now.budget_seconds


def _merge(cheap: list[_Move], dear: list[_Move]) -> list[_Move]:
    """Return both in order of worth, the dear ones no earlier than after half of the cheap ones."""
    half = (len(cheap) + 1) // 2
    return [*cheap[:half], *sorted([*cheap[half:], *dear], key=lambda move: -move.worth)]


def _hopes(report: ProbeReport) -> dict[str, float]:
    """Return the log gain to hope for by knob: what the probe expects at best, or what is usual."""
    named = {one.knob for one in report.advice}
    hopes = {name: hope if name in named else _UNNAMED * hope for name, hope in _HOPES.items()}
    for one in report.advice:
        if one.gain is not None:
            # A probe sees no more of malloc than the traffic it leaves behind: what is usual counts too.
            hopes[one.knob] = max(hopes.get(one.knob, 0.0), math.log(one.gain.high))
    return hopes


def _order_values(now: Situation, name: str, values: Sequence[KnobValue]) -> list[KnobValue]:
    """Return the values that are not the baseline's, the most promising first."""
    current = get_knob(now.space.baseline, name)
    others = [value for value in values if value != current]
    if name == "num_workers":
        wanted = now.report.hardware.usable_cpu_count
        advised = [one for one in now.report.advice if one.knob == name]
        # Where more of them than cores are offered, the loader waits rather than computes: the most come first.
        largest = max((int(value) for value in others), default=0)
        wanted = largest if advised and largest > wanted else wanted
        return sorted(others, key=lambda value: (abs(int(value) - wanted), int(value)))
    if name == "micro_batch_size":
        return sorted(others, key=lambda value: (int(value) > int(current or 0), -int(value)))
    return others


def _proving(now: Situation, config: TrainConfig) -> float:
    numerics = numerics_of(config, now.space.baseline, now.report.target.numerics)
    return {"exact": 1.0, "rounding": _PROVING, "semantic": 2 * _PROVING}[numerics]


def _pairs(now: Situation, base: TrainConfig) -> Iterator[TrainConfig]:
    """Return the pairs that physics makes more than the sum of their parts, where a part holds."""
    choices = now.space.choices
    for pair in _PAIRS:
        is_offered = all(value in choices.get(name, ()) for name, value in pair.items())
        if is_offered and any(_holds(now, name, value) for name, value in pair.items()):
            yield _keep(now, base, pair)
            yield _keep(now, now.incumbent, pair)


def _share_cpus(now: Situation, base: TrainConfig, hope: float) -> Iterator[_Move]:
    """Return workers with as many threads as they leave CPUs: one change of who has which (1.8x, where each loses).

    Where the probe advises workers; each right after the same number alone (the sort is stable), however that did.
    """
    choices, usable = now.space.choices, now.report.hardware.usable_cpu_count
    advised = any(one.knob == "num_workers" and one.gain is not None for one in now.report.advice)
    for workers in _order_values(now, "num_workers", choices.get("num_workers", ())):
        count = int(workers)
        threads = max(1, usable - count)
        if advised and threads in choices.get("num_threads", ()) and 0 < count <= usable:
            config = _keep(now, base, {"num_workers": count, "num_threads": threads})
            yield _Move(config, "num_workers", hope / now.price(config))
        hope *= _LATER_VALUE


def _presets(now: Situation, base: TrainConfig) -> Iterator[TrainConfig]:
    """Return the shipped presets, cut to what has won alone or what the probe advises."""
    for preset in load_presets():
        held = {name: value for name, value in preset.settings.items() if _holds(now, name, value)}
        config = _keep(now, base, held)
        if len(changed_fields(config, base)) > 1 and not needs_compilation(config):
            yield config


def _keep(now: Situation, config: TrainConfig, values: Mapping[str, KnobValue]) -> TrainConfig:
    return now.space.keep(with_knobs(config, values))


def _holds(now: Situation, name: str, value: KnobValue) -> bool:
    """Return whether a value has won alone, is part of the best so far, or is of a knob that the probe advises."""
    advised = any(one.knob == name and (one.gain is None or one.gain.high > 1.0) for one in now.report.advice)
    won = now.effects.get(f"{name}={value}", 0.0) > _LEAST_WIN or get_knob(now.incumbent, name) == value
    return (advised or won) and (name, value) not in now.space.unproven


def _take_back(now: Situation) -> Iterator[TrainConfig]:
    """Return the incumbent with one change less: that can only make the winner simpler, and sometimes faster."""
    for name in changed_fields(now.incumbent, now.space.baseline):
        if name in now.space.choices:
            yield _move(now.space, now.incumbent, name, get_knob(now.space.baseline, name))


def _move(space: SearchSpace, config: TrainConfig, name: str, value: KnobValue | None) -> TrainConfig:
    if name not in space.choices:
        return config
    values = {field_name: get_knob(config, field_name) for field_name in space.choices}
    return space.complete({**values, name: value})
