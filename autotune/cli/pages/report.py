"""The page of a search: which search is meant, and where its page goes."""

from __future__ import annotations

from pathlib import Path

from autotune.errors import AutotuneError, UsageError
from autotune.records.explanation import Explanation
from autotune.records.profile import Profile
from autotune.search.store.folder import SearchFolder, find_search_of, list_searches

USUAL_ANSWER = Path("best.json")


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
    from autotune.explain.run import explain

    try:
        place = find_search_of(profile, Path.cwd()) or find_search_of(profile, path.resolve().parent)
        return None if place is None else explain(place, profile)
    except AutotuneError:
        return None  # the answer is shown without it
