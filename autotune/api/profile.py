"""`autotune.Profile`: the record, with what one does with an answer from Python.

profile ── repr, summary, _repr_html_   what it says
        ├─ report, export               as a page, for another tool
        └─ apply                        on a training of one's own
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from autotune.arguments import shorten, shown_hints
from autotune.errors import UsageError
from autotune.records import profile as records
from autotune.records.given import GivenRecord
from autotune.sentences.answer import describe_speedup
from autotune.sentences.settings import describe_changes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from autotune.emit.export import Export
    from autotune.engine.live import Applied


class Profile(records.Profile, GivenRecord):
    """A search's answer: the settings to train with, and why they can be trusted.

    `Profile.load("best.json")` reads one, `run_search` returns one.
    """

    @classmethod
    def of(cls, profile: records.Profile) -> Self:
        """Return the same answer with what can be done with it."""
        return cls.model_validate({name: getattr(profile, name) for name in records.Profile.model_fields})

    def __eq__(self, other: object) -> bool:
        """Return whether an answer says the same, be it a plain record."""
        same = records.Profile.model_fields
        return isinstance(other, records.Profile) and all(getattr(self, one) == getattr(other, one) for one in same)

    __hash__ = records.Profile.__hash__

    def __repr__(self) -> str:
        """Return the verdict with its figures, and the changes."""
        from autotune.cli.view.terminal import one_line

        changes = describe_changes(self.config, self.baseline_config) if self.verdict == "improved" else ""
        return one_line(f"<Profile {describe_speedup(self)}{f': {changes}' if changes else ''}>")

    def __str__(self) -> str:
        """Return the summary."""
        return self.summary()

    def _repr_html_(self) -> str:
        from autotune.api.html import draw_profile

        return draw_profile(self)

    def summary(self) -> str:
        """Return the page that `autotune show` prints, with what each change is worth where the search is here."""
        from autotune.cli.pages.answer import list_answer
        from autotune.cli.pages.report import explain_answer

        return "\n".join(line.plain for line in list_answer(self, explain_answer(self, Path("best.json"))))

    @shown_hints()
    def report(
        self, path: str | Path = "report.html", *, folder: str | Path | None = None, force: bool = False
    ) -> Path:
        """Write the search that this is the answer of as one HTML page, and return where it is.

        Args:
            path: of the page.
            folder: that the search was made in; None for the current one.
            force: replace a file that is no report of this target.

        Raises:
            UsageError: the file exists, or the folder has no search with this answer.
            MachineError: the file cannot be written.
        """
        from autotune.cli.emit import write_output
        from autotune.cli.pages.report import is_own_page, render_search
        from autotune.search.store.folder import find_search_of

        out, work = Path(path), Path(folder or Path.cwd())
        if out.is_dir() or (out.exists() and not force and not is_own_page(out, self.target.label)):
            raise UsageError(f"{out} exists", hint="give another path, or force=True to replace the file")
        search = find_search_of(self, work)
        if search is None:
            raise UsageError(
                f"no search in {str(work)!r} has this answer",
                hint="give folder=, the one that the search was made in; its records are in .autotune",
            )
        write_output(out, render_search(search.path))
        return out

    @shown_hints()
    def export(self, to: str) -> Export:
        """Return the settings in the words of another tool: `text` for its file, and what it has no place for.

        Args:
            to: `torch`, `hf`, `hf-flags`, `lightning`, `accelerate`, `deepspeed` or `env`.

        Raises:
            UsageError: there is no such exporter.
        """
        from autotune.emit.export import export_profile
        from autotune.machine.hardware import read_hardware

        return export_profile(self, to, found=read_hardware().host_allocators)

    @shown_hints()
    def apply(
        self, model: nn.Module, optimizer: Optimizer | None = None, loader: DataLoader[Any] | None = None
    ) -> Applied:
        """Apply the settings to a training of one's own, before its first step; what is left out is said.

        Args:
            model: on its device.
            optimizer: over its parameters.
            loader: of the training samples.

        Raises:
            UsageError: something is given that is none of these.
        """
        from torch import nn
        from torch.optim import Optimizer
        from torch.utils.data import DataLoader

        from autotune.engine.live import apply_live
        from autotune.machine.hardware import read_hardware

        for name, given, kind in (
            ("model", model, nn.Module),
            ("optimizer", optimizer, Optimizer),
            ("loader", loader, DataLoader),
        ):
            if not isinstance(given, kind) and (given is not None or name == "model"):
                raise UsageError(f"{name} is {shorten(given)}", hint=f"give a {kind.__module__}.{kind.__name__}")
        return apply_live(
            self.config,
            self.baseline_config,
            model=model,
            optimizer=optimizer,
            loader=loader,
            host_allocators=read_hardware().host_allocators,
        )
