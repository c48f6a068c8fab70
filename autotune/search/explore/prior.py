"""What changes usually bring, before anything was launched: from public training scripts, and from the probe. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autotune.records.probe import ProbeReport
from autotune.records.search import KnownEffect
from autotune.search.explore.additive import Change, Effect, Prior

USUAL: dict[Change, Effect] = {
    ("host_allocator", None): Effect(0.15, 0.18),
    ("num_workers", None): Effect(-0.02, 0.10),
    ("memory_format", None): Effect(0.10, 0.15),
    ("optimizer_implementation", None): Effect(0.03, 0.05),
    ("compile_mode", None): Effect(0.12, 0.18),
    ("device_allocator", None): Effect(0.01, 0.03),
    ("attention_backend", None): Effect(-0.03, 0.10),
    ("cudnn_benchmark", None): Effect(0.03, 0.06),
    ("allow_tf32", None): Effect(0.10, 0.15),
    ("precision", None): Effect(-0.05, 0.20),
    ("micro_batch_size", None): Effect(-0.10, 0.15),
    ("num_threads", None): Effect(-0.20, 0.15),
    ("activation_checkpointing", "selective"): Effect(-0.12, 0.05),
    ("activation_checkpointing", "full"): Effect(-0.28, 0.06),
    ("prefetch_factor", None): Effect(0.0, 0.01),
    ("persistent_workers", None): Effect(0.0, 0.02),
    ("pin_memory", None): Effect(0.01, 0.03),
    ("non_blocking", None): Effect(0.01, 0.02),
}
"""Log speed-up, mean and standard deviation over public training scripts on two CPU cores; on GPUs a guess."""

OWN = Effect(0.08, 0.25)
"""Of a knob of the user's own: what is put there is what is taken for the bottleneck."""

PAIRS: dict[tuple[Change, Change], Effect] = {
    # bf16 makes matrix products faster and may make fused attention slower: together they can win where each loses.
    (("precision", "bf16"), ("attention_backend", "math")): Effect(0.05, 0.10),
    # What an allocator saves, another layout, a smaller batch or a compiled graph does not allocate any more.
    (("host_allocator", None), ("memory_format", None)): Effect(0.0, 0.08),
    (("host_allocator", None), ("micro_batch_size", None)): Effect(-0.03, 0.06),
    (("host_allocator", None), ("compile_mode", None)): Effect(-0.06, 0.08),
    # Workers and threads share the CPUs: each loses alone where both together may win.
    (("num_workers", None), ("num_threads", None)): Effect(0.05, 0.10),
}


SHARED_CPUS = Effect(0.25, 0.25)
"""Where the loader is waited for: workers on the CPUs that fewer threads leave them (1.8x, where each alone loses)."""


FAILED = Effect(-0.30, 0.10)
"""Of what has failed in an earlier search of the same: it is tried again, after all else."""


def make_prior(
    report: ProbeReport, recalled: Sequence[KnownEffect] = (), usual: Mapping[Change, Effect] = USUAL
) -> Prior:
    """Return what is usual, moved to what the probe expects of the knobs that it advises.

    Args:
        report: of the probe.
        recalled: what earlier searches of the like have read.
        usual: what changes bring on other targets.
    """
    effects = {**usual} | {(f"user_knobs.{name}", None): OWN for name in report.target.knobs}
    pairs = dict(PAIRS)
    for one in report.advice:
        before = usual.get((one.knob, None), Effect())
        if one.gain is not None:
            low, high = math.log(one.gain.low), math.log(one.gain.high)
            # A probe sees no more of malloc than the traffic it leaves behind: what is usual counts too.
            effects[one.knob, None] = Effect(max(before.mean, (low + high) / 2), max(before.sd, (high - low) / 2))
            if one.knob == "num_workers":
                pairs[("num_workers", None), ("num_threads", None)] = SHARED_CPUS
    prior = Prior(effects, pairs)
    known = {
        (one.knob, one.value): FAILED if one.failed else _combine(prior.find(one.knob, one.value), one)
        for one in recalled
    }
    return Prior(effects | known, pairs)


def _combine(expected: Effect, read: KnownEffect) -> Effect:
    """Return the product of two normal opinions of one change."""
    weight = expected.sd**2 / (expected.sd**2 + read.log_sd**2)
    mean = expected.mean + weight * (read.log_speedup - expected.mean)
    return Effect(mean, math.sqrt(1.0 - weight) * expected.sd)
