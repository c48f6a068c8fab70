"""What each change of the baseline was worth, read off configs that differ in nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autotune.records.config import TrainConfig, changed_fields, get_knob
from autotune.search.scores.ranking import Entry
from autotune.space import BATCH_KNOBS, put_back


def measure_effects(entries: Sequence[Entry], baseline: TrainConfig) -> Mapping[str, float]:
    """Return the largest log gain that each change, as `name=value`, was seen to bring on top of anything.

    Args:
        entries: the configs that were timed, the baseline among them.
        baseline: the user's own settings.
    """
    scores = {one.key: one.score for one in entries}
    effects: dict[str, float] = {}
    for one in entries:
        for name in changed_fields(one.config, baseline):
            if name in BATCH_KNOBS and name != "micro_batch_size":
                continue  # it follows from the micro batch
            without = scores.get(put_back(one.config, baseline, [name]).model_dump_json())
            if without is not None:
                change, gain = f"{name}={get_knob(one.config, name)}", one.score - without
                effects[change] = max(effects.get(change, gain), gain)
    return effects
