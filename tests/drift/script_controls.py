"""Scripts with one known mistake each, and scripts with none; a knob of their own switches the mistake on."""

from __future__ import annotations

from controls import Control

BATCH_FLAGS = "--bs {micro_batch_size:16} --accum {gradient_accumulation_steps:1}"
FOUR_BY_FOUR: dict[str, object] = {"micro_batch_size": 4, "gradient_accumulation_steps": 4}

_SCRIPT = f"control_script.py {BATCH_FLAGS} --fault {{fault}}"
_LONG_SCRIPT = f"control_script.py --samples 1000 {BATCH_FLAGS} --fault {{fault}}"
_DRY_SCRIPT = "control_script.py --dropout 0 --fault {fault}"
_FAULTS = ("fault=none,nothing,loss-scale,doubled-rate,dropped-batch:rounding",)


_UNEQUAL_MEANS = f"control_script.py {BATCH_FLAGS} --fault unequal-means"
_SKIPS = ("fault=none,skipped-batch:rounding",)
_MASKS = ("fault=none,forgotten-masks:rounding",)


def _switch_on(fault: str) -> dict[str, object]:
    return {"user_knobs": {"fault": fault}}


def _change(name: str, caught_by: str | None = None, *, script: str = _SCRIPT, **changes: object) -> Control:
    knobs = {_SCRIPT: _FAULTS, _LONG_SCRIPT: _MASKS, _DRY_SCRIPT: _SKIPS}
    return Control(f"script-{name}", script, changes, caught_by, knobs.get(script, ()))


SCRIPT_NEGATIVE = (
    _change("loss-scale", "gradients", **_switch_on("loss-scale")),
    _change("doubled-rate", "schedule", **_switch_on("doubled-rate")),
    _change("dropped-batch", "tape", **_switch_on("dropped-batch")),
    # The loader hands the short batch over, and no step is taken on it.
    _change("skipped-batch", "schedule", script=_DRY_SCRIPT, **_switch_on("skipped-batch")),
    # Masks drawn twice also move the order of the next epoch, which the tape would see first in a short one.
    _change("forgotten-masks", "gradients", script=_LONG_SCRIPT, **_switch_on("forgotten-masks")),
    _change("unequal-means", "additivity", script=_UNEQUAL_MEANS, **FOUR_BY_FOUR),
    _change("hurried-schedule", "schedule", script=f"scheduler_script.py {BATCH_FLAGS}", **FOUR_BY_FOUR),
)

SCRIPT_POSITIVE = (
    _change("nothing", **_switch_on("nothing")),
    _change("bf16", precision="bf16"),
    _change("workers", num_workers=2),
    _change("workers-by-flag", script="control_script.py --workers {num_workers:0}", num_workers=2),
    _change("fused", optimizer_implementation="fused"),
    _change("foreach", optimizer_implementation="foreach"),
    _change("fused-sgd", script="control_script.py --optimizer sgd", optimizer_implementation="fused"),
    _change("checkpointing-full", activation_checkpointing="full"),
    _change("checkpointing-selective", activation_checkpointing="selective"),
    _change("micro-batch", **FOUR_BY_FOUR),
    _change("micro-batch-and-fused", optimizer_implementation="fused", **FOUR_BY_FOUR),
)

SCRIPT_CONTROLS = SCRIPT_NEGATIVE + SCRIPT_POSITIVE
