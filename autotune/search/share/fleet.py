"""One search as a worker of a shared study: what it gives to the others, and what it takes from them.

    given    each finished launch: its settings and its score over this machine's own baseline
    taken    the same of the others, as evidence for what to try; what a dead worker left; the turn to hold finals

No claim rests on it: a speed-up is proven by this machine's own pairs. The trials' own files stay the truth, and what
could not be sent while the database was away is sent when it is back.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import statistics
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.errors import AutotuneError, MachineError
from autotune.format import count
from autotune.records.config import TrainConfig, get_knob
from autotune.records.profile import Profile
from autotune.records.trial import TrialStatus
from autotune.search.explore.study import SPEED, make_distribution
from autotune.search.launch.suspects import Ended
from autotune.search.problem import SearchProblem
from autotune.search.scores.objective import KEYS, Judged
from autotune.search.share.address import Address, open_storage, read_address
from autotune.search.share.alone import ALONE, Alone, KnowsWorker
from autotune.search.share.board import BEAT_SECONDS, GRACE_SECONDS, Board, Place, View
from autotune.search.share.link import OPENING_SECONDS, PATIENCE_SECONDS, STUCK_SECONDS, AwayError, Link
from autotune.search.share.naming import name_study
from autotune.search.share.shared_study import SharedStudy
from autotune.sentences.objective import describe_least

_ENOUGH_READINGS = 2
"""Of a config, on any machines: what looks best is launched again somewhere until it has so many."""

_MOST_LEADS = 2
"""Of others, that are launched here before finals are held: the best of many readings is lucky."""

_Answer = TypeVar("_Answer")


class Fleet(Alone):
    """A worker's view of the others. What asks the database returns in seconds, whatever becomes of that.

    Args:
        address: of the database.
        beat_seconds: between two signs of life.
        grace_seconds: after which a worker that gave none is dead.
        patience_seconds: that the search waits for the database once.
        stuck_seconds: after which a connection that hangs is given up for another.

    Raises:
        UsageError: there is no such kind of database, or its driver is not installed.
        MachineError: it cannot be reached, refuses, or was made by another Optuna.
    """

    def __init__(
        self,
        address: Address,
        *,
        beat_seconds: float = BEAT_SECONDS,
        grace_seconds: float = GRACE_SECONDS,
        patience_seconds: float = PATIENCE_SECONDS,
        stuck_seconds: float = STUCK_SECONDS,
    ) -> None:
        self._address, self._grace_seconds = address, grace_seconds
        self._place = Place("", "", "")
        self._name = ""
        self._board: Board | None = None
        self._view, self._is_away_told, self._has_finals = View(), False, False
        self._last_holder: Place | None = None
        self._told: Callable[[str], None] = lambda _sentence: None
        self._unsent: dict[int, FrozenTrial] = {}
        self._own: dict[str, list[float]] = {}
        self._keys: dict[int, tuple[TrainConfig, str]] = {}
        self._handed: set[int] = set()
        self._running: list[str] = []
        self._inherited: TrainConfig | None = None
        self._link: Link[BaseStorage] = Link(
            partial(open_storage, address),
            self._beat,
            beat_seconds=beat_seconds,
            patience_seconds=patience_seconds,
            stuck_seconds=stuck_seconds,
        )
        try:
            self._link.call(lambda _storage: None, patience_seconds=OPENING_SECONDS)
        except AwayError as error:
            self._link.close()
            raise _describe_opening(address, error) from None

    def settle(self, folder: KnowsWorker, out: Path) -> None:
        """Say who this worker is, before it joins."""
        self._place = Place(folder.read_worker(), socket.gethostname(), str(out))

    def join(self, problem: SearchProblem, told: Callable[[str], None]) -> None:
        """Join the study of a problem, and say so."""
        self._problem, self._told = problem, told
        self._distributions = {name: make_distribution(values) for name, values in problem.space.choices.items()}
        self._name = name_study(problem)
        self._look()
        if not self._is_away_told:
            others = count(self._view.others, "other worker")
            told(f"shares the study {self._name} at {self._address.shown}: {others}, {self._count_readings()}")

    def open_study(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """Return what makes the study that proposes: ours, which the others' readings go into."""
        return partial(SharedStudy, self)

    # ---- what the others have

    @property
    def readings(self) -> Sequence[FrozenTrial]:
        """Finished launches of all workers, as last seen."""
        return self._view.readings

    @property
    def explored(self) -> int:
        """Launches of other workers that count as evidence."""
        return len(self._list_foreign())

    @property
    def has_finals_elsewhere(self) -> bool:
        """Another worker holds the finals."""
        return self._view.holder is not None

    def list_taken(self) -> Container[str]:
        """Return the keys of the configs that others run, or have run; without the one to be read once more here."""
        again = self._find_lead()
        finished = {self._name_config(one)[1] for one in self._list_foreign()}
        return finished.union(self._running) - {one.key for one in (again, self._inherited) if one is not None}

    def list_ended(self) -> list[Ended]:
        """Return how the launches of others have ended: what makes them fail there is not tried here."""
        statuses = {one.value: one for one in TrialStatus}
        return [
            (self._name_config(one)[0], statuses[status])
            for one in self._list_foreign()
            if (status := one.user_attrs.get("status")) in statuses
        ]

    def list_new_readings(self) -> list[FrozenTrial]:
        """Return the readings of others that were not handed out yet."""
        found = [one for one in self._list_foreign() if one.number not in self._handed]
        self._handed |= {one.number for one in found}
        return found

    def find_wanted(self, closed: Container[object]) -> TrainConfig | None:
        """Return what is to be launched here before anything new: what a dead worker left, then what leads elsewhere.

        Args:
            closed: configs that may not be launched here.
        """
        inherited = self._inherited
        if inherited is not None and inherited in closed:
            self.drop(inherited)
        found = (one for one in (self._inherited, self._find_lead()) if one is not None and one not in closed)
        return next(found, None)

    def list_leads(self) -> list[TrainConfig]:
        """Return what others have read to be faster than all that was launched here, the fastest first."""
        policy = self._problem.policy
        bar = max((statistics.fmean(values) for values in self._own.values() if values), default=0.0)
        means = self._list_means()
        ahead = [one for one in means if one[0] > max(0.0, bar) + policy.least_gain and one[1].key not in self._own]
        return [config for _, config, _ in sorted(ahead, key=lambda one: -one[0])[:_MOST_LEADS]]

    def _find_lead(self) -> TrainConfig | None:
        """Return what was read to be the fastest of all, by others and once only; None where it is something else."""
        best = max(self._list_means(), key=lambda one: one[0], default=None)
        if best is None or best[0] <= self._problem.policy.least_gain:
            return None
        mean, config, readings = best
        own = [statistics.fmean(values) for key, values in self._own.items() if values and key != config.key]
        is_settled = config.key in self._own or readings >= _ENOUGH_READINGS or config.key in self._running
        return None if is_settled or mean <= max(own, default=-math.inf) else config

    def _list_means(self) -> list[tuple[float, TrainConfig, int]]:
        """Return each config that others have timed and found feasible: its mean, and how many readings that has."""
        values: dict[str, list[float]] = {}
        configs: dict[str, TrainConfig] = {}
        failed: set[str] = set()
        for one in self._list_foreign():
            config, key = self._name_config(one)
            if self._is_too_slow(one.user_attrs.get(SPEED)):
                continue
            if one.state is TrialState.COMPLETE and one.value is not None:
                values.setdefault(key, []).append(one.value)
                configs[key] = config
            else:
                failed.add(key)
        return [
            (statistics.fmean([*read, *self._own.get(key, ())]), configs[key], len(read))
            for key, read in values.items()
            if key not in failed
        ]

    def _is_too_slow(self, speed: float | None) -> bool:
        """Return whether what saves memory does so at too high a price; None where speed is what counts."""
        return speed is not None and speed < self._problem.policy.least_speed

    def _list_foreign(self) -> list[FrozenTrial]:
        foreign = (one for one in self._view.readings if one.user_attrs["worker"] != self._place.worker)
        return [one for one in foreign if self._is_known(one.params)]

    def _name_config(self, reading: FrozenTrial) -> tuple[TrainConfig, str]:
        found = self._keys.get(reading.number)
        if found is None:
            config = self._complete(reading.params)
            found = self._keys[reading.number] = (config, config.key)
        return found

    def _count_readings(self) -> str:
        return count(len(self._list_foreign()), "reading")

    # ---- what is given to them

    def claim(self, config: TrainConfig) -> bool:
        """Return whether a config may be launched here: it was before, is inherited, or nobody else has begun it."""
        is_known = config.key in self._own or config == self._problem.baseline
        if is_known or (self._inherited is not None and config == self._inherited):
            return True
        params = self._encode(config)
        return self._ask(lambda board: board.claim(params), True)

    def keep(self, judged: Judged, value: float | None, speed: float | None = None) -> None:
        """Keep a finished launch to be sent; the baseline's own are everybody's own anchor.

        Args:
            judged: the launch.
            value: its score; None where it was not timed.
            speed: its log speed-up, where the score is another figure.
        """
        if judged.config == self._problem.baseline:
            return
        is_evidence = value is not None and judged.score.feasible
        leads = is_evidence and not self._is_too_slow(speed)
        self._own.setdefault(judged.key, []).extend([value] if value is not None and leads else [])
        number = judged.result.spec.number
        reading = create_trial(
            state=TrialState.COMPLETE if is_evidence else TrialState.PRUNED,
            value=value if is_evidence else None,
            params=self._encode(judged.config),
            distributions=self._distributions,
            user_attrs={
                "worker": self._place.worker,
                "number": number,
                "status": judged.score.status.value,
                **({} if speed is None else {SPEED: speed}),
            },
        )
        for name in KEYS:
            reading.set_constraint(name, judged.score.constraints[name])
        self._unsent[number] = reading

    def finish(self, config: TrainConfig) -> None:
        """Send what is kept, and end the lease of a launch that was run."""
        self._forget_inherited(config)
        sent, params = dict(self._unsent), self._encode(config)

        def send(board: Board) -> bool:
            board.post(sent.values())
            board.release(params, is_finished=True)
            return True

        self._forget_sent(sent, self._ask(send, False))

    def drop(self, config: TrainConfig) -> None:
        """Give back a launch that was not finished, if it is this worker's."""
        self._forget_inherited(config)
        params = self._encode(config)
        self._ask(lambda board: board.release(params), None)

    def _forget_inherited(self, config: TrainConfig) -> None:
        if config == self._inherited:
            self._inherited = None

    # ---- the finals and the answer

    def take_finals(self) -> bool:
        """Return whether the finals are held here from now on: nobody else has them, or nobody can be asked."""
        if self.is_answered():
            return False
        holder = self._ask(Board.take_finals, None)
        self._has_finals = holder is None
        if holder is not None:
            self._view = dataclasses.replace(self._view, holder=holder)
            self._last_holder = holder
        return self._has_finals

    def is_answered(self) -> bool:
        """Return whether another worker has proven the answer since this one joined, which holds no finals."""
        self._look()
        return bool(self._view.answers) and not self._has_finals

    def end_search(self, *, held_finals: bool) -> str:
        """Tell the others that nothing more is launched here, and return where the answer is, as `describe_answer`.

        Args:
            held_finals: there were finals here; who had nothing to prove leaves them to the others.
        """
        self._has_finals = self._has_finals and held_finals
        self._ask(Board.end_search, None)
        self._look()
        return self.describe_answer()

    def describe_answer(self) -> str:
        """Return where the answer is, if that is elsewhere; empty where it is not."""
        if self._has_finals:
            return ""
        if self._view.answers:
            best = max(self._view.answers, key=lambda one: one.low)
            least = describe_least(self._problem.objective, best.low)
            return f"proven on {best.place.host}, {least}: the answer is there, in {best.place.out}"
        holder, last = self._view.holder, self._last_holder
        if holder is None and last is not None:
            return f"{last.host} held the finals and proved nothing: what it has found is there, in {last.out}"
        if holder is not None:
            return f"the proof runs on {holder.host}: the answer will be there, in {holder.out}"
        if not self._view.others:  # one that is between two launches runs nothing, and searches all the same
            return ""
        others = count(self._view.others, "other worker still searches", "other workers still search")
        return f"{others} this study: an answer may yet come from there"

    def sign(self, profile: Profile) -> Profile:
        """Return an answer that leaves open what is proven elsewhere."""
        where = self.describe_answer()
        if not where or profile.evidence.pairs:
            return profile
        candidate = profile.candidate and profile.candidate.replace(reason=where)
        return profile.replace(verdict="inconclusive", candidate=candidate)

    def leave(self, profile: Profile | None) -> None:
        """Leave the study; a search that was proven here is the answer of all."""
        low = None
        if profile is not None and profile.verdict == "improved" and profile.speedup is not None:
            low = profile.speedup.low if profile.memory_ratio is None else 1 / profile.memory_ratio.high
        if self._name:
            self._look()
            self._ask(lambda board: board.leave(low), None)
            self._name = ""
            if self._unsent:
                unsent = count(len(self._unsent), "reading was", "readings were")
                self._told(f"{unsent} not sent to {self._address.shown}: --resume with the same --storage sends them")
        self._link.close()

    # ---- the database

    def _look(self) -> None:
        """Send what is kept, and see what the others have done; nothing but their readings counts while it is away."""
        sent = dict(self._unsent)

        def exchange(board: Board) -> View:
            board.post(sent.values())
            return board.look()

        view = self._ask(exchange, None)
        self._forget_sent(sent, view is not None)
        self._view = view or View(readings=self._view.readings, answers=self._view.answers)
        self._last_holder = self._view.holder or self._last_holder
        self._running = [self._complete(one).key for one in self._view.running if self._is_known(one)]
        inherited = self._view.inherited
        if inherited is not None and self._is_known(inherited):
            self._inherited = self._complete(inherited)

    def _forget_sent(self, sent: Mapping[int, FrozenTrial], was_sent: bool) -> None:
        if was_sent:
            self._unsent = {number: one for number, one in self._unsent.items() if number not in sent}

    def _ask(self, do: Callable[[Board], _Answer], otherwise: _Answer) -> _Answer:
        self._tell_change()
        try:
            return self._link.call(lambda storage: do(self._ready(storage)))
        except AwayError:
            self._tell_change()
            return otherwise

    def _tell_change(self) -> None:
        """Say once that the database is away, and once that it is back."""
        reason = self._link.reason
        if reason is not None and not self._is_away_told:
            self._is_away_told = True
            self._told(
                f"{self._address.shown} is away ({self._address.explain(reason)}): the search goes on alone, and joins "
                "the others again when it is back"
            )
        elif reason is None and self._is_away_told:
            self._is_away_told = False
            unsent = count(len(self._unsent), "reading")
            self._told(f"{self._address.shown} is back: the search has joined the others again, with {unsent} for them")

    def _ready(self, storage: BaseStorage) -> Board:
        """Return the board, made at the first call; in the thread of the link, which may be another one by now."""
        if self._board is None:
            self._board = Board(storage, self._name, self._place, grace_seconds=self._grace_seconds)
        self._board.storage = storage
        return self._board

    def _beat(self, storage: BaseStorage, is_back: bool) -> None:
        """Show that this worker is alive; in the thread of the link."""
        if not self._name:
            return
        board = self._ready(storage)
        if is_back:
            board.forget_pulses()
        board.beat()

    # ---- configs as Optuna has them

    def _encode(self, config: TrainConfig) -> dict[str, Any]:
        return {name: get_knob(config, name) for name in self._distributions}

    def _is_known(self, params: Mapping[str, Any]) -> bool:
        """Return whether params that stand in the database are of this search's space."""
        choices = self._problem.space.choices
        return params.keys() == choices.keys() and all(value in choices[name] for name, value in params.items())

    def _complete(self, params: Mapping[str, Any]) -> TrainConfig:
        return self._problem.space.complete(dict(params))


def _describe_opening(address: Address, error: AwayError) -> AutotuneError:
    cause = error.__cause__
    if isinstance(cause, AutotuneError):
        return cause
    seconds = f"{OPENING_SECONDS:.0f} s"
    return MachineError(
        f"--storage {address.shown} does not answer within {seconds}",
        hint="check its host and port, or leave --storage out to search alone",
    )


@contextmanager
def open_fleet(url: str | None) -> Iterator[Alone]:
    """Reach the database of a shared study, before anything else is begun; leave the study at the end, whatever it is.

    Args:
        url: of the database; None for a search by itself.

    Raises:
        UsageError: it is no URL of a database, or its driver is not installed.
        MachineError: it cannot be reached, refuses, or was made by another Optuna.
    """
    if url is None:
        yield ALONE
        return
    fleet = Fleet(read_address(url))
    try:
        yield fleet
    finally:
        fleet.leave(None)
