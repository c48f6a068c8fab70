"""A checkpoint is complete or not there, whatever happens while it is written; it is read as data only."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import pickle
import shutil
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from noisy_workload import Noisy
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from autotune.engine.loop import Training
from autotune.errors import CheckpointError, TargetError
from autotune.records.codec import read_record, write_record
from autotune.records.config import TrainConfig
from autotune.records.run import CheckpointManifest
from autotune.targets.workload import check_workload
from autotune.train.loop import checkpoint
from autotune.train.loop.checkpoint import KEPT, Checkpoints
from autotune.train.loop.state import Progress, capture_state, find_non_finite, require_loadable

FINGERPRINT = "0123456789ab"


NOTES = {"meters": {"training_samples": 7}}


def save_checkpoint(folder: Path, training: Training, progress: Progress) -> Path:
    return Checkpoints(folder, fingerprint=FINGERPRINT).save(training, progress, NOTES)


def load_checkpoint(folder: Path, training: Training) -> tuple[Progress, list[str]]:
    restored = Checkpoints(folder, fingerprint=FINGERPRINT).load(training)
    assert restored.notes == NOTES
    return restored.progress, list(restored.problems)


def make_training(workload: Noisy | None = None, *, config: TrainConfig | None = None) -> Training:
    loaded = check_workload(workload or Noisy(), label="noisy", fingerprint=FINGERPRINT)
    return Training(loaded, config or TrainConfig(micro_batch_size=8), device=torch.device("cpu"), seed=0)


def save(folder: Path, step: int, training: Training | None = None) -> Path:
    """Save a checkpoint whose first bias tells its step."""
    training = training or make_training()
    with torch.no_grad():
        training.model[0].bias.fill_(float(step))  # type: ignore[index, union-attr]
    return save_checkpoint(folder, training, Progress(step, 8 * step))


def load(folder: Path) -> tuple[int, list[str]]:
    """Return the step of the checkpoint that is restored, and the problems met; checks that step and weights agree."""
    training = make_training()
    progress, problems = load_checkpoint(folder, training)
    assert set(training.model[0].bias.tolist()) == {float(progress.step)}  # type: ignore[index, union-attr]
    assert progress.samples == 8 * progress.step
    return progress.step, problems


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def forge(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a checkpoint's state and make its manifest fit, as somebody else could."""
    state = path / "state.pt"
    write(state)
    manifest = read_record(path / "manifest.json", CheckpointManifest)
    checksum = hashlib.sha256(state.read_bytes()).hexdigest()
    write_record(path / "manifest.json", manifest.replace(bytes=state.stat().st_size, sha256=checksum))


def test_what_is_saved_is_restored(tmp_path: Path) -> None:
    training = make_training()
    for _ in range(8):
        training.step()
    saved = capture_state(training, Progress(8, 60), NOTES)
    path = save_checkpoint(tmp_path, training, Progress(8, 60))
    assert path.name == "step-00000008"
    other = make_training()
    assert load_checkpoint(tmp_path, other) == (Progress(8, 60), [])
    restored = capture_state(other, Progress(8, 60), NOTES)
    assert pickle.dumps(restored["optimizer"]["param_groups"]) == pickle.dumps(saved["optimizer"]["param_groups"])
    assert (restored["epoch"], restored["batches_done"]) == (1, 2)
    assert torch.equal(restored["torch_rng"], saved["torch_rng"])
    assert restored["python_rng"] == saved["python_rng"]
    assert restored["scheduler"] == saved["scheduler"]
    for name, value in saved["model"].items():
        assert torch.equal(value, restored["model"][name])
    for number, state in saved["optimizer"]["state"].items():
        for name, value in state.items():
            assert torch.equal(value, restored["optimizer"]["state"][number][name])


def test_the_newest_ones_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    (tmp_path / ".tmp-left").mkdir()
    (tmp_path / "step-00000001").mkdir()  # its removal was cut short
    (tmp_path / "step-00000001" / "state.pt").touch()
    for step in (2, 3, 10):
        save(tmp_path, step)
    assert KEPT == 2
    assert names(tmp_path) == ["step-00000003", "step-00000010"]
    assert load(tmp_path) == (10, [])


