"""The picture of the README: what a search of the demo leaves on a terminal, docs/search.svg.

    python benchmarks/picture.py                            search for two minutes, keep what is printed, draw it
    python benchmarks/picture.py --from docs/search.txt     draw again what was kept

What is printed is kept in docs/search.txt as it is. Of the numbered launches in the middle the picture leaves out what
makes it too long, and says how many.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "search.svg"
KEPT = PICTURE.with_suffix(".txt")
WIDTH = 96
"""Columns: at the 830 pixels that a README has on GitHub, letters are 14 pixels high."""

_SHOWN_LAUNCHES = 12
_LAUNCH = re.compile(r"#\d+ ")
_FONT_FACE = re.compile(r"@font-face \{\{.*?\}\}\n", re.DOTALL)


def search(budget: str) -> str:
    """Return what a search of the demo prints on a terminal, with its colours.

    Raises:
        SystemExit: the search has failed.
    """
    words = ["autotune", "search", "demo", "--budget", budget]
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", *words, "--no-history"],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    if done.returncode:
        raise SystemExit(done.stdout)
    return f"$ {' '.join(words)}\n{done.stdout}"


def shorten(lines: list[str]) -> list[str]:
    """Return the lines without launches in the middle, where there are more than the picture shows."""
    launches = [place for place, line in enumerate(lines) if _LAUNCH.match(Text.from_ansi(line).plain)]
    left_out = launches[_SHOWN_LAUNCHES // 2 : -_SHOWN_LAUNCHES // 2]
    if len(left_out) < 2:
        return lines
    note = f"  ... {len(left_out)} launches more ..."
    return [note if place == left_out[0] else line for place, line in enumerate(lines) if place not in left_out[1:]]


def draw(text: str) -> str:
    """Return the picture of a terminal's text; its letters are the reader's own, for none are fetched."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    for line in shorten(text.splitlines()):
        console.print(Text.from_ansi(line))
    style = _FONT_FACE.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code, monospace", "Consolas, Menlo, monospace")
    return console.export_svg(title="autotune", theme=MONOKAI, code_format=style, unique_id="search")


def main() -> int:
    """Search or read what was kept, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="2m")
    parser.add_argument("--from", dest="kept", type=Path, help="a file that an earlier run has kept")
    arguments = parser.parse_args()
    text = arguments.kept.read_text(encoding="utf-8") if arguments.kept else search(arguments.budget)
    if arguments.kept is None:
        KEPT.write_text(text, encoding="utf-8")
    PICTURE.write_text(draw(text), encoding="utf-8")
    print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
