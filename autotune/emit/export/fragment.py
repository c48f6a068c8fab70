"""What a script of one's own is to be given: the changed settings as a few lines to paste, each at its place."""

from __future__ import annotations

from autotune.emit.export.by_hand import comment, list_by_hand, list_lines
from autotune.emit.export.exported import Export, Request, build_export
from autotune.records import TrainConfig


def export_fragment(request: Request) -> Export:
    """Return the lines, in the order of a script; `...` stands for what is there already."""
    written = list_by_hand(request, TrainConfig.model_fields)
    lines = comment(request.header)
    lines += ["# Each line at its place in your script; ... is what you have there.", "", *list_lines(written)]
    comments = {name: line for name, line in written.items() if line.startswith("#")}
    return build_export("tuned.py", "\n".join(lines) + "\n", request, comments)
