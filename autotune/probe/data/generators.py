"""Random generators of a dataset's own: has it any, and do a loader's workers draw alike from their copies of them?"""

from __future__ import annotations

import hashlib
import itertools
import pickle
import random
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from autotune.engine.data_fingerprint import GENERATORS
from autotune.engine.data_trace import digest_batches
from autotune.engine.dataloader import seeded

OWN_GENERATOR = "a generator of the dataset's own"

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_DEPTH = 3
_MOST_ITEMS = 8
_MOST_SAMPLES = 4
_WORKERS = 2
_TIMEOUT_SECONDS = 30.0


def draws_itself(dataset: Any) -> bool:
    """Return whether a dataset keeps a random generator, or a sample is another one when it is fetched again.

    Where the generator is out of sight, as in what a transform calls, its samples show it: they differ though every
    global generator is as it was.

    Args:
        dataset: of the map style, whose first sample is fetched twice.
    """
    if holds_generator(dataset):
        return True
    try:
        return len({_digest_first(dataset) for _ in range(2)}) > 1
    except Exception:  # a sample that cannot be had again, or be read byte by byte, tells nothing
        return False


def _digest_first(dataset: Any) -> str:
    with seeded(0, GENERATORS):
        return digest_batches([dataset[0]] if len(dataset) else [])[0]


def holds_generator(dataset: Any) -> bool:
    """Return whether a dataset, or what it is made of, keeps a random generator."""
    return next(_find_generators(dataset, _DEPTH), None) is not None


def workers_draw_alike(loader: DataLoader[Any]) -> bool:
    """Return whether two workers of a loader would draw the same random numbers for the same samples.

    Two workers are started with the loader's own `worker_init_fn`, each fetches the same few samples, and the states of
    the dataset's generators are compared afterwards: one that was drawn from, or seeded, must differ. Where none is in
    sight, the samples must. In doubt they draw alike, as they do where nothing seeds the copies that the workers start
    with.

    Args:
        loader: of a map-style dataset, of which the first samples are fetched by their numbers.
    """
    context = loader.multiprocessing_context or torch.multiprocessing.get_context()
    if loader.num_workers == 0 and context.get_start_method() != "fork":
        return True  # a worker would run the script again, which may not expect it
    own = _digest_generators(loader.dataset) or [""]
    try:
        first, second = list(_open_twice(loader))
    except Exception as error:  # whatever the dataset's code raises: what cannot be seen is not taken for granted
        traceback.clear_frames(error.__traceback__)  # they keep the workers alive
        return True
    if not len(own) == len(first) == len(second):
        return True
    alike = any(ours == theirs != before for ours, theirs, before in zip(first, second, own, strict=True))
    return alike or first == second


def _open_twice(loader: DataLoader[Any]) -> DataLoader[Any]:
    count = min(_MOST_SAMPLES, len(loader.dataset))  # type: ignore[arg-type]
    return DataLoader(
        loader.dataset,
        batch_sampler=[list(range(count))] * _WORKERS,
        num_workers=_WORKERS,
        collate_fn=_report_draws,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        timeout=_TIMEOUT_SECONDS,
        generator=torch.Generator().manual_seed(0),
    )


def _report_draws(samples: list[Any]) -> list[str]:
    """Return the states of a worker's generators, in place of the batch that it has just fetched; else the batch's."""
    worker = get_worker_info()
    return [] if worker is None else _digest_generators(worker.dataset) or [digest_batches(samples)[0]]


def _digest_generators(dataset: Any) -> list[str]:
    return [hashlib.sha256(pickle.dumps(_read_state(one))).hexdigest() for one in _find_generators(dataset, _DEPTH)]


def _read_state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.get_state().tolist()


def _find_generators(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, _GENERATORS):
        yield value
        return
    if depth == 0 or isinstance(value, torch.Tensor | np.ndarray | str | bytes | type):
        return
    parts = list(getattr(value, "__dict__", {}).values())
    if isinstance(value, list | tuple):
        parts += value[:_MOST_ITEMS]
    elif isinstance(value, dict):
        parts += itertools.islice(value.values(), _MOST_ITEMS)
    for part in parts:
        yield from _find_generators(part, depth - 1)
