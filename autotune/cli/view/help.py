"""Help in groups, without a column of types, and with examples to copy."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from autotune.cli.view.terminal import print_error_json

_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""What is raised for an option that is not there, lacks its value, or has one that cannot be: it has no public name."""

BASICS, CHANGES, SCRIPTS, OUTPUT = "Basics", "What may change", "Scripts", "Output"
"""Groups of options, in this order."""

Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", rich_help_panel=OUTPUT, help="Print nothing but the answer and errors.")
]

WIDEST = 100
"""Columns of a help page; a narrower terminal has a narrower one."""


class Command(TyperCommand):
    """A command whose options are shown by the groups they are given, and whose epilog is shown as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; what cannot be read is told as JSON where that was asked for."""
        typed = [*args]  # which the parser takes from its list
        wants_json = "--json" in args[: args.index("--")] if "--" in args else "--json" in args
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            self.mend(error, ctx, typed)
            if not wants_json:
                raise
            hint = f"{ctx.command_path} --help lists the options"
            print_error_json(2, "UsageError", error.format_message(), hint)  # type: ignore[attr-defined]
            raise typer.Exit(2) from None

    def mend(self, error: Any, ctx: Any, args: list[str]) -> None:
        """Have an error say what was meant.

        Args:
            error: about what was typed.
            ctx: of the command.
            args: that were typed.
        """
        _mend(error)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options group by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            row = _tidy(parameter.get_help_record(ctx))
            if row is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else OUTPUT
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(row)
        order = ["Arguments", BASICS, CHANGES, SCRIPTS, OUTPUT]
        for title in sorted(groups, key=order.index):
            with formatter.section(title):
                formatter.write_dl(groups[title], col_max=26)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what follows the command's name: an argument by the name it is given, without brackets around it."""
        named = [parameter.metavar for parameter in self.get_params(ctx) if parameter.param_type_name == "argument"]
        return [self.options_metavar or "", *(one for one in named if one)] if all(named) else self._usual_pieces(ctx)

    def _usual_pieces(self, ctx: Any) -> list[str]:
        pieces: list[str] = super().collect_usage_pieces(ctx)
        return pieces

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


def _mend(error: Any) -> None:
    """Have an error name an option by its name of today, and say the reason alone."""
    parameter = getattr(error, "param", None)
    if parameter is not None and error.param_hint is None and parameter.param_type_name == "option":
        error.param_hint = f"'{_visible(parameter.opts)[-1]}'"
    error.message = re.sub(r"^Value error, ", "", error.message)


def _split_names(name: str) -> tuple[str, str, str]:
    """Return an option's names, and what stands for its value."""
    found = re.fullmatch(r"((?:-[^ ,]+, )*-[^ ,]+)( ?)(.*)", name)
    assert found is not None
    return found[1], found[2], found[3]


def _visible(names: list[str]) -> list[str]:
    """Return an option's short name and its first long one: the others are those of earlier releases."""
    short, long = [[name for name in names if name.startswith("--") is is_long] for is_long in (False, True)]
    return [*short, *long[:1]]


def _tidy(row: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return a row without the types that no user types, and with its default as it is told."""
    if row is None:
        return None
    name, text = row
    name = re.sub(r" <[^>]*(\[[^\]]*\])?>$", "", name)
    if name.startswith("-"):
        names, space, metavar = _split_names(name)
        name = ", ".join(_visible(names.split(", "))) + space + metavar
    text = re.sub(r"\[default: \(([^)]*)\)[^\]]*\]", r"[default: \1]", text)
    return name, re.sub(r"(;| *\[)[-\d<= ]*x[<>=]+\d+(?=\])\]?", lambda found: "]" if found[1] == ";" else "", text)
