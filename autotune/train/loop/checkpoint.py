"""Checkpoints that are complete or not there: written beside, checked by a checksum, loaded as data only.

    .tmp-XXXX/state.pt ── fsync ── manifest.json (its SHA-256) ── fsync ── rename to step-00000120/ ── fsync

Of a sharded training the shards of each process are files beside it, with their SHA-256 in the manifest too.

A folder without a manifest that fits its files is no checkpoint; the one before it is used. The best one by the
metric is kept as best-00000120/, hard links to the same files, so it costs no second write.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autotune.distributed.shards import checksum, read_shards, save_shards, shard_state, without_tensors
from autotune.distributed.training import RankTraining
from autotune.engine.loop import Training
from autotune.errors import AutotuneError, CheckpointError
from autotune.isolation.causes import explain_exception
from autotune.records.codec import make_folder, read_record, sync_folder, write_record
from autotune.records.layout import MANIFEST_FILE
from autotune.records.run import CheckpointManifest
from autotune.train.loop.state import Progress, capture_state, gather_generators, restore_state
from autotune.train.loop.user_code import blame_target
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.steps_down import MEMORY_CAUSES
from autotune.train.runs.folder import newest_first, read_step

KEPT = 2
"""Complete checkpoints kept: the newest and one to fall back to."""

_STATE_FILE = "state.pt"


@dataclass(frozen=True)
class Restored:
    """What was restored.

    Attributes:
        progress: where the training stands.
        notes: what else the checkpoint remembers.
        problems: what was wrong with newer ones, one sentence each.
        path: of the checkpoint; None when the training begins anew.
    """

    progress: Progress
    notes: Mapping[str, Any]
    problems: tuple[str, ...] = ()
    path: Path | None = None


class Checkpoints:
    """The checkpoints of one run.

    Attributes:
        folder: they are in.
        fingerprint: of the target, noted in each.
        kept: how many of the newest complete ones are kept.
        anchor_step: the newest one not after this step is kept too, and a few older ones, each about twice as old as
            the one before: what shows late has begun early. None for neither.
    """

    def __init__(self, folder: Path, *, fingerprint: str, kept: int = KEPT, policy: TrainPolicy = TRAIN_POLICY) -> None:
        """Prepare to save to a folder, which need not exist yet."""
        self.folder = folder
        self.fingerprint = fingerprint
        self.kept = kept
        self._policy = policy
        self.anchor_step: int | None = None

    def save(self, training: Training, progress: Progress, notes: Mapping[str, Any]) -> Path:
        """Write a complete checkpoint, drop old ones, and return its folder; one of this step is written once.

        Raises:
            OSError: the disk is full or cannot be written; the earlier checkpoints are untouched.
        """
        make_folder(self.folder)
        final = self.folder / f"step-{progress.step:08d}"
        if _find_damage(final) is None:
            # Replacing it would take two renames, and a kill between them would leave neither.
            return final
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.folder))
        try:
            shards, others = _save_parts(training, scratch)
            found = capture_state(training, progress, notes, others)
            state = scratch / _STATE_FILE
            _write_state(state, without_tensors(found, training) if shards else found)
            manifest = CheckpointManifest(
                step=progress.step,
                epoch=training.windows.epoch,
                bytes=state.stat().st_size,
                sha256=checksum(state),
                shards=shards,
                target_fingerprint=self.fingerprint,
                torch=torch.__version__,
            )
            write_record(scratch / MANIFEST_FILE, manifest)
            sync_folder(scratch)
            _remove(final)
            scratch.rename(final)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_folder(self.folder)
        self._drop_old()
        return final

    def keep_best(self, path: Path) -> Path:
        """Keep a checkpoint as the best one, whatever becomes of the others, and return where it is.

        Raises:
            OSError: the disk cannot be written; the earlier best one is untouched.
        """
        final = self.folder / path.name.replace("step-", "best-")
        if _find_damage(final) is None and _is_same(final, path):
            return final
        scratch = Path(tempfile.mkdtemp(prefix=".tmp-", dir=self.folder))
        try:
            for file in path.iterdir():
                _link_or_copy(file, scratch / file.name)
            _remove(final)
            scratch.rename(final)
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        sync_folder(self.folder)
        # The one before stays too: the newest checkpoint may be one that still names it.
        bests = sorted(self.folder.glob("best-[0-9]*"), key=read_step, reverse=True)
        for other in bests[self._policy.best_checkpoints :]:
            _remove(other, ignore_errors=True)
        return final

    def load(self, training: Training) -> Restored:
        """Restore the newest complete checkpoint of a freshly built training.

        Raises:
            CheckpointError: there is none, or it belongs to another model.
            TargetError: there is no memory for it.
        """
        problems: list[str] = []
        damaged: list[Path] = []
        for path in newest_first(self.folder):
            try:
                state = read_verified(path, training)
            except CheckpointError as error:
                problems.append(error.message)
                damaged.append(path)
                continue
            progress, notes = _restore(training, state, path)
            for other in damaged:
                _set_aside(other, "damaged")
            return Restored(progress, notes, tuple(problems), path)
        detail = f" ({problems[0]})" if problems else ""
        raise CheckpointError(
            f"{self.folder} holds no complete checkpoint{detail}", hint="train without --resume, into a new --run-dir"
        )

    def newest_step(self, *, not_after: int | None = None) -> int | None:
        """Return the step of the newest complete checkpoint, or of the newest not after a step; None without one."""
        for path in newest_first(self.folder):
            if (not_after is None or read_step(path) <= not_after) and _find_damage(path) is None:
                return read_step(path)
        return None

    def exist(self) -> bool:
        """Return whether a checkpoint was written, also one that is damaged, but none that was taken back."""
        return any(any(self.folder.glob(pattern)) for pattern in ("step-[0-9]*", "damaged-step-*"))

    def oldest_step(self) -> int | None:
        """Return the step of the oldest complete checkpoint; None without one."""
        complete = [path for path in newest_first(self.folder) if _find_damage(path) is None]
        return read_step(complete[-1]) if complete else None

    def set_aside_after(self, step: int) -> None:
        """Take every checkpoint of a later step, best ones too, out of the way of a training that goes back."""
        for path in (*newest_first(self.folder), *self.folder.glob("best-[0-9]*")):
            if read_step(path) > step:
                _set_aside(path, "suspect")

    def _drop_old(self) -> None:
        found = list(newest_first(self.folder))
        complete = [path for path in found if (path / MANIFEST_FILE).is_file()]
        kept = complete[: self.kept]
        if self.anchor_step is not None:
            kept += [path for path in complete if read_step(path) <= self.anchor_step][:1]
            kept += _choose_spaced(complete)[: self._policy.spaced_checkpoints]
        for path in (*found, *self.folder.glob(".tmp-*")):
            if path not in kept:
                _remove(path, ignore_errors=True)


def load_checkpoint(training: Training, path: Path) -> Progress:
    """Restore one checkpoint of a freshly built training.

    Raises:
        CheckpointError: it is damaged, or belongs to another model.
    """
    return _restore(training, read_verified(path, training), path)[0]


def _choose_spaced(newest_first: list[Path]) -> list[Path]:
    """Return a few checkpoints, each about twice as old as the one before: the oldest of each power of two."""
    now = read_step(newest_first[0])
    oldest = {(now - read_step(path)).bit_length(): path for path in newest_first[1:]}
    return [oldest[power] for power in sorted(oldest)]


def _is_same(first: Path, second: Path) -> bool:
    one, two = (read_record(path / MANIFEST_FILE, CheckpointManifest) for path in (first, second))
    return (one.sha256, one.shards) == (two.sha256, two.shards)


def _save_parts(training: Training, folder: Path) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Write the shards of a sharded training, and return their checksums, with the random generators of other ranks."""
    if isinstance(training, RankTraining) and training.is_sharded:
        return save_shards(training, folder)
    return {}, gather_generators(training)


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


