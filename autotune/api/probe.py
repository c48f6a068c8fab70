"""`autotune.run_probe`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.api.targets import find_folder, name_target
from autotune.arguments import shown_hints

if TYPE_CHECKING:
    from autotune.records.probe import ProbeReport


@shown_hints()
def run_probe(
    target: object = None,
    *,
    folder: str | Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> ProbeReport:
    """Probe a training with its own settings: what limits it, what could be gained, what is worth trying.

    Args:
        target: as of `run_search`.
        folder: working folder; None for the current one.
        should_stop: polled; True ends the probe with an error.

    Raises:
        UsageError: the target or the settings file cannot be used as given.
        TargetError: the training fails with its own settings.
        MachineError: a limit of this machine's (`ulimit`) stops it, or the disk is full.
    """
    from autotune.probe import run as stage

    work = find_folder(folder)
    return stage.run_probe(name_target(target, work), folder=work, should_stop=should_stop)
