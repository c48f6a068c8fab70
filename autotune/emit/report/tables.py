"""The report's tables: records in, rows of text out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autotune.emit.report.wording import ARROW, shorten, typeset_factor
from autotune.format import (
    count,
    format_bandwidth,
    format_bytes,
    format_duration,
    format_rate,
)
from autotune.records import (
    Measurement,
    ProbeReport,
    Profile,
    QualityCheck,
    RuledOut,
    TrainConfig,
    TrialResult,
    TrialStatus,
    changed_fields,
    get_knob,
)
from autotune.records.layout import LOG_FILE
from autotune.sentences.answer import describe_break_even, describe_power
from autotune.sentences.loss_check import JUDGED_BY_BOUNDS, VERDICTS, describe_worsening, format_margin
from autotune.sentences.machine import describe_products, list_gpu
from autotune.sentences.noise import describe_noise, list_remarks
from autotune.sentences.settings import name_setting

_DASH = "\N{EN DASH}"
_MAX_VALUE_LENGTH = 60
_QUALITY_TESTS = {
    "tape": "data, batch by batch",
    "schedule": "steps and learning rates",
    "additivity": "a batch against its parts",
    "gradients": "gradients at the same weights",
    "samples-to-loss": "samples to the same loss",
    "equal-launches": "losses with and without",
    "exact-losses": "losses bit for bit",
    "paired-losses": "losses, paired seeds",
    "metric": "metric, paired seeds",
}


@dataclass(frozen=True)
class SettingRow:
    """One knob in the table of settings; `changed` against the baseline in the chosen or candidate column."""

    knob: str
    baseline: str
    chosen: str
    candidate: str
    changed: bool


@dataclass(frozen=True)
class TrialRow:
    """One trial; `status` is also the name of its colour.

    Attributes:
        values: what the columns of figures are sorted by: samples per second, bytes and seconds; None where not known.
    """

    number: int
    purpose: str
    status: str
    difference: str
    rate: str
    ratio: str
    memory: str
    seconds: str
    values: dict[str, float | None]
    error: str
    log: str


@dataclass(frozen=True)
class QualityRow:
    """One check of what is learned; `kind` is also the name of its colour."""

    test: str
    metric: str
    difference: str
    margin: str
    scope: str
    verdict: str
    kind: str
    reason: str


@dataclass(frozen=True)
class ParetoRow:
    """Settings that no others beat in both throughput and memory."""

    changes: str
    presets: str
    speedup: str
    memory: str


def list_pareto(profile: Profile) -> list[ParetoRow]:
    """Return throughput against memory, the fastest first; nothing where one setting is best in both."""
    rows = [
        ParetoRow(
            changes=describe_difference(one.config, profile.baseline_config),
            presets=", ".join(f"preset {name}" for name in one.presets),
            speedup=typeset_factor(one.speedup),
            memory=format_bytes(one.memory.used_bytes),
        )
        for one in profile.pareto
    ]
    return rows if len(rows) > 1 else []


def find_baseline_rate(profile: Profile, probe: ProbeReport) -> float:
    """Return the samples per second of the user's own settings, which every launch of the page is held against."""
    return profile.evidence.baseline_samples_per_second or probe.measurement.samples_per_second


def list_figures(profile: Profile, probe: ProbeReport) -> list[tuple[str, str]]:
    """Return the figures beside the verdict: name and value."""
    evidence = profile.evidence
    figures = [("your settings", format_rate(find_baseline_rate(profile, probe)))]
    if profile.verdict == "improved" and evidence.samples_per_second is not None:
        figures.append(("chosen settings", format_rate(evidence.samples_per_second)))
    memory = profile.memory or probe.measurement.peak_memory
    before = profile.baseline_memory if profile.verdict == "improved" else None
    if memory.device_bytes is not None:
        own = None if before is None else before.device_bytes
        figures.append(("peak device memory", _format_change(own, memory.device_bytes)))
    own = None if before is None else before.host_bytes
    figures.append(("peak host memory", _format_change(own, memory.host_bytes)))
    if profile.verdict == "improved" and profile.one_off.compile_seconds > 0:
        figures.append(("compiled once in", format_duration(profile.one_off.compile_seconds)))
    if profile.one_off.search_seconds > 0:
        figures.append(("search took", format_duration(profile.one_off.search_seconds)))
    return figures


