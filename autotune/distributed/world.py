"""The processes of one training as one of them sees them: rank 0 leads, the others do what it tells them.

    leader ── Command.STEP ──▶ followers      all take an optimizer step; gradients meet in it
           ── Command.STATE ─▶                each hands its random generators to the leader, for a checkpoint
           ── Command.LOAD ──▶                each loads the checkpoint that is named
           ── Command.PAUSE ─▶                the leader evaluates or writes: it may take as long as it takes
           ── Command.MEET ──▶                each says how long it worked by itself, its device done with all it has
           ── Command.SAVE ──▶                each writes its shards of a checkpoint
           ── Command.CHECK ─▶                each looks for what is not finite in its shards
           ── Command.EVALUATE ▶              all evaluate together, the model being sharded
           ── Command.END ───▶                the training is over

Commands and answers go over gloo groups of their own, so that nobody waits for a device because of them. Whoever waits
for a rank that has died finds out at once, and for one that hangs within the patience.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autotune.engine.device import choose_device
from autotune.errors import AutotuneError

_FOR_EVER = timedelta(days=365)
_SILENT = ("timed out", "timeout")
_KEPT: list[dist.ProcessGroup] = []
"""Groups of gloo, to the end of the process: up to torch 2.7 one that is freed may wait for ever for its own thread."""
_LOST = ("gloo", "nccl", "connection closed by peer", "connection reset by peer", "broken pipe", "operation timed out")


class Command(enum.IntEnum):
    """What the leader tells all ranks to do next."""

    STEP = 1
    STATE = 2
    LOAD = 3
    PAUSE = 4
    END = 5
    MEET = 6
    SAVE = 7
    CHECK = 8
    EVALUATE = 9


class RankLostError(AutotuneError):
    """Another process of the training has died or does not answer; what became of it is told by who started it.

    Attributes:
        is_silent: it does not answer, and its connection is there.
    """

    exit_code = 5

    def __init__(self, message: str, *, is_silent: bool) -> None:
        super().__init__(message, hint="go on with --resume")
        self.is_silent = is_silent


@dataclass(frozen=True)
class World:
    """A process among those of a training.

    Attributes:
        rank: its number, counted from 0.
        size: how many there are.
        device: where it trains.
        patience_seconds: longest wait for another one.
        commands: group that commands go over, which may be long in coming.
        answers: group that plain data goes over.
    """

    rank: int
    size: int
    device: torch.device
    patience_seconds: float
    commands: dist.ProcessGroup
    answers: dist.ProcessGroup

    @property
    def leads(self) -> bool:
        """It has the run's folder, tells the others what to do, and speaks to the user."""
        return self.rank == 0

    def tell(self, command: Command) -> None:
        """Tell all other ranks what to do next.

        Raises:
            RankLostError: one of them is gone, or does not listen.
        """
        self._send(torch.tensor([int(command)]), timedelta(seconds=self.patience_seconds))

    def hear(self, *, for_ever: bool = False) -> Command:
        """Return what the leader wants done next.

        Args:
            for_ever: it has said that it may take long.

        Raises:
            RankLostError: it is gone, or does not answer.
        """
        told = torch.zeros(1, dtype=torch.int64)
        self._send(told, _FOR_EVER if for_ever else timedelta(seconds=self.patience_seconds))
        return Command(int(told))

    def _send(self, command: Tensor, patience: timedelta) -> None:
        with self.watching():
            work = dist.broadcast(command, 0, group=self.commands, async_op=True)
            assert work is not None
            work.wait(patience)

    def share(self, value: Any) -> Any:
        """Return the leader's value, plain data, on every rank."""
        values = [value]
        with self.watching():
            dist.broadcast_object_list(values, 0, group=self.answers)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, plain data, in order, on the leader; nothing elsewhere."""
        values: list[Any] = [None] * self.size if self.leads else []
        with self.watching():
            dist.gather_object(value, values if self.leads else None, 0, group=self.answers)
        return values

    def meet(self, value: float) -> tuple[float, ...]:
        """Return every rank's number, in order, on all of them: none goes on before all are here."""
        found = [torch.zeros(1, dtype=torch.float64) for _ in range(self.size)]
        with self.watching():
            dist.all_gather(found, torch.tensor([value], dtype=torch.float64), group=self.answers)
        return tuple(float(one) for one in found)

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks, on the device; the host waits for nothing."""
        total = value.detach().clone()
        with self.watching():
            dist.all_reduce(total)
        return total

    def first(self, value: Tensor) -> Tensor:
        """Return the leader's tensor on all ranks, on the device."""
        found = value.detach().clone()
        with self.watching():
            dist.broadcast(found, 0)
        return found

    def copy_first(self, values: Sequence[Tensor]) -> None:
        """Give every rank the leader's values of some tensors, in place; on the host they go over gloo."""
        with torch.no_grad():
            for value in values:
                group = self.answers if value.device.type == "cpu" else None
                found = value.detach().contiguous()
                dist.broadcast(found, 0, group=group)
                value.copy_(found)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Turn what a lost rank looks like from here into RankLostError.

        Raises:
            RankLostError: the code inside failed because of another rank.
        """
        try:
            yield
        except RuntimeError as error:
            if not looks_lost(error):
                raise
            is_silent = any(word in str(error).lower() for word in _SILENT)
            what = f"has not answered within {self.patience_seconds:g} s" if is_silent else "is gone"
            raise RankLostError(f"another process of the training {what}", is_silent=is_silent) from error


def looks_lost(error: BaseException) -> bool:
    """Return whether an error is what another process looks like from here that has died or does not answer."""
    text = str(error).lower()
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in text for word in _LOST)
    )


@contextmanager
def joined_world(meeting: Path | None, patience_seconds: float) -> Iterator[World]:
    """Join the processes that torch.distributed's launcher has started: NCCL on GPUs, gloo on CPUs.

    Args:
        meeting: file to meet at, on this machine, that is not there yet: a port would be open to its network. None
            for processes of several machines, which meet at the store that their agents have met at.
        patience_seconds: longest wait for another one.

    Raises:
        RankLostError: they do not all come.
    """
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = choose_device("auto")
    uses_gpu = device.type == "cuda"
    device = torch.device("cuda", local_rank) if uses_gpu else device
    if uses_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if uses_gpu else "gloo",
        store=None if meeting is None else dist.FileStore(str(meeting), size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=patience_seconds),
        device_id=device if uses_gpu else None,
    )
    commands = dist.new_group(backend="gloo", timeout=_FOR_EVER)
    answers = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience_seconds))
    assert isinstance(commands, dist.ProcessGroup)
    assert isinstance(answers, dist.ProcessGroup)
    _KEPT.extend([commands, answers])
    if not uses_gpu and dist.group.WORLD is not None:
        _KEPT.append(dist.group.WORLD)
    yield World(rank, size, device, patience_seconds, commands, answers)
    dist.destroy_process_group()  # not after an error: it might wait for who is gone
