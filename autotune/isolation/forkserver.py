"""A warm fork server: it has imported torch and touched nothing, so a trial starts in a fraction of a cold start.

It runs no parallel region and initialises no device, both of which do not survive a fork. One trial at a time:

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
from pathlib import Path

from autotune.lifeline import die_with_parent

_MESSAGE_BYTES = 65536


def main(descriptor: int, *, supervisor: int) -> None:
    """Serve until the supervisor closes the socket.

    Args:
        descriptor: our end of the socket.
        supervisor: process that started this one.
    """
    die_with_parent(supervisor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from autotune.isolation.keeper import reap
    from autotune.isolation.process import find_exit_status
    from autotune.runs import workload as child

    importlib.import_module("torch._dynamo")  # every optimizer imports it at its first use

    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as channel:
        _send(channel, {"ready": os.getpid()})
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
                child.run_and_exit(Path(request["folder"]), started=float(request["started"]))
            os.close(descriptors[0])
            _send(channel, {"pid": pid})
            _send(channel, {"status": find_exit_status(pid, block=True) or 0})


def _take_output(log: int) -> None:
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _send(channel: socket.socket, message: dict[str, int]) -> None:
    channel.send(json.dumps(message).encode())


if __name__ == "__main__":
    main(int(sys.argv[1]), supervisor=int(sys.argv[2]))
