"""Make PyTorch training faster without changing what is learned, by measurement on this machine.

Importing this package imports neither torch nor optuna; each name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autotune.version import VERSION

if TYPE_CHECKING:
    from autotune.api import run_search
    from autotune.errors import AutotuneError
    from autotune.probe.run import run_machine_probe, run_probe
    from autotune.records import DriftLimits, Margin, Profile, TrainConfig
    from autotune.search.run import SearchOptions
    from autotune.targets.workload import Workload
    from autotune.train.options import TrainingCallbacks, TrainingOptions
    from autotune.train.run import run_training

__version__ = VERSION

__all__ = [
    "AutotuneError",
    "DriftLimits",
    "Margin",
    "Profile",
    "SearchOptions",
    "TrainConfig",
    "TrainingCallbacks",
    "TrainingOptions",
    "Workload",
    "__version__",
    "run_machine_probe",
    "run_probe",
    "run_search",
    "run_training",
]

_HOME = {
    "AutotuneError": "autotune.errors",
    "DriftLimits": "autotune.records",
    "Margin": "autotune.records",
    "Profile": "autotune.records",
    "SearchOptions": "autotune.search.run",
    "TrainConfig": "autotune.records",
    "TrainingCallbacks": "autotune.train.options",
    "TrainingOptions": "autotune.train.options",
    "Workload": "autotune.targets.workload",
    "run_machine_probe": "autotune.probe.run",
    "run_probe": "autotune.probe.run",
    "run_search": "autotune.api",
    "run_training": "autotune.train.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
