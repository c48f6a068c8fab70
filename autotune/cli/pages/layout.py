"""A page of facts on stdout: drawn for people on a terminal, one fact a line in a pipe.

What is shown comes from user code, files and drivers: it is never read as markup, and never reaches the terminal with
a control character or a sign that its encoding does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autotune.cli.view.console import result_console
from autotune.cli.view.terminal import one_line
from autotune.format import format_share

_WIDEST = 120
_INDENT = 2
_LABEL_WIDTH = 15
_SCALE_WIDTH = 24
_NAME_WIDTH = 26


@dataclass(frozen=True)
class Part:
    """One part of a whole.

    Attributes:
        name: what it is.
        share: of the whole, 0 to 1.
        amount: the same in its unit.
        style: colour on a terminal; empty for what is left over.
    """

    name: str
    share: float
    amount: str
    style: str


@dataclass(frozen=True)
class _Glyphs:
    """The signs of a terminal; parts of a whole are told apart by colour or, without colours, by their own fill."""

    rule: str
    filled: str
    empty: str
    fills: str
    left_over: str
    swatch: str = ""


_LINE, _HEAVY = "\N{BOX DRAWINGS LIGHT HORIZONTAL}", "\N{BOX DRAWINGS HEAVY HORIZONTAL}"
_FULL, _LIGHT, _DOT = "\N{FULL BLOCK}", "\N{LIGHT SHADE}", "\N{MIDDLE DOT}"
_COLOURED = _Glyphs(_LINE, _HEAVY, _LINE, _FULL, _LIGHT, swatch="\N{BLACK SQUARE}")
_PATTERNS = _Glyphs(_LINE, _HEAVY, _DOT, f"{_FULL}\N{MEDIUM SHADE}{_LIGHT}\N{DARK SHADE}=+", _DOT)
_ASCII = _Glyphs("-", "#", ".", "#=+%o~", ".")


class LinePage:
    """A page in a pipe: every line says what it is about, and its wording depends on no width."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = False

    def heading(self, title: str, note: str = "") -> None:
        """Begin a section."""
        self._separate()
        self._line(f"{title} ({note})" if note else title)

    def facts(self, label: str, facts: Iterable[str]) -> None:
        """Print what is known of something; nothing when nothing is."""
        for fact in facts:
            self._line(f"  {label:<{_LABEL_WIDTH}} {fact}")

    def scale(self, label: str, fraction: float, text: str, *, style: str = "cyan") -> None:
        """Print a figure, on a terminal beside a bar that is filled by a fraction."""
        self.facts(label, [text])

    def parts(self, label: str, parts: Sequence[Part]) -> None:
        """Print a whole by its parts, on a terminal as one bar with a legend."""
        for part in parts:
            self.facts(label, [_describe_part(part, parts)])

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print rows; the first cell names a row."""
        for first, *cells in rows:
            words = [f"{head} {cell}" for head, cell in zip(heads[1:], cells, strict=True)]
            self.facts(heads[0], [f"{first}: {', '.join(words)}"])

    def entry(self, title: str, text: str, *, badge: str = "", remedy: str = "", style: str = "bold cyan") -> None:
        """Print something with its name, a figure or two, a sentence, and what to do."""
        self._line(f"  {title:<{_NAME_WIDTH}} {f'{badge}: ' if badge else ''}{text}")
        if remedy:
            self._line(f"  {title:<{_NAME_WIDTH}} do: {remedy}")

    def sentence(self, text: str, *, style: str = "", bullet: bool = False) -> None:
        """Print a sentence of its own."""
        self._line(f"  {text}")

    def notes(self, notes: Sequence[str]) -> None:
        """Print the section of what the user should know, each note once; nothing when there is none."""
        if notes:
            self.heading("notes")
        for note in dict.fromkeys(notes):
            self.sentence(note, style="yellow", bullet=True)

    def _separate(self) -> None:
        if self._begun:
            self._console.print()
        self._begun = True

    def _line(self, text: str) -> None:
        self._console.print(Text(self._clean(text)))

    def _clean(self, text: str) -> str:
        """Return text as one line of what this output can show."""
        encoding = self._console.encoding
        return one_line(text).encode(encoding, "replace").decode(encoding)


class TerminalPage(LinePage):
    """A page on a terminal: wrapped to its width, with bars, in colour where there is any."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        coloured = console.color_system is not None and not console.no_color
        plain = console.is_dumb_terminal or not console.encoding.startswith("utf")
        self._glyphs = _ASCII if plain else _COLOURED if coloured else _PATTERNS
        self._width = min(_WIDEST, console.width)
        self._label_width = min(_LABEL_WIDTH, self._width // 3)
        self._value_width = max(1, self._width - _INDENT - self._label_width - 1)

    def heading(self, title: str, note: str = "") -> None:
        """Begin a section with a line across the page."""
        self._separate()
        line = Text.assemble((title, "bold"), (f"  {note}" if note else "", "dim"), " ")
        rest = self._width - line.cell_len
        self._print(line.append(self._glyphs.rule * rest, "dim") if rest > 0 else line)

    def facts(self, label: str, facts: Iterable[str]) -> None:
        """Print what is known of something beside its name."""
        known = ", ".join(facts)
        if known:
            self._print(self._beside(label, self._text(known)))

    def scale(self, label: str, fraction: float, text: str, *, style: str = "cyan") -> None:
        """Print a bar that is filled by a fraction, and the figure beside it."""
        width = min(_SCALE_WIDTH, self._value_width // 4)
        filled = round(width * min(1.0, max(0.0, fraction)))
        bar = Text.assemble((self._glyphs.filled * filled, style), (self._glyphs.empty * (width - filled), "dim"))
        self._print(self._beside(label, bar, self._text(text), width=width))

    def parts(self, label: str, parts: Sequence[Part]) -> None:
        """Print one bar of all parts, and a legend as wide as fits."""
        fills = [self._glyphs.left_over if not part.style else fill for part, fill in self._fill(parts)]
        bar, legend, total, end = Text(), [], 0.0, 0
        for part, fill in zip(parts, fills, strict=True):
            start, total = end, total + part.share
            end = round(self._value_width * min(1.0, total))
            bar.append(fill * (end - start), part.style or "dim")
            swatch = (self._glyphs.swatch if part.style and self._glyphs.swatch else fill, part.style or "dim")
            legend.append(Text.assemble(swatch, " ", self._clean(_describe_part(part, parts)), overflow="fold"))
        self._print(self._beside(label, Group(bar, Columns(legend, padding=(0, 3)))))

    def table(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table, figures to the right."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for index, head in enumerate(heads):
            table.add_column(self._text(head), justify="right" if index else "left", overflow="fold")
        for row in rows:
            table.add_row(*(self._text(cell) for cell in row))
        self._print(Padding(table, (0, 0, 0, _INDENT), expand=False))

    def entry(self, title: str, text: str, *, badge: str = "", remedy: str = "", style: str = "bold cyan") -> None:
        """Print a name with its figure, and below what there is to say."""
        head = Text.assemble((self._clean(title), style), ("  " + self._clean(badge) if badge else "", "bold green"))
        self._print(Padding(head, (0, 0, 0, _INDENT)))
        self._print(Padding(self._text(text), (0, 0, 0, 2 * _INDENT)))
        if remedy:
            self._print(Padding(self._hang("> ", remedy, "green"), (0, 0, 0, 2 * _INDENT)))

    def sentence(self, text: str, *, style: str = "", bullet: bool = False) -> None:
        """Print a sentence of its own, wrapped."""
        shown = self._hang("- ", text, style) if bullet else self._text(text, style)
        self._print(Padding(shown, (0, 0, 0, _INDENT)))

    def _fill(self, parts: Sequence[Part]) -> Iterable[tuple[Part, str]]:
        return zip(parts, cycle(self._glyphs.fills), strict=False)

    def _beside(self, label: str, *cells: RenderableType, width: int | None = None) -> Table:
        grid = Table.grid(padding=(0, 1, 0, 0), expand=True)
        grid.add_column(width=self._label_width + _INDENT, overflow="fold")
        for index in range(len(cells)):
            last = index == len(cells) - 1
            grid.add_column(width=None if last else width, ratio=1 if last else None, overflow="fold")
        name = Padding(self._text(label, "dim"), (0, 0, 0, _INDENT))
        grid.add_row(name, *cells)
        return grid

    def _hang(self, sign: str, text: str, style: str) -> Table:
        grid = Table.grid()
        grid.add_column(width=len(sign))
        grid.add_column(overflow="fold")
        grid.add_row(Text(sign, style=style), self._text(text, style))
        return grid

    def _text(self, text: str, style: str = "") -> Text:
        return Text(self._clean(text), style=style, overflow="fold")

    def _print(self, shown: RenderableType) -> None:
        # A forced terminal in a pipe has a console that does not wrap.
        self._console.print(shown, width=self._width, soft_wrap=False)


def open_page() -> LinePage:
    """Return the page that fits stdout."""
    console = result_console()
    return TerminalPage(console) if console.is_terminal else LinePage(console)


def _describe_part(part: Part, parts: Sequence[Part]) -> str:
    """Return name, amount and share, in columns that fit all parts."""
    names, amounts = max(len(other.name) for other in parts), max(len(other.amount) for other in parts)
    return f"{part.name:<{names}} {part.amount:>{amounts}} {format_share(part.share):>4}"
