"""What changes usually bring, before anything was launched: from public training scripts, and from the probe. Pure.

speed    what is usual of each change, moved to what the probe expects
memory   what the probe's model of the peak predicts of each change, else what is usual
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence

from autotune.probe.analysis.pipeline import COMPUTE_KNOBS
from autotune.records.config import TrainConfig, get_knob
from autotune.records.facts import Switched
from autotune.records.probe import ProbeReport
from autotune.records.search import KnownEffect
from autotune.search.explore.additive import Change, Effect, Prior
from autotune.search.explore.loading import expect_of_loading, find_compute_share
from autotune.search.scores.ranking import PEAK_SD
from autotune.space import SearchSpace

USUAL: dict[Change, Effect] = {
    ("host_allocator", None): Effect(0.10, 0.18),
    ("host_allocator", "tcmalloc"): Effect(0.17, 0.16),
    ("host_allocator", "jemalloc"): Effect(-0.05, 0.18),
    ("num_workers", None): Effect(-0.02, 0.10),
    ("memory_format", None): Effect(0.10, 0.15),
    ("optimizer_implementation", None): Effect(0.03, 0.05),
    ("compile_mode", None): Effect(0.12, 0.18),
    ("device_allocator", None): Effect(0.0, 0.03),
    ("attention_backend", None): Effect(-0.03, 0.10),
    ("cudnn_benchmark", None): Effect(0.03, 0.06),
    ("matmul_precision", None): Effect(0.02, 0.10),
    ("precision", None): Effect(-0.05, 0.20),
    ("micro_batch_size", None): Effect(-0.10, 0.15),
    ("num_threads", None): Effect(-0.20, 0.15),
    ("activation_checkpointing", "selective"): Effect(-0.12, 0.05),
    ("activation_checkpointing", "full"): Effect(-0.28, 0.06),
    ("prefetch_factor", None): Effect(0.0, 0.01),
    ("persistent_workers", None): Effect(0.0, 0.02),
    ("pin_memory", None): Effect(0.01, 0.03),
    ("non_blocking", None): Effect(0.01, 0.02),
    ("distributed_strategy", "fsdp"): Effect(-0.15, 0.15),
    ("distributed_strategy", "ddp"): Effect(0.15, 0.15),
    ("bucket_cap_mb", None): Effect(0.01, 0.04),
    ("gradient_as_bucket_view", None): Effect(0.01, 0.03),
    ("static_graph", None): Effect(0.01, 0.02),
    ("reshard_after_forward", None): Effect(0.03, 0.05),
    ("sync_each_micro_batch", None): Effect(-0.08, 0.06),
    ("reduce_dtype", None): Effect(0.03, 0.08),
}
"""Log speed-up over PyTorch's defaults, mean and standard deviation over public training scripts on two CPU cores; of
what several processes share it is a guess."""

USUAL_ON_GPU: dict[Change, Effect] = {
    **USUAL,
    ("precision", None): Effect(0.15, 0.20),
    ("matmul_precision", None): Effect(0.10, 0.15),
    ("attention_backend", None): Effect(0.0, 0.05),
    ("attention_backend", "math"): Effect(-0.20, 0.15),
    ("optimizer_implementation", None): Effect(0.10, 0.08),
    ("optimizer_implementation", "fused"): Effect(0.14, 0.08),
}
"""The same on a GPU: judgement, which a small GPT on one (an H200) agreed with.

Scaled dot product attention is fused already where it can be, and only the unfused kernel is another algorithm; an
optimizer's loop launches some kernels for each parameter.
"""

OWN = Effect(0.08, 0.25)
"""Of a knob of the user's own: what is put there is what is taken for the bottleneck."""

PAIRS: dict[tuple[Change, Change], Effect] = {
    # bf16 makes matrix products faster and may make fused attention slower: together they can win where each loses, and
    # do in four of six public scripts.
    (("precision", "bf16"), ("attention_backend", "math")): Effect(0.10, 0.12),
    # What an allocator saves, another layout, a smaller batch or a compiled graph does not allocate any more: in one
    # public script (a graph attention network) the two together bring 0.4 less than their sum, in another one more.
    (("host_allocator", None), ("memory_format", None)): Effect(0.0, 0.08),
    (("host_allocator", None), ("micro_batch_size", None)): Effect(-0.03, 0.06),
    (("host_allocator", None), ("compile_mode", None)): Effect(-0.06, 0.15),
}

COMPILED_HALF: tuple[Change, Change] = (("precision", None), ("compile_mode", None))

