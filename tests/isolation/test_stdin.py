"""What a trial reads from: nothing, and from a terminal where its user's is one."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios

_SIZE_AND_WHAT_IS_READ = """
import subprocess
from autotune.isolation.process import open_stdin
subprocess.run(['sh', '-c', 'stty size; cat; echo read'], stdin=open_stdin(), timeout=30)
"""


def read_as_trial(stdin: int) -> list[str]:
    """Return what a trial says of what it reads from, where ours reads from `stdin`."""
    command = [sys.executable, "-c", _SIZE_AND_WHAT_IS_READ]
    return subprocess.run(command, stdin=stdin, capture_output=True, text=True, timeout=60, check=True).stdout.split()


def test_a_terminals_trial_reads_from_a_terminal_as_wide_and_without_input() -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 33, 77, 0, 0))
    os.write(ours, b"typed by the user\n")
    try:
        assert read_as_trial(theirs) == ["33", "77", "read"]
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_a_terminal_a_trial_has_none_and_reads_nothing() -> None:
    assert read_as_trial(subprocess.DEVNULL) == ["read"]
