from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_machine import V2, write

from autotune.machine.interference import InterferenceMeter
from autotune.records.measurement import GpuState, Interference

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
COLUMNS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal", "guest", "guest_nice")
START = dict.fromkeys(COLUMNS, 1_000)
NOTHING = Interference(major_faults=0)


def stat(*, cpus: dict[int, dict[str, int]] | None = None, **grown: int) -> str:
    """Return /proc/stat after CPU 0 and CPU 2 have grown, unless `cpus` says which have."""
    cpus = {0: grown, 2: {}} if cpus is None else cpus
    lines = [
        f"cpu{cpu} " + " ".join(str(START[column] + growth.get(column, 0)) for column in COLUMNS)
        for cpu, growth in cpus.items()
    ]
    return "\n".join(["cpu  " + "7 " * 10, *lines, "intr 5 cpu0 9", "ctxt 1", "cpu0 of no meaning", ""])


def pressure(total_microseconds: int) -> str:
    return (
        f"some avg10=99.00 avg60=99.00 avg300=99.00 total={total_microseconds}\n"
        f"full avg10=50.00 avg60=50.00 avg300=50.00 total={total_microseconds * 7}\n"
    )


class Machine:
    """A folder in place of /, a wall clock and a CPU clock of our own, all set by hand."""

    def __init__(self, root: Path) -> None:
        self.root, self.wall_seconds, self.own_seconds = root, 50.0, 8.0

    def meter(self, **options: Callable[[], GpuState | None]) -> InterferenceMeter:
        own = lambda: self.own_seconds  # noqa: E731
        return InterferenceMeter(root=self.root, now=lambda: self.wall_seconds, own_cpu_seconds=own, **options)

    def write(self, files: dict[str, str]) -> None:
        write(self.root, files)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2}, raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(resource, "getrusage", lambda _who: SimpleNamespace(ru_majflt=3, ru_utime=0.0, ru_stime=0.0))
    return Machine(tmp_path)


def test_others_under_the_same_quota_count_however_many_cpus_idle(machine: Machine) -> None:
    machine.write(
        {
            "proc/self/cgroup": "0::/",
            "proc/self/mountinfo": V2,
            "sys/fs/cgroup/cpu.max": "100000 100000",
            "sys/fs/cgroup/cpu.stat": "usage_usec 5000000",
            "proc/stat": stat(),
        }
    )
    meter = machine.meter()
    machine.write({"proc/stat": stat(cpus={0: {"user": 150}, 2: {"idle": 150}})})
    machine.write({"sys/fs/cgroup/cpu.stat": "usage_usec 6500000"})
    machine.own_seconds += 1.0
    machine.wall_seconds += 2.0
    assert meter.read().foreign_cpu_fraction == pytest.approx(0.25)


def read_interval(machine: Machine, before: str, after: str, *, own_ticks: float = 0) -> Interference:
    machine.write({"proc/stat": before})
    meter = machine.meter()
    machine.write({"proc/stat": after})
    machine.own_seconds += own_ticks / TICKS_PER_SECOND
    return meter.read()


# Of 100 ticks on CPU 0 are 50 busy; CPU 2 idles for another 100.
GROWN = {"user": 30, "nice": 5, "system": 10, "idle": 40, "iowait": 5, "irq": 2, "softirq": 3, "steal": 5, "guest": 20}
BOTH = {0: GROWN, 2: {"idle": 100}}


