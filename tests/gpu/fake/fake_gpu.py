"""Builds the fake GPU's extension for the torch that is installed: half a minute, then it is kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCES = Path(__file__).with_name("src")


def find_torch() -> Path:
    """Return the folder of the installed torch, which is not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def find_compiler() -> str | None:
    """Return a C++ compiler; None without one."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")


def is_supported() -> bool:
    """Return whether the sources are written for the installed torch: what C++ sees changes with each release."""
    version = importlib.metadata.version("torch")
    return version.startswith("2.13.") and not (find_torch() / "lib" / "libtorch_cuda.so").exists()


def library_path() -> Path:
    """Return where the extension for this torch, this Python and these sources is kept."""
    parts = [
        importlib.metadata.version("torch"),
        sys.version,
        *(path.read_text() for path in sorted(SOURCES.iterdir())),
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return ROOT / "build" / "fake_gpu" / digest / "fake_gpu_backend.so"


def build() -> Path:
    """Return the extension, compiled if it is not there yet.

    Raises:
        RuntimeError: there is no compiler, or it refuses the sources.
    """
    library = library_path()
    if library.exists():
        return library
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError("no C++ compiler")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch) / f"{one.stem}.o" for one in sources]
        compiles = [
            subprocess.Popen([compiler, *_flags(), "-c", str(one), "-o", str(out)], stderr=subprocess.PIPE, text=True)
            for one, out in zip(sources, objects, strict=True)
        ]
        failed = [told for one in compiles for told in [one.communicate()[1]] if one.returncode]
        if failed:
            raise RuntimeError(f"the fake GPU does not compile: {failed[0][-2000:]}")
        driver = Path(scratch) / "libnvidia-ml.so.1"
        _run([compiler, "-x", "c", "-shared", "-fPIC", "-w", str(SOURCES / "nvml.c"), "-o", str(driver)])
        driver.replace(library.parent / driver.name)
        made = Path(scratch) / library.name
        _link(compiler, objects, made)
        made.replace(library)  # last: it says that all is there
    return library


def _flags() -> list[str]:
    include = find_torch() / "include"
    folders = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    return ["-std=c++20", "-O1", "-fPIC", "-w", *(f"-I{folder}" for folder in folders)]


def _link(compiler: str, objects: list[Path], made: Path) -> None:
    libraries = find_torch() / "lib"
    names = ["-ltorch_python", "-ltorch_cpu", "-lc10"]
    rest = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-Wl,--no-as-needed", *names, "-o", str(made)]
    _run([compiler, "-shared", *map(str, objects), *rest])


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise RuntimeError(f"the fake GPU cannot be built: {ended.stderr[-2000:]}")


def make_environment(**settings: str) -> dict[str, str]:
    """Return the environment of a process that finds the fake GPU, and so do those that it starts.

    Args:
        settings: `FAKE_GPU_COUNT`, `FAKE_GPU_MEMORY` and `FAKE_GPU_CONTEXT` (bytes), `FAKE_GPU_CAPABILITY` ("8.0").
    """
    library, own = build(), os.environ
    folders = [str(Path(__file__).with_name("site")), str(ROOT), own.get("PYTHONPATH", "")]
    libraries = [str(library.parent), own.get("LD_LIBRARY_PATH", "")]
    return {
        **own,
        "FAKE_GPU_LIBRARY": str(library),
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        **settings,
    }


if __name__ == "__main__":
    print(build())
