"""What all commands share: the result on stdout, all talk on stderr, errors as one to three lines."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.text import Text

from autotune.cli.view.console import attempt, be_quiet, talk_console
from autotune.errors import AutotuneError, MachineError, TargetError, UsageError

_LONGEST_MESSAGE = 2000


def say(text: str, *, style: str = "", is_error: bool = False) -> None:
    """Print one line of talk; what users and files put into it is never read as markup.

    Nothing ends because it cannot be printed.
    """
    console = talk_console(is_error=is_error)
    attempt(console, lambda: console.print(Text(printable(text), style=style)))


def warn(text: str) -> None:
    """Print a warning."""
    say(f"warning: {text}", style="yellow")


def printable(text: str) -> str:
    """Return text without control characters other than line ends."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def one_line(text: str) -> str:
    """Return text on one line, without control characters."""
    return printable(text.replace("\n", " "))


def shorten(text: str) -> str:
    """Return a message on one line, cut where what a file or a user wrote makes it endless."""
    line = " ".join(text.split("\n"))
    return line if len(line) <= _LONGEST_MESSAGE else f"{line[:_LONGEST_MESSAGE]}..."


def printable_text(text: str, style: str = "") -> Text:
    """Return text to print as it is, without control characters: neither markup nor a terminal's commands."""
    return Text(printable(text), style=style)


def print_json(text: str) -> None:
    """Print JSON on stdout, past any styling; what a terminal would obey or cannot show is escaped as JSON has it."""
    # Such a character can only be inside of a string.
    print_plain("".join(c if c == "\n" or (c.isprintable() and _can_show(c)) else json.dumps(c)[1:-1] for c in text))


def print_plain(text: str) -> None:
    """Print a text on stdout, past any styling and without control characters."""
    shown = "".join(c if _can_show(c) else "?" for c in printable(text))
    sys.stdout.write(shown if shown.endswith("\n") else shown + "\n")
    sys.stdout.flush()


def _can_show(sign: str) -> bool:
    """Return whether standard output's encoding has a sign."""
    if sign.isascii():
        return True
    try:
        sign.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def forgiven_output() -> Iterator[None]:
    """Print a result inside whose loss changes no exit status: one line says it, none where its reader has gone."""
    try:
        yield
    except OSError as error:
        _drop_stdout()
        if not isinstance(error, BrokenPipeError):
            say(f"error: standard output cannot be written: {error.strerror or error}", style="red", is_error=True)


def print_error_json(code: int, kind: str, message: str, hint: str) -> None:
    """Print an error on stdout as JSON."""
    fields = {"code": code, "kind": kind, "message": message, "hint": hint}
    print_json(json.dumps({"error": fields}, indent=2))


def user_traceback(error: BaseException) -> str:
    """Return the traceback of what the user's code raised, without this package's own frames."""
    own = str(Path(__file__).parents[2])
    text = traceback.TracebackException.from_exception(error)
    text.stack = traceback.StackSummary.from_list([f for f in text.stack if not f.filename.startswith(own)])
    return "".join(text.format()).rstrip()


@contextmanager
def reported_errors(*, as_json: bool, quiet: bool = False) -> Iterator[None]:
    """Turn an AutotuneError into its message and exit code; AUTOTUNE_DEBUG=1 shows the traceback too.

    Args:
        as_json: an error goes to standard output.
        quiet: nothing is said inside but the answer and errors.
    """
    be_quiet(quiet)
    try:
        try:
            _check_names()
            yield
            sys.stdout.flush()
        except BrokenPipeError:
            _drop_stdout()  # the reader has gone (`| head`)
            raise typer.Exit(0) from None
        except OSError as error:
            raise _explain(error) from error
    except AutotuneError as error:
        if os.environ.get("AUTOTUNE_DEBUG") == "1":
            say("".join(traceback.format_exception(error)).rstrip(), is_error=True)
        _report(error, as_json=as_json)
        raise typer.Exit(error.exit_code) from None
    finally:
        be_quiet(False)


def _check_names() -> None:
    """Make sure that what names the user's files can be written into records and messages.

    Raises:
        UsageError: an argument, or the name of the working or the temporary folder, is not UTF-8.
        MachineError: the working folder is gone.
    """
    from autotune.records.reading import is_text

    try:
        places = os.getcwd(), os.environ.get("TMPDIR", "")
    except OSError as error:
        raise MachineError(f"the working folder: {error.strerror}", hint="change to one that is there") from None
    for name in (*places, *sys.argv[1:]):
        if not is_text(name):
            raise UsageError(f"the name {name!r} is not UTF-8, or has a NUL in it", hint="rename what it stands for")


def _explain(error: OSError) -> MachineError:
    """Return the error for something that could not be read or written and that nobody else has explained."""
    reason = error.strerror or str(error)
    try:
        sys.stdout.write("\n")  # what could not be written before is forgotten: only another try tells
        sys.stdout.flush()
    except OSError:
        return MachineError(f"standard output cannot be written: {reason}", hint="what is in files is complete")
    place = f"{error.filename}: " if error.filename is not None else ""
    return MachineError(f"{place}{reason}", hint="check the space there is, and permissions")


def _report(error: AutotuneError, *, as_json: bool) -> None:
    if as_json:
        try:
            print_error_json(error.exit_code, type(error).__name__, error.message, error.hint)
            return
        except OSError:
            _drop_stdout()
    if isinstance(error, TargetError) and error.__cause__ is not None:
        say(user_traceback(error.__cause__), is_error=True)
    say(f"error: {shorten(error.message)}", style="red", is_error=True)
    if error.hint:
        say(f"  {shorten(error.hint)}", is_error=True)


def _drop_stdout() -> None:
    """Point stdout at nothing, so that closing it raises no second error."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)