def _restore(training: Training, state: dict[str, Any], path: Path) -> tuple[Progress, dict[str, Any]]:
    try:
        return restore_state(training, state), dict(state["notes"])
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError, MemoryError) as error:
        _pass_on(error, path)
        text = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path} does not fit this model: {type(error).__name__}: {text}",
            hint="it was written by another version of it",
        ) from None


def _pass_on(error: Exception, path: Path) -> None:
    """Raise what is no fault of a checkpoint's.

    Raises:
        TargetError: there is no memory to read it, too few files may be open, or the device is lost.
    """
    if explain_exception(error)[1] in (*MEMORY_CAUSES, "limits", "device-error"):
        with blame_target(f"reading {path}"):
            raise error


def read_verified(path: Path, training: Training | None = None) -> dict[str, Any]:
    """Return the state that a checkpoint holds, on the CPU.

    Args:
        path: of the checkpoint.
        training: that it is for: of a sharded one this process's shards; None for all of it.

    Raises:
        CheckpointError: it is not complete, or damaged.
    """
    damage = _find_damage(path)
    if damage is not None:
        raise CheckpointError(f"{path.name} {damage}")
    try:
        # What nobody trains with is read where it lies: the weights alone, that is, out of a file that holds more.
        state: dict[str, Any] = torch.load(
            path / _STATE_FILE, map_location="cpu", weights_only=True, mmap=training is None
        )
    except Exception as error:  # torch raises many types for a file it refuses to unpickle
        _pass_on(error, path)
        raise CheckpointError(f"{path.name} cannot be loaded: {type(error).__name__}") from None
    named = read_step(path)
    step = state.get("step", named) if isinstance(state, dict) else named
    if type(step) is not int or step != named:
        raise CheckpointError(f"{path.name} is damaged: its state is of another step")
    return _read_parts(path, state, training)


