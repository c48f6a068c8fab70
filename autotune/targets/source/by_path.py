"""Files as modules of this one, under names that hold their paths: `..source.by_path._2fme_2frandom_2epy`.

No other module has such a name, and every process can import it: a loader's worker that is started anew finds what it
was sent.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__path__: list[str] = []
"""Makes this module one that has modules; they are found below, and in no folder."""


def module_name(path: Path) -> str:
    """Return the name under which a file can be imported.

    Args:
        path: of the file, absolute.
    """
    signs = (chr(byte) if chr(byte).isalnum() and byte < 128 else f"_{byte:02x}" for byte in os.fsencode(path))
    return f"{__name__}.{''.join(signs)}"


def is_users(name: str) -> bool:
    """Return whether a module of this name is a file of the user's."""
    return name.startswith(f"{__name__}.")


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent, _, signs = fullname.rpartition(".")
        if parent != __name__:
            return None
        found = re.sub(b"_([0-9a-f]{2})", lambda code: bytes.fromhex(code[1].decode()), signs.encode())
        return importlib.util.spec_from_file_location(fullname, os.fsdecode(found))


sys.meta_path.append(_Finder())
