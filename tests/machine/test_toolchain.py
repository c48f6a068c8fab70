from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_machine import write

from autotune.errors import MachineError
from autotune.machine import toolchain


def test_allocators_are_found_by_full_path_and_only_for_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    own = b"\x7fELF\x02\x01\x01" + bytes(11) + b"\x3e\x00"
    foreign = b"\x7fELF\x01\x01\x01" + bytes(11) + b"\x03\x00"
    interpreter = tmp_path / "python"
    interpreter.write_bytes(own)
    monkeypatch.setattr(toolchain.sys, "executable", str(interpreter))
    write(tmp_path, {"etc/ld.so.conf.d/x.conf": "# comment\n/opt/x/lib\n", "opt/x/lib/libjemalloc.so": "GROUP ( x )"})
    for name, header in {
        "opt/x/lib/libjemalloc.so.1": foreign,
        "opt/x/lib/libjemalloc.so.2": own,
        "usr/lib/libtcmalloc_debug.so.4": own,
        "usr/lib/libtcmalloc_minimal.so.4": own,
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(header)
    assert toolchain.find_host_allocators(tmp_path) == {
        "jemalloc": str(tmp_path / "opt/x/lib/libjemalloc.so.2"),
        "tcmalloc": str(tmp_path / "usr/lib/libtcmalloc_minimal.so.4"),
    }


@pytest.mark.parametrize(
    ("preload", "expected"),
    [("", None), ("libm.so.6", None), ("libm.so.6 /home/me/lib/libjemalloc.so.2", "libjemalloc.so.2")],
)
def test_the_malloc_library_in_use_is_known_by_name_and_not_by_folder(
    preload: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", preload)
    assert toolchain.find_preloaded_malloc() == expected


def test_a_compiler_is_the_one_torch_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.sys, "platform", "linux")
    assert not toolchain.has_cpp_compiler()
    (tmp_path / "g++").touch(mode=0o755)
    assert toolchain.has_cpp_compiler()
    monkeypatch.setenv("CXX", "icpx")
    assert not toolchain.has_cpp_compiler()
    (tmp_path / "icpx").touch(mode=0o755)
    assert toolchain.has_cpp_compiler()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.6.0+cu124'\ndebug = False\ncuda: Optional[str] = '12.4'\n", ("2.6.0+cu124", "12.4")),
        ("from typing import Optional\n__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", ("2.13.0+cpu", None)),
    ],
)
def test_torch_build_is_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: tuple[str, str | None]
) -> None:
    write(tmp_path, {"torch/__init__.py": "raise RuntimeError('imported')", "torch/version.py": text})
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _name: spec)
    assert toolchain.read_torch_build() == expected


def test_without_torch_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> str:
        raise toolchain.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(toolchain.importlib.util, "find_spec", lambda _name: None)
    monkeypatch.setattr(toolchain.importlib.metadata, "version", refuse)
    with pytest.raises(MachineError, match="PyTorch is not installed"):
        toolchain.read_torch_build()
