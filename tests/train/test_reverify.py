from __future__ import annotations

import itertools
import math
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from probe_records import timing
from record_factory import make_hardware, make_result
from train_world import CONFIG, open_workplace

import autotune.train.settings.reverify as reverify_module
from autotune.records.run import Reverification
from autotune.records.script import Script
from autotune.records.trial import Target, TrialResult, TrialSpec, TrialStatus
from autotune.train.policy import TRAIN_POLICY
from autotune.train.settings import reverify as module
from autotune.train.settings.choice import Settings
from autotune.train.settings.reverify import ReverifyOptions, reverify, reverify_in_processes

OWN = CONFIG
FAST = CONFIG.replace(precision="bf16", num_workers=1)
TARGET = Target(spec="train.py:workload", folder="/")
SETTINGS = Settings(FAST, OWN, "profile", None, None, ("the profile was measured on other hardware (A; here B)",))


@dataclass
class Machine:
    """Runs trials without a process: rates as planted, on a clock of its own.

    Attributes:
        ratio: of the profile's settings over the own.
        noise: standard deviation of the log rate of a launch.
        launch_seconds: what one takes.
        ends: how launches of a config end instead, by config.
        specs: what was asked.
        seconds: on the clock.
    """

    ratio: float = 1.3
    noise: float = 0.02
    launch_seconds: float = 5.0
    seed: int = 0
    ends: dict[str, TrialStatus] = field(default_factory=dict)
    specs: list[TrialSpec] = field(default_factory=list)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def now(self) -> float:
        return self.seconds

    def __call__(self, spec: TrialSpec) -> TrialResult:
        self.specs.append(spec)
        end = self.ends.get("own" if spec.config == OWN else "profile")
        took = min(self.launch_seconds, spec.limits.time_limit_seconds)
        self.seconds += took
        if took < self.launch_seconds:
            assert spec.limits.ends_with_stage
            end = TrialStatus.INTERRUPTED
        if end is not None:
            error = "no memory left\x1b[2J"
            return make_result(spec, status=end, cause="user-error", error=error, elapsed_seconds=took)
        rate = 1000.0 * (self.ratio if spec.config == FAST else 1.0) * math.exp(self._random.gauss(0.0, self.noise))
        return make_result(spec, elapsed_seconds=took, measurement=timing(step_ms=1000 * 10 / rate, samples=10))


PAIRS = TRAIN_POLICY.verify_pairs
QUICK = replace(TRAIN_POLICY, verify_measure_seconds=0.2)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_hardware()
    monkeypatch.setattr(reverify_module, "read_hardware", lambda: machine)


def look(machine: Machine, settings: Settings = SETTINGS, target: Target = TARGET, **frame: Any) -> Reverification:
    return reverify(settings, target, ReverifyOptions(now=machine.now, **frame), run_trial=machine)


def test_settings_that_are_faster_here_too_are_used() -> None:
    machine, told = Machine(), []
    found = look(machine, say=told.append)
    assert found.trusted
    assert found.pairs == PAIRS == 4
    assert found.differences == SETTINGS.differences
    assert found.speedup is not None
    assert 1.2 < found.speedup.low < found.speedup.estimate < 1.4
    assert found.speedup.confidence_level == pytest.approx(0.90)  # each end at 95 %
    assert found.reason.startswith("the profile's settings are used: they run at 1.3")
    assert "at most 3m00s" in told[0]
    assert len(told) == 2 * PAIRS + 2
    assert told[-1] == f"re-verification: {found.reason}"


def test_pairs_are_interleaved_and_neither_is_always_first() -> None:
    machine = Machine()
    look(machine)
    configs = [spec.config for spec in machine.specs]
    pairs = [tuple(configs[i : i + 2]) for i in range(0, 2 * PAIRS, 2)]
    assert all({OWN.to_json(), FAST.to_json()} == {one.to_json() for one in pair if one} for pair in pairs)
    assert Counter(pair[0] == OWN for pair in pairs) == {True: 2, False: 2}


def test_every_launch_is_asked_for_alike() -> None:
    machine = Machine()
    look(machine, random_sources=("numpy",))
    assert [spec.number for spec in machine.specs] == list(range(2 * PAIRS))
    for spec in machine.specs:
        assert (spec.purpose, spec.random_sources, spec.baseline) == ("final", ("numpy",), None)
        assert spec.limits.measure_seconds == 2.0
        assert spec.limits.time_limit_seconds <= 180.0
        assert spec.limits.host_memory_limit_bytes is not None


def test_a_script_is_told_what_it_does_by_itself() -> None:
    machine = Machine()
    target = Target(spec="python train.py", folder="/", script=Script(command=("python", "train.py")))
    settings = Settings(FAST, OWN, "profile", None, None, ("x",), training_loaders=("first",))
    assert look(machine, settings, target, random_sources=("numpy",)).trusted
    for spec in machine.specs:
        assert (spec.baseline, spec.training_loaders, spec.random_sources) == (OWN, ("first",), ())


@pytest.mark.parametrize(
    ("ratio", "noise", "told"),
    [
        (0.9, 0.01, "slower"),
        (0.99, 0.001, "slower"),
        (1.05, 0.3, "which does not rule out a loss"),
    ],
)
@pytest.mark.fault("38", injected="settings of another machine that lose here", outcome="not used")
def test_settings_that_may_lose_here_are_not_used(ratio: float, noise: float, told: str) -> None:
    found = look(Machine(ratio=ratio, noise=noise, seed=1))
    assert not found.trusted
    assert found.pairs == PAIRS
    assert found.speedup is not None
    assert "your own settings are used" in found.reason
    assert f"{found.speedup.estimate:.2f}x your own" in found.reason
    assert found.reason.endswith(told)


