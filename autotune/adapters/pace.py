"""Whether a training keeps the pace that its settings were measured at."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from autotune.format import format_rate, format_share
from autotune.machine.hardware import read_hardware
from autotune.records.profile import Profile


@dataclass(frozen=True)
class PacePolicy:
    """When a pace is called slow.

    Attributes:
        warmup_steps: left out at the start: compilation, first batches, a cold cache.
        window_steps: in one window.
        windows: of them that have to be slow one after the other; a short disturbance is none.
        least_share: of the promised rate. Judgement: far below what machines vary by.
    """

    warmup_steps: int = 20
    window_steps: int = 50
    windows: int = 2
    least_share: float = 0.7


class PaceGuard:
    """Samples a second of a training, held against what was promised.

    Attributes:
        promised: samples a second; None where nothing was measured on this machine.
    """

    def __init__(
        self,
        promised: float | None,
        *,
        policy: PacePolicy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare to count.

        Args:
            promised: samples a second, or None.
            policy: thresholds.
            clock: seconds.
        """
        self.promised = promised
        self._policy, self._clock = policy or PacePolicy(), clock
        self._last: float | None = None
        self._left_out, self._slow, self._told = 0, 0, False
        self._samples, self._seconds, self._steps = 0, 0.0, 0
        self._all_samples, self._all_seconds = 0, 0.0

    @property
    def samples_per_second(self) -> float | None:
        """Mean over all counted steps; None before there are any."""
        return self._all_samples / self._all_seconds if self._all_seconds > 0 else None

    def pause(self) -> None:
        """Leave out the time up to the end of the next step, as for an evaluation or a checkpoint."""
        self._last = None

    def count(self, samples: int) -> str | None:
        """Count a step that has just ended; return a warning the first time that the pace stays too low.

        Args:
            samples: trained on in this step.
        """
        now, before = self._clock(), self._last
        self._last = now
        if before is None:
            return None
        if self._left_out < self._policy.warmup_steps:
            self._left_out += 1
            return None
        self._samples, self._seconds, self._steps = (
            self._samples + samples,
            self._seconds + now - before,
            self._steps + 1,
        )
        self._all_samples, self._all_seconds = self._all_samples + samples, self._all_seconds + now - before
        return self._close_window() if self._steps == self._policy.window_steps else None

    def _close_window(self) -> str | None:
        rate = self._samples / max(self._seconds, 1e-9)
        self._samples, self._seconds, self._steps = 0, 0.0, 0
        promised = self.promised
        is_slow = promised is not None and rate < self._policy.least_share * promised
        self._slow = self._slow + 1 if is_slow else 0
        if promised is None or self._told or self._slow < self._policy.windows:
            return None
        self._told = True
        share = format_share(rate / promised)
        return (
            f"the training runs at {format_rate(rate)}, {share} of the {format_rate(promised)} that were measured: "
            "something else uses the machine, or a setting is not applied"
        )


def find_promised_rate(profile: Profile) -> float | None:
    """Return the samples a second that an answer's settings reached; None on another machine than its own."""
    if profile.hardware.fingerprint != read_hardware().fingerprint:
        return None
    evidence = profile.evidence
    return evidence.samples_per_second if profile.verdict == "improved" else evidence.baseline_samples_per_second
