from __future__ import annotations

import os
from pathlib import Path

import pytest
from fake_machine import FOUR_CORES, cpu, write

from autotune.machine.cpus import (
    count_cores,
    count_numa_nodes,
    name_cpu,
    read_affinity,
    read_cpu_fields,
    read_cpu_flags,
    read_last_level_cache_bytes,
)
from autotune.machine.procfs import read_cpu_list, read_text

MIB = 2**20
NODES = "sys/devices/system/node"


@pytest.mark.parametrize(
    ("cpus", "cores", "nodes", "cache"),
    [
        ({*range(8)}, 4, 2, 64 * MIB),
        ({0, 4}, 1, 1, 32 * MIB),
        ({0, 1}, 2, 1, 32 * MIB),
        ({5, 6}, 2, 2, 64 * MIB),
        ({3}, 1, 1, 32 * MIB),
    ],
    ids=["all", "two threads of a core", "two cores", "two packages", "one"],
)
def test_only_the_cpus_of_this_process_count(
    tmp_path: Path, cpus: set[int], cores: int, nodes: int, cache: int
) -> None:
    write(tmp_path, FOUR_CORES)
    mine = frozenset(cpus)
    assert count_cores(tmp_path, mine) == cores
    assert count_numa_nodes(tmp_path, mine) == nodes
    assert read_last_level_cache_bytes(tmp_path, mine) == cache


def test_without_threads_a_core_is_told_by_its_package_and_number(tmp_path: Path) -> None:
    same_number = [cpu(i, package=i // 2, core=i % 2) for i in range(4)]
    write(tmp_path, {name: text for files in same_number for name, text in files.items()})
    assert count_cores(tmp_path, frozenset(range(4))) == 4
    write(tmp_path, {"sys/devices/system/cpu/cpu3/topology/core_id": "0\n"})
    assert count_cores(tmp_path, frozenset(range(4))) == 3


def test_clusters_that_number_their_cores_alike_are_told_apart_by_threads(tmp_path: Path) -> None:
    for number in range(4):
        write(tmp_path, cpu(number, core=number % 2))  # arm64: two clusters, each with a core 0 and a core 1
        write(tmp_path, {f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list": f"{number}\n"})
    assert count_cores(tmp_path, frozenset(range(4))) == 4


def test_cores_that_do_not_reach_the_last_level_add_nothing_to_it(tmp_path: Path) -> None:
    write(tmp_path, cpu(0, threads="0", cache="0-1", kib=24576) | cpu(1, threads="1", cache="0-1", kib=24576))
    write(tmp_path, cpu(2, threads="2", cache="2-3", kib=2048, level=2))
    assert read_last_level_cache_bytes(tmp_path, frozenset((0, 1, 2))) == 24 * MIB
    assert read_last_level_cache_bytes(tmp_path, frozenset((2,))) == 2 * MIB


@pytest.mark.parametrize(("text", "expected"), [("512K", 2**19), ("32M", 32 * MIB), ("1G", 2**30), ("4096", 4096)])
def test_sizes_of_caches(tmp_path: Path, text: str, expected: int) -> None:
    write(tmp_path, cpu(0, threads="0", cache="0", kib=1))
    write(tmp_path, {"sys/devices/system/cpu/cpu0/cache/index3/size": text})
    assert read_last_level_cache_bytes(tmp_path, frozenset((0,))) == expected


def test_a_machine_that_tells_nothing(tmp_path: Path) -> None:
    for cpus in (frozenset[int](), frozenset((0, 1))):
        assert count_cores(tmp_path, cpus) is None
        assert count_numa_nodes(tmp_path, cpus) is None
        assert read_last_level_cache_bytes(tmp_path, cpus) is None


def test_one_cpu_that_does_not_tell_makes_the_whole_unknown(tmp_path: Path) -> None:
    write(tmp_path, FOUR_CORES)
    cpus = frozenset((0, 1, 9))
    assert count_cores(tmp_path, cpus) is None
    assert read_last_level_cache_bytes(tmp_path, cpus) is None
    assert count_numa_nodes(tmp_path, frozenset((9,))) is None


@pytest.mark.parametrize("broken", ["level", "size", "shared_cpu_list"])
@pytest.mark.parametrize("text", ["", "nonsense", "-1"])
def test_a_cache_that_is_not_described_is_passed_over(tmp_path: Path, broken: str, text: str) -> None:
    write(tmp_path, cpu(0, threads="0", cache="0", kib=2048))
    write(tmp_path, {f"sys/devices/system/cpu/cpu0/cache/index3/{broken}": text})
    assert read_last_level_cache_bytes(tmp_path, frozenset((0,))) == 48 * 2**10


def test_a_node_without_cpus_or_with_nonsense_is_no_node_of_ours(tmp_path: Path) -> None:
    write(tmp_path, {f"{NODES}/node0/cpulist": "0-3\n", f"{NODES}/node1/cpulist": "\n", f"{NODES}/node2/cpulist": "x"})
    assert count_numa_nodes(tmp_path, frozenset((1, 2))) == 1


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}),
        ("5", {5}),
        ("\n", set()),
        ("0-", {0}),
        ("-3", None),
        ("0-x", None),
        ("a,b", None),
    ],
)
def test_lists_of_cpus(tmp_path: Path, text: str, numbers: set[int] | None) -> None:
    write(tmp_path, {"list": text})
    assert read_cpu_list(tmp_path / "list") == numbers


def test_a_file_that_is_not_there_a_folder_and_odd_bytes(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff 7\n")
    assert read_text(tmp_path / "missing") is None
    assert read_text(tmp_path) is None
    assert read_text(tmp_path / "odd") == "\ufffd 7"


def test_affinity_that_is_refused_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> set[int]:
        raise OSError

    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {3, 5})
    assert read_affinity() == {3, 5}
    monkeypatch.setattr(os, "sched_getaffinity", refuse)
    assert read_affinity() is None
    monkeypatch.delattr(os, "sched_getaffinity")
    assert read_affinity() is None


def test_a_processor_without_a_file_still_has_a_name(tmp_path: Path) -> None:
    fields = read_cpu_fields(tmp_path)
    assert fields == {}
    assert name_cpu(fields)
    assert read_cpu_flags(fields) is None
