from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from autotune.probe.data import cpu_share
from autotune.probe.data.cpu_share import CpuShare
from autotune.probe.data.look import look_at_data


class Clocks:
    """Clocks of a process on paper."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, schedule: Path) -> None:
        self.wall = self.worked = self.ready = 0.0
        self._schedule = schedule
        monkeypatch.setattr(cpu_share.time, "perf_counter", lambda: self.wall)
        monkeypatch.setattr(cpu_share.time, "process_time", lambda: self.worked)
        self.spend()

    def spend(self, *, asleep: float = 0.0, worked: float = 0.0, ready: float = 0.0) -> None:
        self.wall += asleep + worked + ready
        self.worked += worked
        self.ready += ready
        self._schedule.write_text(f"{int(1e9 * self.worked)} {int(1e9 * self.ready)} 12\n")


@pytest.mark.parametrize(
    ("spent", "share"),
    [
        ({"asleep": 9.0, "worked": 1.0}, 0.1),
        ({"worked": 1.0}, 1.0),
        ({"asleep": 2.0}, 0.0),
        ({"worked": 1.0, "ready": 9.0}, 1.0),  # others had the CPU: nothing was waited for but them
        ({"worked": 1.0, "ready": 1.0, "asleep": 2.0}, 0.5),
    ],
)
def test_waiting_for_a_cpu_is_no_waiting(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, spent: dict[str, float], share: float
) -> None:
    clocks = Clocks(monkeypatch, tmp_path / "schedstat")
    clocks.spend(worked=5.0, ready=5.0)  # before
    measured = CpuShare(schedule=tmp_path / "schedstat")
    clocks.spend(**spent)
    assert measured.read() == (pytest.approx(sum(spent.values())), pytest.approx(share))


@pytest.mark.parametrize("text", [None, "", "x", "1 x 2"])
def test_a_kernel_that_does_not_tell_is_believed_to_have_had_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    clocks = Clocks(monkeypatch, tmp_path / "other")
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    measured = CpuShare(schedule=tmp_path / "schedstat")
    clocks.spend(worked=1.0, ready=3.0)
    assert measured.read()[1] == pytest.approx(0.25)


class Remote(Dataset[Tensor]):
    """Samples that come from far away."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.02)
        return torch.zeros(4)


def test_a_dataset_that_sleeps_is_seen_to_wait() -> None:
    facts = look_at_data(Remote, None, batch_size=4, fingerprints=True).facts
    assert facts.seconds_per_sample >= 0.02
    assert facts.waits
