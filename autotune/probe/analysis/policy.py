"""From where on a figure of a step says something: the thresholds of the verdict, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VerdictPolicy:
    """Thresholds of a verdict: shares of a step or of its computation, and ratios of measured rates.

    Judgement, where no source is given.

    Attributes:
        input_wait_fraction: share of a step that waits for the loader, beyond which it is bound by it.
        input_step_ratio: step over its computation, beyond which it is so if the wait is most of the difference.
            Source: Mohan et al. 2021 (arXiv 2007.06775), the differential method.
        notable_wait_fraction: share of a step that waits for the loader, from which it is worth a sentence.
        hidden_all_reduce_fraction: share of a step that an all-reduce would fill, up to which it hides behind the
            backward pass.
        most_all_reduce_fraction: beyond this share it contradicts the step that was measured.
        busy_fraction: share of a step in which kernels run, from which on a GPU is not idle.
        enqueue_fraction: share of a step in which the host hands it over, from which the host holds up the GPU.
        free_elasticity: below this exponent of time over samples more samples cost next to nothing.
        clear_lead: by so much the largest share of the computation is larger than the next.
        overhead_fraction: share of the computation in calls, beyond which they bind.
        compute_mfu: utilisation beyond which products bind, where shares are not known.
        bandwidth_mfu: utilisation below which memory can bind, where shares are not known.
        most: share that is called most of something.
        optimizer_rate: achieved over measured memory rate of the optimizer alone, whose least traffic is known, from
            which on it is bound by the memory.
        least_plausible_rate: achieved over measured memory rate, below which something else holds the traffic up.
        most_plausible_rate: achieved over measured rate, above which the rate was measured too low, or the traffic
            did not all reach the memory.
        most_of_a_limit: a measured limit may be exceeded by noise up to this ratio.
        much_lost_fraction: share of the CPUs a training wants that others had, beyond which nothing can be told.
        some_lost_fraction: the same, beyond which a doubt is resolved against the figures.
        changed_speed: ratio of the machine's speed after to before, in either direction, that is another machine.
    """

    input_wait_fraction: float = 0.10
    input_step_ratio: float = 1.1
    notable_wait_fraction: float = 0.05
    hidden_all_reduce_fraction: float = 0.5
    most_all_reduce_fraction: float = 1.25
    busy_fraction: float = 0.80
    enqueue_fraction: float = 0.90
    free_elasticity: float = 0.3
    clear_lead: float = 0.10
    overhead_fraction: float = 0.40
    compute_mfu: float = 0.50
    bandwidth_mfu: float = 0.30
    most: float = 0.5
    optimizer_rate: float = 0.6
    least_plausible_rate: float = 0.2
    most_plausible_rate: float = 1.25
    most_of_a_limit: float = 1.1
    much_lost_fraction: float = 0.25
    some_lost_fraction: float = 0.10
    changed_speed: float = 2.0


USUAL = VerdictPolicy()
"""What every probe is judged by."""
