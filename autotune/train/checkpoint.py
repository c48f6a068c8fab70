"""Checkpoints that are complete or not there: written beside, checked by a checksum, loaded as data only.

    .tmp-XXXX/state.pt ── fsync ── manifest.json (its SHA-256) ── fsync ── rename to step-00000120/ ── fsync

A folder without a manifest that fits its state file is no checkpoint; the one before it is used.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autotune.engine.dataloader import read_generators, restore_generators
from autotune.engine.loop import Training
from autotune.errors import AutotuneError, CheckpointError
from autotune.records.codec import read_record, sync_folder, write_record
from autotune.records.run import CheckpointManifest

KEPT = 2
"""Complete checkpoints kept: the newest and one to fall back to."""

CHECKPOINTS_FOLDER = "checkpoints"
"""Where they are in a run folder."""

_STATE_FILE = "state.pt"
_MANIFEST_FILE = "manifest.json"


@dataclass(frozen=True)
class Progress:
    """How far a training has come.

    Attributes:
        step: optimizer steps taken.
        samples: samples trained on.
    """

    step: int = 0
    samples: int = 0


def save_checkpoint(folder: Path, training: Training, progress: Progress, *, fingerprint: str) -> Path:
    """Write a complete checkpoint, drop old ones, and return its folder; one of this step is written once.

    Raises:
        OSError: the disk is full or cannot be written; the earlier checkpoints are untouched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{progress.step:08d}"
    if _find_damage(final) is None:
        # Replacing it would take two renames, and a kill between them would leave neither.
        return final
    scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder))
    try:
        state = scratch / _STATE_FILE
        _write_state(state, _capture(training, progress))
        manifest = CheckpointManifest(
            step=progress.step,
            epoch=training.windows.epoch,
            bytes=state.stat().st_size,
            sha256=_checksum(state),
            target_fingerprint=fingerprint,
            torch=torch.__version__,
        )
        write_record(scratch / _MANIFEST_FILE, manifest)
        if final.exists():
            shutil.rmtree(final)
        scratch.rename(final)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_folder(folder)
    _drop_old(folder)
    return final


def load_checkpoint(folder: Path, training: Training) -> tuple[Progress, list[str]]:
    """Restore the newest complete checkpoint and return where the training stands, and what was wrong with newer ones.

    Raises:
        CheckpointError: there is none, or it belongs to another model.
    """
    problems: list[str] = []
    damaged: list[Path] = []
    for path in _newest_first(folder):
        try:
            state = _read_verified(path)
        except CheckpointError as error:
            problems.append(error.message)
            damaged.append(path)
            continue
        progress = _restore(training, state, path)
        for other in damaged:
            _set_aside(other)
        return progress, problems
    detail = f" ({problems[0]})" if problems else ""
    raise CheckpointError(
        f"{folder} holds no complete checkpoint{detail}", hint="train without --resume, into a new --out"
    )


def _write_state(path: Path, state: dict[str, Any]) -> None:
    with path.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:
            # torch reports a failed write as a mismatch of positions; the disk's own error is its context.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        file.flush()
        os.fsync(file.fileno())


def _capture(training: Training, progress: Progress) -> dict[str, Any]:
    generators = read_generators()
    name, keys, position, has_gauss, gauss = generators["numpy"]
    return {
        "model": training.model.state_dict(),
        "optimizer": training.optimizer.state_dict(),
        "scheduler": None if training.scheduler is None else training.scheduler.state_dict(),
        "scaler": None if training.scaler is None else training.scaler.state_dict(),
        "epoch": training.windows.epoch,
        "batches_done": training.windows.batches_done,
        "step": progress.step,
        "samples": progress.samples,
        "torch_rng": generators["torch"],
        "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy_rng": [name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, gauss],
        "python_rng": generators["random"],
    }


def _restore(training: Training, state: dict[str, Any], path: Path) -> Progress:
    try:
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        for part, name in ((training.scheduler, "scheduler"), (training.scaler, "scaler")):
            if (part is None) != (state[name] is None):
                raise ValueError(f"{'it has' if part is None else 'it lacks'} a {name}'s state")
            if part is not None:
                part.load_state_dict(state[name])
        progress = Progress(step=int(state["step"]), samples=int(state["samples"]))
        training.windows.move_to(epoch=int(state["epoch"]), batches_done=int(state["batches_done"]))
        _restore_generators(state)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} does not fit this model: {type(error).__name__}: {text}",
            hint="it was written by another version of it",
        ) from None
    return progress


def _restore_generators(state: dict[str, Any]) -> None:
    name, keys, position, has_gauss, gauss = state["numpy_rng"]
    version, internal, gauss_next = state["python_rng"]
    restore_generators(
        {
            "torch": state["torch_rng"],
            "numpy": (name, keys.numpy().astype(np.uint32), position, has_gauss, gauss),
            "random": (version, tuple(internal), gauss_next),
        }
    )
    if state["cuda_rng"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda_rng"])


def _read_verified(path: Path) -> dict[str, Any]:
    damage = _find_damage(path)
    if damage is not None:
        raise CheckpointError(f"{path.name} {damage}")
    try:
        state: dict[str, Any] = torch.load(path / _STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a file it refuses to unpickle
        raise CheckpointError(f"{path.name} cannot be loaded: {type(error).__name__}") from None
    return state


def _find_damage(path: Path) -> str | None:
    try:
        manifest = read_record(path / _MANIFEST_FILE, CheckpointManifest)
    except AutotuneError as error:
        return f"is not complete: {error.message}"
    file = path / _STATE_FILE
    if not file.is_file() or file.stat().st_size != manifest.bytes or _checksum(file) != manifest.sha256:
        return "is damaged: its state file does not match its manifest"
    return None


def _set_aside(path: Path) -> None:
    # Under its name it would count as one of the checkpoints to keep, in the place of a good one.
    aside = path.with_name(f"damaged-{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    path.rename(aside)


def _newest_first(folder: Path) -> Iterator[Path]:
    yield from sorted(folder.glob("step-[0-9]*"), reverse=True)


def _drop_old(folder: Path) -> None:
    found = list(_newest_first(folder))
    kept = [path for path in found if (path / _MANIFEST_FILE).is_file()][:KEPT]
    for path in (*found, *folder.glob(".tmp-*")):
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _checksum(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
