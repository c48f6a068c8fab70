"""`autotune show`, `report` and `export`: the answer in other forms."""

from __future__ import annotations

import json
import math
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.view.terminal import print_json, print_plain, printable, reported_errors, say, warn

if TYPE_CHECKING:
    from autotune.emit.export import Export
    from autotune.search.store.folder import SearchFolder


def show(
    profile: Annotated[Path, typer.Argument(help="An answer.", metavar="[PROFILE]")] = Path("best.json"),
    json_output: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Print a search's answer once more."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.answer import print_answer
        from autotune.cli.pages.report import explain_answer
        from autotune.records.profile import Profile

        answer = Profile.load(profile)
        if json_output:
            print_json(answer.to_json())
        else:
            print_answer(answer, profile, explain_answer(answer, profile), is_new=False)
            if answer.evidence.stop_reason == "running":
                say("its search is still at work, or was cut off: autotune status says which")


def export(
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORM",
            help="hf (JSON for HfArgumentParser), hf-flags, lightning (YAML for LightningCLI), accelerate (YAML), "
            "deepspeed (JSON), torch (Python; of a script, the lines to paste), env (a file to source).",
        ),
    ],
    answer: Annotated[Path, typer.Argument(help="An answer.", metavar="[PROFILE]")] = Path("best.json"),
    named: Annotated[Path | None, typer.Option("--profile", hidden=True, help="The same.")] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="A new file.", show_default="standard output")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print text, mapped and unmapped knobs as JSON.")] = False,
) -> None:
    """Print what an answer changes in another tool's format, and once what it cannot express.

    That is in comments of the text, or on standard error where the format has none (hf, hf-flags).
    """
    with reported_errors(as_json=json_output):
        if out is not None:
            require_new(out)
        exported = _export(named or answer, to)
        text = exported.to_json() if json_output else exported.text
        if out is not None:
            write_output(out, text)
        elif json_output:
            print_json(text)
        else:
            print_plain(text)
        for line in () if json_output else exported.aside:
            say(line)


def _export(answer: Path, to: str) -> Export:
    """Return an answer in another form; say what holds for any of them."""
    from autotune.emit.export import export_profile, find_exporter
    from autotune.machine.hardware import read_hardware
    from autotune.records.profile import Profile

    find_exporter(to)  # before the answer is read
    profile, machine = Profile.load(answer), read_hardware()
    exported = export_profile(profile, to, found=machine.host_allocators)
    if machine.fingerprint != profile.hardware.fingerprint:
        warn("it was measured on another machine than this one: how much faster it is here, nobody has measured")
    own = profile.hardware.preloaded_malloc
    if own is not None and profile.config.host_allocator != "default":
        warn(f"take {printable(own)} out of your own LD_PRELOAD: it was replaced when this was measured")
    return exported


def report(
    answer: Annotated[
        Path | None, typer.Argument(help="An answer, or a search's folder.", metavar="[PROFILE | SEARCH]")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Where the page goes [default: report.html, or plots.html]"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report of this target.")] = False,
    price: Annotated[
        float | None,
        typer.Option(metavar="PER_HOUR", help="Of the machine: the page has what is saved in money too."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Write no page, print the same as text.")] = False,
    plots: Annotated[
        bool, typer.Option("--plots", help="Write Optuna's plots instead; needs the extra plots.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the page's path as JSON.")] = False,
) -> None:
    """Write a search as one HTML page that needs no network: of best.json, else of this folder's newest one."""
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.report import find_search, print_report
        from autotune.errors import UsageError

        if price is not None and not 0 <= price < math.inf:
            raise UsageError(f"--price {price:g} is no price", hint="give what an hour of the machine costs: 2.50")
        place = find_search(answer, Path.cwd())
        if text:
            print_report(place)
            return
        page = _write_plots(place, out, force=force) if plots else _write_report(place, out, force=force, price=price)
        if json_output:
            print_json(json.dumps({"report": str(page)}))
        else:
            say(f"{page} written")
        if open_page:
            webbrowser.open(page.resolve().as_uri())


def _write_report(place: SearchFolder, out: Path | None, *, force: bool, price: float | None) -> Path:
    from autotune.cli.pages.report import USUAL_PAGE, is_own_page, render_search
    from autotune.records.profile import Profile

    page = out or USUAL_PAGE
    require_new(page, force=force or is_own_page(page, Profile.load(place.profile).target.label))
    write_output(page, render_search(place.path, price=price))
    return page


def _write_plots(place: SearchFolder, out: Path | None, *, force: bool) -> Path:
    from autotune.search.store.plots import render_plots

    page = out or Path("plots.html")
    require_new(page, force=force)
    write_output(page, render_plots(place.database))
    return page


def explain(
    answer: Annotated[
        Path | None, typer.Argument(help="An answer, or a search's folder.", metavar="[PROFILE | SEARCH]")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(metavar="TIME", help="For launches of what is not known well; 0: none, only what is known."),
    ] = "5m",
    json_output: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Say what each change of an answer is worth, what else was tried, and what is left to you.

    A change's worth is the answer over the answer without it. What the search has measured well enough is taken from
    there; the rest is launched, in pairs of fresh processes, and kept beside the search.
    """
    with reported_errors(as_json=json_output):
        from autotune.cli.pages.explanation import print_explanation
        from autotune.cli.pages.report import find_search
        from autotune.cli.stopping import stop_on_signals
        from autotune.cli.view.search import search_view
        from autotune.explain.run import explain as explain_known
        from autotune.explain.run import run_explain
        from autotune.units import parse_duration

        place = find_search(answer, Path.cwd())
        seconds = 0.0 if budget == "0" else parse_duration(budget, name="--budget")
        with stop_on_signals() as stop:
            if seconds:
                with search_view(seconds) as reporter:
                    found = run_explain(place, seconds, reporter=reporter, should_stop=stop)
            else:
                found = explain_known(place)
        if json_output:
            print_json(found.to_json())
        else:
            print_explanation(found)
        stop.exit_if_set()


def require_new(out: Path, *, force: bool | None = None) -> None:
    """Make sure that a file may be written.

    Args:
        out: the file.
        force: it may replace another; None where there is no such option.

    Raises:
        UsageError: it exists, or is no file.
    """
    from autotune.errors import UsageError
    from autotune.search.store.folder import require_file

    require_file(out)
    if out.exists() and not force:
        more = "" if force is None else ", or pass --force to replace it"
        raise UsageError(f"{out} exists", hint=f"choose another --out{more}")


def write_output(out: Path, text: str) -> None:
    """Write a file.

    Raises:
        MachineError: it cannot be written.
    """
    from autotune.errors import MachineError
    from autotune.records.codec import write_text

    try:
        write_text(out, text)
    except OSError as error:
        raise MachineError(f"{out}: {error.strerror}", hint="choose a folder that can be written") from None
