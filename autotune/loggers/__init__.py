"""Figures of a training or a search for the tools that people watch them with; `--log` names them."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, get_args

from autotune.errors import MachineError, UsageError

if TYPE_CHECKING:
    from autotune.loggers.point_log import PointLog

LoggerName = Literal["tensorboard", "wandb", "mlflow", "csv"]

_KNOWN: tuple[LoggerName, ...] = get_args(LoggerName)
_PACKAGES: dict[LoggerName, str] = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""What each needs, and the extra that brings it."""


def read_loggers(names: Sequence[str]) -> tuple[LoggerName, ...]:
    """Return the loggers that are named, each once; all of them can be used here.

    Raises:
        UsageError: there is no logger of a name.
        MachineError: a package is not installed.
    """
    found: list[LoggerName] = []
    for name in dict.fromkeys(names):
        known = next((one for one in _KNOWN if one == name), None)
        if known is None:
            near = difflib.get_close_matches(name.lower(), _KNOWN, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise UsageError(f"--log {name!r} is not known", hint=f"{meant}it is one of {', '.join(_KNOWN)}")
        require_package(known)
        found.append(known)
    return tuple(found)


def require_package(name: LoggerName) -> None:
    """Make sure that a logger can be used, before anything else takes its time.

    Raises:
        MachineError: its package is not installed.
    """
    package = _PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        raise MachineError(
            f"--log {name}: {package} is not installed", hint=f"pip install {package}, or autotune-torch[{package}]"
        )


def find_logger(name: LoggerName) -> type[PointLog]:
    """Return the class of a logger; its package is imported when one is made."""
    module = importlib.import_module(f"autotune.loggers.{name}_log")
    found: type[PointLog] = module.LOG
    return found