@pytest.mark.parametrize(
    ("cpus", "own_ticks", "foreign", "steal"),
    [
        pytest.param(BOTH, 20, 30 / 200, 5 / 200, id="busy without ours; guest is in user"),
        pytest.param(BOTH, 0, 50 / 200, 5 / 200, id="nothing of ours"),
        pytest.param(BOTH, 50, 0.0, 5 / 200, id="all ours"),
        pytest.param(BOTH, 53, 0.0, 5 / 200, id="more of ours than the ticks saw"),
        pytest.param({1: {"user": 900, "steal": 900}, **BOTH}, 20, 30 / 200, 5 / 200, id="CPU 1 is not for us"),
        pytest.param({0: {"iowait": 50}, 2: {"idle": 50}}, 0, 0.0, 0.0, id="waiting is idle"),
        pytest.param({0: {"steal": 50}, 2: {"idle": 50}}, 0, 0.0, 0.5, id="steal is not foreign work"),
        pytest.param({0: {"user": 50}, 2: {"system": 50}}, 0, 1.0, 0.0, id="all foreign"),
        pytest.param({0: {"irq": 50}, 2: {"softirq": 30, "nice": 20}}, 0, 1.0, 0.0, id="interrupts and nice are work"),
        pytest.param({0: {"guest": 90, "guest_nice": 90, "user": 10, "idle": 90}, 2: {}}, 0, 0.1, 0.0, id="guests"),
        pytest.param({0: {"user": 10, "idle": 30, "iowait": -400}, 2: {}}, 0, 0.25, 0.0, id="iowait steps back"),
    ],
)
def test_cpu_time(
    machine: Machine, cpus: dict[int, dict[str, int]], own_ticks: int, foreign: float, steal: float
) -> None:
    seen = read_interval(machine, stat(cpus={cpu: {} for cpu in cpus}), stat(cpus=cpus), own_ticks=own_ticks)
    assert seen.foreign_cpu_fraction == pytest.approx(foreign, abs=1e-9)
    assert seen.steal_fraction == pytest.approx(steal, abs=1e-9)


@pytest.mark.parametrize(
    ("busy", "foreign"),
    [
        pytest.param({0: {"user": 50}, 2: {"idle": 50}}, 0.0, id="as many are idle as the quota allows"),
        pytest.param({0: {"user": 50}, 2: {"user": 25, "idle": 25}}, 0.5, id="half of the quota is left"),
        pytest.param({0: {"user": 50}, 2: {"user": 50}}, 1.0, id="nothing is left"),
    ],
)
def test_of_a_quota_others_take_what_is_not_left_for_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, busy: dict[int, dict[str, int]], foreign: float
) -> None:
    monkeypatch.setattr("autotune.machine.interference.read_cpu_quota", lambda _root: 1.0)
    seen = read_interval(machine, stat(cpus={0: {}, 2: {}}), stat(cpus=busy))
    assert seen.foreign_cpu_fraction == pytest.approx(foreign, abs=1e-9)


GOOD = stat(cpus={0: {"user": 40}, 2: {"idle": 60}})


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param("", id="empty"),
        pytest.param("garbage\n\n\x00\n", id="garbage"),
        pytest.param("cpu 1 2 3 4 5 6 7 8\n", id="the sum only"),
        pytest.param(stat(cpus={0: {"user": 40}}), id="a usable CPU is missing"),
        pytest.param(GOOD.replace("cpu2", "cpu3"), id="another CPU instead"),
        pytest.param(GOOD.replace("1060", "-1060"), id="a negative number"),
        pytest.param(GOOD.replace("1040", "many"), id="a word"),
        pytest.param(GOOD.replace("1040", "9" * 5_000), id="no number of a kernel"),
        pytest.param("cpu0 1 2 3\ncpu2 1 2 3\n", id="too few columns"),
        pytest.param(None, id="a folder"),
    ],
)
def test_a_bad_stat_file_tells_nothing_and_recovers(machine: Machine, bad: str | None) -> None:
    file = machine.root / "proc/stat"
    machine.write({"proc/stat": stat()})
    meter = machine.meter()
    if bad is None:
        file.unlink()
        file.mkdir()
    else:
        machine.write({"proc/stat": bad})
    assert meter.read() == NOTHING
    if bad is None:
        file.rmdir()
    machine.write({"proc/stat": stat()})
    assert meter.read() == NOTHING  # its beginning was the bad reading
    machine.write({"proc/stat": GOOD})
    seen = meter.read()
    assert (seen.foreign_cpu_fraction, seen.steal_fraction) == (0.4, 0.0)


def test_a_part_of_the_usable_cpus_tells_nothing(machine: Machine) -> None:
    assert read_interval(machine, stat(cpus={0: {}}), stat(cpus={0: {"user": 40, "idle": 60}})) == NOTHING


def test_a_machine_that_tells_nothing(machine: Machine) -> None:
    meter = machine.meter()
    meter.start()
    machine.wall_seconds += 1
    assert meter.read() == NOTHING


