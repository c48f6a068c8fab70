"""What is installed: malloc libraries to preload, a C++ compiler, the PyTorch build. Nothing is loaded to find out."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from autotune.engine.allocator import PRELOAD, find_malloc_libraries
from autotune.errors import MachineError

_ALLOCATOR_PATTERNS = {
    "jemalloc": ("libjemalloc.so*",),
    "tcmalloc": ("libtcmalloc.so*", "libtcmalloc_minimal.so*"),
}
_LIBRARY_FOLDERS = ("/usr/local/lib", "/usr/lib64", "/lib64", "/usr/lib", "/lib")
# Magic, word size and machine lie within the first 20 bytes of an ELF file (elf(5)).
_ELF_HEADER_BYTES = 20


def find_host_allocators(root: Path) -> dict[str, str]:
    """Return the full path of each malloc library this interpreter could preload, by its knob value.

    The folders are those of the dynamic linker. `ctypes.util.find_library` would start a compiler to answer, and then
    give a name without a folder.

    Args:
        root: where the file system starts.
    """
    wanted = _elf_kind(Path(sys.executable))
    found: dict[str, str] = {}
    folders = list(_library_folders(root)) if wanted is not None else []
    for name, patterns in _ALLOCATOR_PATTERNS.items():
        candidates = (path for pattern in patterns for folder in folders for path in sorted(folder.glob(pattern)))
        # LD_PRELOAD is split at spaces and colons; a library of another machine is skipped with no more than a warning.
        usable = (path for path in candidates if _elf_kind(path) == wanted and not set(" :") & set(str(path)))
        path = next(usable, None)
        if path is not None:
            found[name] = str(path)
    return found


def find_preloaded_malloc() -> str | None:
    """Return the file name of the malloc library that this process was started with; None for the C library's."""
    found = find_malloc_libraries(os.environ.get(PRELOAD, ""))
    return Path(found[0]).name if found else None


def has_cpp_compiler() -> bool:
    """Return whether torch.compile will find a C++ compiler: CXX when it is set, else g++ (clang++ on macOS).

    Source: `torch/_inductor/config.py`, `cpp.cxx`; no other compiler on PATH is tried.
    """
    return shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")) is not None


def read_torch_build() -> tuple[str, str | None]:
    """Return PyTorch's version with its build tag and the CUDA version it was built for, without importing it.

    Raises:
        MachineError: PyTorch is not installed.
    """
    spec = importlib.util.find_spec("torch")
    constants = _read_constants(Path(spec.origin).with_name("version.py")) if spec and spec.origin else {}
    version = constants.get("__version__")
    if version is None:
        try:
            version = importlib.metadata.version("torch")
        except importlib.metadata.PackageNotFoundError:
            raise MachineError(
                f"PyTorch is not installed in {sys.executable}", hint="install it: https://pytorch.org/get-started"
            ) from None
    return version, constants.get("cuda")


def _library_folders(root: Path) -> Iterator[Path]:
    """Yield the folders the dynamic linker looks in, the user's own first."""
    machine = sysconfig.get_config_var("MULTIARCH") or f"{platform.machine()}-linux-gnu"
    names = [name for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name]
    names.append(f"{sys.prefix}/lib")
    for configuration in sorted((root / "etc/ld.so.conf.d").glob("*.conf")):
        try:
            lines = configuration.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names += [line.strip() for line in lines if line.strip().startswith("/")]
    names += [f"/usr/lib/{machine}", f"/lib/{machine}", *_LIBRARY_FOLDERS]
    for name in dict.fromkeys(names):
        yield root / name.lstrip("/") if name.startswith("/") else Path(name).absolute()


def _elf_kind(path: Path) -> tuple[int, bytes] | None:
    """Return word size and machine of a binary; None for any other file, e.g. a linker script."""
    try:
        with path.open("rb") as file:
            header = file.read(_ELF_HEADER_BYTES)
    except OSError:
        return None
    if len(header) < _ELF_HEADER_BYTES or not header.startswith(b"\x7fELF"):
        return None
    return header[4], header[18:20]


def _read_constants(path: Path) -> dict[str, str]:
    """Return the module-level string constants of a Python file, read as text."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return {}
    constants: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign):
            targets: list[ast.expr] = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        else:
            continue
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            text = node.value.value
            constants |= {target.id: text for target in targets if isinstance(target, ast.Name)}
    return constants
