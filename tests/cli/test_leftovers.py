"""What commands leave in the temporary folder: nothing; what a killed one leaves, the next one removes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = """
import torch
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(512, 8))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(100_000):
    for (x,) in torch.utils.data.DataLoader(data, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    open("log.txt", "a").write("x")
"""

NEIGHBOUR = """
import sys
from autotune.scratch import make_scratch
print(make_scratch().name, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def temporary(tmp_path: Path) -> Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    return folder


@contextmanager
def started(folder: Path, temporary: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yield a command at work in a folder; it is ended if it is still there."""
    command = [sys.executable, "-P", "-m", "autotune", *arguments]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def list_left(temporary: Path) -> list[str]:
    """Return the names of what is ours in the temporary folder."""
    return sorted(path.name for path in temporary.glob("autotune-*"))


def await_true(condition: Callable[[], object], *, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)


@pytest.mark.fault("F8", injected="SIGTERM of a probe", outcome="exit 143, nothing left")
def test_a_terminated_probe_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    with started(tmp_path, temporary, "probe", "--", sys.executable, "train.py") as probe:
        await_true(lambda: list_left(temporary))
        probe.send_signal(signal.SIGTERM)
        _, said = probe.communicate(timeout=60)
    assert probe.returncode == 128 + signal.SIGTERM, said
    assert "Traceback" not in said
    assert list_left(temporary) == []


@pytest.mark.slow
@pytest.mark.fault("F8", injected="kill -9 of a script's search, 5 times", outcome="one command later nothing is left")
def test_what_killed_searches_left_is_gone_after_one_command(tmp_path: Path, temporary: Path) -> None:
    work = tmp_path / "project" / "work"
    work.mkdir(parents=True)
    (work / "train.py").write_text(SCRIPT)
    with subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as living:
        try:
            assert living.stdout is not None
            name = living.stdout.readline().strip()
            (temporary / name / "file").write_text("theirs")
            left = {name}
            for seconds in (0.0, 0.5, 2.0, 4.0, 6.0):
                with started(work, temporary, "search", "--budget", "10m", "--", sys.executable, "train.py") as search:
                    await_true(lambda before=frozenset(left): {*list_left(temporary)} - before)
                    time.sleep(seconds)  # to another phase of the trial
                    search.send_signal(signal.SIGKILL)
                    search.wait()
                left |= {*list_left(temporary)}
            assert len(left) > 3
            with started(tmp_path, temporary, "probe") as probe:
                _, said = probe.communicate(timeout=300)
            assert probe.returncode == 0, said
            assert list_left(temporary) == [name]
            assert (temporary / name / "file").read_text() == "theirs"
        finally:
            living.kill()
