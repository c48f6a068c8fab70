"""Everything this package raises on purpose, and the exit code of each.

    AutotuneError                1  an internal error: please report it
    ├── UsageError               2  an argument, a setting or a target that cannot be used
    ├── NothingFeasibleError     3  no setting could be used, or none but the user's own be measured (no exception)
    ├── TargetError              4  the training itself fails with the user's own settings
    ├── MachineError             5  the machine, the disk or the GPU is unsuitable
    ├── BusyError                6  another search owns the folder
    ├── ProfileError             7  a profile is invalid or not for this target
    ├── FolderError              8  a folder's owner or permissions are refused
    └── CheckpointError          9  no usable checkpoint

A stop by signal N exits with 128 + N.
"""

from __future__ import annotations

import sys


class AutotuneError(Exception):
    """An error with one plain sentence for the user and a hint about what to do next.

    Attributes:
        message: what was given and what is wrong with it.
        hint: what is allowed or what to do next; may be empty.
        exit_code: the status the command line ends with.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(AutotuneError):
    """An argument, a setting or a target cannot be used as given."""

    exit_code = 2


class NothingFeasibleError(AutotuneError):
    """No setting that was tried is usable."""

    exit_code = 3


class TargetError(AutotuneError):
    """The training fails with the user's own settings."""

    exit_code = 4


class MachineError(AutotuneError):
    """The machine, the disk or the GPU cannot do what is asked."""

    exit_code = 5


class BusyError(AutotuneError):
    """Another search owns the folder."""

    exit_code = 6


class ProfileError(AutotuneError):
    """A profile cannot be read or is not meant for this target."""

    exit_code = 7


class FolderError(AutotuneError):
    """A folder's owner or permissions are refused."""

    exit_code = 8


class CheckpointError(AutotuneError):
    """No checkpoint can be used."""

    exit_code = 9


def require_linux() -> None:
    """Refuse any other system: processes, memory and files are asked of Linux.

    Raises:
        MachineError: this is another.
    """
    if sys.platform != "linux":
        raise MachineError(
            f"this system is {sys.platform}, and autotune runs on Linux alone",
            hint="run it in a Linux container or virtual machine (on Windows WSL 2)",
        )