@pytest.mark.usefixtures("here")
def test_how_often_it_decides_how() -> None:
    def share_trusted(ratio: float, noise: float) -> float:
        return sum(look(Machine(ratio=ratio, noise=noise, seed=seed)).trusted for seed in range(200)) / 200

    assert share_trusted(0.95, 0.02) <= 0.02
    assert share_trusted(0.90, 0.05) <= 0.05
    assert share_trusted(1.10, 0.02) >= 0.95
    assert share_trusted(1.50, 0.10) >= 0.90


@pytest.mark.parametrize("status", [TrialStatus.OUT_OF_MEMORY, TrialStatus.CRASHED, TrialStatus.UNSUPPORTED])
def test_one_failure_of_the_profiles_settings_is_enough(status: TrialStatus) -> None:
    machine = Machine(ends={"profile": status})
    found = look(machine)
    assert not found.trusted
    assert found.speedup is None
    assert f"the profile's fail here ({status.value}: no memory left[2J)" in found.reason
    assert len(machine.specs) <= 2


def test_own_settings_that_fail_are_used_and_that_is_said() -> None:
    found = look(Machine(ends={"own": TrialStatus.CRASHED}))
    assert not found.trusted
    assert "they fail here, so nothing could be compared (crashed: no memory left" in found.reason


@pytest.mark.parametrize(("launch_seconds", "pairs"), [(500.0, 0), (60.0, 1), (40.0, 2), (26.0, 3), (20.0, 4)])
def test_it_ends_in_time_and_too_few_pairs_are_no_proof(launch_seconds: float, pairs: int) -> None:
    machine = Machine(launch_seconds=launch_seconds)
    found = look(machine)
    assert machine.seconds <= 180.0
    assert found.pairs == pairs
    assert found.trusted == (pairs >= TRAIN_POLICY.verify_least_pairs)
    if not found.trusted:
        assert "finished when 3m00s were over, too few to tell" in found.reason


def stop_after(calls: int) -> Callable[[], bool]:
    asked = itertools.count()
    return lambda: next(asked) >= calls


@pytest.mark.parametrize("calls", [0, 1, 3])
def test_a_stop_ends_it_and_nothing_is_trusted(calls: int) -> None:
    machine = Machine()
    found = look(machine, should_stop=stop_after(calls))
    assert not found.trusted
    assert len(machine.specs) == calls
    assert "finished when it was stopped" in found.reason


@pytest.mark.usefixtures("here")
def test_an_allocator_that_is_not_installed_is_no_reason_to_fail() -> None:
    machine = Machine()
    found = look(machine, Settings(OWN.replace(host_allocator="jemalloc"), OWN, "profile", None, None, ("x",)))
    assert not found.trusted
    assert "host_allocator 'jemalloc' is not installed on this machine" in found.reason
    assert machine.specs == []


# In processes


WATCHED = """
import os
from noisy_workload import WithMomentum

class Watched(WithMomentum):
    def build_model(self):
        with open("seen", "a") as file:
            print(os.getpid(), os.environ.get("MALLOC_TRIM_THRESHOLD_"), file=file)
        return super().build_model()

workload = Watched()
"""


@pytest.mark.slow
def test_real_pairs_of_fresh_processes_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_workplace(tmp_path)
    (tmp_path / "watched.py").write_text(WATCHED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):  # this process was started for the profile
        monkeypatch.setenv(name, str(2**30))
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    told: list[str] = []
    frame = ReverifyOptions(say=told.append, random_sources=("torch", "numpy", "random"), policy=QUICK)
    settings = Settings(CONFIG.replace(host_allocator="glibc-tuned"), CONFIG, "profile", None, None, ("x",))
    target = Target(spec="watched.py:workload", folder=str(tmp_path))
    found = reverify_in_processes(settings, target, frame)
    assert found.pairs == PAIRS, told
    assert found.speedup is not None
    assert os.environ["MALLOC_TRIM_THRESHOLD_"] == str(2**30)
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
    launches = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert len({pid for pid, _ in launches}) == len(launches) == 2 * PAIRS
    assert Counter(value for _, value in launches) == {"None": PAIRS, str(2**30): PAIRS}


def test_only_the_profiles_malloc_library_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    library = "/lib/libtcmalloc.so.4"
    machine = module.read_hardware().replace(host_allocators={"tcmalloc": library})
    monkeypatch.setattr(module, "read_hardware", lambda: machine)
    settings = Settings(CONFIG.replace(host_allocator="tcmalloc"), CONFIG, "profile", None, None, ("x",))
    target = Target(spec="watched.py:workload", folder=".")
    for preload, without in ((f"libm.so.6:{library}", "libm.so.6"), (library, None), ("libm.so.6", "libm.so.6")):
        monkeypatch.setenv("LD_PRELOAD", preload)
        with module._processes(settings, target, ReverifyOptions()):
            assert os.environ.get("LD_PRELOAD") == without
        assert os.environ["LD_PRELOAD"] == preload


@pytest.mark.slow
def test_a_stop_reaches_a_launch_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text("import time\nopen('reached', 'w').close()\ntime.sleep(600)\n")
    monkeypatch.chdir(tmp_path)
    frame = ReverifyOptions(should_stop=(tmp_path / "reached").exists)
    target = Target(spec="hangs.py:workload", folder=str(tmp_path))
    found = reverify_in_processes(SETTINGS, target, frame)
    assert not found.trusted
    assert "finished when it was stopped" in found.reason


def test_launches_are_of_as_many_processes_as_the_training():
    machine = Machine()
    frame = ReverifyOptions(world_size=2, now=machine.now)
    assert reverify(SETTINGS, TARGET, frame, run_trial=machine).trusted
    assert {spec.world_size for spec in machine.specs} == {2}
