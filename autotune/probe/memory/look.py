"""What the memory of a training is made of, and what other settings would need: one look, for either way in.

    a step's shapes at two sizes, for each mode ── a line ──────────────┐
    a real step                                 ── what no shape can tell ──┴── peak by mode and micro batch

How a step is followed, and which real step there is to hold it against, is the subject's own: `WorkloadMemory` builds a
training and takes steps of its own, `ScriptMemory` has the models that the hooks have seen and the peak that was timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.device import on_accelerator, read_device_generator, restore_device_generator
from autotune.measure.memory import release_free_memory
from autotune.probe.memory.lines import (
    Calibration,
    Line,
    Trace,
    attempt,
    conclude,
    find_line,
    find_lines,
    list_modes,
    lower_mode,
)
from autotune.probe.memory.shapes import count_weights, state_bytes
from autotune.probe.time_shares import ProbePolicy
from autotune.records.config import Precision, TrainConfig
from autotune.records.facts import MemoryFacts, TargetFacts
from autotune.records.measurement import Measurement


@dataclass(frozen=True)
class Tracer:
    """A way to follow the memory of a step.

    Attributes:
        trace: follows one.
        sizes: the two micro batches to follow.
        mode_seconds: returns what one mode takes, about, known once there was a real step; none is begun later.
    """

    trace: Trace
    sizes: tuple[int, int]
    mode_seconds: Callable[[], float] = lambda: 0.0


class MemorySubject(Protocol):
    """A training whose memory is looked at."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """Its models, once it is built."""
        ...

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Its optimizers, once it is built."""
        ...

    @property
    def refusal(self) -> str:
        """That none of its tracers worked, in words."""
        ...

    def build(self, baseline: TrainConfig, deadline: float) -> None:
        """Have models and optimizers to look at.

        Args:
            baseline: its own settings, uncompiled.
            deadline: of the look, by `time.monotonic()`.
        """
        ...

    def list_tracers(self) -> Iterator[Tracer]:
        """Yield the ways to follow a step, the best first."""
        ...

    def calibrate(self) -> Calibration:
        """Return a real step; called once, after the tracers were tried."""
        ...

    def look_ahead_bytes(self) -> float:
        """Return the bytes per sample of the batch that is loaded while another one is trained on."""
        ...


def look_at_memory(
    subject: MemorySubject,
    baseline: TrainConfig,
    device: torch.device,
    *,
    base_bytes: int,
    limit_bytes: int,
    supported: Sequence[Precision],
    checkpoints: bool,
    budget_seconds: float = ProbePolicy.memory_seconds,
) -> MemoryFacts:
    """Return a training's memory; whatever it cannot do is told in `missing`, and nothing is raised.

    No training of it should be alive: what it holds would count as the process's own. Random generators are left as
    they were; its objects run on tensors without data, so it should not be trained afterwards.

    Args:
        subject: the training.
        baseline: its own settings.
        device: where it trains.
        base_bytes: in use before a training was built: of a GPU, or the resident set.
        limit_bytes: what a training may use.
        supported: precisions that run on the device, and that the training can be given.
        checkpoints: a model has blocks to checkpoint.
        budget_seconds: wall time, about; modes there is no time for are left out.
    """
    facts = MemoryFacts(
        base_bytes=base_bytes, weights_bytes=0, gradient_bytes=0, optimizer_bytes=0, limit_bytes=limit_bytes
    )
    modes = list_modes(baseline, supported, checkpoints=checkpoints)
    deadline = time.monotonic() + budget_seconds
    with _undisturbed(device):
        found = attempt(lambda: _look(subject, facts, modes, device, deadline))
        return facts.replace(missing=f"it could not be looked at: {found}") if isinstance(found, str) else found


def _look(
    subject: MemorySubject, facts: MemoryFacts, modes: Sequence[TrainConfig], device: torch.device, deadline: float
) -> MemoryFacts:
    subject.build(modes[0], deadline)
    weights, gradients = count_weights(subject.models, subject.optimizers)
    tracer, line = _find_tracer(subject, modes[0])
    calibration = attempt(subject.calibrate)
    # The optimizer has its state now, if it had none before its first step.
    state = sum(map(state_bytes, subject.optimizers))
    facts = facts.replace(weights_bytes=weights, gradient_bytes=gradients, optimizer_bytes=state)
    if isinstance(line, str) or isinstance(calibration, str):
        why = calibration if isinstance(calibration, str) else line
        return facts.replace(missing=f"{subject.refusal}: {why}")
    if on_accelerator(device):  # cuBLAS and cuDNN have been loaded since, beside PyTorch's allocator
        facts = facts.replace(base_bytes=max(calibration.outside, facts.base_bytes))
    lines = find_lines(tracer.trace, modes, tracer.sizes, line, deadline=deadline - tracer.mode_seconds())
    return conclude(facts, lines, calibration, look_ahead=subject.look_ahead_bytes())


def _find_tracer(subject: MemorySubject, baseline: TrainConfig) -> tuple[Tracer, Line | str]:
    """Return the first tracer that works and its line, or any and why the best one does not."""
    refusal = ""
    for tracer in subject.list_tracers():
        line = attempt(partial(find_line, tracer.trace, baseline, tracer.sizes))
        if not isinstance(line, str):
            return tracer, line
        refusal = refusal or line
    return tracer, refusal


def cap_memory(facts: TargetFacts, measurement: Measurement) -> TargetFacts:
    """Return the facts with no mode above what the training itself was measured to need on a CPU.

    The prediction is calibrated in a process that has done much else by then, which a fresh one has not.

    Args:
        facts: with a prediction, or without.
        measurement: of the baseline, before all that.
    """
    memory, baseline = facts.memory, facts.baseline
    own = memory.find_mode(baseline.precision, baseline.activation_checkpointing) if memory is not None else None
    if memory is None or own is None or facts.device != "cpu":
        return facts
    over = own.predict_bytes(baseline.micro_batch_size) - measurement.peak_memory.host_bytes
    if over <= 0:
        return facts
    modes = tuple(lower_mode(mode, over, memory.limit_bytes) for mode in memory.modes)
    return facts.replace(memory=memory.replace(modes=modes))


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Put the random generators back afterwards, and release memory that is no longer used."""
    generators = read_generators()
    device_generator = read_device_generator(device)
    try:
        yield
    finally:
        restore_generators(generators)
        restore_device_generator(device_generator, device)
        release_free_memory()
