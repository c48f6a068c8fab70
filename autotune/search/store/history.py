"""What earlier searches have read, in the user's cache folder: where a later one begins, never what it claims.

    the same target, machine, versions and settings    what each change brought, a little less sure
    a relative on this machine                         the same, much less sure: the target as it was before it was
                                                       changed, else the model that is nearest in kind and size

A file per search, written anew by the next search of the same; one that is damaged or somebody else's is as if absent.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.format import count, format_duration
from autotune.records.codec import read_record, write_record
from autotune.records.config import KnobValue, changed_fields, is_user_knob
from autotune.records.facts import ModelFacts
from autotune.records.probe import ProbeReport
from autotune.records.profile import Profile
from autotune.records.quality import DriftLimits
from autotune.records.search import KnownEffect, PastSearch, Recalled
from autotune.search.log import SearchLog, list_changes
from autotune.search.scores.ranking import is_disturbed
from autotune.user_cache import find_user_cache

Effects = Mapping[tuple[str, KnobValue | None], tuple[float, float]]
"""Log speed-up and its standard deviation, by knob and value."""

SAME_SD = 0.03
"""Log: by how much a change brings more or less on another day; what launches of one machine differ by (judgement)."""

RELATIVE_SD = 0.10
"""Log: the same between two trainings of a kind. Judgement: the effect of one change varies by 0.1 to 0.2 over all."""

_MOST_BITS = 3.0
"""Binary orders of magnitude in parameters between relatives."""

_MOST_KEPT = 100
_LARGEST_FILE_BYTES = 256 * 1024


def recall(report: ProbeReport, folder: Path, *, knows_refusals: bool = True, now: float | None = None) -> Recalled:
    """Return what earlier searches say of the changes of a target that was just probed.

    Args:
        report: of the probe.
        folder: the working folder.
        knows_refusals: what was refused there is refused here too, by the usual limits.
        now: seconds since 1970; None for the clock's.
    """
    target = report.target
    machine = (report.hardware.fingerprint, report.software.fingerprint, target.device, target.world_size)
    here = [one for one in list_past() if (one.hardware, one.software, one.device, one.world_size) == machine]
    distances = [_find_distance(one, report, digest_folder(folder)) for one in here]
    least = min(distances, default=math.inf)
    if math.isinf(least):
        return Recalled()
    past, is_same, is_own = here[distances.index(least)], least == _SAME, least <= _CHANGED
    sd = SAME_SD if is_same else RELATIVE_SD
    effects = tuple(
        one.replace(log_sd=math.hypot(one.log_sd, sd))
        for one in past.effects
        if ((is_same and knows_refusals) or not one.failed) and (is_own or not is_user_knob(one.knob))
    )
    if not effects:
        return Recalled()
    whose = "the last search of it" if is_same else f"a search {'of it as it was' if is_own else f'of {past.label}'}"
    age = format_duration(max(0.0, (time.time() if now is None else now) - past.ended_at))
    read = count(len(effects), "change")
    sentence = f"{whose}, {age} ago, says what to try first: a guess about {read}, no proof"
    return Recalled(sentence=sentence, effects=effects)


_SAME, _CHANGED = 0.0, 0.5


def _find_distance(past: PastSearch, report: ProbeReport, folder: str) -> float:
    """Return how far a target is from that of a past search; infinite where they are not alike.

    Between models of one kind it is |log2| of the ratio of their parameters, at least one bit.
    """
    target = report.target
    if (past.label, past.fingerprint, past.baseline) == (target.label, target.fingerprint, target.baseline):
        return _SAME
    if (past.label, past.folder) == (target.label, folder):
        return _CHANGED
    ours, theirs = target.model, past.model
    if _kind_of(ours) != _kind_of(theirs) or not (ours.parameter_count and theirs.parameter_count):
        return math.inf
    bits = abs(math.log2(ours.parameter_count / theirs.parameter_count))
    return max(1.0, bits) if bits <= _MOST_BITS else math.inf


def _kind_of(model: ModelFacts) -> tuple[bool, bool, bool]:
    return model.has_4d_convolution, model.has_batch_norm, model.calls_attention


def digest_folder(folder: Path) -> str:
    """Return by what a working folder is known again: its path is nobody's business."""
    return hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:16]


def make_past(log: SearchLog, profile: Profile, effects: Effects, folder: Path) -> PastSearch:
    """Return what is to be remembered of a search: of no change what was read only while others had the CPUs.

    Args:
        log: of the search.
        profile: its answer.
        effects: log speed-up and its standard deviation by knob and value, of all that may be varied.
        folder: the working folder.
    """
    baseline, target = log.problem.baseline, log.problem.report.target
    own = [one.config for one in log.judged if one.score.value is not None and not is_disturbed(one.result)]
    timed = frozenset[str]().union(*(list_changes(one, baseline, changed_fields(one, baseline)) for one in own))
    is_usual = log.problem.state.max_drift == DriftLimits()  # by others nothing is refused for the next search
    refused = frozenset[str]().union(*(one for one in log.refused if len(one) == 1 and is_usual))
    failed = refused | log.find_suspects(count_overdue=False).guilty.keys()
    return PastSearch(
        ended_at=time.time(),
        label=target.label,
        folder=digest_folder(folder),
        fingerprint=target.fingerprint,
        hardware=profile.hardware.fingerprint,
        software=profile.software.fingerprint,
        device=target.device,
        world_size=target.world_size,
        model=target.model,
        baseline=baseline,
        objective=profile.objective,
        verdict=profile.verdict,
        config=profile.config,
        speedup=profile.speedup,
        effects=tuple(
            KnownEffect(knob=name, value=value, log_speedup=mean, log_sd=sd, failed=f"{name}={value}" in failed)
            for (name, value), (mean, sd) in effects.items()
            if f"{name}={value}" in timed | failed
            # Of a planned run the model has its compilation in what it brings, which another run shares out otherwise.
            if name != "compile_mode" or log.problem.charged_samples is None
        ),
    )


def remember(past: PastSearch) -> bool:
    """Keep what a search has read, in place of an earlier one of the same; return whether that could be written."""
    folder = _find_folder()
    if folder is None:
        return False
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(folder / f"{_build_key(past)}.json", past, private=True)
    except OSError:
        return False
    for path, _ in _read_all()[_MOST_KEPT:]:
        path.unlink(missing_ok=True)
    return True


def list_past() -> list[PastSearch]:
    """Return what is remembered, the newest first."""
    return [past for _, past in _read_all()]


def forget() -> int:
    """Forget all of it, and return how many searches that were.

    Raises:
        OSError: a file cannot be removed.
    """
    found = _read_all()
    for path, _ in found:
        path.unlink(missing_ok=True)
    return len(found)


def _read_all() -> list[tuple[Path, PastSearch]]:
    folder = _find_folder()
    found: list[tuple[Path, PastSearch]] = []
    for path in () if folder is None else folder.glob("*.json"):
        try:
            if path.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.append((path, read_record(path, PastSearch, max_bytes=_LARGEST_FILE_BYTES)))
        except (OSError, AutotuneError):
            continue
    return sorted(found, key=lambda one: one[1].ended_at, reverse=True)


def _find_folder() -> Path | None:
    cache = find_user_cache()
    return None if cache is None else cache / "history"


def _build_key(past: PastSearch) -> str:
    parts = [past.label, past.fingerprint, past.hardware, past.software, past.baseline.to_json()]
    parts += [] if past.world_size == 1 else [str(past.world_size)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