def _format_change(before: int | None, after: int) -> str:
    """Return a size, after what it was where that is another."""
    return format_bytes(after) if before is None else f"{format_bytes(before)} {ARROW} {format_bytes(after)}"


def is_candidate_apart(profile: Profile) -> bool:
    """Return whether a candidate was measured in the finals but not chosen."""
    return profile.candidate_config is not None and profile.candidate_config != profile.config


def list_settings(profile: Profile) -> list[SettingRow]:
    """Return every knob's value, those that differ first."""
    candidate = profile.candidate_config or profile.config
    own = sorted({*profile.baseline_config.user_knobs, *profile.config.user_knobs, *candidate.user_knobs})
    names = [name for name in TrainConfig.model_fields if name != "user_knobs"]
    changed = {
        *changed_fields(profile.config, profile.baseline_config),
        *changed_fields(candidate, profile.baseline_config),
    }
    rows = [
        SettingRow(
            knob=shorten(name, _MAX_VALUE_LENGTH),
            baseline=format_value(profile.baseline_config, name),
            chosen=format_value(profile.config, name),
            candidate=format_value(candidate, name),
            changed=name in changed,
        )
        for name in [*names, *(f"user_knobs.{name}" for name in own)]
    ]
    return sorted(rows, key=lambda row: not row.changed)


def format_value(config: TrainConfig, name: str) -> str:
    """Return a knob's value for people."""
    value = get_knob(config, name)
    if value is None:
        return "as it is"
    if isinstance(value, bool):
        return "on" if value else "off"
    return shorten(str(value), _MAX_VALUE_LENGTH)


def describe_difference(config: TrainConfig | None, baseline: TrainConfig) -> str:
    """Return how a config differs from the baseline, e.g. `precision bf16, workers 4`."""
    if config is None:
        return "your settings, being found"
    parts = [f"{name_setting(name)} {format_value(config, name)}" for name in changed_fields(config, baseline)]
    return shorten(", ".join(parts)) if parts else "your settings"


def list_trials(trials: Sequence[TrialResult], baseline: TrainConfig, *, baseline_rate: float) -> list[TrialRow]:
    """Return a row for each trial."""
    return [_trial_row(trial, baseline, baseline_rate) for trial in trials]


def _trial_row(trial: TrialResult, baseline: TrainConfig, baseline_rate: float) -> TrialRow:
    measurement = trial.measurement
    bound = trial.samples_per_second_bound
    rate = bound if measurement is None else measurement.samples_per_second
    most = "≤ " if measurement is None and bound is not None else ""
    own = trial.spec.config in (None, baseline)  # whose rate is their mean: none of them is faster than itself
    memory = None if measurement is None else measurement.peak_memory
    error = ": ".join(part for part in (trial.cause, trial.error) if part)
    return TrialRow(
        number=trial.spec.number,
        purpose=trial.spec.purpose,
        status=trial.status.value,
        difference=describe_difference(trial.spec.config, baseline),
        rate=_DASH if rate is None else most + format_rate(rate, unit=""),
        ratio=_DASH if rate is None or own else most + typeset_factor(rate / baseline_rate),
        memory=_DASH if memory is None else format_bytes(memory.used_bytes),
        seconds=format_duration(trial.elapsed_seconds),
        values={
            "rate": rate,
            "memory": None if memory is None else memory.used_bytes,
            "seconds": trial.elapsed_seconds,
        },
        log="" if trial.status is TrialStatus.COMPLETED else f"trials/{trial.spec.number:04d}/{LOG_FILE}",
        error=_remark(measurement) if trial.status is TrialStatus.COMPLETED else shorten(error),
    )


