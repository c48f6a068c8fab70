from __future__ import annotations

from typing import Any

import pytest
from record_factory import make_data, make_memory, make_mode
from simulated import BASELINE, Machine, all_equal, make_report, open_search, run_simulated

from autotune.records import MemoryFacts, TrainConfig
from autotune.search.explore.stage import Tried
from autotune.search.launch.forecast import Forecast
from autotune.search.scores.objective import Limits

GIB = 2**30
DATA = make_data(sample_count=4096, seconds_per_sample=1e-6)


def memory(*, per_sample: float = GIB / 64) -> MemoryFacts:
    return make_memory(
        make_mode(bytes_per_sample=per_sample),
        make_mode(bytes_per_sample=per_sample / 4, activation_checkpointing="full"),
    )


def forecast(limit: float = 2.0, shared: int | None = 2 * GIB, **facts: Any) -> Forecast:
    report = make_report(Machine(facts={"memory": memory(), **facts}))
    report = report.replace(hardware=report.hardware.replace(shared_memory_total_bytes=shared))
    return Forecast(report, Limits(host_memory_bytes=round(limit * GIB), device_memory_bytes=None, max_drift=0.005))


def config(size: int = 32, **changes: Any) -> TrainConfig:
    return BASELINE.replace(micro_batch_size=size, **changes)


@pytest.mark.parametrize(
    ("size", "changes", "hopeless"),
    [
        (64, {}, False),  # 2 GiB: at the limit
        (80, {}, False),  # 2.25 GiB: over it by less than the prediction may be off
        (90, {}, True),
        (90, {"activation_checkpointing": "full"}, False),
        (400, {"activation_checkpointing": "full"}, True),
        (4000, {"precision": "bf16"}, False),  # nothing was predicted for it
    ],
)
def test_what_clearly_would_not_fit_is_hopeless(size: int, changes: dict[str, Any], hopeless: bool) -> None:
    assert forecast().is_hopeless(config(size, **changes)) == hopeless


def test_without_a_memory_model_everything_is_tried() -> None:
    assert not forecast(memory=None).is_hopeless(config(100_000))


def test_loader_workers_are_part_of_a_training_on_a_cpu() -> None:
    busy = forecast(data=DATA.replace(worker_bytes=GIB // 2))
    assert not busy.is_hopeless(config(64))
    assert busy.is_hopeless(config(64, num_workers=1))
    assert busy.predict_peak_bytes(config(64, num_workers=2)) == 3 * GIB


def test_batches_of_workers_have_to_fit_into_shared_memory() -> None:
    large = forecast(limit=100.0, data=DATA.replace(batch_bytes=GIB // 4))  # of 1 GiB that is free
    assert not large.is_hopeless(config(num_workers=0, prefetch_factor=8))
    assert not large.is_hopeless(config(num_workers=1, prefetch_factor=2))
    assert large.is_hopeless(config(num_workers=2, prefetch_factor=2))
    assert large.is_hopeless(config(64, num_workers=1, prefetch_factor=2))


def test_shared_memory_that_is_not_known_or_seen_to_suffice_rules_nothing_out() -> None:
    large = DATA.replace(batch_bytes=GIB)
    assert not forecast(limit=100.0, shared=None, data=large).is_hopeless(config(num_workers=2))
    own = BASELINE.replace(num_workers=2)
    used = forecast(limit=100.0, data=large, baseline=own)
    assert not used.is_hopeless(own.replace(precision="bf16"))
    assert used.is_hopeless(own.replace(num_workers=3))


def test_on_a_gpu_a_peak_is_that_of_the_allocator() -> None:
    facts = {"device": "cuda", "memory": memory()}  # of its 1 GiB that stays everything is the context's
    assert forecast(**facts).predict_peak_bytes(config(64)) == GIB


def test_a_hopeless_config_counts_as_tried_and_is_remembered_once() -> None:
    log = open_search(Machine(facts={"memory": memory(per_sample=GIB)})).log
    tried = Tried(log, log.find_suspects(count_overdue=True))
    assert config(4096) in tried
    assert config(4096) in tried
    assert log.hopeless == (config(4096),)


@pytest.mark.slow
def test_a_search_leaves_out_what_would_not_fit_and_says_so(tmp_path: Any) -> None:
    baseline = BASELINE.replace(micro_batch_size=8, gradient_accumulation_steps=4)
    machine = Machine(speed=all_equal, facts={"memory": memory(per_sample=0.8 * GIB), "baseline": baseline})
    profile = run_simulated(machine, tmp_path, memory_limit_bytes=8 * GIB).profile
    tried = [spec.config for spec in machine.specs if spec.config is not None and spec.purpose == "measure"]
    plain = {one.micro_batch_size for one in tried if (one.precision, one.activation_checkpointing) == ("fp32", "off")}
    assert plain <= {1, 2, 4, 8}
    assert {one.micro_batch_size for one in tried} > {8}
    assert any("would not fit" in note for note in profile.evidence.notes), profile.evidence.notes