PAIRS_ON_GPU: dict[tuple[Change, Change], Effect] = {
    # Where products take half the time, what a compiler fuses is more of the rest (1.15x, 1.12x, and 1.43x together).
    COMPILED_HALF: Effect(0.05, 0.10),
}

ALIKE_ON_GPU: dict[tuple[Change, ...], float] = {(("compile_mode", None),): 0.8, (("precision", None),): 0.8}
"""Correlation of what changes bring: a compiler fuses the same in each mode, half types halve bytes."""

ALIKE: dict[tuple[Change, ...], float] = {
    (("compile_mode", None),): 0.6,
    # Both compute products of bf16 inside: where such products are slow (depthwise convolutions), both lose.
    (("precision", "bf16"), ("matmul_precision", "medium")): 0.6,
    # All keep more of the pages that they were given.
    (("host_allocator", None),): 0.6,
}
"""The same on a CPU, where the modes of a compiler differ by matrix products of its own as well: judgement."""

PLAIN = TrainConfig(optimizer_implementation="for-loop")
"""What usual effects are counted from."""

CASTS = (0.10, 0.90)
"""Of log speed-up, what half types bring less on a CPU than a probe expects of their products and bytes: in any step,
and on top in one that is all calls, for each cast is one more. Of 17 trainings what is left has a deviation of 0.2.
Where float32 products may have bf16 inside (AMX), they are cast as well."""

FAILED = Effect(-0.30, 0.10)
"""Of what has failed in an earlier search of the same: it is tried again, after all else."""


def make_prior(
    report: ProbeReport, recalled: Sequence[KnownEffect] = (), usual: Mapping[Change, Effect] | None = None
) -> Prior:
    """Return what is usual, moved to what the probe expects of the knobs that it advises.

    Args:
        report: of the probe.
        recalled: what earlier searches of the like have read.
        usual: what changes bring on other targets; None for what is usual on the device.
    """
    on_gpu = report.target.device == "cuda"
    usual = usual or (USUAL_ON_GPU if on_gpu else USUAL)
    effects = _scale(_count_from(report.target.baseline, usual), COMPUTE_KNOBS, find_compute_share(report))
    effects |= {(f"user_knobs.{name}", None): OWN for name in report.target.knobs}
    pairs = dict(PAIRS_ON_GPU if on_gpu else PAIRS)
    if on_gpu and not all(_is_plain(report.target.baseline, name) for name, _ in COMPILED_HALF):
        del pairs[COMPILED_HALF]
    for one in report.advice:
        before = effects.get((one.knob, None), Effect())
        if one.gain is not None:
            low, high = math.log(one.gain.low), math.log(one.gain.high)
            # A probe sees no more of malloc than the traffic it leaves behind: what is usual counts too.
            raised = Effect(max(before.mean, (low + high) / 2), max(before.sd, (high - low) / 2))
            gained = raised.mean - before.mean
            for change, own in list(effects.items()):  # values that are known to be better than others stay so
                if change[0] == one.knob and change[1] is not None and own.mean > 0.0:
                    effects[change] = Effect(own.mean + gained, raised.sd)
            effects[one.knob, None] = raised
    effects |= _take_off_casts(effects, report)
    loading = expect_of_loading(report, effects)
    effects |= loading.effects
    pairs |= loading.pairs
    groups = (ALIKE_ON_GPU if on_gpu else ALIKE).items()
    alike = {group: one for group, one in groups if all(_is_plain(report.target.baseline, name) for name, _ in group)}
    prior = Prior(effects, pairs)
    effects |= {(one.knob, one.value): _combine(prior.find(one.knob, one.value), one) for one in report.target.switched}
    prior = Prior(effects, pairs)
    known = {
        (one.knob, one.value): FAILED if one.failed else _combine(prior.find(one.knob, one.value), one)
        for one in recalled
    }
    return Prior(effects | known, pairs, alike=alike)


def _take_off_casts(effects: Mapping[Change, Effect], report: ProbeReport) -> dict[Change, Effect]:
    """Return what half types are expected to bring on a CPU where the probe advises them: casts take time too."""
    work, features = report.target.work, report.hardware.cpu_features
    if report.target.device == "cuda" or work is None:
        return {}
    # What was tried in the running training has its casts in it.
    advised = {one.knob for one in report.advice if one.gain} - {one.knob for one in report.target.switched}
    casting = {"precision"} | ({"matmul_precision"} if "amx_bf16" in features else set())  # casts for each product
    least, calls = CASTS
    lost = find_compute_share(report) * (least + calls * work.overhead_fraction)
    of_them: list[Change] = [(name, None) for name in casting & advised]
    return {change: Effect(effects[change].mean - lost, effects[change].sd) for change in of_them}


