"""Measured limits kept between runs: a file per machine, software and way to start, in the user's cache folder.

    hardware, software, device, environment ──hash──▶ ceilings-<key>.json ──▶ ceilings and their age

A file that is damaged, too old or somebody else's counts as absent: the limits are then measured anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

from autotune.errors import AutotuneError
from autotune.records.ceilings import Ceilings
from autotune.records.codec import SCHEMA_VERSION, Record, read_record, write_record
from autotune.records.hardware import INSTRUCTION_LIMITS, HardwareInfo, SoftwareInfo
from autotune.user_cache import find_user_cache

OLDEST_SECONDS = 30 * 24 * 3600.0
"""Limits older than this are measured anew."""

# Part of the key; to be raised when the same machine would be given other figures by another way of measuring.
# 2: the rate of emulated arithmetic is kept. 3: a CPU's convolutions have rates of their own.
# 4: so have its float32 products of another precision.
_METHOD = 4
_LARGEST_FILE_BYTES = 64 * 1024
_ENVIRONMENT = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"),
    *INSTRUCTION_LIMITS,
)


class CachedCeilings(Record):
    """Limits of one machine as one file holds them."""

    schema_version: int = SCHEMA_VERSION
    """Version of this file."""
    key: str
    """What they depend on, hashed."""
    device: str
    """Where they were measured, e.g. `cpu` or `cuda`."""
    measured_at: float
    """Seconds since 1970."""
    ceilings: Ceilings
    """The limits."""


def find_cached_ceilings(
    hardware: HardwareInfo,
    software: SoftwareInfo,
    *,
    device: str,
    now: float | None = None,
) -> tuple[Ceilings, float] | None:
    """Return limits measured earlier and their age in seconds; None when there are none to rely on.

    Args:
        hardware: the machine.
        software: its versions.
        device: where they were measured.
        now: seconds since 1970; None for the clock's.
    """
    key = _build_key(hardware, software, device=device)
    path = _find_path(key)
    try:
        if path is None or path.stat().st_uid != os.geteuid():
            return None
        cached = read_record(path, CachedCeilings, max_bytes=_LARGEST_FILE_BYTES)
    except (OSError, AutotuneError):
        return None
    age = (time.time() if now is None else now) - cached.measured_at
    if cached.key != key or cached.device != device or not 0 <= age <= OLDEST_SECONDS:
        return None
    return cached.ceilings, age


def save_ceilings(
    ceilings: Ceilings,
    hardware: HardwareInfo,
    software: SoftwareInfo,
    *,
    device: str,
    now: float | None = None,
) -> bool:
    """Keep limits for later runs, where the cache folder can be written.

    Args:
        ceilings: kept only when the rates that products keep up are among them: without, they were measured in haste.
        hardware: as for `find_cached_ceilings`.
        software: likewise.
        device: likewise.
        now: likewise.

    Returns:
        Whether they are kept.
    """
    key = _build_key(hardware, software, device=device)
    path = _find_path(key)
    is_full = bool(ceilings.matmul) and all(
        rate.emulated or rate.sustained_flops_per_second is not None for rate in ceilings.matmul
    )
    if path is None or not is_full:
        return False
    measured_at = time.time() if now is None else now
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_record(path, CachedCeilings(key=key, device=device, measured_at=measured_at, ceilings=ceilings))
    except OSError:
        return False
    return True


def _build_key(hardware: HardwareInfo, software: SoftwareInfo, *, device: str) -> str:
    parts = {
        "method": _METHOD,
        "hardware": hardware.fingerprint,
        "affinity": hardware.affinity_cpu_count,
        "quota": hardware.cpu_quota,
        "software": software.fingerprint,
        "device": device,
        "threads": None,  # this and the next stay as they were: what was kept before is found
        "ranks": 1,
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _find_path(key: str) -> Path | None:
    folder = find_user_cache()
    return None if folder is None else folder / f"ceilings-{key}.json"
