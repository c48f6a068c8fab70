"""The search space: the KNOBS table applied to one target on one machine.

A space is flat and static (Optuna's multivariate TPE models jointly only what every trial has), and `canonical` maps
every config to the one spelling of what it does, so that nothing is run twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autotune.errors import UsageError
from autotune.knobs import KNOBS, Facts
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob, with_knob
from autotune.records.probe import RuledOut
from autotune.records.script import Numerics


@dataclass(frozen=True)
class SearchSpace:
    """What a search may vary.

    Attributes:
        baseline: the user's own settings.
        choices: values by knob name, in order; the baseline's is among them.
        ruled_out: what is not tried, and why.
    """

    baseline: TrainConfig
    choices: dict[str, tuple[KnobValue, ...]]
    ruled_out: tuple[RuledOut, ...]

    def contains(self, config: TrainConfig) -> bool:
        """Return whether every knob has an allowed value and the effective batch is the baseline's."""
        if config.effective_batch_size != self.baseline.effective_batch_size:
            return False
        free = {*self.choices, "gradient_accumulation_steps"}
        fixed = [name for name in changed_fields(config, self.baseline) if name not in free]
        return not fixed and all(get_knob(config, name) in values for name, values in self.choices.items())

    def complete(self, values: dict[str, KnobValue | None]) -> TrainConfig:
        """Return the config with some knobs set, accumulation following the micro batch, in canonical spelling."""
        config = self.baseline
        for name, value in values.items():
            config = with_knob(config, name, value)
        if config.micro_batch_size != self.baseline.micro_batch_size:
            steps = self.baseline.effective_batch_size // config.micro_batch_size
            config = config.replace(gradient_accumulation_steps=steps)
        return canonical(config, self.baseline)

    def keep(self, config: TrainConfig) -> TrainConfig:
        """Return a config with every value that is not in the space put back to the baseline's."""
        allowed: dict[str, KnobValue | None] = {}
        for name, values in self.choices.items():
            value = get_knob(config, name)
            if value in values:
                allowed[name] = value
        return self.complete(allowed)

    def restrict(self, names: Sequence[str]) -> SearchSpace:
        """Return the space in which only some knobs vary.

        Raises:
            UsageError: a name is none of the knobs that may vary here.
        """
        unknown = [name for name in names if name not in self.choices]
        if unknown:
            raise UsageError(f"{unknown[0]!r} cannot be varied here", hint=f"what can: {', '.join(self.choices)}")
        others = [name for name in self.choices if name not in names]
        ruled_out = (RuledOut(knob=name, value=None, reason="left out of this search") for name in others)
        return SearchSpace(self.baseline, {name: self.choices[name] for name in names}, (*self.ruled_out, *ruled_out))


def build_space(facts: Facts) -> SearchSpace:
    """Return the space of one target on one machine."""
    baseline = facts.target.baseline
    choices: dict[str, tuple[KnobValue, ...]] = {}
    ruled_out: list[RuledOut] = []
    for knob in KNOBS:
        if knob.field in facts.target.fixed:
            ruled_out.append(RuledOut(knob=knob.field, value=None, reason=facts.target.fixed[knob.field]))
            continue
        allowed, reasons = knob.choices(facts)
        current = get_knob(baseline, knob.field)
        values = allowed if current is None or current in allowed else (current, *allowed)
        if len(values) > 1:
            choices[knob.field] = values
        ruled_out += [RuledOut(knob=knob.field, value=v, reason=r) for v, r in reasons.items() if v != current]
    for name, own in facts.target.knobs.items():
        choices[f"user_knobs.{name}"] = own
    return SearchSpace(baseline=baseline, choices=choices, ruled_out=tuple(ruled_out))


def canonical(config: TrainConfig, baseline: TrainConfig) -> TrainConfig:
    """Return the one spelling of what a config does: settings without effect are the baseline's.

    Without workers there is nothing to prefetch or to keep alive; without pinning a copy is never asynchronous.
    """
    if config.num_workers == 0:
        config = config.replace(
            prefetch_factor=baseline.prefetch_factor, persistent_workers=baseline.persistent_workers
        )
    if not config.pin_memory:
        config = config.replace(non_blocking=baseline.non_blocking)
    return config


def numerics_of(config: TrainConfig, baseline: TrainConfig, special: Mapping[str, Numerics] | None = None) -> Numerics:
    """Return the class of the strongest change a config makes to the baseline.

    Args:
        config: the settings.
        baseline: the user's own.
        special: knobs whose class on this target is not the table's.
    """
    rank: dict[Numerics, int] = {"exact": 0, "rounding": 1, "semantic": 2}
    by_field = {knob.field: knob.numerics for knob in KNOBS} | dict(special or {})
    found: list[Numerics] = [by_field.get(name, "semantic") for name in changed_fields(config, baseline)]
    return max(found, key=rank.__getitem__, default="exact")


def inexact_changes(
    config: TrainConfig, baseline: TrainConfig, special: Mapping[str, Numerics] | None = None
) -> frozenset[str]:
    """Return the changes to the baseline that are not exact, as `name=value`; arguments as of `numerics_of`."""
    by_field = {knob.field: knob.numerics for knob in KNOBS} | dict(special or {})
    names = (name for name in changed_fields(config, baseline) if by_field.get(name) != "exact")
    return frozenset(f"{name}={get_knob(config, name)}" for name in names)


def needs_compilation(config: TrainConfig) -> bool:
    """Return whether a process with this config compiles before it trains."""
    return config.compile_mode != "off"
