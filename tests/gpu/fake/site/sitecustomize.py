"""With this folder on PYTHONPATH a CPU build of torch finds a GPU: the fake one, in every process that is started.

The extension is loaded right after `torch._C`, so that all of torch that is imported after it sees a CUDA build.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

_BINDINGS = Path(__file__).parents[1] / "bindings.py"


class _Loader(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        # First: torch asks once, while it is loaded, which accelerator it was built with.
        ctypes.CDLL(os.environ["FAKE_GPU_LIBRARY"])
        return super().create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        library = os.environ["FAKE_GPU_LIBRARY"]
        spec = importlib.util.spec_from_file_location("fake_gpu_backend", library)
        assert spec is not None
        assert spec.loader is not None
        backend = sys.modules["fake_gpu_backend"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(backend)
        made = sys.modules["fake_gpu_bindings"] = ModuleType("fake_gpu_bindings")
        exec(compile(_BINDINGS.read_text(), str(_BINDINGS), "exec"), made.__dict__)
        made.install(module, backend)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch._C":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


if "FAKE_GPU_LIBRARY" in os.environ:
    sys.meta_path.insert(0, _Finder)
