"""Terminals and pipes that are only a buffer, or that nobody reads any more."""

from __future__ import annotations

import io
import re

from rich.console import Console

from autotune.cli.view.console import RaisingConsole

HOSTILE = "[bold]name[/bold] [/x] :smile: \x1b[31mred\x07\r\nnext\tline \u202e\ud800 {x} %s \N{SNOWMAN}" + "x" * 200


def make_console(width: int = 100, *, encoding: str = "utf-8", is_terminal: bool = True) -> Console:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="", errors="backslashreplace")
    return RaisingConsole(
        file=stream,
        width=width,
        force_terminal=is_terminal,
        color_system="standard" if is_terminal else None,
        highlight=False,
        emoji=False,
        soft_wrap=not is_terminal,
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )


def read(console: Console) -> str:
    console.file.flush()
    raw: bytes = console.file.buffer.getvalue()  # type: ignore[attr-defined]
    return raw.decode(console.file.encoding or "utf-8")


def strip(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


class Broken(io.TextIOBase):
    """A stream whose reader has gone."""

    encoding = "utf-8"

    def write(self, _text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def flush(self) -> None:
        raise OSError(5, "Input/output error")

    def isatty(self) -> bool:
        return True
