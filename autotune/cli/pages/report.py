"""The page of a search: which search is meant, and where its page goes."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from autotune.errors import AutotuneError, UsageError
from autotune.records.explanation import Explanation
from autotune.records.profile import Profile
from autotune.records.reading import read_bytes
from autotune.records.search import SearchState
from autotune.search.store.folder import SearchFolder, find_search_of, list_searches

USUAL_ANSWER = Path("best.json")
USUAL_PAGE = Path("report.html")

_GENERATOR = '<meta name="generator" content="autotune report">'
_OWNER = re.compile(r'<meta name="autotune-target" content="([^"]*)">')
_HEAD_BYTES = 8192


def find_search(named: Path | None, folder: Path) -> SearchFolder:
    """Return the search that is meant.

    Args:
        named: an answer, or a search's folder; None for `best.json` where that is a search's, else the newest with one.
        folder: the working folder.

    Raises:
        AutotuneError: the answer cannot be read.
        UsageError: it is no answer of a search in this folder, or no search has one.
    """
    if named is not None and named.is_dir():
        place = SearchFolder(named.resolve())
        if not place.state_file.exists() or not place.profile.exists():
            raise UsageError(f"{named} is no search with an answer", hint="give a folder of .autotune, or a best.json")
        return place
    if named is not None:
        place_of_it = _find_by_answer(named, folder)
        if place_of_it is None:
            raise UsageError(
                f"no search in {folder} has this answer: {named}",
                hint="it was changed since, or its search is gone or elsewhere: run it there, or name its folder",
            )
        return place_of_it
    usual = _find_by_answer(USUAL_ANSWER, folder) if (folder / USUAL_ANSWER).exists() else None
    found = usual or next((search for search in list_searches(folder) if search.profile.exists()), None)
    if found is None:
        raise UsageError("no search with an answer was made in this folder", hint="run autotune search first")
    return found


def _find_by_answer(named: Path, folder: Path) -> SearchFolder | None:
    profile = Profile.load(folder / named)
    beside = (folder / named).resolve().parent
    return find_search_of(profile, folder) or (find_search_of(profile, beside) if beside != folder else None)


def explain_answer(profile: Profile, path: Path) -> Explanation | None:
    """Return what the changes of an answer are worth, as far as its search has measured it; None without that search.

    Args:
        profile: the answer.
        path: where it is; its search is looked for in the working folder, and beside it.
    """
    try:
        place = find_search_of(profile, Path.cwd()) or find_search_of(profile, path.resolve().parent)
    except AutotuneError:
        return None  # the answer is shown without it
    return None if place is None else read_explanation(place, profile)


def read_explanation(place: SearchFolder, profile: Profile) -> Explanation | None:
    """Return what a search's launches say of its answer; None where its files are damaged, or make no sense."""
    from autotune.explain.run import explain

    try:
        return explain(place, profile)
    except (AutotuneError, ArithmeticError, ValueError):
        return None


def render_search(path: Path, explanation: Explanation | None = None, *, price: float | None = None) -> str:
    """Return the page of a search.

    Args:
        path: its folder.
        explanation: of its answer; None to make it.
        price: of an hour of the machine; None where money is not asked for.

    Raises:
        AutotuneError: the search's files are damaged.
        UsageError: the search has no probe report.
    """
    from autotune.emit.report import Origin, render_report

    place = SearchFolder(path)
    probe = place.read_probe()
    if probe is None:
        raise UsageError(f"{path} holds no probe report", hint="run autotune search again")
    profile = Profile.load(place.profile)
    explanation = explanation or read_explanation(place, profile)
    origin = Origin(state=_read_state(place), began=place.began, folder=os.path.relpath(path), price=price)
    return render_report(profile, probe, place.read_all_trials(), explanation, origin)


def _read_state(place: SearchFolder) -> SearchState | None:
    try:
        return place.read_state()
    except AutotuneError:
        return None


def is_own_page(path: Path, label: str) -> bool:
    """Return whether a file is a report of a search of a target, which may be made anew."""
    try:
        head = read_bytes(path, max_bytes=_HEAD_BYTES).decode("utf-8", "replace")
    except OSError:
        return False
    named = _OWNER.search(head)
    return _GENERATOR in head and named is not None and html.unescape(named[1]) == label


def write_page_beside(profile: Profile, answer: Path, *, force: bool) -> tuple[Explanation | None, str]:
    """Write the page of a search that has just ended beside its answer; return what explains it, and what to tell.

    A file of somebody else's is left alone. A search does not fail for its page.

    Args:
        profile: the answer.
        answer: where it is.
        force: replace any file.
    """
    from autotune.records.codec import write_text

    page = answer.with_name(USUAL_PAGE.name)
    if page.exists() and not force and not is_own_page(page, profile.target.label):
        return explain_answer(profile, answer), f"{page} is left alone, it is no report of this target"
    try:
        place = find_search_of(profile, Path.cwd())
        if place is None:
            return None, ""
        explanation = read_explanation(place, profile)
        write_text(page, render_search(place.path, explanation))
    except (AutotuneError, OSError) as error:
        return None, f"no report was written: {error}"
    return explanation, f"{page} written: the whole of it as a page"


def print_report(place: SearchFolder) -> None:
    """Print a search's answer and what explains it on stdout."""
    from autotune.cli.pages.answer import print_answer
    from autotune.cli.pages.explanation import print_explanation
    from autotune.explain.run import explain

    profile = Profile.load(place.profile)
    explanation = explain(place, profile)
    print_answer(profile, Path(os.path.relpath(place.profile)), explanation, is_new=False)
    print()
    print_explanation(explanation)
