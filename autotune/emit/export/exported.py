"""`Export`: a config written in another tool's format, with an account of every knob."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.records import Record, TrainConfig


class Export(Record):
    """A config in another tool's format. Every knob is in `mapped` or in `unmapped`, never in both."""

    filename: str
    """Name the file is usually given."""
    text: str
    """Its whole content, ending with a newline."""
    mapped: tuple[str, ...]
    """Knobs the text sets."""
    unmapped: dict[str, str]
    """Knobs the text cannot set, and what to do instead: one sentence each."""


def build_export(filename: str, text: str, unmapped: Mapping[str, str]) -> Export:
    """Return an export whose mapped knobs are all those that are not listed as unmapped."""
    assert unmapped.keys() <= TrainConfig.model_fields.keys()
    mapped = tuple(field for field in TrainConfig.model_fields if field not in unmapped)
    listed = {field: unmapped[field] for field in TrainConfig.model_fields if field in unmapped}
    return Export(filename=filename, text=text, mapped=mapped, unmapped=listed)
