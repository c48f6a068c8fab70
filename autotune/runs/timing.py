"""Time the steps of a training, loader, copies and optimizer included."""

from __future__ import annotations

from autotune.machine.interference import watch_interference
from autotune.measure.memory import MemoryMeter
from autotune.measure.throughput import measure_throughput
from autotune.measure.timing import Progress, make_timing
from autotune.records.config import TrainConfig
from autotune.records.trial import LossCurve, TrialLimits
from autotune.runs.source import Found, Run, StepSource


def time_steps(
    source: StepSource, config: TrainConfig, limits: TrialLimits, *, seed: int, progress: Progress | None = None
) -> Run[Found]:
    """Return the timing of a training and the losses it had on the way.

    Args:
        source: of the steps.
        config: that it trains with.
        limits: when to stop.
        seed: that the training was started with.
        progress: told what the measurement is at; None where nobody asks.

    Raises:
        DivergedError: a loss is not finite.
        TooSlowError: its first steps are hopelessly slower than its rival's.
        TrainingEndedError: it ended before anything could be timed.
    """
    device = source.device
    timing = make_timing(
        device,
        clock=source.clock,
        read_scale=source.read_loss_scale,
        interference=watch_interference(device),
        progress=progress,
        read_ranks=source.read_ranks,
    )
    source.timing = timing
    measurement = yield from measure_throughput(timing, config, limits, MemoryMeter(device, source.list_others))
    source.timing = None
    curve = LossCurve(seed=seed, losses=timing.read_losses(), samples=timing.samples)
    return Found(measurement=measurement, curves=(curve,))