def _scale(effects: Mapping[Change, Effect], names: Container[str], share: float) -> dict[Change, Effect]:
    """Return effects of which those of some knobs act on a share of a step alone."""
    return {
        change: Effect(share * one.mean, share * one.sd) if change[0] in names else one
        for change, one in effects.items()
    }


def _count_from(baseline: TrainConfig, usual: Mapping[Change, Effect]) -> dict[Change, Effect]:
    """Return usual effects over some settings: what these have turned on already, turning it off costs."""
    effects, known = dict(usual), Prior(usual, {})
    for name in {name for name, _ in usual}:
        own, plain = get_knob(baseline, name), get_knob(PLAIN, name)
        if own == plain or not isinstance(own, str | bool):
            continue
        had = known.find(name, own)
        others = {value: known.find(name, value) for knob, value in usual if knob == name and value != own}
        effects |= {(name, value): Effect(one.mean - had.mean, one.sd) for value, one in others.items()}
        effects[name, plain] = Effect(-had.mean, had.sd)
    return effects


def _is_plain(config: TrainConfig, name: str) -> bool:
    return get_knob(config, name) == get_knob(PLAIN, name)


SAVED: dict[Change, Effect] = {
    ("activation_checkpointing", "selective"): Effect(0.10, 0.10),
    ("activation_checkpointing", "full"): Effect(0.25, 0.20),
    ("micro_batch_size", None): Effect(0.15, 0.15),
    ("device_allocator", None): Effect(0.02, 0.06),
    ("precision", None): Effect(0.05, 0.15),
    ("compile_mode", None): Effect(-0.05, 0.15),
    ("attention_backend", None): Effect(0.0, 0.10),
    ("optimizer_implementation", None): Effect(0.0, 0.04),
    ("memory_format", None): Effect(0.0, 0.03),
    ("num_threads", None): Effect(0.0, 0.03),
    ("pin_memory", None): Effect(-0.01, 0.03),
    ("distributed_strategy", "fsdp"): Effect(0.25, 0.25),
    ("distributed_strategy", "ddp"): Effect(-0.25, 0.25),
    ("gradient_as_bucket_view", None): Effect(0.08, 0.08),
    ("reshard_after_forward", None): Effect(-0.10, 0.10),
    ("sync_each_micro_batch", None): Effect(0.05, 0.08),
}
"""Log of the memory saved, mean and standard deviation, where the probe has predicted no peak (judgement)."""

SAVED_ON_HOST: dict[Change, Effect] = {
    ("num_workers", None): Effect(-0.30, 0.25),
    ("prefetch_factor", None): Effect(-0.01, 0.03),
    ("persistent_workers", None): Effect(0.0, 0.02),
    ("host_allocator", None): Effect(-0.10, 0.10),
}
"""The same of the host's memory: none of these is a device's."""

_PREDICTABLE = frozenset({"precision", "activation_checkpointing", "micro_batch_size", "num_workers"})
"""Knobs that the probe's model of the peak knows."""

_PREDICTED_SD = 0.05
"""Of a peak that the probe predicts, as a logarithm: it is off by a twentieth or so beside the baseline's own."""


def make_saving_prior(
    space: SearchSpace, predict_peak: Callable[[TrainConfig], float | None], *, on_host: bool
) -> Prior:
    """Return what changes are taken to save of the peak memory, as a logarithm.

    Args:
        space: what may be varied.
        on_host: it is the host's memory.
        predict_peak: returns the peak of a config by the probe, in bytes; None where that is not known.
    """
    own = predict_peak(space.baseline)
    predicted = {
        (name, value): predict_peak(space.complete({name: value}))
        for name, values in space.choices.items()
        if name in _PREDICTABLE
        for value in values
        if value != get_knob(space.baseline, name)
    }
    saved: dict[Change, Effect] = {
        change: Effect(mean := math.log(own / peak), max(_PREDICTED_SD, abs(mean) / 2))
        for change, peak in predicted.items()
        if peak and own and peak != own  # the same to a byte: the model does not know of it
    }
    of_host = SAVED_ON_HOST if on_host else dict.fromkeys(SAVED_ON_HOST, Effect(0.0, _PREDICTED_SD))
    return Prior({**SAVED, **of_host, **saved}, {}, noise_sd=PEAK_SD)


def _combine(expected: Effect, read: KnownEffect | Switched) -> Effect:
    """Return the product of two normal opinions of one change."""
    weight = expected.sd**2 / (expected.sd**2 + read.log_sd**2)
    mean = expected.mean + weight * (read.log_speedup - expected.mean)
    return Effect(mean, math.sqrt(1.0 - weight) * expected.sd)
