"""What settings bring that are switched on for some steps of a running training."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from autotune.measure.throughput import TrainingEndedError
from autotune.probe.step import switches
from autotune.probe.step.switches import list_switches, time_switches
from autotune.records.config import TrainConfig
from autotune.records.facts import Switched
from autotune.runs.source import Step, drive

MEDIUM, ALONE = TrainConfig(matmul_precision="medium"), TrainConfig(num_threads=1)


class Source:
    """A training whose steps take as long by a fake clock as they are said to."""

    device = torch.device("cpu")

    def __init__(self, seconds: Callable[[], float], *, most: float = math.inf) -> None:
        self.clock, self.time, self.steps = self, 0.0, 0
        self._seconds, self._most = seconds, most

    def now(self) -> float:
        return self.time

    def synchronize(self) -> None:
        pass

    def take_step(self) -> Step:
        if self.steps >= self._most:
            raise TrainingEndedError
        self.steps += 1
        self.time += self._seconds()
        return Step(samples=8, loss=torch.zeros(()))


def find(source: Source, budget_seconds: float = 60.0, seconds_per_step: float = 0.1) -> tuple[Switched, ...]:
    run: Any = time_switches(source, seconds_per_step, budget_seconds=budget_seconds)  # type: ignore[arg-type]

    def take_step() -> Step:
        try:
            return source.take_step()
        except TrainingEndedError as error:
            run.throw(error)
            raise AssertionError("a run that goes on without steps") from error

    return drive(run, take_step)


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "list_switches", lambda _device: iter([MEDIUM, ALONE]))
    monkeypatch.setattr(switches, "compiled_graph_count", lambda: 0)  # of this process, which runs other tests too


def seconds_of(medium: float, alone: float) -> Callable[[], float]:
    def seconds() -> float:
        is_medium = torch.get_float32_matmul_precision() == "medium"
        return 0.1 * (medium if is_medium else 1.0) * (alone if torch.get_num_threads() == 1 else 1.0)

    return seconds


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_what_each_brings_is_read_and_all_is_put_back() -> None:
    medium, alone = find(Source(seconds_of(0.5, 1.25)))
    assert (medium.knob, medium.value, alone.knob, alone.value) == ("matmul_precision", "medium", "num_threads", 1)
    assert medium.log_speedup == pytest.approx(math.log(2.0))
    assert alone.log_speedup == pytest.approx(math.log(0.8))
    assert 0.05 < medium.log_sd == alone.log_sd < 0.1
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("highest", 2)


def test_a_noisy_training_tells_less() -> None:
    seconds, steps = seconds_of(0.5, 1.0), iter(range(1000))
    noisy = Source(lambda: seconds() * (1.0 + 0.5 * (next(steps) % 3 == 0)))
    assert find(noisy)[0].log_sd > 1.5 * find(Source(seconds))[0].log_sd


def test_what_is_hopeless_takes_two_steps() -> None:
    source = Source(seconds_of(50.0, 1.0))
    medium, alone = find(source)
    assert medium.log_speedup == pytest.approx(math.log(1 / 50))
    assert source.time < 0.1 * (2 * 50 + 24)
    assert alone.log_speedup == pytest.approx(0.0)


@pytest.mark.parametrize(("budget", "count"), [(60.0, 2), (1.7, 2), (1.0, 1), (0.3, 0), (0.0, 0)])
def test_what_there_is_no_time_for_is_left_out(budget: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(seconds_of(0.5, 1.0))
    monkeypatch.setattr(switches.time, "monotonic", source.now)
    assert len(find(source, budget)) == count
    assert source.time <= budget + 0.2


@pytest.mark.parametrize(("steps", "count"), [(10, 0), (17, 1), (40, 2)])
def test_a_training_may_end_meanwhile(steps: int, count: int) -> None:
    assert len(find(Source(seconds_of(0.5, 1.0), most=steps))) == count
    assert (torch.get_float32_matmul_precision(), torch.get_num_threads()) == ("highest", 2)


def test_compiled_code_would_be_compiled_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "compiled_graph_count", lambda: 1)
    source = Source(seconds_of(0.5, 1.0))
    assert (find(source), source.steps) == ((), 0)


def test_what_is_on_already_is_no_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "count_usable_cpus", lambda *_: 8)
    monkeypatch.setattr(switches, "list_arithmetics", lambda _: ("fp32", "fp32-medium", "tf32"))
    torch.set_num_threads(4)
    cpu = torch.device("cpu")
    assert [*list_switches(cpu)] == [MEDIUM, ALONE, TrainConfig(num_threads=8)]
    try:
        torch.set_float32_matmul_precision("high")  # as scripts do for a GPU's sake
        assert next(iter(list_switches(cpu))) == MEDIUM
        torch.set_float32_matmul_precision("medium")
        assert [*list_switches(cpu)] == [ALONE, TrainConfig(num_threads=8)]
    finally:
        torch.set_float32_matmul_precision("highest")
    assert [*list_switches(torch.device("cuda"))] == [TrainConfig(matmul_precision="high")]
