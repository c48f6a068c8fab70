"""What a shipped preset comes to on this target and this machine: a probe finds out what both can do.

    preset ── put onto the target's own settings ── less what the probe rules out, each with its reason

Nobody has measured a preset here. So it changes neither the effective batch nor, where it promises to leave the numbers
bit for bit as they are, anything that on this target would not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import AutotuneError, UsageError
from autotune.isolation.runner import TrialRunner
from autotune.knobs import KNOBS, Facts
from autotune.machine.hardware import read_hardware, read_software
from autotune.probe.run import PROBE_SECONDS, probe_target
from autotune.records.codec import read_record
from autotune.records.config import KnobValue, TrainConfig, get_knob
from autotune.records.facts import TargetFacts
from autotune.records.layout import STATE_FOLDER
from autotune.records.probe import ProbeReport
from autotune.records.search import Preset
from autotune.records.trial import Target, TrialLimits
from autotune.scratch import scratch_folder
from autotune.search.store.folder import find_search_folder, write_report
from autotune.space import SearchSpace, build_space, classify_changes, revert_knobs

_REPORT_FILE = "probe.json"  # as `write_report` names it
_MEASURE_SECONDS = 1.0
_WARMUP_SECONDS = 5.0


@dataclass(frozen=True)
class FittedPreset:
    """A preset as it can be used here.

    Attributes:
        config: the settings.
        left_out: `knob=value (reason)` for what they leave out of it.
    """

    config: TrainConfig
    left_out: tuple[str, ...]


def fit_preset(preset: Preset, facts: TargetFacts) -> FittedPreset:
    """Return a preset on top of a target's own settings, without what this machine or this target cannot do.

    Args:
        preset: to apply.
        facts: of a probe on this machine; its baseline is what the preset is applied to.
    """
    space = build_space(Facts(target=facts, hardware=read_hardware()))
    wanted = preset.apply_to(space.baseline)
    config = space.keep(wanted)
    inexact = list(_find_inexact(config, preset, facts))
    config = revert_knobs(config, space.baseline, inexact)
    left_out = tuple(
        f"{name}={value} ({_explain(name, value, space, inexact)})"
        for name, value in preset.settings.items()
        if get_knob(config, name) != value
    )
    return FittedPreset(config, left_out)


def find_facts(
    target: Target, *, fingerprint: str | None, should_stop: Callable[[], bool], say: Callable[[str], None]
) -> TargetFacts:
    """Return what is known about a target on this machine: from a probe made before, else from one made now.

    Args:
        target: as it is resolved.
        fingerprint: of the target as it is now.
        should_stop: polled; True ends the probe.
        say: told that a probe is made.

    Raises:
        UsageError: the target cannot be used as given, or the user stopped the probe.
        TargetError: the training fails with its own settings.
        FolderError: `.autotune` belongs to someone else or is writable by others.
    """
    known = next((report for report in _list_reports(target) if _fits(report, target, fingerprint)), None)
    if known is not None:
        return known.target
    say("a probe finds out what this machine and this training can do")
    limits = TrialLimits(
        time_limit_seconds=PROBE_SECONDS, measure_seconds=_MEASURE_SECONDS, warmup_cap_seconds=_WARMUP_SECONDS
    )
    with (
        scratch_folder() as scratch,
        TrialRunner(scratch, should_stop=should_stop, warm=False) as runner,
    ):
        try:
            report, _ = probe_target(target, runner, limits=limits)
        except AutotuneError:
            if should_stop():
                raise UsageError("stopped before the preset's settings were known", hint="start it again") from None
            raise
    try:
        write_report(Path(target.folder), report)  # this process may have to start anew with another environment
    except OSError:
        pass
    return report.target


def _list_reports(target: Target) -> Iterator[ProbeReport]:
    folder = Path(target.folder)
    try:
        yield read_record(folder / STATE_FOLDER / _REPORT_FILE, ProbeReport)
    except AutotuneError:  # none yet, one of the machine alone, or one of another version
        pass
    search = find_search_folder(folder, target.spec)
    report = None if search is None else search.read_probe()
    if report is not None:
        yield report


def _fits(report: ProbeReport, target: Target, fingerprint: str | None) -> bool:
    """Return whether a probe saw this target as it is now, on this machine."""
    return (report.target.label, report.target.fingerprint) == (target.spec, fingerprint) and (
        report.hardware.fingerprint,
        report.software.fingerprint,
    ) == (read_hardware().fingerprint, read_software().fingerprint)


def _find_inexact(config: TrainConfig, preset: Preset, facts: TargetFacts) -> Iterator[str]:
    """Yield the changes that are more on this target than the preset makes them out to be."""
    table = {knob.field: knob.numerics for knob in KNOBS}
    is_exact = all(table.get(name) == "exact" for name in preset.settings)
    for name, numerics in classify_changes(config, facts.baseline, facts.numerics).items():
        if numerics == "semantic" or (is_exact and numerics != "exact"):
            yield name


def _explain(name: str, value: KnobValue, space: SearchSpace, inexact: list[str]) -> str:
    if name in inexact:
        return "here it changes what is computed, and the preset promises not to"
    return space.explain_left_out(name, value)