def test_a_complete_checkpoint_is_not_written_again(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    before = (path / "state.pt").stat()
    assert save(tmp_path, 5) == path
    after = (path / "state.pt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_damaged_one_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    (path / "state.pt").write_bytes(b"torn")
    save(tmp_path, 5)
    assert load(tmp_path) == (5, [])


# Damage


def _truncate(path: Path) -> None:
    state = path / "state.pt"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])


def _flip(path: Path) -> None:
    state = path / "state.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0x10
    state.write_bytes(content)


def _remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _remove_state(path: Path) -> None:
    (path / "state.pt").unlink()


def _tear_manifest(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:20])


def _become_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("not a folder")


DAMAGE = [_truncate, _flip, _remove_manifest, _remove_state, _tear_manifest, _become_file]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.fault(
    "35",
    injected="a newest checkpoint truncated, one bit flipped, files missing, torn, no folder",
    outcome="the one before it is used, and that is said",
)
def test_damage_falls_back_to_the_one_before_and_says_so(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    step, problems = load(tmp_path)
    assert step == 10
    assert len(problems) == 1
    assert "step-00000020" in problems[0]


def test_after_a_fall_back_two_good_ones_are_kept_again(tmp_path: Path) -> None:
    save(tmp_path, 10)
    _flip(save(tmp_path, 20))
    assert load(tmp_path)[0] == 10
    save(tmp_path, 15)
    assert load(tmp_path) == (15, [])
    _flip(tmp_path / "step-00000015")
    assert load(tmp_path)[0] == 10


@pytest.mark.fault("35", injected="every checkpoint damaged", outcome="refused, with the first reason")
def test_without_a_good_one_it_is_refused(tmp_path: Path) -> None:
    for step in (10, 20):
        _truncate(save(tmp_path, step))
    with pytest.raises(CheckpointError, match=r"no complete checkpoint .*step-00000020 is damaged"):
        load_checkpoint(tmp_path, make_training())
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_checkpoint(tmp_path / "nothing", make_training())


def test_the_one_from_before_a_step_is_kept_and_gone_back_to(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, fingerprint=FINGERPRINT)
    checkpoints.anchor_step = 25
    training = make_training()
    for step in range(10, 410, 10):
        checkpoints.save(training, Progress(step, 8 * step), NOTES)
    kept = [400 - int(name.removeprefix("step-")) for name in names(tmp_path)]
    assert {0, 10, 380} <= set(kept)  # the newest two, and the one from before the anchor
    assert len(kept) <= 9
    rungs = sorted(set(kept) - {0, 380})
    assert rungs[-1] >= 120
    assert all(after <= 4 * before for before, after in itertools.pairwise(rungs))
    assert checkpoints.newest_step(not_after=25) == 20
    assert checkpoints.newest_step(not_after=5) is None
    assert checkpoints.oldest_step() == 400 - max(kept)
    checkpoints.set_aside_after(25)
    assert load_checkpoint(tmp_path, make_training()) == (Progress(20, 160), [])


class HoldsAPath(LambdaLR):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, lambda step: np.float64(0.9) ** step)
        self.path = Path("somewhere")


class NumpyRates(Noisy):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=np.float64(1e-2))

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: np.float64(0.9) ** step)


class UnloadableSchedule(Noisy):
    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return HoldsAPath(optimizer)


def test_numpys_numbers_are_loaded_as_data(tmp_path: Path) -> None:
    training = make_training(NumpyRates())
    training.step()
    require_loadable(training)
    save(tmp_path, 1, training)
    load_checkpoint(tmp_path, other := make_training(NumpyRates()))
    assert other.optimizer.param_groups[0]["lr"] == training.optimizer.param_groups[0]["lr"]


