"""What a script's training samples cost, and whether other worker processes would give the same ones."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autotune.engine.dataloader import find_random_sources
from autotune.engine.hooks.script import ScriptHooks
from autotune.probe.cpu_share import CpuShare
from autotune.records.config import TrainConfig
from autotune.records.facts import DataFacts
from autotune.records.script import Numerics

_MOST_PICKLED_BYTES = 2**29
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_LOADER_KNOBS = ("num_workers", "prefetch_factor", "persistent_workers")


def look_at_data(
    hooks: ScriptHooks, loader: DataLoader[Any] | None, baseline: TrainConfig
) -> tuple[DataFacts, dict[str, str], dict[str, Numerics]]:
    """Return what the training samples cost, the loader knobs that must stay with reasons, and those not exact."""
    if loader is None:
        reason = "the script has no DataLoader to train from"
        data = DataFacts(sample_count=None, seconds_per_sample=0.0, random_sources=(), iterable=False)
        return data, dict.fromkeys((*_LOADER_KNOBS, "pin_memory"), reason), {}
    dataset, fixed = loader.dataset, {}
    iterable = isinstance(dataset, IterableDataset)
    sources, seconds, cpu_fraction, trouble = set(hooks.loaders.random_sources), 0.0, None, ""
    if not iterable:
        drawn, seconds, cpu_fraction, trouble = _fetch_some(loader)
        sources |= set(drawn)
        trouble = find_worker_trouble(dataset) or trouble
    if trouble and "num_workers" not in fixed:
        fixed = dict.fromkeys(_LOADER_KNOBS, trouble)
    elif baseline.persistent_workers:
        fixed["persistent_workers"] = "the script keeps its workers already"
    numerics: dict[str, Numerics] = dict.fromkeys(_LOADER_KNOBS, "rounding") if sources else {}
    data = DataFacts(
        sample_count=None if iterable else len(dataset),  # type: ignore[arg-type]
        seconds_per_sample=seconds,
        cpu_fraction=cpu_fraction,
        random_sources=tuple(sorted(sources)),
        iterable=iterable,
    )
    return data, fixed, numerics


def find_worker_trouble(dataset: Any) -> str:
    """Return why other worker processes could give other samples; empty when they cannot."""
    if _holds_generator(dataset, depth=3):
        return "its dataset holds a random generator of its own: every worker would start with a copy of it"
    try:
        pickle.Pickler(_Nowhere()).dump(dataset)
    except _EnoughError:
        return ""
    except Exception as error:
        what = " ".join(str(error).split())[:120]
        return f"its dataset cannot be pickled ({what}): what it holds open may not be shared among workers"
    return ""


class _EnoughError(Exception):
    """So much was pickled that the rest will pickle too."""


class _Nowhere:
    def __init__(self) -> None:
        self._written = 0

    def write(self, data: Any) -> int:
        self._written += len(data) if isinstance(data, bytes) else memoryview(data).nbytes
        if self._written > _MOST_PICKLED_BYTES:
            raise _EnoughError
        return 0


def _holds_generator(value: Any, *, depth: int) -> bool:
    if isinstance(value, _GENERATORS):
        return True
    if depth == 0 or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return False
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple):
        parts += value[:8]
    elif isinstance(value, dict):
        parts += list(value.values())[:8]
    return any(_holds_generator(part, depth=depth - 1) for part in parts)


def _fetch_some(loader: DataLoader[Any]) -> tuple[tuple[str, ...], float, float | None, str]:
    """Return what samples draw from, the seconds one takes, the share in which a CPU worked, and what went wrong."""
    collate = loader.collate_fn if loader.batch_size is not None or loader.batch_sampler is not None else _first
    share = CpuShare()
    try:
        sources = find_random_sources(loader.dataset, collate)
    except Exception as error:
        return (), 0.0, None, f"its samples could not be fetched one by one ({type(error).__name__}: {error})"[:200]
    fetched = max(1, min(16, len(loader.dataset)))  # type: ignore[arg-type]
    seconds, worked = share.read()
    return sources, seconds / fetched, worked, ""


def _first(samples: list[Any]) -> Any:
    return samples[0]
