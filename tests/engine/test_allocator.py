"""The environment a process needs for the two allocator knobs."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from typing import Any

import pytest

from autotune.engine.allocator import describe_exchange, find_malloc_libraries, launch_environment
from autotune.records import TrainConfig

LIBRARIES = {"jemalloc": "/usr/lib/libjemalloc.so.2", "tcmalloc": "/usr/lib/libtcmalloc.so.4"}
HOST: dict[str, dict[str, str]] = {
    "default": {},
    "glibc-tuned": {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"},
    "jemalloc": {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"},
    "tcmalloc": {"LD_PRELOAD": "/usr/lib/libtcmalloc.so.4"},
}
OLDER, NEWER, EXPAND = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "expandable_segments:True"
DEVICE = {"default": {}, "expandable-segments": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}


@pytest.mark.parametrize(("host", "device"), list(itertools.product(HOST, DEVICE)))
def test_the_environment_of_each_pair(host: Any, device: Any) -> None:
    config = TrainConfig(host_allocator=host, device_allocator=device)
    assert launch_environment(config, LIBRARIES, own={}) == {**HOST[host], **DEVICE[device]}


T, J = LIBRARIES["tcmalloc"], LIBRARIES["jemalloc"]
# the user's own LD_PRELOAD, the knob's value, what it becomes (None for as it is), what is said
EXCHANGES = {
    "nothing": ("", "tcmalloc", T, None),
    "another library": ("/lib/libown.so", "tcmalloc", f"/lib/libown.so:{T}", None),
    "others, in their order": ("a.so b.so:c.so", "jemalloc", f"a.so:b.so:c.so:{J}", None),
    "the same library": (T, "tcmalloc", T, None),
    "the same among others": (f"a.so:{T}:b.so", "tcmalloc", f"a.so:{T}:b.so", None),
    "another malloc": ("/x/libmimalloc.so.2.1", "tcmalloc", T, ("libmimalloc.so.2.1", "libtcmalloc.so.4")),
    "another among others": (f"a.so:{J}:b.so", "tcmalloc", f"a.so:{T}:b.so", ("libjemalloc.so.2", "libtcmalloc.so.4")),
    "two of them": (f"{J} libtcmalloc_minimal.so.4", "jemalloc", J, ("libtcmalloc_minimal.so.4", "the C library")),
    "glibc's own": ("a.so", "glibc-tuned", None, None),
    "glibc's own instead": (f"a.so:{J}", "glibc-tuned", "a.so", ("libjemalloc.so.2", "the C library")),
    "glibc's own instead of all": (J, "glibc-tuned", "", ("libjemalloc.so.2", "the C library")),
    "the baseline's": (f"a.so:{J}", "default", None, None),
}


@pytest.mark.parametrize("case", EXCHANGES)
def test_what_the_user_preloads_stays_and_only_a_malloc_library_gives_way(case: str) -> None:
    before, value, after, said = EXCHANGES[case]
    config = TrainConfig(host_allocator=value)
    own = {"LD_PRELOAD": before}
    environment = launch_environment(config, LIBRARIES, own)
    assert environment.get("LD_PRELOAD") == after
    assert len(find_malloc_libraries(environment.get("LD_PRELOAD", ""))) <= 1
    sentence = describe_exchange(environment, own)
    if said is None:
        assert sentence is None
    else:
        assert sentence is not None
        assert f"names {said[0]}:" in sentence
    again = launch_environment(config, LIBRARIES, own | environment)
    assert again.get("LD_PRELOAD", after) == after


@pytest.mark.parametrize("name", ["libjemalloc.so", "libtcmalloc_minimal.so.4", "libmimalloc-secure.so", "libm.so.6"])
def test_a_malloc_library_is_known_by_its_file_name(name: str) -> None:
    named = [name] if name != "libm.so.6" else []
    assert find_malloc_libraries(f"/opt/libmimalloc/libfoo.so:/usr/lib/{name}") == [f"/usr/lib/{one}" for one in named]


def test_the_environment_is_this_processs_own_where_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "libm.so.6")
    assert launch_environment(TrainConfig(host_allocator="tcmalloc"), LIBRARIES)["LD_PRELOAD"] == f"libm.so.6:{T}"


@pytest.mark.parametrize("missing", ["jemalloc", "tcmalloc"])
def test_a_library_that_is_not_there_is_named(missing: Any) -> None:
    others = {name: path for name, path in LIBRARIES.items() if name != missing}
    with pytest.raises(ValueError, match=f"host_allocator '{missing}' is not installed"):
        launch_environment(TrainConfig(host_allocator=missing), others)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the thresholds are glibc's")
@pytest.mark.parametrize(("host", "kept"), [("default", False), ("glibc-tuned", True)])
def test_glibc_keeps_a_freed_block_when_tuned(host: Any, kept: bool) -> None:
    # A block above glibc's largest dynamic threshold (32 MiB): mapped and unmapped by default, kept when tuned.
    program = (
        "import ctypes, pathlib\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "resident = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
        "block = libc.malloc(64 * 2**20); ctypes.memset(ctypes.c_void_p(block), 1, 64 * 2**20)\n"
        "full = resident(); libc.free(block)\n"
        "print(resident() > full - 8192)\n"
    )
    environment = launch_environment(TrainConfig(host_allocator=host), {})
    finished = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip() == str(kept)


@pytest.mark.parametrize(
    ("own", "after"),
    [
        ({}, {OLDER: EXPAND}),
        ({OLDER: "max_split_size_mb:128"}, {OLDER: f"max_split_size_mb:128,{EXPAND}"}),
        ({OLDER: "expandable_segments:False,backend:native"}, {OLDER: f"backend:native,{EXPAND}"}),
        (
            {NEWER: "roundup_power2_divisions:[256:1,512:2]"},
            dict.fromkeys((OLDER, NEWER), f"roundup_power2_divisions:[256:1,512:2],{EXPAND}"),
        ),
    ],
    ids=["nothing set", "the older name", "switched off", "the newer name"],
)
def test_the_users_own_settings_of_the_device_allocator_stay(own: dict[str, str], after: dict[str, str]) -> None:
    config = TrainConfig(device_allocator="expandable-segments")
    assert launch_environment(config, {}, own) == after
    assert launch_environment(config, {}, own | after) == after
