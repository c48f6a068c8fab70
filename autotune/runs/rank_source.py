"""One rank's part of a workload's training as a source of steps: the leader's runs ask, and the others take them too.

timing                    the leader runs it; the others do what it says until it is over
learning, gradients,      every rank runs the same, step for step; the leader alone evaluates and writes
data
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from autotune.distributed.training import OwnTime, RankTraining
from autotune.distributed.world import Command, World
from autotune.engine.dataloader import mix_seed
from autotune.engine.loop import Training
from autotune.engine.shards import take_shard, whole
from autotune.measure.clock import Clock
from autotune.measure.memory import MemoryMeter
from autotune.records.config import TrainConfig
from autotune.records.measurement import PeakMemory
from autotune.records.trial import DataTrace
from autotune.runs.source import Found, Run, Step
from autotune.runs.workload_source import WorkloadSource
from autotune.targets.workload import LoadedWorkload


class RankSource(WorkloadSource):
    """One rank's part of a training; all ranks build it, and take its steps, together."""

    def __init__(
        self,
        loaded: LoadedWorkload,
        config: TrainConfig,
        world: World,
        *,
        seed: int,
        random_sources: tuple[str, ...] = (),
        is_timed: bool = False,
        in_float64: bool = False,
    ) -> None:
        """Build the training.

        Args:
            loaded: the workload.
            config: settings of each rank.
            world: this process among the others.
            seed: of its weights, its data order and its random numbers.
            random_sources: generators that its samples draw from.
            is_timed: its steps are going to be.
            in_float64: compute the model in it.

        Raises:
            TargetError: a part of the workload returns something of the wrong type.
            UsageError: the workload cannot be trained by several processes.
            RankLostError: another rank is gone.
        """
        self.world = world
        self._in_float64 = in_float64
        self._own_time = OwnTime(world.device) if is_timed else None
        self._rank_seconds: tuple[float, ...] = ()
        super().__init__(loaded, config, world.device, seed=seed, random_sources=random_sources)
        self._memory = MemoryMeter(world.device)
        if world.leads and is_timed:
            self.clock = RankClock(self.clock, self)

    def _build(
        self, loaded: LoadedWorkload, config: TrainConfig, device: torch.device, seed: int, sources: tuple[str, ...]
    ) -> Training:
        training = RankTraining(
            loaded, config, world=self.world, seed=seed, random_sources=sources, in_float64=self._in_float64
        )
        training.own_time = self._own_time
        return training

    def take_step(self) -> Step:
        """Take one optimizer step with all ranks."""
        if not self.world.leads:
            command = self.world.hear()
            assert command == Command.STEP, command
        return super().take_step()

    def follow(self) -> None:
        """Take the steps of the leader's timing, until it is over."""
        while (command := self.world.hear()) != Command.END:
            if command == Command.STEP:
                self.training.step()
            else:
                self.meet()

    def meet(self) -> None:
        """Wait until the devices of all ranks have done what they were given."""
        if self.world.leads:
            self.world.tell(Command.MEET)
        self._rank_seconds = self.world.meet(0.0 if self._own_time is None else self._own_time.take())

    def read_ranks(self) -> tuple[float, ...]:
        return self._rank_seconds

    def conclude(self, found: Found) -> Found:
        """Return what a run has found out, with the memory of all ranks."""
        if found.measurement is None:
            return found
        self.world.tell(Command.END)
        peaks = self.gather_peaks()
        return Found(
            measurement=found.measurement.replace(peak_memory=add_memory([found.measurement.peak_memory, *peaks[1:]])),
            curves=found.curves,
        )

    def gather_peaks(self) -> list[PeakMemory]:
        """Return the peak of each rank's memory, on the leader."""
        self._memory.sample()
        peaks = self.world.gather(self._memory.read().model_dump())
        return [PeakMemory.model_validate(peak) for peak in peaks]

    def find_metrics(self) -> Run[dict[str, float]]:
        if self.training.is_sharded:  # all of them have to compute it
            return (yield from super().find_metrics())
        if not self.world.leads:
            while self.world.hear(for_ever=True) == Command.PAUSE:
                continue
            return {}
        self.world.tell(Command.PAUSE)
        found = yield from super().find_metrics()
        self.world.tell(Command.MEET)
        return found

    def read_data(self) -> Run[Found]:
        found = yield from super().read_data()
        assert found.tape is not None
        tapes = self.world.gather(found.tape.model_dump())
        return Found(tape=join_tapes([DataTrace.model_validate(tape) for tape in tapes]) if tapes else None)

    def _seed_window(self, seed: int) -> None:
        super()._seed_window(mix_seed(seed, self.world.rank))  # equal dropout masks would be no draws

    def save_weights(self, path: Path, *, writes: bool) -> None:
        with self.world.watching():
            state = {name: whole(value) for name, value in self.training.model.state_dict().items()}
        if writes:
            torch.save(state, path)

    def load_weights(self, path: Path) -> None:
        own = self.training.model.state_dict()
        full = torch.load(path, map_location=self.device, weights_only=True)
        self.training.model.load_state_dict({name: take_shard(value, own[name]) for name, value in full.items()})


class RankClock:
    """The leader's clock: to synchronise is to meet all ranks, so that the time of a block is that of the slowest."""

    def __init__(self, inner: Clock, source: RankSource) -> None:
        self._inner, self._source = inner, source

    def now(self) -> float:
        """Return seconds since some fixed moment."""
        return self._inner.now()

    def synchronize(self) -> None:
        """Wait until the devices of all ranks have done what they were given."""
        self._inner.synchronize()
        self._source.meet()

    def mark(self) -> None:
        """Note the end of a step of the leader."""
        self._inner.mark()

    def take_intervals(self) -> list[float]:
        """Return the seconds between the leader's marks, and start anew."""
        return self._inner.take_intervals()


def add_memory(peaks: Sequence[PeakMemory]) -> PeakMemory:
    """Return the memory of several processes: of the host what they hold together, of a device the fullest one's."""
    devices = [peak.device_bytes for peak in peaks if peak.device_bytes is not None]
    return PeakMemory(host_bytes=sum(peak.host_bytes for peak in peaks), device_bytes=max(devices, default=None))


def join_tapes(tapes: Sequence[DataTrace]) -> DataTrace:
    """Return what the loaders of all ranks hand over, as one."""
    return DataTrace(
        batches=_join_digests([tape.batches for tape in tapes]),
        shapes=tuple(" | ".join(parts) for parts in zip(*(tape.shapes for tape in tapes), strict=False)),
        ends=_join_digests([tape.ends for tape in tapes]),
        end_shapes=tuple(" | ".join(parts) for parts in zip(*(tape.end_shapes for tape in tapes), strict=False)),
        order=_digest([tape.order for tape in tapes]),
        samples=sum(tape.samples or 0 for tape in tapes),
        repeated=sum(tape.repeated for tape in tapes),
    )


def _join_digests(rows: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(_digest(parts) for parts in zip(*rows, strict=False))


def _digest(parts: Sequence[str]) -> str:
    return hashlib.sha256("+".join(parts).encode()).hexdigest()[:16]
