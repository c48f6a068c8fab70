"""An answer in another tool's format: one pure function a format, each accounting for every knob that was changed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping

from autotune.emit.export.accelerate import export_accelerate
from autotune.emit.export.deepspeed import export_deepspeed
from autotune.emit.export.environment import export_environment
from autotune.emit.export.exported import Export, Request
from autotune.emit.export.fragment import export_fragment
from autotune.emit.export.header import make_request
from autotune.emit.export.hf import export_hf_flags, export_hf_json
from autotune.emit.export.lightning import export_lightning
from autotune.emit.export.snippet import export_snippet
from autotune.errors import UsageError
from autotune.records.profile import Profile


def _export_torch(request: Request) -> Export:
    """Return a whole training of a workload; a script has its own, and is given lines for it."""
    return export_fragment(request) if request.is_script else export_snippet(request)


EXPORTERS: dict[str, Callable[[Request], Export]] = {
    "torch": _export_torch,
    "hf": export_hf_json,
    "hf-flags": export_hf_flags,
    "lightning": export_lightning,
    "accelerate": export_accelerate,
    "deepspeed": export_deepspeed,
    "env": export_environment,
}
"""Exporters by the name the user gives."""

__all__ = ["EXPORTERS", "Export", "Request", "export_profile", "find_exporter"]


def find_exporter(to: str) -> Callable[[Request], Export]:
    """Return the exporter of a name.

    Raises:
        UsageError: there is none.
    """
    exporter = EXPORTERS.get(to)
    if exporter is None:
        near = difflib.get_close_matches(to, EXPORTERS, n=1)
        suggestion = f"did you mean {near[0]}? " if near else ""
        raise UsageError(f"there is no exporter {to!r}", hint=f"{suggestion}choose one of {', '.join(EXPORTERS)}")
    return exporter


def export_profile(profile: Profile, to: str, *, found: Mapping[str, str] | None = None) -> Export:
    """Return an answer in another tool's format.

    Args:
        profile: the answer.
        to: a name in `EXPORTERS`.
        found: paths of malloc libraries by knob value that this machine has found; None where they are not known.

    Raises:
        UsageError: there is no exporter of that name.
    """
    exporter = find_exporter(to)
    # By its path only what is found here: a library is code, and whose path a profile says is open.
    named = profile.hardware.host_allocators
    libraries = {name: path for name, path in named.items() if (found or {}).get(name) == path}
    return exporter(make_request(profile, libraries))