def test_a_state_that_could_not_be_loaded_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="state of the scheduler cannot be loaded as data") as caught:
        require_loadable(make_training(UnloadableSchedule()))
    assert "numbers" in caught.value.hint


class KeepsADeque(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("history", deque(maxlen=5)).append(1.0)
        return super().step(closure)


class UnloadableMoments(Noisy):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return KeepsADeque(model.parameters(), lr=0.1)


def test_a_state_that_the_first_step_makes_is_looked_at_too(tmp_path: Path) -> None:
    training = make_training(UnloadableMoments())
    require_loadable(training)
    training.step()
    with pytest.raises(TargetError, match="state of the optimizer cannot be loaded as data"):
        require_loadable(training)


class Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state[f"{prefix}weight"] = 10.0 * state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, metadata, *others)


class VersionedModel(Noisy):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Versioned(6, 1))


def test_a_module_is_told_the_version_that_its_state_is_of(tmp_path: Path) -> None:
    training = make_training(VersionedModel())
    save(tmp_path, 1, training)
    load_checkpoint(tmp_path, other := make_training(VersionedModel()))
    assert torch.equal(*(one.model.state_dict()["0.weight"] for one in (training, other)))


def test_the_best_one_outlives_the_others_at_no_cost(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, fingerprint=FINGERPRINT)
    first = checkpoints.keep_best(save(tmp_path, 10))
    assert (first / "state.pt").stat().st_ino == (tmp_path / "step-00000010" / "state.pt").stat().st_ino
    for step in (20, 30, 40):
        save(tmp_path, step)
    assert names(tmp_path) == ["best-00000010", "step-00000030", "step-00000040"]
    assert checkpoints.keep_best(tmp_path / "step-00000040").name == "best-00000040"
    assert names(tmp_path) == ["best-00000010", "best-00000040", "step-00000030", "step-00000040"]
    checkpoints.set_aside_after(35)
    assert names(tmp_path) == ["best-00000010", "step-00000030", "suspect-best-00000040", "suspect-step-00000040"]
    save(tmp_path, 40, other := make_training())
    assert checkpoints.keep_best(tmp_path / "step-00000040").name == "best-00000040"
    other.step()
    forge(tmp_path / "best-00000040", lambda path: torch.save({}, path))
    again = checkpoints.keep_best(tmp_path / "step-00000040")  # of another stretch: replaced
    assert (again / "state.pt").read_bytes() == (tmp_path / "step-00000040" / "state.pt").read_bytes()


def test_a_position_is_one_in_samples(tmp_path: Path) -> None:
    training = make_training()
    for _ in range(3):
        training.step()
    save(tmp_path, 3, training)
    halved = make_training(config=TrainConfig(micro_batch_size=4, gradient_accumulation_steps=2))
    load_checkpoint(tmp_path, halved)
    assert halved.windows.batches_done == 6
    larger = make_training(config=TrainConfig(micro_batch_size=16))
    with pytest.raises(CheckpointError, match="24 samples of the epoch are no multiple of 16"):
        load_checkpoint(tmp_path, larger)


def test_a_step_down_keeps_its_own_implementation_layout_and_precision(tmp_path: Path) -> None:
    training = make_training(config=TrainConfig(micro_batch_size=8, optimizer_implementation="fused", precision="fp16"))
    training.step()
    save(tmp_path, 1, training)
    eager = make_training(config=TrainConfig(micro_batch_size=8, optimizer_implementation="for-loop"))
    load_checkpoint(tmp_path, eager)
    (group,) = eager.optimizer.param_groups
    assert (group["fused"], group["foreach"]) == (False, False)
    eager.step()
    forged = torch.load(tmp_path / "step-00000001" / "state.pt", weights_only=True)
    forge(tmp_path / "step-00000001", lambda path: torch.save(forged | {"scaler": None}, path))
    with pytest.raises(CheckpointError, match="lacks the state of: scaler"):
        load_checkpoint(tmp_path, make_training(config=training.config))


