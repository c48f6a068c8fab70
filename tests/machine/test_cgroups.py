from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import GIB, V1, V2, mount, write

from autotune.machine.cgroups import (
    find_throttle_readers,
    read_cpu_quota,
    read_memory_headroom,
    read_memory_limit,
    read_oom_kills,
)

NO_LIMIT_V1 = "9223372036854771712"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        pytest.param({}, None, id="no /proc"),
        pytest.param({"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}, None, id="v2 without files"),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/job/cpu.max": "150000 100000"},
            1.5,
            id="v2 quota",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/job/cpu.max": "max 100000"},
            None,
            id="v2 max",
        ),
        pytest.param(
            {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2, "sys/fs/cgroup/job/cpu.max": "nonsense"},
            None,
            id="v2 garbage",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/cpu.max": "600000 100000",
                "sys/fs/cgroup/pod/cpu.max": "200000 100000",
                "sys/fs/cgroup/pod/job/cpu.max": "400000 100000",
            },
            2.0,
            id="v2 parent is tighter",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/pod/other/cpu.max": "50000 100000",
                "sys/fs/cgroup/pod/job/cpu.max": "300000 100000",
            },
            3.0,
            id="v2 sibling does not count",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/x\n3:cpu,cpuacct:/job\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "125000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "50000",
            },
            2.5,
            id="v1 quota",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            3.0,
            id="v1 only the parent",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/docker/abc\n",
                "proc/self/mountinfo": mount("/sys/fs/cgroup/cpu", "cgroup", "rw,cpu,cpuacct", top="/docker/abc"),
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            4.0,
            id="v1 container that sees the host's path",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/../sibling\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/cpu.max": "500000 100000",
                "sys/fs/sibling/cpu.max": "100000 100000",
            },
            5.0,
            id="v2 outside the namespace",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a\n",
                "proc/self/mountinfo": mount(r"/mnt/c\040g", "cgroup2"),
                "mnt/c g/a/cpu.max": "700000 100000",
            },
            7.0,
            id="mount point with a space",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job\n0::/job\n",
                "proc/self/mountinfo": V1 + mount("/sys/fs/cgroup/unified", "cgroup2"),
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "600000",
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/unified/job/cpu.max": "450000 100000",
            },
            4.5,
            id="hybrid: the tighter one",
        ),
    ],
)
@pytest.mark.fault("47", injected="files of CPU quotas", outcome="read in CPUs")
def test_cpu_quota(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, files)
    assert read_cpu_quota(tmp_path) == quota


@pytest.mark.parametrize(
    ("files", "limit", "headroom"),
    [
        pytest.param({}, None, None, id="no /proc"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/pod/memory.max": str(4 * GIB),
                "sys/fs/cgroup/pod/memory.current": str(3 * GIB),
                "sys/fs/cgroup/pod/memory.stat": f"anon 1\nactive_file 5\ninactive_file {GIB}\n",
                "sys/fs/cgroup/pod/job/memory.max": str(6 * GIB),
                "sys/fs/cgroup/pod/job/memory.current": str(GIB),
            },
            4 * GIB,
            2 * GIB,
            id="v2 parent is tighter; inactive cache is free",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/job/memory.max": "max",
                "sys/fs/cgroup/job/memory.current": str(GIB),
            },
            None,
            None,
            id="v2 max",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu:/\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/memory/memory.limit_in_bytes": NO_LIMIT_V1,
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(GIB),
                "sys/fs/cgroup/memory/job/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\n",
            },
            2 * GIB,
            GIB + GIB // 2,
            id="v1 limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/job\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": NO_LIMIT_V1,
            },
            None,
            None,
            id="v1 without a limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/job/memory.max": str(GIB),
                "sys/fs/cgroup/job/memory.current": str(2 * GIB),
            },
            GIB,
            0,
            id="over the limit",
        ),
    ],
)
def test_memory_limit(tmp_path: Path, files: dict[str, str], limit: int | None, headroom: int | None) -> None:
    write(tmp_path, files)
    assert (read_memory_limit(tmp_path), read_memory_headroom(tmp_path)) == (limit, headroom)


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        pytest.param({}, [], id="no /proc"),
        pytest.param({"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2}, [], id="v2 without files"),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/pod/job/cpu.stat": "usage_usec 9\nnr_throttled 7\nthrottled_usec 2500000\n",
                "sys/fs/cgroup/pod/cpu.stat": "usage_usec 9\nthrottled_usec 750000\nnr_bursts 0\n",
                "sys/fs/cgroup/cpu.stat": "usage_usec 9\nuser_usec 5\n",
                "sys/fs/cgroup/pod/other/cpu.stat": "throttled_usec 1\n",
            },
            [2.5, 0.75],
            id="v2: the group and the one above it; the root counts nothing",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/job\n3:cpu,cpuacct:/job\n",
                "proc/self/mountinfo": V1,
                "sys/fs/cgroup/cpu,cpuacct/job/cpu.stat": "nr_periods 4\nnr_throttled 2\nthrottled_time 1500000000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
                "sys/fs/cgroup/memory/job/cpu.stat": "throttled_time 1\n",
            },
            [1.5, 0.0],
            id="v1 counts nanoseconds",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/pod/job\n",
                "proc/self/mountinfo": V2,
                "sys/fs/cgroup/pod/job/cpu.stat": "throttled_usec many\n",
                "sys/fs/cgroup/pod/cpu.stat": "throttled_usec\n",
                "sys/fs/cgroup/cpu.stat": "throttled_usec 4000000\n",
            },
            [4.0],
            id="v2 garbage is passed over",
        ),
    ],
)
def test_throttled_time(tmp_path: Path, files: dict[str, str], seconds: list[float]) -> None:
    write(tmp_path, files)
    assert [read() for read in find_throttle_readers(tmp_path)] == seconds


def test_a_throttle_reader_follows_its_file(tmp_path: Path) -> None:
    stat = "sys/fs/cgroup/job/cpu.stat"
    group = {"proc/self/cgroup": "0::/job\n", "proc/self/mountinfo": V2}
    write(tmp_path, {**group, stat: "throttled_usec 1000000\n"})
    (read,) = find_throttle_readers(tmp_path)
    write(tmp_path, {stat: "throttled_usec 3000000\n"})
    assert read() == 3.0
    (tmp_path / stat).unlink()
    assert read() is None


def test_kills_are_those_of_the_nearest_group_that_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/pod/job\n", "proc/self/mountinfo": V2})
    write(tmp_path, {"sys/fs/cgroup/pod/memory.events": "oom_kill 9\n"})
    assert read_oom_kills(tmp_path) == 9  # the limit that binds the job is its pod's
    write(tmp_path, {"sys/fs/cgroup/pod/job/memory.events": "oom_kill 2\n"})
    assert read_oom_kills(tmp_path) == 2


@pytest.mark.parametrize(
    ("files", "file"),
    [
        (("0::/job/step\n", V2), "sys/fs/cgroup/job/step/memory.events"),
        (("0::/host/path\n", V2), "sys/fs/cgroup/memory.events"),
        (("9:cpu:/a\n4:memory:/job\n0::/\n", V1), "sys/fs/cgroup/memory/job/memory.oom_control"),
    ],
)
def test_the_kernels_kills_are_counted_in_the_own_group(tmp_path: Path, files: tuple[str, str], file: str) -> None:
    write(tmp_path, {"proc/self/cgroup": files[0], "proc/self/mountinfo": files[1]})
    assert read_oom_kills(tmp_path) is None
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 4\noom_kill 3\n")
    assert read_oom_kills(tmp_path) == 3
