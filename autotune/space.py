"""The search space: the KNOBS table applied to one target on one machine.

A space is flat and static (a sampler models jointly only what every trial has), and `canonical` maps
every config to the one spelling of what it does, so that nothing is run twice.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from autotune.arithmetics import find_cautions
from autotune.errors import UsageError
from autotune.knobs import KNOBS, Facts
from autotune.records.config import (
    SHORT_NAMES,
    KnobValue,
    LearningRateRule,
    TrainConfig,
    changed_fields,
    get_knob,
    is_user_knob,
    with_knobs,
)
from autotune.records.probe import Caution, RuledOut
from autotune.records.script import Numerics

SPLIT_KNOBS = frozenset({"micro_batch_size", "gradient_accumulation_steps"})

REORDERING_KNOBS = SPLIT_KNOBS | {"compile_mode", "memory_format", "precision", "attention_backend", "num_threads"}
"""They draw the random numbers of a step in another order: their masks are others, and no worse. Or they only sum in
another order, all of which is seen without masks."""

BATCH_KNOBS = SPLIT_KNOBS | {"learning_rate_scale"}
"""They make one change together."""

HALF_KERNELS = frozenset({"flash", "cudnn"})
"""Of attention: on a GPU they need half precision, and on a CPU nobody chooses them."""

CODE_KNOBS = (
    *("compile_mode", "precision", "matmul_precision", "activation_checkpointing", "memory_format"),
    *("attention_backend", "micro_batch_size", "num_threads", "distributed_strategy", "user_knobs"),
)
"""Knobs that decide which code is compiled; launches that differ in none of them share it in the search's cache."""

DDP_KNOBS = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
FSDP_KNOBS = ("reshard_after_forward",)
"""Without effect beside the other strategy."""

_NUMERICS: dict[str, Numerics] = {knob.field: knob.numerics for knob in KNOBS}
_MOST_REVERTED = 2**12
"""Kept: a search asks for the same ones thousands of times."""


