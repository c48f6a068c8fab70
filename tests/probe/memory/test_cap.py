"""A prediction held against what the training itself needed."""

from __future__ import annotations

import pytest
from probe_records import target, timing
from record_factory import make_memory, make_mode

from autotune.probe.memory.look import cap_memory
from autotune.records import PeakMemory

MODE = make_mode(fixed_bytes=500.0, bytes_per_sample=10.0, least_bytes=300.0, largest_micro_batch_size=45)


@pytest.mark.parametrize(
    ("measured_bytes", "fixed", "least"), [(400, 300.0, 100.0), (600, 500.0, 300.0), (0, 0.0, 0.0)]
)
def test_no_mode_is_above_what_the_training_needed(measured_bytes: int, fixed: float, least: float) -> None:
    memory = make_memory(MODE, base_bytes=0, limit_bytes=1000)
    measured = timing().replace(peak_memory=PeakMemory(host_bytes=measured_bytes))
    found = cap_memory(target(memory=memory), measured).memory  # 600 bytes are predicted for its 10 samples
    assert found is not None
    assert (found.modes[0].fixed_bytes, found.modes[0].least_bytes) == (fixed, least)
    assert found.modes[0].largest_micro_batch_size == (950 - fixed) // 10
    on_gpu = cap_memory(target(memory=memory, device="cuda"), measured).memory
    assert on_gpu is not None
    assert on_gpu.modes == (MODE,)