def _remark(measurement: Measurement | None) -> str:
    """Return what to know about a timing: that it had not settled, was ended early, or what else went on."""
    if measurement is None:
        return ""
    disturbed = sum(block.disturbed for block in measurement.blocks)
    blocks = [f"{disturbed} of {count(len(measurement.blocks), 'block')} disturbed"] if disturbed else []
    return "; ".join([*list_remarks(measurement), *blocks])


def list_quality(checks: Sequence[QualityCheck]) -> list[QualityRow]:
    """Return a row for each check of what is learned."""
    return [
        QualityRow(
            test=_QUALITY_TESTS[check.test],
            metric=shorten(check.metric, _MAX_VALUE_LENGTH),
            difference=describe_worsening(check) if check.test in JUDGED_BY_BOUNDS else "",
            margin=format_margin(check.margin) if check.test in JUDGED_BY_BOUNDS else "",
            scope=_describe_scope(check),
            verdict=VERDICTS[check.verdict],
            kind=check.verdict,
            reason=shorten(check.reason),
        )
        for check in checks
    ]


def _describe_scope(check: QualityCheck) -> str:
    if check.seeds < 1 or check.samples < 1:
        return ""
    return f"{count(check.seeds, 'seed')}, {check.samples:,} samples each"


def list_ruled_out(ruled_out: Sequence[RuledOut]) -> list[tuple[str, str, str]]:
    """Return knob, value and reason of what was not tried."""
    return [
        (
            shorten(item.knob, _MAX_VALUE_LENGTH),
            "all others" if item.value is None else shorten(str(item.value), _MAX_VALUE_LENGTH),
            shorten(item.reason),
        )
        for item in ruled_out
    ]


def list_notes(profile: Profile, probe: ProbeReport) -> list[str]:
    """Return what the user should know, each sentence once."""
    power, costs = describe_power(profile), describe_break_even(profile.one_off)
    figures = [f"{text[0].upper()}{text[1:]}." for text in (power, costs) if text]
    notes = (*figures, *(_begin(one) for one in (*profile.evidence.notes, *probe.target.warnings)))
    return [shorten(note) for note in dict.fromkeys(notes)]


def _begin(sentence: str) -> str:
    """Return a sentence as a line of its own begins; one that begins with a name of the user's stays."""
    return sentence[:1].upper() + sentence[1:] if sentence.split(" ", 1)[0].isalpha() else sentence


def list_machine(profile: Profile, probe: ProbeReport) -> list[tuple[str, str]]:
    """Return name and value of what the machine is and what it was measured to do."""
    hardware, ceilings = profile.hardware, probe.target.ceilings
    plain = ceilings.flops_per_second("fp32")
    rows = [
        ("processor", f"{shorten(hardware.cpu_name)}, {hardware.usable_cpu_count} usable CPUs"),
        ("instructions", shorten(", ".join(hardware.cpu_features)) or "none that matter here"),
        ("memory", f"{format_bytes(hardware.memory_limit_bytes)} usable"),
        *(("GPU", shorten(", ".join(list_gpu(gpu)))) for gpu in hardware.gpus),
        ("trained on", probe.target.device),
        *(("noise", shorten(describe_noise(seen))) for seen in [profile.evidence.noise] if seen is not None),
        *((f"{rate.dtype} products", describe_products(rate, plain)) for rate in ceilings.matmul),
    ]
    if ceilings.memory_bytes_per_second is not None:
        rows.append(("memory traffic", format_bandwidth(ceilings.memory_bytes_per_second)))
    if ceilings.copy_to_device_bytes_per_second is not None:
        rows.append(("copy to device", format_bandwidth(ceilings.copy_to_device_bytes_per_second)))
    return [*rows, *(("not read", shorten(missing)) for missing in hardware.missing)]


def list_versions(profile: Profile) -> list[tuple[str, str]]:
    """Return name and version of the software."""
    software = profile.software
    rows = [("autotune", software.autotune), ("Python", software.python), ("PyTorch", software.torch)]
    rows += [("CUDA", software.cuda)] if software.cuda else []
    rows += [("NVIDIA driver", software.driver)] if software.driver else []
    return [(name, shorten(value)) for name, value in [*rows, ("platform", software.platform)]]
