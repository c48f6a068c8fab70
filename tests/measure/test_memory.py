"""Peak memory against allocations of known size."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autotune.measure import memory
from autotune.measure.memory import MemoryMeter

MIB = 2**20
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """A child process that holds 64 MiB until it is told to go."""
    program = "import sys; block = bytearray(64 * 2**20); print('ready', flush=True); sys.stdin.read(1)"
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.communicate(b"x")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("Name:\tpython\nVmHWM:\t  2048 kB\nVmRSS:\t 1024 kB\n", 2048 * 1024),
        ("55d0-7ffe ---p 00:00 0 [rollup]\nRss:   300 kB\nPss:   100 kB\nPss_Anon:   40 kB\n", 100 * 1024),
        ("Rss:  300 kB\n", 0),
        ("", 0),
    ],
)
def test_sizes_are_read_in_kibibytes(tmp_path: Path, text: str, size: int) -> None:
    file = tmp_path / "status"
    file.write_text(text)
    assert memory._read_kibibytes(file) == size


def test_a_process_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    assert memory._read_kibibytes(tmp_path / "gone") == 0


def test_the_peak_counts_what_has_been_freed_again() -> None:
    before = MemoryMeter(CPU).read()
    size = before.host_bytes  # large enough to be a new peak, whatever ran in this process before
    block = bytearray(size)
    block[::4096] = b"x" * len(block[::4096])
    del block
    after = MemoryMeter(CPU).read()
    assert after.host_bytes >= before.host_bytes + size // 4
    assert after.device_bytes is None


def test_workers_are_added_at_their_peak(worker: subprocess.Popen[bytes]) -> None:
    meter = MemoryMeter(CPU)
    alone = meter.read().host_bytes
    meter.sample()
    with_worker = meter.read().host_bytes
    assert 60 * MIB <= with_worker - alone < 160 * MIB
    assert worker.stdin is not None
    worker.stdin.write(b"x")
    worker.stdin.flush()
    worker.wait()
    meter.sample()
    assert meter.read().host_bytes >= with_worker


def test_two_workers_are_added_together() -> None:
    program = "import sys; block = bytearray(32 * 2**20); print('ready', flush=True); sys.stdin.read(1)"
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        meter = MemoryMeter(CPU)
        alone = meter.read().host_bytes
        meter.sample()
        assert meter.read().host_bytes - alone >= 64 * MIB
    finally:
        for process in processes:
            process.communicate(b"x")


def test_without_proc_the_kernels_own_maximum_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_read_kibibytes", lambda _file: 0)
    meter = MemoryMeter(CPU)
    meter.sample()
    assert meter.read().host_bytes > 10 * MIB


def test_a_sample_is_cheap_enough_to_take_between_blocks() -> None:
    meter = MemoryMeter(CPU)
    began = time.process_time()  # its own work, however busy the machine is
    for _ in range(5):
        meter.sample()
    assert (time.process_time() - began) / 5 < 0.1