def test_without_affinity_every_cpu_counts(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    cpus = {0: {"user": 10}, 1: {"idle": 30, "steal": 20}, 7: {"idle": 40}}
    seen = read_interval(machine, stat(cpus={cpu: {} for cpu in cpus}), stat(cpus=cpus))
    assert (seen.foreign_cpu_fraction, seen.steal_fraction) == (0.1, 0.2)


def test_without_affinity_a_cpu_that_comes_or_goes_tells_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    assert read_interval(machine, stat(cpus={0: {}}), stat(cpus={0: {"user": 5}, 1: {"user": 5}})) == NOTHING


@pytest.mark.parametrize(
    ("ranks", "foreign"), [("1", 0.4), ("2", None), ("16", None), ("", 0.4), ("two", 0.4), ("-2", 0.4), (None, 0.4)]
)
def test_one_of_several_ranks_cannot_tell_foreign_work(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, ranks: str | None, foreign: float | None
) -> None:
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    seen = read_interval(machine, stat(), stat(cpus={0: {"user": 40}, 2: {"idle": 50, "steal": 10}}))
    assert (seen.foreign_cpu_fraction, seen.steal_fraction) == (foreign, 0.1)


@pytest.mark.parametrize(
    ("name", "before", "after", "fraction"),
    [
        ("io", pressure(1_000_000), pressure(1_500_000), 0.25),
        ("memory", pressure(1_000_000), pressure(1_500_000), 0.25),
        ("cpu", pressure(1_000_000), pressure(1_500_000), 0.25),
        ("cpu", pressure(1_000_000), pressure(1_000_000), 0.0),
        ("cpu", pressure(1_000_000), pressure(9_000_000), 1.0),
        ("cpu", pressure(1_000_000), pressure(900_000), 0.0),
        ("cpu", pressure(1_000_000), "", None),
        ("cpu", "", pressure(1_000_000), None),
        ("cpu", pressure(1_000_000), "some avg10=0.00 total=\n", None),
        ("cpu", pressure(1_000_000), "some avg10=0.00 total=-5\n", None),
        ("cpu", pressure(1_000_000), "full avg10=0.00 total=1500000\n", None),
        ("cpu", pressure(1_000_000), "\x00\xff some total", None),
    ],
)
def test_pressure(machine: Machine, name: str, before: str, after: str, fraction: float | None) -> None:
    machine.write({f"proc/pressure/{name}": before})
    meter = machine.meter()
    machine.write({f"proc/pressure/{name}": after})
    machine.wall_seconds += 2.0
    assert meter.read() == NOTHING.replace(**{f"{name}_pressure_fraction": fraction})


@pytest.mark.parametrize(
    ("own", "above", "fraction"),
    [
        pytest.param(500_000, 0, 0.25, id="the own group is held"),
        pytest.param(0, 800_000, 0.4, id="the one above is held"),
        pytest.param(500_000, 800_000, 0.4, id="the one held longer"),
        pytest.param(8_000_000, 0, 1.0, id="on several CPUs at once"),
        pytest.param(-100_000, -100_000, 0.0, id="a group made anew"),
        pytest.param(0, 0, 0.0, id="not held"),
        pytest.param(None, 800_000, 0.4, id="a file that has gone"),
        pytest.param(None, None, None, id="both files gone"),
    ],
)
def test_throttling(machine: Machine, own: int | None, above: int | None, fraction: float | None) -> None:
    files = {"sys/fs/cgroup/pod/job/cpu.stat": (1_000_000, own), "sys/fs/cgroup/pod/cpu.stat": (9_000_000, above)}
    machine.write({"proc/self/cgroup": "0::/pod/job\n", "proc/self/mountinfo": V2})
    machine.write({name: f"nr_throttled 1\nthrottled_usec {count}\n" for name, (count, _) in files.items()})
    meter = machine.meter()
    machine.wall_seconds += 2.0
    for name, (count, growth) in files.items():
        if growth is None:
            (machine.root / name).unlink()
        else:
            machine.write({name: f"nr_throttled 1\nthrottled_usec {count + growth}\n"})
    seen = meter.read()
    assert seen.throttled_fraction == pytest.approx(fraction)
    assert seen.replace(throttled_fraction=None) == NOTHING


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_an_interval_without_length_has_no_shares(machine: Machine, seconds: float) -> None:
    group = {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2}
    machine.write({**group, "sys/fs/cgroup/job/cpu.stat": "throttled_usec 1\n", "proc/stat": stat()})
    machine.write({f"proc/pressure/{name}": pressure(5) for name in ("cpu", "io", "memory")})
    meter = machine.meter()
    machine.wall_seconds += seconds
    assert meter.read() == NOTHING
    machine.wall_seconds += 1.0
    machine.write({"proc/stat": GOOD})
    full = meter.read()
    shares = full.model_dump(exclude={"major_faults", "gpu"})
    assert None not in shares.values()  # the same files tell everything of an interval that has a length


def test_major_faults_are_those_of_the_interval(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    meter = machine.meter()
    counts = {resource.RUSAGE_SELF: 10, resource.RUSAGE_CHILDREN: 500}
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_majflt=counts[who]))
    assert [meter.read().major_faults, meter.read().major_faults] == [7, 0]


