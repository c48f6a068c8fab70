"""A warm fork server: it has imported torch and touched nothing, so a trial starts in a fraction of a cold start.

It runs no parallel region and initialises no device, both of which do not survive a fork. A script's trial does not
know that torch is there: it imports it where the script says so (`imports`). One trial at a time:

               ◀── {"modules"} ──────────────────────────────
    supervisor ── {"folder", "started"} + log descriptor ──▶ server ── fork ──▶ trial
               ◀── {"pid"} ──────────────────────────────────
               ◀── {"status"} when it has ended ─────────────
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autotune.lifeline import die_with_parent

_MESSAGE_BYTES = 65536


def main(descriptor: int, *, supervisor: int, is_script: bool) -> None:
    """Serve until the supervisor closes the socket.

    Args:
        descriptor: our end of the socket.
        supervisor: process that started this one.
        is_script: the trials are a script's.
    """
    die_with_parent(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from autotune.isolation.keeper import reap
    from autotune.isolation.process import find_exit_status

    run = _prepare_scripts() if is_script else _prepare_workloads()
    with socket.socket(fileno=descriptor) as channel:
        _send(channel, {"modules": sorted(name for name in sys.modules if "." not in name)})
        pid = 0
        while True:
            message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE_BYTES, 1)
            if not message:
                return
            if pid:
                reap(pid)  # only now: the supervisor kills its group by this number, which nobody else may have
            request = json.loads(message)
            server = os.getpid()
            pid = os.fork()
            if pid == 0:
                die_with_parent(server)
                channel.close()
                _take_output(descriptors[0])
                run(Path(request["folder"]), float(request["started"]))
            os.close(descriptors[0])
            _send(channel, {"pid": pid})
            _send(channel, {"status": find_exit_status(pid, block=True) or 0})


def _prepare_workloads() -> Callable[[Path, float], None]:
    """Import what a workload's trial needs, and return what runs one in a forked process; it does not return."""
    from autotune.runs import workload

    importlib.import_module("torch._dynamo")  # every optimizer imports it at its first use
    gc.collect()
    gc.freeze()
    return lambda folder, started: workload.run_and_exit(folder, started=started)


def _prepare_scripts() -> Callable[[Path, float], None]:
    """Likewise of a script. Its objects are no more frozen than those of a process that has imported torch itself."""
    from autotune.isolation.script_entry import start_script
    from autotune.isolation.warm.imports import hide_imports

    importlib.import_module("torch")
    brought = tuple(name for name in ("numpy",) if name in sys.modules)
    for name in ("torch._dynamo", "autotune.runs.script"):
        importlib.import_module(name)
    gc.collect()

    def run(folder: Path, started: float) -> None:
        hide_imports({"torch": brought, "numpy": ()})
        start_script(folder, started=started)

    return run


def _take_output(log: int) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), supervisor=int(sys.argv[2]), is_script="script" in sys.argv[3:])
