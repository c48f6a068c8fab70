"""`autotune export` as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from emit_records import TUNED, make_hardware, make_profile


@pytest.mark.parametrize("is_here", [True, False])
def test_an_export_names_the_malloc_library_that_was_measured_where_it_is(tmp_path: Path, is_here: bool) -> None:
    library = tmp_path / "libtcmalloc_minimal.so.4.5"
    if is_here:
        library.touch()
    hardware = make_hardware(host_allocators={"tcmalloc": str(library)}, preloaded_malloc="libjemalloc.so.2")
    profile = make_profile(config=TUNED.replace(host_allocator="tcmalloc"), hardware=hardware)
    profile.save(tmp_path / "best.json")
    exported = subprocess.run(
        [sys.executable, "-P", "-m", "autotune", "export", "--profile", "best.json", "--to", "torch"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert exported.returncode == 0, exported.stderr
    named = library if is_here else "libtcmalloc_minimal.so.4"
    assert f"# run as: LD_PRELOAD={named}${{LD_PRELOAD:+:$LD_PRELOAD}} python" in exported.stdout
    assert ("ldconfig -p | grep tcmalloc" in exported.stdout) is not is_here
    assert "take libjemalloc.so.2 out of your own LD_PRELOAD" in " ".join(exported.stderr.split())