def test_weights_that_are_not_finite_are_found(tmp_path: Path) -> None:
    training = make_training()
    training.step()
    assert find_non_finite(training) is None
    state = training.optimizer.state[training.model[0].bias]  # type: ignore[index]
    state["exp_avg_sq"][0] = torch.inf
    assert find_non_finite(training) == "0.bias's exp_avg_sq"
    with torch.no_grad():
        training.model[3].weight[0, 0] = torch.nan  # type: ignore[index]
    assert find_non_finite(training) == "3.weight"


@pytest.mark.fault("F18", injected="a checkpoint's folder is a link", outcome="the link goes in its turn, alone")
@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_rotated_and_replaced_like_a_folder(tmp_path: Path, dangling: bool) -> None:
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    save(folder, 10).rename(elsewhere)
    (folder / "step-00000010").symlink_to(tmp_path / "nowhere" if dangling else elsewhere)
    (folder / "step-00000005").write_text("no folder")
    (folder / ".tmp-link").symlink_to(elsewhere)
    (folder / "step-00000030").symlink_to(tmp_path / "nowhere")
    for step in (20, 30):
        save(folder, step)
    assert names(folder) == ["step-00000020", "step-00000030"]
    assert load(folder) == (30, [])
    assert (elsewhere / "state.pt").exists()


def _claim_a_step(path: Path) -> None:
    manifest = read_record(path / "manifest.json", CheckpointManifest)
    write_record(path / "manifest.json", manifest.replace(step=10**15))


