"""From where on something about a machine or a training is an issue: the thresholds, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class IssuePolicy:
    """Shares of what there is; judgement, where no source is given.

    Attributes:
        swap_fraction: of the machine's memory, in use as swap, beyond which pages that come back stop a training.
        little_memory_fraction: of the memory a process may use, available, below which it is nearly full.
        peak_fraction: of the host's or the device's memory, used at the training's peak, beyond which little more fits.
        container_shared_memory_bytes: /dev/shm of a container that nobody gave more. Source: docker run, --shm-size.
        sustained_fraction: of the best rate of products, kept up in a long run, below which something holds it down.
        gpu_taken_fraction: of a GPU's memory, in use before the training, beyond which somebody else has it.
        gpu_busy_fraction: of the time before the training, in which a GPU worked, beyond which it is somebody else's.
        disturbed_fraction: of the time of a block, taken by other processes or spent waiting for disk or memory, beyond
            which it is disturbed.
        waiting_fraction: of a step, spent waiting for data, beyond which what a sample costs is told.
        own_code_fraction: of a step, spent in neither loader, model nor optimizer, beyond which it is worth a look.
    """

    swap_fraction: float = 0.05
    little_memory_fraction: float = 0.10
    peak_fraction: float = 0.90
    container_shared_memory_bytes: int = 64 * 2**20
    sustained_fraction: float = 0.80
    gpu_taken_fraction: float = 0.05
    gpu_busy_fraction: float = 0.10
    disturbed_fraction: float = 0.10
    waiting_fraction: float = 0.10
    own_code_fraction: float = 0.30


USUAL = IssuePolicy()
"""What every probe goes by."""
