"""What advice promises of a change where it was not measured, and from where on a change is named: in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AdvicePolicy:
    """Shares of a step, ratios of times, and factors on them; deliberately wide, and judgement all of them.

    Attributes:
        least_gain: speed-up that a change has to promise at its best to be named.
        faster_arithmetic: ratio of rates from which another arithmetic is clearly faster.
        optimizer_fraction: share of a step from which the optimizer is worth another implementation.
        unexplained_fraction: share of a step in memory traffic and calls from which compilation is worth a try.
        half_the_bytes: of the memory traffic that 16-bit activations save; norms and reductions stay in fp32.
        sure_of_products: part of the saving of a faster arithmetic that is sure.
        much_overhead: share of a step in calls from which casts, operations of their own, may cost more than they save.
        cast_risk: factor on the gain's cautious end then.
        fused_traffic: of the memory traffic that fusion saves: it makes one pass of about three.
        compiled_overhead: of the calls that graphs and generated code save.
        compile_risk: factor on the cautious end, since both can fail to pay.
        layout_saved: of the products and the traffic that channels_last saves, by what it did elsewhere.
        layout_risk: factor on the cautious end.
        cudnn_saved: of the products that cuDNN's own choice saves, by what it did elsewhere.
        allocator_saved: of the memory traffic that another malloc saves, by what it did elsewhere.
        allocator_saved_untold: of forward and backward, where the traffic is not known.
        copy_fraction: share of a step from which copies to the device are worth hiding.
        uneven_steps: ratio of one step in twenty to the median, from which steps are uneven.
        least_steps: fewer have no tail of one in twenty.
        default_prefetch: batches in reserve of each worker, beyond which there are enough: PyTorch's default.
        short_epoch_seconds: in an epoch of at most this the start of workers counts.
        pinned_saved: of the copies that page-locked memory saves, three times as fast, where its rate is not known.
        shared_cpus_risk: factor on the cautious end of giving CPUs to another side.
        least_saved_by_threads: share of a step that fewer threads, where the loader is not waited for, or fewer workers
            have to save.
        sure_of_waiting: part of the waiting that workers save for sure: it takes no CPU from the computation.
        even: elasticities this close to one say that a pass takes as long as its samples, large or small.
        least_elasticity: no clock is trusted below, nor beyond the next.
        most_elasticity: as the last.
    """

    least_gain: float = 1.02
    faster_arithmetic: float = 1.3
    optimizer_fraction: float = 0.10
    unexplained_fraction: float = 0.30
    half_the_bytes: float = 0.5
    sure_of_products: float = 0.25
    much_overhead: float = 0.4
    cast_risk: float = 0.9
    fused_traffic: float = 2 / 3
    compiled_overhead: float = 0.9
    compile_risk: float = 0.9
    layout_saved: float = 1 / 3
    layout_risk: float = 0.9
    cudnn_saved: float = 0.25
    allocator_saved: float = 0.5
    allocator_saved_untold: float = 0.25
    copy_fraction: float = 0.05
    uneven_steps: float = 2.0
    least_steps: int = 20
    default_prefetch: int = 2
    short_epoch_seconds: float = 60.0
    pinned_saved: float = 2 / 3
    shared_cpus_risk: float = 0.9
    least_saved_by_threads: float = 0.03
    sure_of_waiting: float = 0.5
    even: float = 0.05
    least_elasticity: float = -1.0
    most_elasticity: float = 3.0


USUAL = AdvicePolicy()
"""What all advice goes by."""
