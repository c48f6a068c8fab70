"""Settings of an answer that a trainer of another library takes while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from autotune.engine.hooks.script import process_settings
from autotune.engine.memory_format import apply_memory_format
from autotune.engine.optimizer import apply_optimizer_implementation, fit_state, is_fresh
from autotune.records.config import changed_fields
from autotune.records.profile import Profile

LIVE = frozenset(
    {
        *("num_threads", "matmul_precision", "cudnn_benchmark", "attention_backend"),
        *("memory_format", "optimizer_implementation"),
    }
)
"""Knobs that are applied to what a trainer has built."""


class LiveSettings:
    """The settings of one training, from its begin to its end."""

    def __init__(self, profile: Profile) -> None:
        """Prepare to apply an answer's settings.

        Args:
            profile: the answer.
        """
        self._profile = profile
        self._stack = ExitStack()

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        """Apply those that differ from the baseline to the process, a model and its optimizers.

        An optimizer that goes on from a checkpoint keeps its implementation: the state of one need not fit another.
        """
        config = self._profile.config
        changed = changed_fields(config, self._profile.baseline_config)
        self._stack.enter_context(process_settings(config, changed))
        if "memory_format" in changed:
            apply_memory_format(model, config)
            fit_state(optimizers, model, widens=False)
        if "optimizer_implementation" in changed:
            # Accelerate's stands before the real one, of which a loss scaler asks who unscales.
            plain = (getattr(one, "optimizer", one) for one in optimizers)
            for optimizer in filter(is_fresh, plain):
                apply_optimizer_implementation(optimizer, config)

    def end(self) -> None:
        """Put back what holds for the process."""
        self._stack.close()


def load_profile(profile: Profile | str | Path) -> Profile:
    """Return an answer that may be given by its file.

    Raises:
        ProfileError: the file is none.
    """
    return profile if isinstance(profile, Profile) else Profile.load(profile)
