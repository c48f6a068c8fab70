"""Settings in words: what a config changes, and what is exchanged for what. Pure."""

from __future__ import annotations

from autotune.format import count
from autotune.records.config import SHORT_NAMES, TrainConfig, changed_fields, get_knob, spread_config

_USER_KNOB = "user_knobs."
_TAKEN = {*TrainConfig.model_fields, *SHORT_NAMES.values()}


def name_setting(field: str) -> str:
    """Return what people call a setting: `workers`; a user knob by its own name, unless a usual one has that."""
    own = field.removeprefix(_USER_KNOB)
    if own != field:
        return field if own in _TAKEN else own
    return SHORT_NAMES.get(field, field)


def name_value(change: str) -> str:
    """Return what people call a `field=value`: `workers=2`."""
    field, _, value = change.partition("=")
    return f"{name_setting(field)}={value}"


def list_changes(config: TrainConfig, baseline: TrainConfig) -> list[str]:
    """Return what a config changes, each as `name=value`."""
    return [f"{name_setting(name)}={get_knob(config, name)}" for name in changed_fields(config, baseline)]


def describe_changes(config: TrainConfig, baseline: TrainConfig) -> str:
    """Return how a config differs from the baseline, e.g. `precision=bf16 workers=2`."""
    return " ".join(list_changes(config, baseline)) or "your settings"


def describe_exchanges(before: TrainConfig, after: TrainConfig) -> str:
    """Return the settings that differ, e.g. `micro_batch 64 -> 32, accumulation 1 -> 2`."""
    names = changed_fields(after, before)
    return ", ".join(f"{name_setting(name)} {get_knob(before, name)} -> {get_knob(after, name)}" for name in names)


def describe_share(config: TrainConfig, world_size: int) -> str:
    """Return what each of several processes does of a step, e.g. `2 processes, each with micro batch 16 x 1`.

    Args:
        config: settings of one process alone.
        world_size: processes that share out its batch.
    """
    each = spread_config(config, world_size)
    micro, steps = each.micro_batch_size, each.gradient_accumulation_steps
    return f"{count(world_size, 'process', 'processes')}, each with micro batch {micro} x {steps}"
