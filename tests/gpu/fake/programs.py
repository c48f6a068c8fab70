"""Known programs, and what a GPU does for each: run by `test_fake_gpu.py` in a process that finds the fake GPU."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

KIB, MIB = 2**10, 2**20
DEVICE = torch.device("cuda")
BACKEND: Any = sys.modules["fake_gpu_backend"]

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    BACKEND.counts(reset=True)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.set_sync_debug_mode("default")


def take_bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=DEVICE)


def count(beginning: str) -> int:
    """Return how often something whose name begins like this has happened since it was last asked."""
    return sum(times for name, times in BACKEND.counts(reset=True).items() if name.startswith(beginning))


def test_it_is_torchs_accelerator() -> None:
    assert torch.cuda.is_available()
    assert torch.accelerator.current_accelerator() == DEVICE
    assert torch.accelerator.device_count() == torch.cuda.device_count() == 1
    properties = torch.cuda.get_device_properties(0)
    assert (properties.name, torch.cuda.get_device_capability()) == ("Fake GPU", (8, 0))
    assert properties.total_memory == torch.cuda.mem_get_info()[1] == BACKEND.total_bytes()


@pytest.mark.parametrize(("asked", "taken"), [(1, 512), (512, 512), (513, 1024), (3 * MIB, 3 * MIB)])
def test_sizes_are_rounded_to_512_bytes(asked: int, taken: int) -> None:
    before = torch.cuda.memory_allocated()
    held = take_bytes(asked)
    assert torch.cuda.memory_allocated() - before == taken
    del held
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [(KIB, 2 * MIB), (MIB, 2 * MIB), (MIB + 1, 20 * MIB), (9 * MIB, 20 * MIB), (11 * MIB, 12 * MIB)],
)
def test_segments_are_those_of_cudas_allocator(asked: int, reserved: int) -> None:
    before = torch.cuda.memory_reserved()
    held = take_bytes(asked)
    assert torch.cuda.memory_reserved() - before == reserved
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() == before


def test_freed_memory_is_cached_and_used_again() -> None:
    first = take_bytes(30 * MIB)
    place = first.data_ptr()
    free = torch.cuda.mem_get_info()[0]
    del first
    assert torch.cuda.mem_get_info()[0] == free  # what is cached is not the driver's
    second = take_bytes(30 * MIB)
    assert second.data_ptr() == place


def test_neighbours_that_are_free_are_merged() -> None:
    parts = [take_bytes(5 * MIB) for _ in range(3)]
    reserved = torch.cuda.memory_reserved()
    del parts[:]
    whole = take_bytes(19 * MIB)
    assert torch.cuda.memory_reserved() == reserved
    del whole


def test_the_peak_is_that_of_the_most_held_at_once() -> None:
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        held = take_bytes(8 * MIB)
        more = take_bytes(4 * MIB)
        del held, more
    assert torch.cuda.max_memory_allocated() - before == 12 * MIB
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == before


def test_a_view_takes_nothing() -> None:
    held = take_bytes(4 * MIB)
    before = torch.cuda.memory_allocated()
    views = [held[100:], held.view(4, -1), held.view(torch.int32), held.view(2, -1).t(), held.unfold(0, 4, 2)]
    assert torch.cuda.memory_allocated() == before
    views[0].fill_(7)
    assert held[50:].cpu().tolist()[49:51] == [held[99].item(), 7]


def test_what_does_not_fit_is_torchs_own_error_after_the_cache_was_given_back() -> None:
    total = BACKEND.total_bytes()
    cached = take_bytes(total // 2)
    del cached
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        take_bytes(total)
    stats = torch.cuda.memory_stats()
    assert (stats["num_alloc_retries"], stats["num_ooms"]) == (1, 1)
    assert torch.cuda.memory_reserved() < total // 2
    assert take_bytes(total // 2).numel() == total // 2


def test_a_process_is_held_to_its_share() -> None:
    torch.cuda.set_per_process_memory_fraction(0.1)
    share = BACKEND.total_bytes() // 10
    with pytest.raises(torch.OutOfMemoryError):
        take_bytes(share + 3 * MIB)
    assert take_bytes(share // 2).is_cuda


READS: list[Any] = [
    pytest.param(lambda one: one.sum().item(), 1, id="item"),
    pytest.param(lambda one: bool((one > 0).all()), 1, id="bool"),
    pytest.param(lambda one: one.cpu(), 1, id="cpu"),
    pytest.param(lambda one: one.tolist(), 1, id="tolist"),
    pytest.param(lambda one: one.nonzero(), 1, id="nonzero"),
    pytest.param(lambda one: one[one > 0], 1, id="mask"),
    pytest.param(lambda one: one.unique(), 1, id="unique"),
    pytest.param(lambda one: torch.equal(one, one + 1), 1, id="equal"),
    pytest.param(lambda one: one.cuda(), 0, id="stays"),
    pytest.param(lambda one: one[torch.tensor([0, 1], device=DEVICE)], 1, id="indices that are made on the host"),
    pytest.param(lambda one: (one @ one.t()).softmax(0).mean(), 0, id="products"),
    pytest.param(lambda one: torch.where(one > 0, one, 0.0), 0, id="where"),
]


@pytest.mark.parametrize(("read", "waits"), READS)
def test_the_host_waits_where_it_must_know(read: Callable[[Tensor], object], waits: int) -> None:
    matrix = torch.randn(8, 8, device=DEVICE)
    assert count("sync:") == 0
    read(matrix)
    assert count("sync:") == waits


def test_waiting_is_told_in_torchs_debug_mode() -> None:
    matrix = torch.ones(4, 4, device=DEVICE)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        matrix.sum().item()
    assert ["synchronizing CUDA operation" in str(one.message) for one in told] == [True]
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation"):
        matrix.sum().item()
    torch.cuda.synchronize()  # asked for: no error


@pytest.mark.parametrize(
    ("pinned", "non_blocking", "waits"), [(False, False, 1), (False, True, 1), (True, False, 1), (True, True, 0)]
)
def test_only_a_pinned_copy_that_may_be_asynchronous_is(pinned: bool, non_blocking: bool, waits: int) -> None:
    source = torch.ones(1024)
    source = source.pin_memory() if pinned else source
    assert source.is_pinned() == pinned
    copied = source.to(DEVICE, non_blocking=non_blocking)
    assert count("sync:") == waits
    target = torch.empty(1024, pin_memory=pinned)
    target.copy_(copied, non_blocking=non_blocking)
    assert count("sync:") == waits
    assert torch.equal(target, source)


def test_a_part_of_pinned_memory_is_pinned() -> None:
    whole = torch.empty(1024, pin_memory=True)
    assert whole[512:].is_pinned()
    assert not whole.clone().is_pinned()


def test_kernels_are_pending_until_something_waits() -> None:
    matrix = torch.ones(8, 8, device=DEVICE)
    torch.cuda.synchronize()
    stream, done = torch.cuda.current_stream(), torch.cuda.Event()
    assert BACKEND.pending(0) == 0
    assert stream.query()
    matrix = matrix @ matrix + 1.0
    done.record()
    assert BACKEND.pending(0) == 2
    assert not stream.query()
    assert not done.query()
    done.synchronize()
    assert BACKEND.pending(0) == 0
    assert done.query()


def test_streams_are_waited_for_one_by_one() -> None:
    matrix, other = torch.ones(8, 8, device=DEVICE), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        assert torch.cuda.current_stream() == other
        matrix + 1.0
    torch.cuda.current_stream().synchronize()
    assert BACKEND.pending(0) == 1
    other.synchronize()
    assert BACKEND.pending(0) == 0


def test_events_tell_the_time_between_them() -> None:
    matrix = torch.randn(512, 512, device=DEVICE)
    first, second, third = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    first.record()
    matrix = matrix @ matrix
    second.record()
    for _ in range(20):
        matrix = matrix @ matrix
    third.record()
    with pytest.raises(RuntimeError, match="completed"):
        first.elapsed_time(third)
    torch.cuda.synchronize()
    assert 0 < first.elapsed_time(second) < first.elapsed_time(third)
    assert first.elapsed_time(third) == pytest.approx(first.elapsed_time(second) + second.elapsed_time(third), rel=0.01)
    untimed = torch.cuda.Event()
    untimed.record()
    torch.cuda.synchronize()
    with pytest.raises((RuntimeError, ValueError), match="enable_timing"):
        untimed.elapsed_time(untimed)


def test_random_numbers_are_the_devices_own() -> None:
    torch.manual_seed(1)
    host = torch.get_rng_state()
    drop = nn.Dropout(0.5)
    ones = torch.ones(64, device=DEVICE)
    kept = torch.cuda.get_rng_state()
    first = [torch.rand(8, device=DEVICE), torch.randperm(8, device=DEVICE), drop(ones)]
    assert torch.equal(torch.get_rng_state(), host)
    assert not torch.equal(torch.cuda.get_rng_state(), kept)
    torch.cuda.set_rng_state(kept)
    again = [torch.rand(8, device=DEVICE), torch.randperm(8, device=DEVICE), drop(ones)]
    assert all(map(torch.equal, first, again))
    own = torch.Generator(DEVICE).manual_seed(3)
    assert torch.equal(
        torch.rand(4, device=DEVICE, generator=own).cpu(), torch.rand(4, generator=torch.Generator().manual_seed(3))
    )


def test_two_devices_are_not_mixed() -> None:
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device=DEVICE) + torch.ones(4)
    assert (torch.ones(4, device=DEVICE) + torch.tensor(2.0)).tolist() == [3.0] * 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Flatten()
        )
        self.attend = nn.MultiheadAttention(14, 2, batch_first=True)
        self.head = nn.Linear(8 * 14 * 14, 10)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.body(images).view(len(images), -1, 14)
        return self.head(self.attend(rows, rows, rows)[0].flatten(1))


def train(device: torch.device, **optimizer: Any) -> list[float]:
    torch.manual_seed(0)
    model, images, labels = Net(), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    model.to(device)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-3, **optimizer)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"fused": True}, {"foreach": False}], ids=str)
def test_a_training_is_the_cpus_to_the_bit(optimizer: dict[str, bool]) -> None:
    assert train(DEVICE, **optimizer) == train(torch.device("cpu"), **optimizer)


def test_a_loss_is_scaled_and_a_step_that_overflows_is_left_out() -> None:
    weight = nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for value, scale in ((1.0, 2.0**10), (float("inf"), 2.0**9)):
        before = weight.detach().clone()
        with torch.autocast("cuda", torch.float16):
            loss = (weight * value).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(weight, before) == (value != 1.0)
        assert scaler.get_scale() == scale


def test_tensors_are_saved_and_loaded_where_they_were(tmp_path: Path) -> None:
    held = torch.randn(8, 8, device=DEVICE)
    torch.save({"held": held, "view": held[2:]}, tmp_path / "file.pt")
    for place, kind in ((None, "cuda"), ("cpu", "cpu"), ("cuda:0", "cuda")):
        loaded = torch.load(tmp_path / "file.pt", map_location=place, weights_only=True)
        assert loaded["held"].device.type == kind
        assert torch.equal(loaded["view"].cpu(), held[2:].cpu())
