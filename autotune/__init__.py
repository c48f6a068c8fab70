"""Make PyTorch training faster without changing what is learned, by measurement on this machine.

Importing this package imports neither torch nor optuna; each name is loaded at its first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from autotune.version import VERSION

if TYPE_CHECKING:
    from autotune.api.probe import run_probe
    from autotune.api.profile import Profile
    from autotune.api.search import run_search
    from autotune.api.training import run_training
    from autotune.errors import AutotuneError
    from autotune.probe.run import run_machine_probe
    from autotune.records import DriftLimits, Margin, ProbeReport, TrainConfig
    from autotune.records.run import TrainingSummary
    from autotune.records.script import Script
    from autotune.records.search import PlannedRun, Preset
    from autotune.search.progress import SearchReporter
    from autotune.search.run import SearchOptions
    from autotune.targets.workload import Workload
    from autotune.train.options import TrainingCallbacks, TrainingOptions

__version__ = VERSION

__all__ = [
    "AutotuneError",
    "DriftLimits",
    "Margin",
    "PlannedRun",
    "Preset",
    "ProbeReport",
    "Profile",
    "Script",
    "SearchOptions",
    "SearchReporter",
    "TrainConfig",
    "TrainingCallbacks",
    "TrainingOptions",
    "TrainingSummary",
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
    "PlannedRun": "autotune.records.search",
    "Preset": "autotune.records.search",
    "ProbeReport": "autotune.records",
    "Profile": "autotune.api.profile",
    "Script": "autotune.records.script",
    "SearchOptions": "autotune.search.run",
    "SearchReporter": "autotune.search.progress",
    "TrainConfig": "autotune.records",
    "TrainingCallbacks": "autotune.train.options",
    "TrainingOptions": "autotune.train.options",
    "TrainingSummary": "autotune.records.run",
    "Workload": "autotune.targets.workload",
    "run_machine_probe": "autotune.probe.run",
    "run_probe": "autotune.api.probe",
    "run_search": "autotune.api.search",
    "run_training": "autotune.api.training",
}


def _refuse(*_arguments: Any, **_options: Any) -> None:
    """Raise what any call raises on another system than Linux."""
    importlib.import_module("autotune.errors").require_linux()


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autotune' has no attribute {name!r}")
    if name.startswith("run_") and sys.platform != "linux":  # some of what it imports is not there elsewhere
        return _refuse
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
