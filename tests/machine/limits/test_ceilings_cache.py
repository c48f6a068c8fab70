from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_hardware

from autotune.machine.limits import cache
from autotune.machine.limits.cache import OLDEST_SECONDS, CachedCeilings, find_cached_ceilings, save_ceilings
from autotune.records import Ceilings, HardwareInfo, MatmulRate, SoftwareInfo

NOW = 2e9
DAY = 24 * 3600.0
HARDWARE = make_hardware(affinity_cpu_count=4)
SOFTWARE = SoftwareInfo(autotune="1", python="3.11", torch="2.13.0+cpu", platform="Linux")
VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE"),
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
)
CEILINGS = Ceilings(
    matmul=(MatmulRate(dtype="fp32", flops_per_second=3e11, sustained_flops_per_second=2e11),),
    memory_bytes_per_second=2e10,
    triad_bytes_per_second=2.5e10,
    launch_seconds=2e-6,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder, not there yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "autotune"


def save(ceilings: Ceilings = CEILINGS, *, now: float = NOW, **changes: Any) -> bool:
    return save_ceilings(ceilings, HARDWARE, SOFTWARE, **{"device": "cpu", "now": now, **changes})


def find(
    *, now: float = NOW, machine: HardwareInfo = HARDWARE, software: SoftwareInfo = SOFTWARE, **changes: Any
) -> tuple[Ceilings, float] | None:
    return find_cached_ceilings(machine, software, **{"device": "cpu", "now": now, **changes})


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_what_is_saved_is_found_with_its_age(folder: Path) -> None:
    assert find() is None
    assert save()
    assert find(now=NOW + DAY) == (CEILINGS, DAY)
    assert only_file(folder).name.startswith("ceilings-")
    assert only_file(folder).suffix == ".json"


def test_a_later_one_takes_its_place(folder: Path) -> None:
    later = CEILINGS.replace(launch_seconds=1e-6)
    assert save()
    assert save(later, now=NOW + DAY)
    assert find(now=NOW + 2 * DAY) == (later, DAY)
    only_file(folder)


def test_the_clock_is_asked_when_no_time_is_given() -> None:
    assert save(now=None)
    found = find(now=None)
    assert found is not None
    assert 0 <= found[1] < DAY


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda"},
        {"machine": HARDWARE.replace(cpu_name="another")},
        {"machine": HARDWARE.replace(affinity_cpu_count=2)},
        {"machine": HARDWARE.replace(cpu_quota=1.5)},
        {"software": SOFTWARE.replace(torch="2.14.0+cpu")},
        {"software": SOFTWARE.replace(driver="580.95.05")},
    ],
)
def test_another_machine_or_way_to_start_has_its_own(other: dict[str, Any]) -> None:
    assert save()
    assert find(**other) is None
    assert find() is not None


@pytest.mark.parametrize("name", VARIABLES)
def test_another_environment_has_its_own(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert save()
    monkeypatch.setenv(name, "1")
    assert find() is None
    monkeypatch.setenv(name, "")
    assert find() is None  # set to nothing hides every GPU; it is not the same as unset


def test_a_rate_of_emulated_arithmetic_has_none_that_is_kept_up(folder: Path) -> None:
    emulated = MatmulRate(dtype="bf16", flops_per_second=1e9, emulated=True)
    assert save(CEILINGS.replace(matmul=(*CEILINGS.matmul, emulated)))
    found = find()
    assert found is not None
    assert found[0].find_rate("bf16") == emulated


def test_a_file_from_when_emulated_rates_were_left_out_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as before:
        before.setattr(cache, "_METHOD", 1)
        assert save()
    assert find() is None


def test_what_does_not_matter_is_no_part_of_the_key() -> None:
    assert save()
    assert find(machine=HARDWARE.replace(memory_available_bytes=1), software=SOFTWARE.replace(python="3.12"))


def test_another_way_of_measuring_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save()
    monkeypatch.setattr(cache, "_METHOD", cache._METHOD + 1)
    assert find() is None


@pytest.mark.parametrize(
    ("age", "is_found"), [(0.0, True), (OLDEST_SECONDS, True), (OLDEST_SECONDS + 1, False), (-1.0, False)]
)
def test_what_is_too_old_or_from_the_future_counts_as_absent(age: float, is_found: bool) -> None:
    assert save()
    assert (find(now=NOW + age) is not None) is is_found


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"key": "x"}', "\x00\xff", '{"a":' * 50 + "1" + "}" * 50, " " * 100_000 + "{}", "NaN"],
)
def test_a_damaged_file_counts_as_absent_and_is_replaced(folder: Path, text: str) -> None:
    assert save()
    only_file(folder).write_text(text)
    assert find() is None
    assert save()
    assert find() is not None


@pytest.mark.parametrize(
    "change", [{"schema_version": 2}, {"key": "0" * 12}, {"device": "cuda"}, {"surprise": 1}, {"measured_at": "now"}]
)
def test_a_file_of_something_else_counts_as_absent(folder: Path, change: dict[str, Any]) -> None:
    assert save()
    plain = json.loads(only_file(folder).read_text())
    only_file(folder).write_text(json.dumps({**plain, **change}))
    assert find() is None


def test_a_cut_file_counts_as_absent(folder: Path) -> None:
    assert save()
    whole = only_file(folder).read_bytes()
    for length in range(0, len(whole) - 2, 25):
        only_file(folder).write_bytes(whole[:length])
        assert find() is None


def test_somebody_elses_file_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save()
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert find() is None


def test_a_folder_in_the_files_place_counts_as_absent(folder: Path) -> None:
    assert save()
    path = only_file(folder)
    path.unlink()
    path.mkdir()
    assert find() is None
    assert not save()


def test_a_file_that_cannot_be_read_counts_as_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert save()

    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert find() is None


def test_a_folder_that_cannot_be_written_is_no_error(folder: Path) -> None:
    folder.parent.write_text("a file where the folder should be")
    assert not save()
    assert find() is None
    assert folder.parent.read_text() == "a file where the folder should be"


@pytest.mark.parametrize("matmul", [(), (*CEILINGS.matmul, MatmulRate(dtype="bf16", flops_per_second=1e12))])
def test_what_was_measured_in_haste_is_not_kept(folder: Path, matmul: tuple[MatmulRate, ...]) -> None:
    assert not save(CEILINGS.replace(matmul=matmul))
    assert not folder.exists()


def test_the_usual_folder_is_the_homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for value in (None, "", "relative/cache"):
        if value is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache._find_path("1") == tmp_path / "home/.cache/autotune/ceilings-1.json"
    assert save()
    assert find() is not None


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert not save()
    assert find() is None


def test_the_record_names_what_it_is(folder: Path) -> None:
    assert save()
    record = CachedCeilings.model_validate_json(only_file(folder).read_text())
    assert (record.schema_version, record.device, record.measured_at) == (1, "cpu", NOW)
    assert record.key in only_file(folder).name


def test_no_torch_is_needed() -> None:
    program = "import sys, autotune.machine.limits.cache; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