def _read_parts(path: Path, state: dict[str, Any], training: Training | None) -> dict[str, Any]:
    """Return a checkpoint's state with the tensors that its training has here, however it was written."""
    if not read_record(path / MANIFEST_FILE, CheckpointManifest).shards:
        return shard_state(state, training) if training is not None and training.is_sharded else state
    try:
        return read_shards(path, state, training)
    except CheckpointError:
        raise
    except Exception as error:  # pickle and torch raise many types for files they refuse
        raise CheckpointError(f"{path.name} cannot be loaded: {type(error).__name__}") from None


def _find_damage(path: Path) -> str | None:
    try:
        manifest = read_record(path / MANIFEST_FILE, CheckpointManifest)
    except AutotuneError as error:
        return f"is not complete: {error.message}"
    if manifest.step != read_step(path):
        return "is damaged: its manifest is of another step"
    file = path / _STATE_FILE
    if not file.is_file() or file.stat().st_size != manifest.bytes or checksum(file) != manifest.sha256:
        return "is damaged: its state file does not match its manifest"
    for name, digest in manifest.shards.items():
        if not (path / name).is_file() or checksum(path / name) != digest:
            return f"is damaged: {name} does not match its manifest"
    return None


def _set_aside(path: Path, word: str) -> None:
    # Under its name it would count as one of the checkpoints to keep, in the place of a good one.
    aside = path.with_name(f"{word}-{path.name}")
    _remove(aside, ignore_errors=True)
    path.rename(aside)


def _remove(path: Path, *, ignore_errors: bool = False) -> None:
    """Remove a folder, or what stands in its place: of a link, the link alone."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=ignore_errors)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        if not ignore_errors:
            raise


def _link_or_copy(file: Path, to: Path) -> None:
    try:
        os.link(file, to)
    except OSError:  # a file system without hard links
        shutil.copy2(file, to)
