"""`autotune export` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
from emit_records import TUNED, make_hardware, make_profile
from typer.testing import CliRunner

from autotune.cli import app


def export(folder: Path, library: Path, found: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Return what is printed of a profile that was measured with a library, on a machine that has found one."""
    here = make_hardware(host_allocators={"tcmalloc": found})
    monkeypatch.setattr("autotune.machine.hardware.read_hardware", lambda: here)
    hardware = make_hardware(host_allocators={"tcmalloc": str(library)}, preloaded_malloc="libjemalloc.so.2")
    profile = make_profile(config=TUNED.replace(host_allocator="tcmalloc"), hardware=hardware)
    profile.save(folder / "best.json")
    exported = CliRunner().invoke(app, ["export", "--profile", str(folder / "best.json"), "--to", "torch"])
    assert exported.exit_code == 0, exported.output
    return exported.stdout, exported.stderr


@pytest.mark.parametrize("is_here", [True, False])
def test_an_export_names_the_malloc_library_that_was_measured_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_here: bool
) -> None:
    library = tmp_path / "libtcmalloc_minimal.so.4.5"
    text, said = export(tmp_path, library, str(library) if is_here else "/usr/lib/libtcmalloc.so.4", monkeypatch)
    named = library if is_here else "libtcmalloc_minimal.so.4"
    assert f"#   run as: LD_PRELOAD={named}${{LD_PRELOAD:+:$LD_PRELOAD}} python" in text
    assert ("ldconfig -p | grep tcmalloc" in text) is not is_here
    assert "take libjemalloc.so.2 out of your own LD_PRELOAD" in " ".join(said.split())


@pytest.mark.fault("37", injected="a profile that names a library of its own", outcome="no command preloads it")
def test_a_library_that_a_profile_brings_along_is_not_preloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "evil.so"
    library.touch()
    text, _ = export(tmp_path, library, "/usr/lib/libtcmalloc.so.4", monkeypatch)
    assert "evil" not in text


@pytest.mark.parametrize("name", ["hf", "hf-flags"])
def test_a_form_without_comments_has_them_on_standard_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = make_profile(config=TUNED.replace(memory_format="channels_last"))
    profile.save(tmp_path / "best.json")
    monkeypatch.chdir(tmp_path)
    exported = CliRunner().invoke(app, ["export", "--to", name, "-o", "tuned"])
    assert (exported.exit_code, exported.stdout) == (0, "")
    said = " ".join(exported.stderr.split())
    assert "at least 1.31x faster" in said
    assert said.count("channels_last)") == 1
    assert "measured on another machine than this one" in said
    written = (tmp_path / "tuned").read_text()
    assert "#" not in written
    assert "adamw_torch_fused" in written


def test_on_its_own_machine_nothing_is_said_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.machine.hardware.read_hardware", make_hardware)
    make_profile(config=TUNED.replace(memory_format="channels_last")).save(tmp_path / "best.json")
    exported = CliRunner().invoke(app, ["export", str(tmp_path / "best.json"), "--to", "lightning"])
    assert (exported.exit_code, exported.stderr) == (0, "")
    assert exported.stdout.count("channels_last)") == 1
