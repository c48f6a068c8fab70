"""`python -m autotune`, and the console script's entry point."""

from __future__ import annotations

import os
import sys
from typing import TextIO


def main() -> None:
    """Run the command line."""
    _open_missing()
    try:
        _require_linux()
        from autotune.cli import app

        app()
    finally:
        _settle_streams()


def _require_linux() -> None:
    from autotune.errors import MachineError, require_linux

    try:
        require_linux()
    except MachineError as error:
        sys.stderr.write(f"error: {error.message}\n  {error.hint}\n")
        sys.exit(error.exit_code)


def _open_missing() -> None:
    """Open what was closed of standard input, output and error (`2>&-`) on nothing.

    Otherwise Python has no such stream, and the next file that is opened becomes what libraries and children write to.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, descriptor)  # inheritable, also where it is the same
            os.set_inheritable(descriptor, True)
            if nothing != descriptor:
                os.close(nothing)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Not by its number: that may be a file of somebody else's by now.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _settle_streams() -> None:
    """Write what is left; where that fails, point the stream at nothing: Python would change the exit status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _drop_stream(stream)


def _drop_stream(stream: TextIO) -> None:
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        return


if __name__ == "__main__":
    main()