def test_the_gpu_is_read_at_the_end_only(machine: Machine) -> None:
    states = [GpuState(sm_clock_mhz=900), None]
    meter = machine.meter(read_gpu=lambda: states.pop(0))
    meter.start()
    assert len(states) == 2
    assert [meter.read().gpu, meter.read().gpu] == [GpuState(sm_clock_mhz=900), None]


@pytest.mark.parametrize("begin", ["start", "read"])
def test_an_interval_begins_anew(machine: Machine, begin: str) -> None:
    machine.write({"proc/stat": stat(), "proc/pressure/cpu": pressure(0)})
    meter = machine.meter()
    machine.write({"proc/stat": stat(user=500, steal=500), "proc/pressure/cpu": pressure(9_000_000)})
    machine.wall_seconds += 10.0
    getattr(meter, begin)()
    machine.write({"proc/stat": stat(user=510, steal=500, idle=90), "proc/pressure/cpu": pressure(9_300_000)})
    machine.wall_seconds += 1.0
    expected = NOTHING.replace(foreign_cpu_fraction=0.1, steal_fraction=0.0)
    seen = meter.read()
    assert seen.cpu_pressure_fraction == pytest.approx(0.3)
    assert seen.replace(cpu_pressure_fraction=None) == expected


class Workers:
    """The CPU time of this process and its children as the kernel tells it, set by hand."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._machine = machine
        self.process_ticks = 700.0
        self.ended_ticks = 300.0
        self.live: dict[int, str] = {}
        self.meter = self._make_meter(monkeypatch)

    def _make_meter(self, monkeypatch: pytest.MonkeyPatch) -> InterferenceMeter:
        monkeypatch.setattr(time, "process_time", lambda: self.process_ticks / TICKS_PER_SECOND)
        monkeypatch.setattr(multiprocessing, "active_children", lambda: [SimpleNamespace(pid=pid) for pid in self.live])
        monkeypatch.setattr(resource, "getrusage", self._read_usage)
        self._write()
        return InterferenceMeter(root=self._machine.root, now=lambda: 0.0)

    def _read_usage(self, who: int) -> SimpleNamespace:
        ticks = {resource.RUSAGE_SELF: 0.0, resource.RUSAGE_CHILDREN: self.ended_ticks}[who]
        half = ticks / TICKS_PER_SECOND / 2
        return SimpleNamespace(ru_majflt=0, ru_utime=half, ru_stime=half)

    def _write(self, **grown: int) -> None:
        files = {f"proc/{pid}/stat": text for pid, text in self.live.items() if text}
        self._machine.write({"proc/stat": stat(**grown), **files})

    def begin(self) -> None:
        self._write()
        self.meter.start()

    def read_own_ticks(self) -> float | None:
        """Return what of 800 busy ticks the meter takes for our own."""
        self._write(user=800, idle=200)
        foreign = self.meter.read().foreign_cpu_fraction
        return None if foreign is None else round(800 - foreign * 1_000, 6)


@pytest.fixture
def workers(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Workers:
    return Workers(machine, monkeypatch)


def process(user: int, system: int, *, name: str = "python") -> str:
    return f"41 ({name}) S 1 41 41 0 -1 4194560 9 8 7 6 {user} {system} 555 666 20 0 1 0 99 88 77\n"


def test_own_work_is_the_process_and_its_workers(workers: Workers) -> None:
    workers.live = {41: process(100, 50), 42: process(0, 0, name="a) S 9 (b")}
    workers.begin()
    workers.process_ticks += 60
    workers.live = {41: process(120, 55), 42: process(3, 4, name="a) S 9 (b")}
    assert workers.read_own_ticks() == 60 + 25 + 7


def test_a_worker_that_comes_is_own_work_from_its_birth(workers: Workers) -> None:
    workers.begin()
    workers.live = {41: process(30, 5)}
    assert workers.read_own_ticks() == 35


def test_a_worker_that_has_ended_loses_nothing(workers: Workers) -> None:
    workers.live = {41: process(400, 100)}
    workers.begin()
    workers.process_ticks += 60
    workers.live, workers.ended_ticks = {}, workers.ended_ticks + 520  # 20 after the last reading
    assert workers.read_own_ticks() == 60 + 20


def test_a_worker_that_lived_within_the_interval_is_own_work(workers: Workers) -> None:
    workers.begin()
    workers.ended_ticks += 90
    assert workers.read_own_ticks() == 90


def test_a_process_number_used_again_is_no_negative_work(workers: Workers) -> None:
    workers.live = {41: process(400, 100)}
    workers.begin()
    workers.live, workers.ended_ticks = {41: process(10, 5)}, workers.ended_ticks + 500
    assert workers.read_own_ticks() == 15


@pytest.mark.parametrize("text", ["", "41 (python) S 1 2\n", process(1, 2).replace(" 1 2 ", " x y "), "\x00\n"])
def test_a_live_worker_that_cannot_be_read_leaves_foreign_work_open(workers: Workers, text: str) -> None:
    workers.begin()
    workers.live = {41: text}
    assert workers.read_own_ticks() is None
    workers.live = {41: process(30, 5)}
    workers.begin()
    workers.live = {41: process(31, 5)}
    assert workers.read_own_ticks() == 1


def test_a_worker_that_vanishes_with_its_time_leaves_foreign_work_open(workers: Workers) -> None:
    workers.live = {41: process(400, 100)}
    workers.begin()
    workers.process_ticks += 60
    workers.live = {}
    assert workers.read_own_ticks() is None


needs_stat = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="/proc/stat is missing: not a Linux machine")
SPIN = "import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass\n"


def read_cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


@needs_stat
@pytest.mark.fault("32", injected="a busy process beside the training", outcome="counted as other work")
def test_a_busy_sibling_is_foreign_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    program = "print('ready', flush=True)\n" + SPIN.format(seconds=0.5) + "input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sibling:
        assert sibling.stdout is not None
        assert sibling.stdout.readline() == "ready\n"
        # Both meters see the same interval and the same other load; only one knows of the sibling.
        with_it = InterferenceMeter()
        without_it = InterferenceMeter(own_cpu_seconds=lambda: time.process_time() + read_cpu_seconds(sibling.pid))
        before = read_cpu_seconds(sibling.pid)
        time.sleep(0.4)
        busy, idle = with_it.read().foreign_cpu_fraction, without_it.read().foreign_cpu_fraction
        assert read_cpu_seconds(sibling.pid) > before
        sibling.communicate("\n", timeout=60)
    assert busy is not None
    assert idle is not None
    assert busy > idle


@needs_stat
@pytest.mark.parametrize("ended", [False, True], ids=["alive", "ended"])
def test_a_busy_worker_is_own_work(monkeypatch: pytest.MonkeyPatch, ended: bool) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    program = SPIN.format(seconds=0.3) + "theirs.send('spun')\ntheirs.recv()\n"
    worker = context.Process(target=exec, args=(program, {"theirs": theirs}))
    knowing, unknowing = InterferenceMeter(), InterferenceMeter(own_cpu_seconds=time.process_time)
    worker.start()
    assert ours.recv() == "spun"
    if ended:
        ours.send("end")
        worker.join()
    foreign, everyone = knowing.read().foreign_cpu_fraction, unknowing.read().foreign_cpu_fraction
    if not ended:
        ours.send("end")
        worker.join()
    worker.close()
    ours.close()
    theirs.close()
    assert foreign is not None
    assert everyone is not None
    assert foreign < everyone


def test_a_reading_needs_no_torch() -> None:
    code = (
        "import sys; from autotune.machine.interference import InterferenceMeter\n"
        "InterferenceMeter().read(); print('torch' in sys.modules, 'pynvml' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["False", "False"]
