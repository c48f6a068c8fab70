"""Settings that can be changed while a training runs, tried for some of its steps each: that costs no process.

    off ── on ── on ── off ── off ── on ── ...     each some steps, after one that is left to get used to it
    a round: log(seconds off / seconds on)         what it brings: the median of the rounds

Only what cannot make a step fail: how many threads there are, and how products of float32 are computed. It is what a
search begins with, and what a probe advises, never what is claimed: for that, processes of their own are started.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from autotune.arithmetics import FASTER_PRODUCTS
from autotune.engine.compilation import compiled_graph_count
from autotune.engine.precision import matmul_precision, read_matmul_precision
from autotune.engine.threads import intra_op_threads
from autotune.machine.cgroups import read_cpu_quota
from autotune.machine.cpus import read_affinity
from autotune.machine.hardware import count_usable_cpus
from autotune.machine.limits.products import list_arithmetics
from autotune.measure.throughput import TrainingEndedError
from autotune.records.config import TrainConfig, changed_fields
from autotune.records.facts import Switched
from autotune.runs.source import Run, StepSource

_CONTEXTS: dict[str, Callable[[TrainConfig], AbstractContextManager[None]]] = {
    "matmul_precision": matmul_precision,
    "num_threads": intra_op_threads,
}
_BLOCK_SECONDS = 0.1
_MOST_STEPS = 50
_ROUNDS, _LEAST_ROUNDS = 4, 2
_LEAST_SD = 0.05
"""Of a logarithm: a process of its own differs from one that was switched by so much (judgement)."""
_UNKNOWN_SD = 0.15
"""Of one round (judgement); it weighs as much as a second one."""
_HOPELESS = 4.0
"""Times as long as a step takes otherwise; a second one that does ends it."""


def list_switches(device: torch.device) -> Iterator[TrainConfig]:
    """Yield what can be switched on in this process: configs that differ in one setting each."""
    precision, arithmetic = FASTER_PRODUCTS[device.type]
    if read_matmul_precision(device) != precision and arithmetic in list_arithmetics(device):
        yield TrainConfig(matmul_precision=precision)
    if device.type == "cpu":
        usable = count_usable_cpus(read_affinity(), read_cpu_quota(Path("/")))
        for count in sorted({1, max(1, usable // 2), usable} - {torch.get_num_threads()}):
            yield TrainConfig(num_threads=count)


def time_switches(source: StepSource, seconds_per_step: float, *, budget_seconds: float) -> Run[tuple[Switched, ...]]:
    """Return what each switch has brought; what there is no time for is left out.

    Args:
        source: of the steps.
        seconds_per_step: as it trains.
        budget_seconds: for all of them.
    """
    found: list[Switched] = []
    until = time.monotonic() + budget_seconds
    timed = max(1, min(_MOST_STEPS, round(_BLOCK_SECONDS / seconds_per_step)))
    # Compiled code is compiled once more where either is another one.
    switches = [] if compiled_graph_count() else [*list_switches(source.device)]
    for left, config in zip(range(len(switches), 0, -1), switches, strict=True):
        share = (until - time.monotonic()) / left
        rounds = int(share / (2 * (1 + timed) * seconds_per_step))
        if rounds < _LEAST_ROUNDS:
            continue
        try:
            found.append((yield from _time_switch(source, config, timed, min(_ROUNDS, rounds), seconds_per_step)))
        except TrainingEndedError:
            break
    return tuple(found)


def _time_switch(
    source: StepSource, config: TrainConfig, timed: int, rounds: int, seconds_per_step: float
) -> Run[Switched]:
    (knob,) = changed_fields(config, TrainConfig())
    clock, value, logs = source.clock, getattr(config, knob), list[float]()

    def take(steps: int) -> Run[float]:
        clock.synchronize()
        began = clock.now()
        for _ in range(steps):
            yield
        clock.synchronize()
        return max(1e-9, clock.now() - began)

    for number in range(rounds):
        seconds: dict[bool, float] = {}
        for is_on in (True, False) if number % 2 else (False, True):
            with _CONTEXTS[knob](config) if is_on else nullcontext():
                first = yield from take(1)
                if is_on and not logs and first > _HOPELESS * seconds_per_step:
                    first = yield from take(1)
                    if first > _HOPELESS * seconds_per_step:
                        lost = math.log(seconds_per_step / first)
                        return Switched(knob=knob, value=value, log_speedup=lost, log_sd=_UNKNOWN_SD)
                seconds[is_on] = yield from take(timed)
        logs.append(math.log(seconds[False] / seconds[True]))
    scatter = math.sqrt((statistics.variance(logs) + _UNKNOWN_SD**2 / rounds) / rounds)
    return Switched(knob=knob, value=value, log_speedup=statistics.median(logs), log_sd=math.hypot(_LEAST_SD, scatter))
