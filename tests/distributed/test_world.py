"""Processes that join and leave again, many times."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

JOINS = """
import os
import sys
from pathlib import Path
from autotune.distributed.world import joined_world

def join(number):
    with joined_world(Path(sys.argv[1]) / str(number), 30.0) as world:
        assert world.share(number) == number

for number in range(80):
    join(number)
os._exit(0)
"""


@pytest.mark.slow
def test_leaving_waits_for_nobody(tmp_path: Path) -> None:
    """Up to torch 2.7 a group of gloo that is freed may wait for its own thread for ever."""
    own = {**os.environ, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo", "AUTOTUNE_DEVICE": "cpu"}
    words = [sys.executable, "-c", JOINS, str(tmp_path)]
    both = [subprocess.Popen(words, env={**own, "RANK": rank, "LOCAL_RANK": rank}) for rank in ("0", "1")]
    try:
        assert [process.wait(timeout=120) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()