@dataclass(frozen=True)
class SearchSpace:
    """What a search may vary.

    Attributes:
        baseline: the user's own settings.
        choices: values by knob name, in order; the baseline's is among them.
        ruled_out: what is not tried, and why.
        batch_is_free: the effective batch may differ from the baseline's.
        learning_rate_rule: what it then does to the learning rate.
        cautions: values that nothing measured speaks for or against, and why.
        half_kernels: of attention, that this device has for half precision alone.
    """

    baseline: TrainConfig
    choices: dict[str, tuple[KnobValue, ...]]
    ruled_out: tuple[RuledOut, ...]
    batch_is_free: bool = False
    learning_rate_rule: LearningRateRule = "none"
    cautions: tuple[Caution, ...] = ()
    half_kernels: frozenset[KnobValue] = frozenset()

    @property
    def unproven(self) -> frozenset[tuple[str, KnobValue]]:
        """Knobs with a value to be tried alone and late: whether this machine has what it needs was not measured."""
        return frozenset(
            (caution.knob, caution.value)
            for caution in self.cautions
            if caution.value in self.choices.get(caution.knob, ())
            if caution.value != get_knob(self.baseline, caution.knob)
        )

    @property
    def free_knobs(self) -> tuple[str, ...]:
        """Knobs that have more than one value, in order."""
        return tuple(name for name, values in self.choices.items() if len(values) > 1)

    def contains(self, config: TrainConfig) -> bool:
        """Return whether every knob has an allowed value and the effective batch is the baseline's, or may differ."""
        effective = self.baseline.effective_batch_size
        if config.effective_batch_size != effective and not self.batch_is_free:
            return False
        scale = scale_learning_rate(self._growth(config), self.learning_rate_rule)
        if config.learning_rate_scale != self.baseline.learning_rate_scale * scale:
            return False
        free = {*self.choices, "gradient_accumulation_steps", "learning_rate_scale"}
        fixed = [name for name in changed_fields(config, self.baseline) if name not in free]
        return not fixed and all(get_knob(config, name) in values for name, values in self.choices.items())

    def complete(self, values: dict[str, KnobValue | None]) -> TrainConfig:
        """Return the config with some knobs set, accumulation following the micro batch, in canonical spelling."""
        config = with_knobs(self.baseline, values)
        if config.micro_batch_size != self.baseline.micro_batch_size:
            steps = max(1, self.baseline.effective_batch_size // config.micro_batch_size)
            growth = steps * config.micro_batch_size / self.baseline.effective_batch_size
            scale = self.baseline.learning_rate_scale * scale_learning_rate(growth, self.learning_rate_rule)
            config = config.replace(gradient_accumulation_steps=steps, learning_rate_scale=scale)
        if config.precision == "fp32" and config.attention_backend in self.half_kernels:
            config = config.replace(attention_backend="auto")
        return canonical(config, self.baseline)

    def keep(self, config: TrainConfig) -> TrainConfig:
        """Return a config with every value that is not in the space put back to the baseline's."""
        allowed: dict[str, KnobValue | None] = {}
        for name, values in self.choices.items():
            value = get_knob(config, name)
            if value in values:
                allowed[name] = value
        return self.complete(allowed)

    def admit(self, settings: Mapping[str, KnobValue]) -> SearchSpace:
        """Return the space with a recipe's values, of knobs that vary here, that would not have been tried by itself.

        What was ruled out stays so, and the batch is split as before.
        """
        ruled_out = {(out.knob, out.value) for out in self.ruled_out}
        more = {
            name: (*self.choices[name], value)
            for name, value in settings.items()
            if name in self.choices and name not in BATCH_KNOBS and not is_user_knob(name)
            if value not in self.choices[name] and (name, value) not in ruled_out
        }
        return dataclasses.replace(self, choices={**self.choices, **more})

    def explain_left_out(self, name: str, value: KnobValue) -> str:
        """Return why a config that was kept to this space does not have a value."""
        if name in BATCH_KNOBS:
            return "the effective batch is held, and how to split it is found by itself"
        reasons = [out.reason for out in self.ruled_out if out.knob == name and out.value in (None, value)]
        if reasons:
            return reasons[0]
        if value in self.choices.get(name, ()):
            return "without effect beside the others"
        return f"here it may be {', '.join(map(str, self.choices.get(name, (get_knob(self.baseline, name),))))}"

    def without(self, names: Iterable[str], reason: str) -> SearchSpace:
        """Return the space in which some knobs stay as the baseline has them, for a reason in one sentence."""
        dropped = [name for name in names if name in self.choices]
        ruled_out = (RuledOut(knob=name, value=None, reason=reason) for name in dropped)
        choices = {name: values for name, values in self.choices.items() if name not in dropped}
        return dataclasses.replace(self, choices=choices, ruled_out=(*self.ruled_out, *ruled_out))

    def restrict(self, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> SearchSpace:
        """Return the space in which only some knobs vary, by their names; a workload's own by its plain name too.

        Args:
            only: that may vary; empty for all.
            exclude: that may not.

        Raises:
            UsageError: a name is no knob's, one that is asked for cannot be varied here, or none is left.
        """
        kept = [self._find_knob(name, "--only") for name in only] or list(self.choices)
        dropped = {self._find_knob(name, "--exclude") for name in exclude}
        for name in kept:
            if name not in self.choices:
                reasons = [out.reason for out in self.ruled_out if out.knob == name]
                why = reasons[0] if reasons else "it has one value here"
                raise UsageError(f"--only {name} cannot be varied here: {why}", hint=self._describe_choices())
        space = self.without([name for name in self.choices if name not in kept], "left out by --only")
        space = space.without(dropped, "left out by --exclude")
        if not space.choices:
            raise UsageError("--only and --exclude leave no knob to vary", hint=self._describe_choices())
        return space

    def _find_knob(self, given: str, option: str) -> str:
        own = f"user_knobs.{given}"
        field = find_field(given)
        name = own if own in self.choices else "micro_batch_size" if field in BATCH_KNOBS else field
        if name in self.choices or any(knob.field == name for knob in KNOBS):
            return name
        near = difflib.get_close_matches(given, self._list_names(), n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"{option} {given!r} is no knob", hint=f"{suggestion}{self._describe_choices()}")

    def _describe_choices(self) -> str:
        return f"what can be varied here: {', '.join(self._list_names())}"

    def _list_names(self) -> list[str]:
        return [SHORT_NAMES.get(name, name.removeprefix("user_knobs.")) for name in self.choices]

    def _growth(self, config: TrainConfig) -> float:
        return config.effective_batch_size / self.baseline.effective_batch_size


def find_field(name: str) -> str:
    """Return the field of a knob that may be given by what people call it: `num_workers` for `workers`."""
    return next((field for field, short in SHORT_NAMES.items() if short == name), name)


def require_knobs(names: Iterable[str], own: Collection[str]) -> None:
    """Make sure that names are knobs', before anything is measured.

    Args:
        names: as given for `--only` and `--exclude`.
        own: knobs of the training's own.

    Raises:
        UsageError: a name is no knob's.
    """
    fields = {knob.field for knob in KNOBS}
    known = [*(SHORT_NAMES.get(knob.field, knob.field) for knob in KNOBS), *own]
    for name in names:
        if find_field(name) not in fields and name.removeprefix("user_knobs.") not in own:
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"{name!r} is no knob", hint=f"{suggestion}the knobs are {', '.join(known)}")


def scale_learning_rate(growth: float, rule: LearningRateRule) -> float:
    """Return the factor on the learning rate for an effective batch that has grown.

    Sources: linear for SGD (Goyal et al. 2017), the square root for Adam and its like (Malladi et al. 2022).

    Args:
        growth: new effective batch size over the old one.
        rule: by name.
    """
    return {"none": 1.0, "sqrt": math.sqrt(growth), "linear": growth}[rule]


def build_space(facts: Facts, *, learning_rate_rule: LearningRateRule = "none") -> SearchSpace:
    """Return the space of one target on one machine.

    Args:
        facts: what is known about both.
        learning_rate_rule: for effective batches other than the baseline's, where they are allowed.
    """
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
    return SearchSpace(
        baseline=baseline,
        choices=choices,
        ruled_out=tuple(ruled_out),
        batch_is_free="batch" in facts.allowed,
        learning_rate_rule=learning_rate_rule,
        cautions=find_cautions(facts.target, choices),
        half_kernels=_find_half_kernels(facts, choices),
    )


def _find_half_kernels(facts: Facts, choices: Mapping[str, tuple[KnobValue, ...]]) -> frozenset[KnobValue]:
    """Return the attention kernels that need half precision: flash's and cuDNN's on a GPU.

    Where the precision is fixed, parameters may be in half precision themselves.
    """
    own = facts.target.baseline
    if not facts.on_gpu or not {"precision", "attention_backend"} <= choices.keys():
        return frozenset()
    return HALF_KERNELS - ({own.attention_backend} if own.precision == "fp32" else set())


def canonical(config: TrainConfig, baseline: TrainConfig) -> TrainConfig:
    """Return the one spelling of what a config does: settings without effect are the baseline's.

    Without workers there is nothing to prefetch or to keep alive; without pinning a copy is never asynchronous; buckets
    are DistributedDataParallel's, resharding is FSDP's; a single micro batch of a step is its last; a graph is static
    where gradients always meet; half types leave a CPU hardly any product of float32.
    """
    if config.num_workers == 0:
        config = config.replace(
            prefetch_factor=baseline.prefetch_factor, persistent_workers=baseline.persistent_workers
        )
    if not config.pin_memory:
        config = config.replace(non_blocking=baseline.non_blocking)
    if config.distributed_strategy == "fsdp":
        config = config.replace(memory_format="contiguous")  # what FSDP2 shards
    idle = DDP_KNOBS if config.distributed_strategy == "fsdp" else FSDP_KNOBS
    if config.gradient_accumulation_steps == 1:
        idle = (*idle, "sync_each_micro_batch")
    elif not config.sync_each_micro_batch:
        idle = (*idle, "static_graph")
    if config.precision != "bf16":
        idle = (*idle, "reduce_dtype")
    if config.precision != "fp32" and config.matmul_precision == "medium":
        idle = (*idle, "matmul_precision")
    return with_knobs(config, {name: get_knob(baseline, name) for name in idle})


def numerics_of(config: TrainConfig, baseline: TrainConfig, special: Mapping[str, Numerics] | None = None) -> Numerics:
    """Return the class of the strongest change a config makes to the baseline.

    Args:
        config: the settings.
        baseline: the user's own.
        special: knobs whose class on this target is not the table's.
    """
    rank: dict[Numerics, int] = {"exact": 0, "rounding": 1, "semantic": 2}
    found = classify_changes(config, baseline, special).values()
    return max(found, key=rank.__getitem__, default="exact")


def classify_changes(
    config: TrainConfig, baseline: TrainConfig, special: Mapping[str, Numerics] | None = None
) -> dict[str, Numerics]:
    """Return the class of every change a config makes to the baseline, by knob; arguments as of `numerics_of`."""
    own: Mapping[str, Numerics] = special or {}
    found: dict[str, Numerics] = {
        name: own.get(name) or _NUMERICS.get(name, "semantic") for name in changed_fields(config, baseline)
    }
    if config.effective_batch_size != baseline.effective_batch_size:
        found |= dict.fromkeys(BATCH_KNOBS & found.keys(), "semantic")
    return found


def revert_knobs(config: TrainConfig, baseline: TrainConfig, names: Iterable[str]) -> TrainConfig:
    """Return a config with some knobs as the baseline has them; those of the batch go together.

    So do half precision and the attention kernels that need it.
    """
    wanted = set(names)
    if wanted & BATCH_KNOBS:
        wanted |= BATCH_KNOBS
    if "precision" in wanted and baseline.precision == "fp32" and config.attention_backend in HALF_KERNELS:
        wanted.add("attention_backend")
    return _revert(config, baseline, frozenset(wanted.intersection(changed_fields(config, baseline))))


@lru_cache(maxsize=_MOST_REVERTED)
def _revert(config: TrainConfig, baseline: TrainConfig, names: frozenset[str]) -> TrainConfig:
    return canonical(with_knobs(config, {name: get_knob(baseline, name) for name in names}), baseline)


def find_code(config: TrainConfig) -> tuple[str, ...]:
    """Return what decides which code is compiled for a config."""
    return tuple(repr(getattr(config, name)) for name in CODE_KNOBS)


def needs_compilation(config: TrainConfig) -> bool:
    """Return whether a process with this config compiles before it trains."""
    return config.compile_mode != "off"
