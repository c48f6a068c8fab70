"""A search listens nowhere and needs no network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from autotune.records import Profile

WORKLOAD = """
import torch
import autotune

class Toy:
    baseline = autotune.TrainConfig(micro_batch_size=16, num_threads=1)
    def build_model(self): return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.01)
    def train_dataset(self):
        inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
        return torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    def compute_loss(self, model, batch): return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

workload = Toy()
"""

WITHOUT_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
"""A network namespace of its own, in which not even the loopback device is up."""


def permits_namespaces() -> bool:
    try:
        return subprocess.run([*WITHOUT_NETWORK, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def list_listening(process: psutil.Process) -> list[str]:
    """Return the sockets on which a process and all that it has started wait for others."""
    found = []
    for one in (process, *process.children(recursive=True)):
        try:
            name = " ".join(one.cmdline()[-3:])
            found += [
                f"{name}: {socket.laddr}"
                for socket in one.net_connections("inet")
                if socket.status == psutil.CONN_LISTEN or (socket.type == 2 and not socket.raddr)
            ]
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_alone", [False, True], ids=["as it is", "without network"])
def test_a_search_listens_nowhere_and_needs_no_network(tmp_path: Path, is_alone: bool) -> None:
    if is_alone and not permits_namespaces():
        pytest.skip("no network namespaces here")
    (tmp_path / "toy.py").write_text(WORKLOAD)
    command = [sys.executable, "-P", "-m", "autotune", "search", "--budget", "60s", "toy.py:workload"]
    seen: list[str] = []
    looks = 0
    with subprocess.Popen(
        [*(WITHOUT_NETWORK if is_alone else ()), *command],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as search:
        process = psutil.Process(search.pid)
        while search.poll() is None:
            seen += list_listening(process)
            looks += 1
            time.sleep(0.1)
        said = "" if search.stderr is None else search.stderr.read()
    assert search.returncode in (0, 3), said
    assert seen == []
    assert looks > 50
    assert Profile.load(tmp_path / "best.json").target.label == "toy.py:workload"
