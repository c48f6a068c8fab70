"""Settings of an answer that a trainer of another library takes while it runs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from autotune.engine.loop import backend_settings
from autotune.engine.memory_format import apply_memory_format
from autotune.engine.optimizer import apply_optimizer_implementation
from autotune.records.profile import Profile

LIVE = frozenset(
    {
        *("num_threads", "allow_tf32", "cudnn_benchmark", "attention_backend"),
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

    def begin(self, model: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        """Apply them to the process, and to a model and fresh optimizers as far as they differ from the baseline."""
        config, baseline = self._profile.config, self._profile.baseline_config
        self._stack.enter_context(backend_settings(config, device))
        if config.memory_format != baseline.memory_format:
            apply_memory_format(model, config)
        if config.optimizer_implementation != baseline.optimizer_implementation:
            for optimizer in optimizers:
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
