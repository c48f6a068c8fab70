"""What an exporter is asked for, and what it returns: `Request` and `Export`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autotune.records import Record, TrainConfig
from autotune.records.config import changed_fields

BATCH = frozenset({"micro_batch_size", "gradient_accumulation_steps"})


@dataclass(frozen=True)
class Request:
    """An answer to be written for another tool.

    Attributes:
        config: the settings of each process.
        baseline: the user's own, which are in the user's own files already.
        header: lines of plain ASCII that say where the settings come from, without a comment sign.
        libraries: paths of malloc libraries by knob value, where they are known.
        on_gpu: it was measured on a GPU.
        cores: CPU cores there, which is how many threads PyTorch takes by itself.
        is_script: it was measured on a script, which has a training loop of its own.
        processes: that trained together.
    """

    config: TrainConfig
    baseline: TrainConfig
    header: tuple[str, ...] = ()
    libraries: Mapping[str, str] | None = None
    on_gpu: bool = False
    cores: int = 1
    is_script: bool = False
    processes: int = 1

    @property
    def changed(self) -> frozenset[str]:
        """Fields in which the settings differ from the user's own."""
        return frozenset(name.partition(".")[0] for name in changed_fields(self.config, self.baseline))

    @property
    def written(self) -> frozenset[str]:
        """Fields to write: the changed ones, and what goes with them, as the two that make the effective batch."""
        return self.changed | BATCH if self.changed & BATCH else self.changed


class Export(Record):
    """Settings in another tool's format. Every knob that differs from the baseline is in `mapped` or in `unmapped`."""

    filename: str
    """Name the file is usually given."""
    text: str
    """Its whole content, ending with a newline."""
    mapped: tuple[str, ...]
    """Changed knobs that the text sets."""
    unmapped: dict[str, str]
    """Changed knobs that it cannot set, and what to write by hand: a line of Python, or a comment."""
    aside: tuple[str, ...] = ()
    """Header and lines to write by hand of a format without comments; empty where they are in the text."""


def build_export(
    filename: str, text: str, request: Request, unmapped: Mapping[str, str], *, aside: Iterable[str] = ()
) -> Export:
    """Return an export whose mapped knobs are all changed ones that are not listed as unmapped."""
    assert unmapped.keys() <= TrainConfig.model_fields.keys()
    mapped = tuple(name for name in TrainConfig.model_fields if name in request.changed and name not in unmapped)
    listed = {name: unmapped[name] for name in TrainConfig.model_fields if name in unmapped}
    return Export(filename=filename, text=text, mapped=mapped, unmapped=listed, aside=tuple(aside))
