"""A search is known as this user's own by a key that lies elsewhere; whatever does not fit counts as a stranger's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from record_factory import make_state, make_target
from simulated import Machine, run_simulated

from autotune.records.trial import Target
from autotune.search.run import SearchOptions, _open_folder
from autotune.search.store.folder import SearchFolder, create_search_folder
from autotune.search.store.seal import _create_key, is_sealed, seal_search


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/autotune"


def make_search(folder: Path, spec: str = "toy.py:workload") -> SearchFolder:
    search = create_search_folder(folder, spec)
    search.write_state(make_state(target=make_target(spec, folder)))
    return search


def test_a_search_of_ones_own_is_sealed_with_a_key_that_nobody_else_can_read(tmp_path: Path, cache: Path) -> None:
    search = _open_folder(tmp_path, Target(spec="toy.py:workload", folder=str(tmp_path)), SearchOptions())
    assert is_sealed(search)
    assert (cache / "seal-key").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in cache.iterdir()] == ["seal-key"]
    other = make_search(tmp_path)
    assert not is_sealed(other)
    assert seal_search(other)  # the same key
    assert is_sealed(search)
    assert is_sealed(other)


def _change_target(search: SearchFolder) -> SearchFolder:
    search.state_file.write_text(search.state_file.read_text().replace("toy.py", "evil.py"))
    return search


def _move(search: SearchFolder) -> SearchFolder:
    elsewhere = search.path.parents[2] / "elsewhere"
    shutil.copytree(search.path.parent, elsewhere / ".autotune")
    return SearchFolder(elsewhere / ".autotune" / search.path.name)


def _empty(search: SearchFolder) -> SearchFolder:
    (search.path / "seal").write_text("")
    return search


def _pipe(search: SearchFolder) -> SearchFolder:
    (search.path / "seal").unlink()
    os.mkfifo(search.path / "seal")
    return search


def _another_seal(search: SearchFolder) -> SearchFolder:
    other = make_search(search.path.parents[1])
    assert seal_search(other)
    shutil.copy(other.path / "seal", search.path / "seal")
    return search


@pytest.mark.fault("F4", injected="a seal that does not fit its search", outcome="counts as a stranger's")
@pytest.mark.parametrize("tamper", [_change_target, _move, _empty, _pipe, _another_seal])
def test_what_was_changed_or_moved_is_a_strangers(
    tmp_path: Path, cache: Path, tamper: Callable[[SearchFolder], SearchFolder]
) -> None:
    (tmp_path / "project").mkdir()
    search = make_search(tmp_path / "project")
    assert seal_search(search)
    assert not is_sealed(tamper(search))


def _readable(key: Path) -> None:
    key.chmod(0o640)


def _link(key: Path) -> None:
    key.rename(key.with_name("other"))
    key.symlink_to("other")


def _short(key: Path) -> None:
    key.write_bytes(key.read_bytes()[:8])


def _gone(key: Path) -> None:
    key.unlink()


@pytest.mark.parametrize("spoil", [_readable, _link, _short, _gone])
def test_a_key_that_others_may_know_seals_nothing(tmp_path: Path, cache: Path, spoil: Callable[[Path], None]) -> None:
    search = make_search(tmp_path)
    assert seal_search(search)
    spoil(cache / "seal-key")
    assert not is_sealed(search)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_key_of_somebody_else_seals_nothing(tmp_path: Path, cache: Path) -> None:
    search = make_search(tmp_path)
    assert seal_search(search)
    os.chown(cache / "seal-key", 65534, 65534)
    assert not is_sealed(search)
    assert not seal_search(search)


@pytest.mark.fault("F4", injected="a home that cannot be written", outcome="no seal, the search goes on")
def test_without_a_place_for_the_key_nothing_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    search = _open_folder(tmp_path, Target(spec="toy.py:workload", folder=str(tmp_path)), SearchOptions())
    assert not (search.path / "seal").exists()
    assert not is_sealed(search)


def test_two_processes_that_make_the_key_at_once_have_the_same(cache: Path) -> None:
    assert _create_key() == _create_key() is not None
    assert [path.name for path in cache.iterdir()] == ["seal-key"]


@pytest.mark.fault("F4", injected="compiled code in a stranger's search", outcome="removed before --resume")
@pytest.mark.parametrize("sealed", [False, True])
def test_what_a_stranger_has_compiled_is_not_loaded(tmp_path: Path, cache: Path, sealed: bool) -> None:
    search = run_simulated(Machine(stop_after=3), tmp_path).folder
    (search.path / "probe.json").unlink()
    state = search.read_state()
    search.compiled.mkdir()
    (search.compiled / "kernel.so").write_text("code")
    if sealed:
        assert seal_search(search)
    asked = SearchOptions(resume=True, measure_seconds=state.measure_seconds)
    assert _open_folder(tmp_path, state.target, asked).path == search.path
    assert (search.compiled / "kernel.so").exists() == sealed


def test_of_a_link_in_its_place_the_link_alone_is_removed(tmp_path: Path, cache: Path) -> None:
    search = run_simulated(Machine(stop_after=3), tmp_path).folder
    (search.path / "probe.json").unlink()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").touch()
    search.compiled.symlink_to(tmp_path / "theirs")
    _open_folder(tmp_path, search.read_state().target, SearchOptions(resume=True))
    assert not search.compiled.is_symlink()
    assert (tmp_path / "theirs/file").exists()
