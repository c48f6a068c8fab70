"""What workers write for each other: readings in one Optuna study, leases in another beside it.

    autotune-1f2e3d4c5b6a          finished launches, each a trial with its log speed-up: nothing but evidence
    autotune-1f2e3d4c5b6a-leases   who is here, what runs where, who holds the finals: a running trial is a lease

A lease belongs to a worker that is here, and lasts as long as it is: it counts up (its beat), and whoever sees the
same figure for too long, by its own clock, takes it for dead. No two clocks are compared, and a database that was away
for all makes nobody dead. Of two leases of one thing the one with the lower number holds: Optuna gives the numbers in
the order in which leases can be seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from optuna.exceptions import DuplicatedStudyError, UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

BEAT_SECONDS = 10.0
"""Between two beats of a worker."""

GRACE_SECONDS = 60.0
"""A worker whose beat stood still for longer is dead: a machine that swaps may miss some."""

_LONGEST_TEXT = 300
_WORKER, _LAUNCH, _FINALS = "worker", "launch", "finals"


@dataclass(frozen=True)
class Place:
    """A worker, and where its answer is.

    Attributes:
        worker: by what it is known, the same when its search is resumed.
        host: its machine.
        out: file of its answer.
    """

    worker: str
    host: str
    out: str


@dataclass(frozen=True)
class Answer:
    """What another worker's search came to.

    Attributes:
        place: whose it is.
        low: the least that it claims, as a ratio.
    """

    place: Place
    low: float


@dataclass(frozen=True)
class View:
    """What a worker sees of the others.

    Attributes:
        readings: finished launches of all workers, its own among them.
        running: params of what others run now, and of what nobody is to run any more.
        inherited: params of a launch that a dead worker left to this one; None without one.
        holder: where the finals are held, if that is elsewhere.
        answers: that were proven since this worker joined.
        others: workers that are here beside it, and have not ended their search.
    """

    readings: tuple[FrozenTrial, ...] = ()
    running: tuple[Mapping[str, Any], ...] = ()
    inherited: Mapping[str, Any] | None = None
    holder: Place | None = None
    answers: tuple[Answer, ...] = ()
    others: int = 0


@dataclass
class _Pulse:
    """A beat as it was last seen.

    Attributes:
        beat: its figure.
        since: when that was seen first.
        last: when it was seen last.
    """

    beat: int
    since: float
    last: float


@dataclass
class Board:
    """One worker's side of a shared study. Every method talks to the database, and may raise whatever it raises.

    Attributes:
        storage: of the database.
        name: of the study.
        place: of this worker.
        grace_seconds: after which a beat that stands still means death.
        clock: of this machine, in seconds; never goes back.
    """

    storage: BaseStorage
    name: str
    place: Place
    grace_seconds: float = GRACE_SECONDS
    clock: Callable[[], float] = time.monotonic

    _own: int | None = field(default=None, init=False)
    _has_left: bool = field(default=False, init=False)
    _beat: int = field(default=0, init=False)
    _held: dict[str, int] = field(default_factory=dict, init=False)
    _pulses: dict[int, _Pulse] = field(default_factory=dict, init=False)
    _ended_before: frozenset[int] = field(default=frozenset(), init=False)

    def __post_init__(self) -> None:
        self._readings = self._open_study(self.name)
        self._leases = self._open_study(f"{self.name}-leases")
        self._ended_before = frozenset(one.number for one in self._list_leases() if one.state.is_finished())
        self.beat()

    def _open_study(self, name: str) -> int:
        try:
            return self.storage.create_new_study([StudyDirection.MAXIMIZE], name)
        except DuplicatedStudyError:
            return self.storage.get_study_id_from_name(name)

    def beat(self) -> None:
        """Show that this worker is alive, and see who else is; one that was taken for dead joins anew."""
        if self._has_left:
            return
        self._beat += 1
        try:
            if self._own is not None:
                self.storage.set_trial_user_attr(self._own, "beat", self._beat)
        except UpdateFinishedTrialError:
            self._own = None
            self._held.clear()  # others have them
        if self._own is None:
            place = {"worker": self.place.worker, "host": self.place.host, "out": self.place.out}
            self._own = self._open_lease({"role": _WORKER, "beat": self._beat, **place})
        self._find_live(self._list_leases())

    def look(self) -> View:
        """Return what there is, the dead told from the living, and take over what one of them left."""
        leases = self._list_leases()
        live = self._find_live(leases)
        launches = [one for one in leases if one.user_attrs["role"] == _LAUNCH]
        running = [one for one in launches if one.state is TrialState.RUNNING]
        readings = tuple(self.storage.get_all_trials(self._readings, deepcopy=False))
        own = [one for one in running if one.user_attrs["session"] == self._own]
        for stray in own:  # of a call that was given up and came through all the same
            if stray._trial_id not in self._held.values():
                self._end(stray._trial_id, TrialState.FAIL)
        others = [one for one in running if one.user_attrs["session"] in live and one not in own]
        left = [one for one in running if one.user_attrs["session"] not in live and one not in own]
        inherited = self._inherit(left, launches, readings)
        condemned = [
            one
            for one in launches
            if one.user_attrs["takes_over"] is not None and (one in left or one.user_attrs.get("died"))
        ]
        return View(
            readings=readings,
            running=tuple(one.user_attrs["params"] for one in (*others, *condemned)),
            inherited=inherited,
            holder=self._find_holder(leases, live),
            answers=tuple(self._list_answers(leases)),
            others=sum(one._trial_id in live - {self._own} and not one.user_attrs.get("ended") for one in leases),
        )

    def claim(self, params: Mapping[str, Any], *, takes_over: int | None = None) -> bool:
        """Return whether a launch is this worker's: nobody else has begun it."""
        attributes = {"role": _LAUNCH, "session": self._own, "params": dict(params), "takes_over": takes_over}
        trial = self._open_lease(attributes)
        leases = self._list_leases()
        number = next(one.number for one in leases if one._trial_id == trial)
        live = {one._trial_id for one in leases if _is_running(one, _WORKER)}
        rivals = [
            one
            for one in leases
            if one.number < number and one.user_attrs["role"] == _LAUNCH and one.user_attrs["session"] != self._own
            if (
                _is_running(one, _LAUNCH)
                and one.user_attrs["session"] in live
                and one.user_attrs["params"] == attributes["params"]
            )
            or (takes_over is not None and one.user_attrs["takes_over"] == takes_over)
        ]
        if rivals:
            self._end(trial, TrialState.FAIL)
            return False
        self._held[_make_key(params)] = trial
        return True

    def release(self, params: Mapping[str, Any], *, is_finished: bool = False) -> None:
        """End the lease of a launch, if this worker has one."""
        trial = self._held.pop(_make_key(params), None)
        if trial is not None:
            self._end(trial, TrialState.COMPLETE if is_finished else TrialState.FAIL)

    def post(self, readings: Iterable[FrozenTrial]) -> None:
        """Add finished launches of this worker, those left out that are there already."""
        known = {
            one.user_attrs["number"]
            for one in self.storage.get_all_trials(self._readings, deepcopy=False)
            if one.user_attrs["worker"] == self.place.worker
        }
        for one in readings:
            if one.user_attrs["number"] not in known:
                self.storage.create_new_trial(self._readings, one)

    def take_finals(self) -> Place | None:
        """Take the finals, unless another worker that is here has them; return where they are held then."""
        leases = self._list_leases()
        own = [one for one in leases if _is_running(one, _FINALS) and one.user_attrs["session"] == self._own]
        ticket = own[0]._trial_id if own else self._open_lease({"role": _FINALS, "session": self._own})
        leases = self._list_leases()
        holder = self._find_holder(leases, self._find_live(leases))
        if holder is not None:
            self._end(ticket, TrialState.FAIL)
        return holder

    def end_search(self) -> None:
        """Show that this worker launches nothing more."""
        if self._own is None:
            return
        try:
            self.storage.set_trial_user_attr(self._own, "ended", True)
        except UpdateFinishedTrialError:  # taken for dead
            pass

    def leave(self, low: float | None) -> None:
        """End all leases of this worker.

        Args:
            low: the least speed-up that its answer claims; None where it claims nothing.
        """
        for trial in self._held.values():
            self._end(trial, TrialState.FAIL)
        self._held.clear()
        own, self._has_left = self._own, True
        if own is None:
            return
        if low is not None:
            self.storage.set_trial_user_attr(own, "proven", low)
        for one in self._list_leases():
            if _is_running(one, _FINALS) and one.user_attrs["session"] == own:
                self._end(one._trial_id, TrialState.COMPLETE)
        self._end(own, TrialState.COMPLETE)

    def forget_pulses(self) -> None:
        """Count nobody's silence any more: the database was away, for the others perhaps as well."""
        self._pulses.clear()

    def _list_leases(self) -> list[FrozenTrial]:
        return [one for one in self.storage.get_all_trials(self._leases, deepcopy=False) if one.user_attrs.get("role")]

    def _open_lease(self, attributes: Mapping[str, Any]) -> int:
        lease = create_trial(state=TrialState.RUNNING, user_attrs=dict(attributes))
        return self.storage.create_new_trial(self._leases, lease)

    def _end(self, trial: int, state: TrialState) -> None:
        try:
            self.storage.set_trial_state_values(trial, state, [0.0] if state is TrialState.COMPLETE else None)
        except UpdateFinishedTrialError:  # another has ended it
            pass

    def _find_live(self, leases: Iterable[FrozenTrial]) -> frozenset[int]:
        """Return who is here; whose beat has stood still for too long is not any more."""
        live, now = set(), self.clock()
        for one in leases:
            if not _is_running(one, _WORKER):
                continue
            trial, beat = one._trial_id, int(one.user_attrs["beat"])
            pulse = self._pulses.get(trial)
            # What was not looked at for a while may have stood still, or not.
            if pulse is None or pulse.beat != beat or now - pulse.last > self.grace_seconds:
                pulse = self._pulses[trial] = _Pulse(beat, now, now)
            pulse.last = now
            if trial != self._own and now - pulse.since > self.grace_seconds:
                self._end(trial, TrialState.FAIL)
            else:
                live.add(trial)
        return frozenset(live)

    def _inherit(
        self, left: Iterable[FrozenTrial], launches: Iterable[FrozenTrial], readings: Iterable[FrozenTrial]
    ) -> Mapping[str, Any] | None:
        """Take over one launch of the dead, if none is held here; one that two have died of is nobody's."""
        taken = {one.user_attrs["takes_over"] for one in launches}
        read = [one.params for one in readings]
        inherited = None
        for one in left:
            params = one.user_attrs["params"]
            if one.user_attrs["takes_over"] is None and one.number not in taken and params not in read:
                if self._held:
                    continue  # for the next look, or for another worker
                if self.claim(params, takes_over=one.number):
                    inherited = params
            self._bury(one)
        return inherited

    def _bury(self, lease: FrozenTrial) -> None:
        try:
            self.storage.set_trial_user_attr(lease._trial_id, "died", True)
        except UpdateFinishedTrialError:
            return
        self._end(lease._trial_id, TrialState.FAIL)

    def _find_holder(self, leases: Iterable[FrozenTrial], live: frozenset[int]) -> Place | None:
        """Return where the finals are held, if that is elsewhere."""
        places = {one._trial_id: one for one in leases if one.user_attrs["role"] == _WORKER}
        holders = [
            one.user_attrs["session"]
            for one in leases
            if _is_running(one, _FINALS) and one.user_attrs["session"] in live
        ]
        return None if not holders or holders[0] == self._own else _read_place(places[holders[0]])

    def _list_answers(self, leases: Iterable[FrozenTrial]) -> Iterable[Answer]:
        for one in leases:
            low = one.user_attrs.get("proven")
            if one.state is TrialState.COMPLETE and low is not None and one.number not in self._ended_before:
                yield Answer(_read_place(one), float(low))


def _is_running(lease: FrozenTrial, role: str) -> bool:
    return lease.state is TrialState.RUNNING and lease.user_attrs["role"] == role


def _make_key(params: Mapping[str, Any]) -> str:
    return json.dumps(params, sort_keys=True)


def _read_place(lease: FrozenTrial) -> Place:
    return Place(*(_clean(lease.user_attrs[name]) for name in ("worker", "host", "out")))


def _clean(text: object) -> str:
    """Return somebody else's text as it may be shown on a terminal."""
    return "".join(one for one in str(text) if one.isprintable())[:_LONGEST_TEXT]
