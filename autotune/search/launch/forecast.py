"""Which configs are not even tried, because what the probe measured says that they cannot run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.probe.analysis.pipeline import count_shared_memory_bytes
from autotune.records.config import TrainConfig
from autotune.records.probe import ProbeReport
from autotune.search.scores.objective import Limits

_MARGIN = 1.15
"""A config is left out when its predicted peak is this many times the limit: the prediction is off by a tenth or so."""


@dataclass(frozen=True)
class Forecast:
    """What a config would need, by the probe's models.

    Attributes:
        report: of the probe.
        limits: of the search.
    """

    report: ProbeReport
    limits: Limits

    def predict_peak_bytes(self, config: TrainConfig) -> float | None:
        """Return the predicted peak, as trials are held to it; None when it is not known.

        On a CPU of the training and its workers; on a GPU of PyTorch's allocator, without the context and whatever
        else was on the device before.
        """
        target = self.report.target
        mode = None
        if target.memory is not None:
            mode = target.memory.find_mode(config.precision, config.activation_checkpointing)
        if mode is None:
            return None
        peak = mode.predict_bytes(config.micro_batch_size)
        if target.device == "cpu":
            return peak + config.num_workers * (target.data.worker_bytes or 0)
        return peak - (target.memory.base_bytes if target.memory is not None else 0.0)

    def is_hopeless(self, config: TrainConfig) -> bool:
        """Return whether a config would run out of memory, or of shared memory for its workers' batches."""
        return self._breaks_limit(config) or self._breaks_shared_memory(config)

    def _breaks_limit(self, config: TrainConfig) -> bool:
        on_gpu = self.report.target.device == "cuda"
        limit = self.limits.device_memory_bytes if on_gpu else self.limits.host_memory_bytes
        peak = self.predict_peak_bytes(config)
        return peak is not None and limit is not None and peak > _MARGIN * limit

    def _breaks_shared_memory(self, config: TrainConfig) -> bool:
        hardware = self.report.hardware
        needed, own = self._count_shared_bytes(config), self._count_shared_bytes(self.report.target.baseline)
        if not needed or not hardware.shared_memory_total_bytes or needed <= own:
            return False
        return needed > hardware.shared_memory_free_bytes

    def _count_shared_bytes(self, config: TrainConfig) -> float:
        target = self.report.target
        baseline_sized = count_shared_memory_bytes(target.replace(baseline=config), config.num_workers) or 0
        return baseline_sized * config.micro_batch_size / target.baseline.micro_batch_size
