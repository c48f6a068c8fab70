"""What the stages of a search ask about other workers, answered for one that has none."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Any, Protocol

from autotune.records.config import TrainConfig
from autotune.records.profile import Profile
from autotune.search.launch.suspects import Ended
from autotune.search.problem import SearchProblem


class KnowsWorker(Protocol):
    """Where a worker keeps its identity: a `SearchFolder`."""

    def read_worker(self) -> str:
        """Return by what the others know it, the same when its search is resumed."""
        ...


class Alone:
    """A search by itself. Whoever shares a study overrides all of it."""

    @property
    def explored(self) -> int:
        """Launches of other workers that count as evidence."""
        return 0

    @property
    def has_finals_elsewhere(self) -> bool:
        """Another worker holds the finals."""
        return False

    def settle(self, folder: KnowsWorker, out: Path) -> None:
        """Say who this worker is, before it joins.

        Args:
            folder: of its search.
            out: file of its answer.
        """

    def join(self, problem: SearchProblem, told: Callable[[str], None]) -> None:
        """Join the study of a problem.

        Args:
            problem: of the search, past its probe.
            told: hears, in a sentence each, what the user should know.
        """

    def open_study(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the study that proposes."""
        return usual

    def list_taken(self) -> Container[str]:
        """Return the keys of the configs that need not be proposed here: others run them, or have run them."""
        return frozenset()

    def list_ended(self) -> Sequence[Ended]:
        """Return how the launches of others have ended: what makes them fail there is not tried here."""
        return ()

    def claim(self, config: TrainConfig) -> bool:
        """Return whether a config may be launched here; False where another worker has just begun it."""
        return True

    def is_answered(self) -> bool:
        """Return whether another worker has proven the answer."""
        return False

    def list_leads(self) -> Sequence[TrainConfig]:
        """Return what others have read to be faster than all that was launched here, the fastest first."""
        return ()

    def take_finals(self) -> bool:
        """Return whether the finals are held here from now on."""
        return True

    def end_search(self, *, held_finals: bool) -> str:
        """Tell the others that nothing more is launched here, and return where the answer is, if that is elsewhere.

        Args:
            held_finals: there were finals here.
        """
        return ""

    def sign(self, profile: Profile) -> Profile:
        """Return an answer that says where the finals are held."""
        return profile

    def leave(self, profile: Profile | None) -> None:
        """Leave the study: everything that was begun here is free.

        Args:
            profile: the answer; None where there is none.
        """


ALONE = Alone()
