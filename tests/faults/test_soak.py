"""A thousand trials in one search, and 200,000 steps of one training: nothing grows."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import COUNTS, run_soak

pytestmark = pytest.mark.slow

MOST_GROWTH_BYTES = 20 * 2**20
MOST_HANDLES = 2
MOST_SLOWER = 2.0
"""A neighbour may make the last fifth this much slower; what grows with the count would be ten times as slow."""
MOST_BYTES_PER_STEP = 40.0


@pytest.mark.parametrize("kind", COUNTS)
def test_nothing_grows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TINY_FOLDER", str(tmp_path))
    soak = run_soak(kind, COUNTS[kind], tmp_path)
    assert soak.looks[-1].done > 0.95
    memory, handles = (soak.first_and_last(name) for name in ("memory_bytes", "handles"))
    assert memory[1] - memory[0] < MOST_GROWTH_BYTES
    assert handles[1] - handles[0] <= MOST_HANDLES
    seconds = soak.seconds_by_kind()
    assert seconds
    assert all(late < MOST_SLOWER * early for early, late in seconds.values()), seconds
    assert soak.bytes_per_step < MOST_BYTES_PER_STEP