def _restate(value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        state = torch.load(path / "state.pt", weights_only=True)
        forge(path, lambda file: torch.save(state | {"step": value}, file))

    return change


def _rename(path: Path) -> None:
    path.rename(path.with_name("step-99999999"))


LIES = {
    "manifest": _claim_a_step,
    "state": _restate(10**30),
    "tensor": _restate(torch.zeros(2)),
    "boolean": _restate(True),
    "name": _rename,
}


@pytest.mark.fault(
    "F18", injected="name, manifest and state of other steps", outcome="the checkpoint before it is used"
)
@pytest.mark.parametrize("lie", LIES)
def test_a_checkpoint_of_another_step_than_it_says_is_not_used(tmp_path: Path, lie: str) -> None:
    save(tmp_path, 10)
    LIES[lie](save(tmp_path, 20))
    step, problems = load(tmp_path)
    assert step == 10
    assert len(problems) == 1
    assert "of another step" in problems[0]


# Faults while saving


class Fault:
    """Counts the calls of some functions and does something at one of them.

    Attributes:
        calls: made so far.
    """

    def __init__(self, at: int, act: Callable[[], None], *, after: bool) -> None:
        self.calls = 0
        self._at, self._act, self._after = at, act, after

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            self.calls += 1
            is_mine = self.calls == self._at
            if is_mine and not self._after:
                self._act()
            value = function(*arguments, **named)
            if is_mine and self._after:
                self._act()
            return value

        return wrapped


PATCHED: list[tuple[Any, str]] = [
    (os, "fsync"),
    (torch, "save"),
    (Path, "open"),
    (Path, "rename"),
    (Path, "replace"),
    (shutil, "rmtree"),
    (checkpoint, "write_record"),
    (checkpoint, "checksum"),
]


@contextmanager
def faulty(fault: Fault) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in PATCHED:
            patch.setattr(owner, name, fault.wrap(getattr(owner, name)))
        yield


def _disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _torch_fails_to_write() -> None:
    try:
        _disk_full()
    except OSError:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 768 vs 662")  # noqa: B904


def _interrupt() -> None:
    raise KeyboardInterrupt


def _count_calls(folder: Path) -> int:
    prepare(folder)
    counter = Fault(0, _interrupt, after=False)
    with faulty(counter):
        save(folder, 30)
    return counter.calls


def prepare(folder: Path) -> None:
    for step in (10, 20):
        save(folder, step)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("act", [_disk_full, _interrupt])
@pytest.mark.fault(
    "25",
    injected="ENOSPC and Ctrl-C before and after each step of a save",
    outcome="the old checkpoint or the new one; no leftovers; the next save works",
)
def test_a_failure_at_any_point_leaves_the_old_or_the_new(tmp_path: Path, act: Callable[[], None], after: bool) -> None:
    count = _count_calls(tmp_path / "counted")
    assert count >= 8
    failed = 0
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        prepare(folder)
        try:
            with faulty(Fault(at, act, after=after)):
                save(folder, 30)
            step = 30
        except (OSError, KeyboardInterrupt):
            failed += 1
            step = None
        assert [name for name in names(folder) if name.startswith(".")] == []
        found, problems = load(folder)
        assert problems == []
        assert found == step or (step is None and found in (20, 30))
        assert save(folder, 40).is_dir()
        assert load(folder) == (40, [])
    assert failed >= 4


@pytest.mark.fault("25", injected="torch.save on a full disk", outcome="the disk's own error")
def test_torchs_report_of_a_failed_write_becomes_the_disks_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", Fault(1, _torch_fails_to_write, after=False).wrap(torch.save))
        with pytest.raises(OSError, match="No space left") as caught:
            save(tmp_path, 30)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == ["step-00000010", "step-00000020"]


def _in_a_fork(work: Callable[[], object]) -> int:
    """Run something in a child process and return how it ended: a status, or minus a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.fault(
    "27",
    injected="SIGKILL at each step of a save",
    outcome="the old checkpoint or the new one; leftovers swept by the next save",
)
def test_a_kill_at_any_point_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    count = _count_calls(tmp_path / "counted")
    found = set()
    for at in range(1, count + 1):
        folder = tmp_path / str(at)
        prepare(folder)

        def be_killed(at: int = at, folder: Path = folder) -> None:
            with faulty(Fault(at, lambda: os.kill(os.getpid(), signal.SIGKILL), after=False)):
                save(folder, 30)

        assert _in_a_fork(be_killed) == -signal.SIGKILL
        step, problems = load(folder)
        assert problems == []
        found.add(step)
        save(folder, 40)
        assert [name for name in names(folder) if name.startswith(".")] == []
        assert load(folder) == (40, [])
    assert found == {20, 30}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_FSIZE as Linux has it")
@pytest.mark.fault(
    "26", injected="RLIMIT_FSIZE of 2 KiB", outcome="EFBIG as an error of the disk; old checkpoints whole"
)
def test_a_quota_is_an_error_of_the_disk(tmp_path: Path) -> None:
    import resource

    prepare(tmp_path)

    def exceed() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))
        try:
            save(tmp_path, 30)
        except OSError as error:
            os._exit(error.errno or 1)

    assert _in_a_fork(exceed) == errno.EFBIG
    assert names(tmp_path) == ["step-00000010", "step-00000020"]
    assert load(tmp_path) == (20, [])


# What is not ours


class Malicious:
    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._marker}",)


@pytest.mark.parametrize("write", ["torch", "torch-legacy", "pickle"])
@pytest.mark.fault(
    "36",
    injected="pickles that run a command, in three formats, with the right checksum",
    outcome="nothing is run; the checkpoint before it is used",
)
def test_a_malicious_state_is_not_executed(tmp_path: Path, write: str) -> None:
    marker = tmp_path / "executed"
    folder = tmp_path / "checkpoints"
    save(folder, 10)
    evil: dict[str, Any] = {"model": Malicious(marker)}
    writers: dict[str, Callable[[Path], object]] = {
        "torch": lambda path: torch.save(evil, path),
        "torch-legacy": lambda path: torch.save(evil, path, _use_new_zipfile_serialization=False),
        "pickle": lambda path: path.write_bytes(pickle.dumps(evil)),
    }
    forge(save(folder, 20), writers[write])
    step, problems = load(folder)
    assert step == 10
    assert "step-00000020 cannot be loaded" in problems[0]
    assert not marker.exists()
    shutil.rmtree(folder / "step-00000010")
    (folder / "damaged-step-00000020").rename(folder / "step-00000020")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load_checkpoint(folder, make_training())
    assert not marker.exists()


class Wider(Noisy):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))


class Deeper(Noisy):
    def build_model(self) -> nn.Module:
        return nn.Sequential(*super().build_model().children(), nn.Linear(1, 1))


class Split(Noisy):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        groups = [{"params": [parameter]} for parameter in model.parameters()]
        return torch.optim.AdamW(groups, lr=1e-2)


class Unscheduled(Noisy):
    build_scheduler = None  # type: ignore[assignment]


MISFITS = {
    "wider": (Wider(), r"size mismatch for 0\.weight"),
    "deeper": (Deeper(), r"4\.weight"),
    "split": (Split(), "param"),
    "unscheduled": (Unscheduled(), "scheduler"),
}


@pytest.mark.parametrize(("workload", "words"), MISFITS.values(), ids=MISFITS.keys())
@pytest.mark.fault(
    "35", injected="a checkpoint of a wider, deeper, otherwise split model", outcome="refused, with the parameter"
)
def test_another_model_is_refused_and_the_difference_named(tmp_path: Path, workload: Noisy, words: str) -> None:
    path = save(tmp_path, 10)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_checkpoint(tmp_path, make_training(workload))
    assert str(path) in caught.value.message
    assert path.is_dir()


@pytest.mark.parametrize(
    ("part", "error"),
    [
        ("autotune.train.loop.checkpoint.restore_state", torch.OutOfMemoryError("CUDA out of memory")),
        ("torch.load", MemoryError()),
    ],
    ids=["device", "host"],
)
def test_a_checkpoint_that_there_is_no_memory_for_is_neither_damaged_nor_another_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    def run_out(*_given: object, **_named: object) -> None:
        raise error

    paths = [save(tmp_path, 10), save(tmp_path, 20)]
    training = make_training()
    monkeypatch.setattr(part, run_out)
    with pytest.raises(TargetError, match=type(error).__name__) as caught:
        load_checkpoint(tmp_path, training)
    assert caught.value.__cause__ is error
    assert sorted(tmp_path.iterdir()) == paths


def test_a_schedule_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    save(tmp_path, 10, make_training(Unscheduled()))
    with pytest.raises(CheckpointError, match="lacks the state of: scheduler"):
        load_checkpoint(tmp_path, make_training())


STATES: dict[str, Any] = {
    "a list": [1, 2],
    "empty": {},
    "a number": 7,
    "no position": {"model": None},
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES.keys())
def test_data_that_is_no_state_is_refused(tmp_path: Path, state: Any) -> None:
    forge(save(tmp_path, 10), lambda path: torch.save(state, path))
    with pytest.raises(CheckpointError, match="does not fit"):
        load_checkpoint(tmp_path, make_training())


PARTS = ["step", "epoch", "numpy_rng", "python_rng", "torch_rng", "cuda_rng", "scheduler", "notes"]


@pytest.mark.parametrize("missing", PARTS)
@pytest.mark.fault("35", injected="a state without one of its parts", outcome="refused, with the part")
def test_a_state_without_a_part_is_refused(tmp_path: Path, missing: str) -> None:
    path = save(tmp_path, 10)
    state = torch.load(path / "state.pt", weights_only=True)
    del state[missing]
    forge(path, lambda file: torch.save(state, file))
    with pytest.raises(CheckpointError, match=missing):
        load_checkpoint(tmp_path, make_training())


def test_checkpoints_are_in_order_of_their_steps_beyond_eight_digits(tmp_path: Path) -> None:
    for step in (99_999_997, 99_999_998, 99_999_999, 100_000_000):
        path = save(tmp_path, step)
        Checkpoints(tmp_path, fingerprint=FINGERPRINT).keep_best(path)
    assert names(tmp_path) == sorted(
        f"{word}-{step}" for word in ("step", "best") for step in (99_999_999, 100_000_000)
    )
    assert Checkpoints(tmp_path, fingerprint=FINGERPRINT).newest_step() == 100_000_000
    assert load(tmp_path) == (100_000_000, [])
