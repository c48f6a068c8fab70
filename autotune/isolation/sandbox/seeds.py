"""Seeds for the random generators that a script makes without one, as the transforms of albumentations are.

    random.Random(), numpy.random.default_rng() ──── the operating system's, others in each launch
                                                └─── in a trial: drawn from its seed, one after the other

Launches of the same settings see the same batches then, by which their losses and gradients are compared.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
from types import ModuleType
from typing import Any


class DrawnSeeds:
    """Seeds of generators that are made without one: the same in each launch, others in each of its processes.

    Args:
        seed: of the trial.
    """

    def __init__(self, seed: int) -> None:
        self._seed, self._drawn = seed, 0

    def serve_random(self) -> None:
        """Give a seed to each `random.Random()` but those of Python's own library."""
        plain, draw = random.Random.seed, self._draw

        def seed(self: random.Random, a: Any = None, version: int = 2) -> None:
            plain(self, draw(128) if a is None and not _is_asked_by_library() else a, version)

        random.Random.seed = seed  # type: ignore[method-assign]

    def serve_numpy(self, numpy: ModuleType) -> None:
        """Give a seed to each of numpy's generators that is made or seeded without one."""
        numpy.random.bit_generator.randbits = self._draw

    def _draw(self, bits: int) -> int:
        self._drawn += 1
        told = f"{self._seed} {_name_process()} {self._drawn}".encode()
        return int.from_bytes(hashlib.shake_256(told).digest(bits // 8), "big")


def _is_asked_by_library() -> bool:
    """Return whether Python's own library makes the generator: names of temporary files are to be others each time."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == random.__name__:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).partition(".")[0] in sys.stdlib_module_names


def _name_process() -> str:
    """Return what tells this process from the others of a launch, and is the same in each launch."""
    data, processes = sys.modules.get("torch.utils.data"), sys.modules.get("multiprocessing")
    worker = None if data is None else data.get_worker_info()
    if worker is not None:
        return str(worker.seed)
    name = "" if processes is None else processes.current_process().name
    return f"{os.environ.get('RANK', '')} {name}"
