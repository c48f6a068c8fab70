"""The exploring stage: propose or launch again, run, judge, until its time is up or nothing is left to find out.

own             the user's presets, then each value of the user's knobs alone: what is taken for the bottleneck
rest            once a change is refused: the fastest that had it, without it
exact           what is exact in the best, alone: once, for it tells what the rest brings, and before a proof, should
                the best not be shown to learn the same
study           what the model of the launches so far takes for the most gain for its time
late            after the first proof: values whose arithmetic was not measured

Every launch is priced first and has to fit what is left once proving the leader is paid for. One that is cut by the end
of its time says so and is priced higher from then on; the stage goes on with what still fits.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from autotune.isolation.runner import KILL_SECONDS
from autotune.records.config import KnobValue, TrainConfig, changed_fields, get_knob, is_user_knob, with_knobs
from autotune.records.objective import Objective
from autotune.records.profile import StopReason
from autotune.records.quality import is_passed
from autotune.records.trial import Rival, TrialResult, TrialStatus
from autotune.search.explore.additive import Prior
from autotune.search.explore.study import Proposal, SpeedFloor
from autotune.search.finals.finalist import LEAST_ROUNDS
from autotune.search.launch.forecast import Forecast
from autotune.search.launch.prices import CACHED_SHARE
from autotune.search.launch.starter import TrialStarter
from autotune.search.launch.suspects import Suspects
from autotune.search.launch.turns import explores_in_turns, has_run_in_turns, is_blamed_on_turns
from autotune.search.log import SearchLog, list_changes
from autotune.search.policy import SearchPolicy
from autotune.search.scores.objective import Judged
from autotune.search.share.alone import ALONE, Alone
from autotune.space import CODE_KNOBS, SearchSpace, classify_changes, needs_compilation, revert_knobs

_SLOW = 1.5
"""Times the fastest way to compile: a slower one is weighed against the best without."""
_OPEN_TURNS = 3
"""Proposals to one that takes what gradients left open for shown; judgement: trainings mostly lose it in noise."""


class Proposals(Protocol):
    """Where configs come from, and who is told what became of them."""

    def open(self, config: TrainConfig) -> Proposal:
        """Return a proposal for a config that is chosen already."""
        ...

    def propose(
        self,
        closed: Container[object],
        together: Iterable[frozenset[str]] = (),
        dear: Mapping[str, float] = MappingProxyType({}),
        lost: Iterable[frozenset[str]] = (),
    ) -> Proposal | None:
        """Return something new that is not closed and does not make changes together that are; None without any.

        What dear changes may bring is weighed against the best without them, their price counted so many times. Lost
        changes cannot be part of the answer: they are closed, and no bar for others.
        """
        ...

    def list_simpler(self, config: TrainConfig) -> list[TrainConfig]:
        """Return a config with one change taken back, for each that may well be worth nothing."""
        ...

    def expect(self, config: TrainConfig) -> float:
        """Return the log speed-up that the changes of a config are taken to bring together."""
        ...

    def close(self, proposal: Proposal, judged: Judged, value: float | None) -> None:
        """Record how a proposal ended: its score, None when it was not timed."""
        ...

    def abandon(self, proposal: Proposal) -> None:
        """Take back a proposal that was not finished."""
        ...

    def list_effects(self) -> Mapping[tuple[str, KnobValue | None], tuple[float, float]]:
        """Return what each change alone is taken to bring: log speed-up and its sd, by knob and value."""
        ...

    def list_estimates(self) -> Mapping[str, float]:
        """Return the log speed-up that each launched config is taken to have by all launches, by its key."""
        ...

    def save(self, attributes: Mapping[str, Any]) -> None:
        """Keep everything that was told, and what came of it all by name."""
        ...


class OpenStudy(Protocol):
    """Makes what proposes configs; arguments as of `Study`."""

    def __call__(
        self,
        path: Path | None,
        space: SearchSpace,
        *,
        seed: int,
        known: Sequence[tuple[Judged, float | None]],
        told: Callable[[str], None],
        prior: Prior,
        price: Callable[[TrainConfig], float],
        floor: SpeedFloor | None,
    ) -> Proposals:
        """Return it."""
        ...


class Tried:
    """The configs that need not be proposed: they ran, are refused, suspected or hopeless, or do not fit the time.

    Args:
        log: knows all that, and is told which ones are hopeless.
        suspects: values that have made launches fail.
        seconds: left for a launch.
        taken: keys of what other workers run, or have run.
        seconds_to_compile: left for a launch that compiles anew.

    Attributes:
        too_dear: something was left out for its price alone.
    """

    def __init__(
        self,
        log: SearchLog,
        suspects: Suspects,
        seconds: float = math.inf,
        taken: Container[str] = frozenset(),
        *,
        seconds_to_compile: float = math.inf,
    ) -> None:
        self._keys, self._taken = {one.key for one in log.judged}, taken
        self._log, self._suspects, self._seconds = log, suspects, seconds
        self._forecast = Forecast(log.problem.report, log.problem.limits)
        dear = find_dear_values(log, min(seconds, seconds_to_compile))
        self._dear = [value for value in dear if value not in suspects.guilty]
        self.too_dear = bool(self._dear)

    @property
    def together(self) -> list[frozenset[str]]:
        """Changes, as `name=value`, that are blocked or too dear wherever all of them are made."""
        blocked = self._suspects.list_blocked(self._log.problem.space.choices)
        return [*blocked, *(frozenset({value}) for value in self._dear)]

    @property
    def compiled_unseen(self) -> list[frozenset[str]]:
        """Changes that were never seen to work, each with each way to compile: such a launch is dear to lose.

        Where that way has worked, those alone that are compiled anew: the others find its code in the cache.
        """
        working = self._suspects.working
        changes = [(name, f"{name}={value}") for name, value in _list_values(self._log.problem.space)]
        ways = [change for name, change in changes if name == "compile_mode"]
        unseen = [(name, change) for name, change in changes if name != "compile_mode" and change not in working]
        return [
            frozenset({way, change})
            for way in ways
            for name, change in unseen
            if way not in working or name in CODE_KNOBS or is_user_knob(name)
        ]

    def __contains__(self, config: object) -> bool:
        if not isinstance(config, TrainConfig):
            return False
        if config.key in self._keys or config.key in self._taken:
            return True
        if self._log.is_refused(config) or self._suspects.is_blocked(config) or self._is_hopeless(config):
            return True
        if self._log.prices.launch_seconds(config) <= self._seconds:
            return False
        self.too_dear = True
        return True

    def _is_hopeless(self, config: TrainConfig) -> bool:
        is_hopeless = self._forecast.is_hopeless(config)
        if is_hopeless:
            self._log.add_hopeless(config)
        return is_hopeless


@dataclass(frozen=True)
class Explorer:
    """What the exploring stage works with.

    Attributes:
        log: of the search.
        starter: starts the trials.
        study: proposes.
        look_at: called with each new best config, which the loss check may refuse.
        kept_seconds: returns what is kept back for proving the leader.
        is_proof_due: returns whether something leads that was not in the finals yet and enough was tried: then it is
            proven while there is time to come back.
        proof_seconds: returns what showing that a config learns the same will take, once it was launched.
        average_proof_seconds: returns the same on average, for what is weighed by its price; None for no difference.
        list_open: returns the changes, each as `name=value`, of which a look has not shown that they learn the same.
        fleet: other workers, where the study is shared.
    """

    log: SearchLog
    starter: TrialStarter
    study: Proposals
    look_at: Callable[[TrainConfig], None] = lambda _config: None
    kept_seconds: Callable[[], float] = lambda: 0.0
    is_proof_due: Callable[[], bool] = lambda: False
    proof_seconds: Callable[[TrainConfig], float] = lambda _config: 0.0
    average_proof_seconds: Callable[[TrainConfig], float] | None = None
    list_open: Callable[[], Sequence[frozenset[str]]] = lambda: ()
    fleet: Alone = ALONE

    def run(self) -> StopReason:
        """Run trials into the log and return why it ended."""
        while True:
            proposal = self._propose()
            if not isinstance(proposal, Proposal):
                return proposal
            if not self.fleet.claim(proposal.config):
                self.study.abandon(proposal)
                continue
            result = self._run(proposal)
            if result.status is TrialStatus.INTERRUPTED:
                self.study.abandon(proposal)
                self.log.add_interrupted(result)
                continue
            self._take(proposal, result)

    def measure(self, config: TrainConfig) -> bool:
        """Launch a config where the time allows it and return whether that was timed."""
        if self.starter.should_stop() or self._price(config) > self._seconds_left() - KILL_SECONDS:
            return False
        proposal = self.study.open(config)
        result = self._run(proposal)
        if result.status is TrialStatus.INTERRUPTED:
            self.study.abandon(proposal)
            self.log.add_interrupted(result)
            return False
        self._take(proposal, result)
        return result.measurement is not None

    def _take(self, proposal: Proposal, result: TrialResult) -> None:
        judged = self.log.add_launch(result)
        self.study.close(proposal, judged, self.log.ranking.score_of(judged))
        self.log.add_estimates(self.study.list_estimates())
        best = self.log.ranking.leader
        if best is not None and best.config == judged.config and best.score > self._policy.least_gain:
            self.look_at(best.config)

    def _propose(self) -> Proposal | StopReason:
        log, left = self.log, self._seconds_left() - KILL_SECONDS
        if self.starter.should_stop():
            return "interrupted"
        if self._is_at_bound():
            return "bound"
        if self.fleet.is_answered():
            return "exhausted"
        again = log.schedule.find_due()
        if again is not None and self._price(again) <= left:
            return self.study.open(again)
        suspects = log.find_suspects(count_overdue=not self.starter.should_stop(), elsewhere=self.fleet.list_ended())
        if left < log.prices.usual_seconds(log.problem.baseline):
            fallback = self._find_fallback(suspects)
            return "budget" if fallback is None else self.study.open(fallback)
        tried = Tried(log, suspects, left, self.fleet.list_taken(), seconds_to_compile=self._seconds_to_compile(left))
        wanted = self._find_own(tried)
        wanted = wanted or self._find_rest(tried, left)
        is_due = wanted is None and self.is_proof_due()
        wanted = wanted or self._prepare_proof(tried, left, is_due=is_due)
        if wanted is None and is_due:
            return "budget"
        proposal = self._choose(tried) if wanted is None else self.study.open(wanted)
        if proposal is not None:
            return proposal
        again = log.schedule.find_due(exhausted=True)
        if again is None:
            return "budget" if tried.too_dear else "exhausted"
        return "budget" if left < self._price(again) else self.study.open(again)

    def _find_own(self, tried: Tried) -> TrainConfig | None:
        """Return the first of the user's own presets that was not tried, then of the values of their knobs."""
        space, most = self.log.problem.space, self._policy.own_share * self.starter.budget.seconds
        presets = [space.keep(preset.apply_to(space.baseline)) for preset in self.log.problem.state.presets]
        alone = list_own(space)
        prices = itertools.accumulate(map(self._price, alone))
        own = [*presets, *(config for config, spent in zip(alone, prices, strict=True) if spent <= most)]
        return next((config for config in own if config not in tried), None)

    def _find_rest(self, tried: Tried, left: float) -> TrainConfig | None:
        """Return the fastest that a refused change was part of, without it; None where that was tried or is nothing.

        What was read of it says little of the rest: what is refused is mostly what most was expected of.
        """
        log, baseline = self.log, self.log.problem.baseline
        measured = log.ranking_of_all.measured if log.refused else []
        changes = {
            one.key: list_changes(one.config, baseline, changed_fields(one.config, baseline)) for one in measured
        }
        for refused in reversed(log.refused):
            with_it = (one for one in measured if refused <= changes[one.key])
            best = max(with_it, key=lambda one: one.score, default=None)
            if best is not None:
                rest = revert_knobs(best.config, baseline, [change.partition("=")[0] for change in refused])
                if rest != baseline and rest not in tried and self._price(rest) <= left:
                    return rest
        return None

    def _simplify_best(self, tried: Tried, left: float) -> TrainConfig | None:
        """Return the best without a change that may be worth nothing; None when it is as simple as it gets.

        One that was launched already is launched again while that may change who is the best.
        """
        ranking = self.log.ranking
        simpler = [] if ranking.leader is None else self.study.list_simpler(ranking.leader.config)
        again = (one.config for one in map(ranking.find, simpler) if one is not None and ranking.may_be_better(one))
        affordable = (config for config in again if self._price(config) <= left)
        return next(itertools.chain((config for config in simpler if config not in tried), affordable), None)

    def _prepare_proof(self, tried: Tried, left: float, *, is_due: bool) -> TrainConfig | None:
        """Return what is to be launched before the best is proven, or where that cannot be any more."""
        is_beyond = self._is_beyond_proof()
        wanted = self._simplify_best(tried, left) if is_due and not is_beyond else None
        if wanted is None and (is_due or is_beyond or not self._has_exact()):
            wanted = self._find_exact_part(tried, left)
        return wanted

    def _has_exact(self) -> bool:
        """Return whether a launch has shown what exact changes bring without any others."""
        baseline, numerics = self.log.problem.baseline, self.log.problem.report.target.numerics
        launched = (classify_changes(one.config, baseline, numerics) for one in self.log.judged)
        return any(set(kinds.values()) == {"exact"} for kinds in launched)

    def _is_beyond_proof(self) -> bool:
        """Return whether there is no time any more to show that the best learns the same."""
        best = self.log.ranking.leader
        if best is None or best.score <= self._policy.least_gain:
            return False
        return self.proof_seconds(best.config) > self.starter.budget.remaining_seconds

    def _find_exact_part(self, tried: Tried, left: float) -> TrainConfig | None:
        """Return what is exact in the best, where that promises something and was not launched by itself yet.

        Its proof needs no loss check: it is there to fall back on where the best does not pass its own.
        """
        log, best = self.log, self.log.ranking.leader
        is_proven = log.finals is not None and log.finals.winner is not None
        if best is None or is_proven or log.problem.objective is Objective.MEMORY:
            return None
        baseline, numerics = log.problem.baseline, log.problem.report.target.numerics
        kinds = classify_changes(best.config, baseline, numerics)
        part = revert_knobs(best.config, baseline, [name for name, kind in kinds.items() if kind != "exact"])
        if part == best.config or part in tried or self._price(part) > left:
            return None
        return part if self.study.expect(part) > self._policy.worth_another else None

    def _find_fallback(self, suspects: Suspects) -> TrainConfig | None:
        """Return what is exact in the best, where there is no time any more for anything but to prove it.

        Were the best not shown to learn the same then, there would be nothing to prove.
        """
        log, left, best = self.log, self._fallback_seconds(), self.log.ranking.leader
        part = self._find_exact_part(Tried(log, suspects, left, self.fleet.list_taken()), left)
        if part is None or best is None:
            return None
        needed = self.proof_seconds(best.config) + LEAST_ROUNDS * log.prices.pair_seconds(best.config)
        leaves_enough = self.starter.budget.remaining_seconds - self._price(part) >= needed
        return part if leaves_enough or self.study.expect(part) >= best.score / 2 else None

    def _fallback_seconds(self) -> float:
        return self.starter.budget.remaining_seconds - LEAST_ROUNDS * self.log.prices.pair_seconds(None)

    def _choose(self, tried: Tried) -> Proposal | None:
        """Return something new: what has a reason to wait comes after the first proof, or where nothing else is."""
        unproven, together = self._find_unproven(), tried.together
        early = [*together, *(frozenset({f"{name}={value}"}) for name, value in unproven), *tried.compiled_unseen]
        refused, late = self.log.refused, [*self._list_unprovable(), *self._list_open()]
        if not self.log.attempted:
            proposal = self.study.propose(tried, early, self._list_dear(), lost=[*refused, *late])
            if proposal is not None:
                return proposal
        best, baseline = self.log.ranking.leader, self.log.problem.baseline
        base = revert_knobs(best.config, baseline, ["compile_mode"]) if best else baseline  # it may fail: then soon
        alone = (self.log.problem.space.keep(with_knobs(base, {name: value})) for name, value in unproven)
        config = next((config for config in alone if config not in tried), None)
        if config is not None:
            return self.study.open(config)
        proposal = self.study.propose(tried, early, lost=[*refused, *late])
        return proposal if proposal or not late else self.study.propose(tried, early, lost=refused)

    def _list_open(self) -> Sequence[frozenset[str]]:
        """Return what gradients have left open, but for every third proposal: it may not be part of the answer."""
        tried = len({one.key for one in self.log.judged})
        return self.list_open() if tried % _OPEN_TURNS else ()

    def _list_unprovable(self) -> list[frozenset[str]]:
        """Return the changes, each as `name=value`, that were timed and cannot be proven any more in the time left.

        None where nothing can: what leads then is what a resumed search begins with.
        """
        log = self.log
        left = self._fallback_seconds()
        late = [(name, value) for name, value, alone in self._alone if self.proof_seconds(alone) > left > 0]
        timed = [one.config for one in log.judged if one.score.value is not None] if late else []
        passed = [config for config, checks in log.checks if is_passed(checks)]
        return [
            frozenset({f"{name}={value}"})
            for name, value in late
            if any(get_knob(config, name) == value for config in timed)
            and not any(get_knob(config, name) == value for config in passed)
            # What was looked at with other changes already may take next to nothing more.
            and all(self.proof_seconds(config) > left for config in timed if get_knob(config, name) == value)
        ]

    def _list_dear(self) -> dict[str, float]:
        """Return the values that take much of the budget to prove or to compile, with the times their price counts.

        A long proof counts more until there is one, where it may take the time of all there is to prove. Not so of a
        user's own knob, and of compiling, whose proof is long by its own compilations alone.
        """
        policy, budget = self._policy, self.starter.budget.seconds
        price = self.average_proof_seconds or self.proof_seconds
        fitting = policy.fitting_proof_share * self.starter.budget.remaining_seconds
        proven_long = {
            f"{name}={value}": policy.first_proof_factor
            for name, value, alone in self._alone
            if name != "compile_mode" and not is_user_knob(name)
            if price(alone) > max(policy.most_proof_share * budget, fitting)
        }
        dear = [*find_dear_values(self.log, policy.dear_compile_share * budget), *list_slow_compilers(self.log)]
        return dict.fromkeys(dear, 1.0) | proven_long

    def _find_unproven(self) -> list[tuple[str, KnobValue]]:
        """Return the values that nothing measured speaks for, and that no launch has shown to work yet."""
        timed = [one.config for one in self.log.judged if one.score.value is not None]
        unproven = sorted(self.log.problem.space.unproven, key=str)
        return [
            (name, value) for name, value in unproven if not any(get_knob(config, name) == value for config in timed)
        ]

    @cached_property
    def _alone(self) -> list[tuple[str, KnobValue, TrainConfig]]:
        """Every value of every knob that is not the user's own setting, and what it is alone."""
        space = self.log.problem.space
        return [(name, value, space.complete({name: value})) for name, value in _list_values(space)]

    def _run(self, proposal: Proposal) -> TrialResult:
        policy, price = self._policy, self._price(proposal.config)
        full = max(policy.least_trial_seconds, policy.patience * price)
        if needs_compilation(proposal.config):
            full = max(price, min(full, policy.most_compile_patience * self.starter.budget.seconds))
        config, rival = proposal.config, self.log.schedule.make_rival(proposal.config)
        if not explores_in_turns(self.log, config, self.starter.budget.seconds):
            return self._run_alone(config, full, rival)
        left = self._seconds_for(price)
        both = max(full, policy.patience * 2 * self.log.prices.usual_seconds(self.log.problem.baseline))
        beside = self.starter.launch_beside(config, min(left, both), ends_with_stage=left < both, rival=rival)
        if not is_blamed_on_turns(self.log, beside):
            return beside
        alone = self._run_alone(config, full, rival)
        if alone.measurement is not None and not (
            has_run_in_turns(self.log) or beside.status is TrialStatus.OUT_OF_MEMORY
        ):
            self.log.takes_turns = False
        self.log.clears_turns |= (alone.status, alone.error) == (beside.status, beside.error)
        return alone

    def _run_alone(self, config: TrainConfig, full: float, rival: Rival | None) -> TrialResult:
        left = self._seconds_for(self._price(config))
        return self.starter.launch(config, "measure", min(left, full), ends_with_stage=left < full, rival=rival)

    def _is_at_bound(self) -> bool:
        policy = self._policy
        problem = self.log.problem
        if problem.objective is Objective.MEMORY:
            return False
        bound, incumbent = problem.report.verdict.speedup_ceiling, self.log.ranking.incumbent
        if bound is None or incumbent is None or incumbent.score <= policy.least_gain:
            return False
        return policy.bound_reached * bound <= math.exp(incumbent.score) <= policy.bound_refuted * bound

    def _seconds_left(self) -> float:
        return self.starter.budget.remaining_seconds - self.kept_seconds()

    def _seconds_to_compile(self, left: float) -> float:
        """Return the time for a launch that compiles anew: once something leads, its proof has to fit as well."""
        leader = self.log.ranking.leader
        if leader is None or leader.score <= self._policy.worth_another:
            return left
        return min(left, self._fallback_seconds() / (1.0 + LEAST_ROUNDS * (1.0 - CACHED_SHARE)))

    def _seconds_for(self, price: float) -> float:
        """Return the time for a launch of a price: one for which there is none any more is what is fallen back on."""
        left = self._seconds_left()
        return left if price <= left else max(left, self._fallback_seconds())

    def _price(self, config: TrainConfig) -> float:
        return self.log.prices.launch_seconds(config)

    @property
    def _policy(self) -> SearchPolicy:
        return self.log.problem.policy


def list_own(space: SearchSpace) -> list[TrainConfig]:
    """Return each value of the user's own knobs alone, on top of their settings.

    Nothing is known of these beforehand: seen with other changes first, what does not go with one of them is never
    seen without it.
    """
    return [space.complete({name: value}) for name, value in _list_values(space) if is_user_knob(name)]


def _list_values(space: SearchSpace) -> list[tuple[str, KnobValue]]:
    """Return every value of every knob that is not the user's own setting."""
    return [
        (name, value)
        for name, values in space.choices.items()
        for value in values
        if value != get_knob(space.baseline, name)
    ]


def find_dear_values(log: SearchLog, seconds: float) -> list[str]:
    """Return the ways to compile, as `name=value`, whose first launch takes longer than some seconds."""
    return [f"compile_mode={mode}" for mode, price in _price_compilers(log).items() if price > seconds]


def list_slow_compilers(log: SearchLog) -> list[str]:
    """Return the ways to compile, as `name=value`, that take much longer than the fastest."""
    prices = {mode: price for mode, price in _price_compilers(log).items() if mode != "off"}
    least = min(prices.values(), default=0.0)
    return [f"compile_mode={mode}" for mode, price in prices.items() if price > _SLOW * least]


def _price_compilers(log: SearchLog) -> dict[KnobValue, float]:
    """Return what a first launch of each mode takes that is not the user's own, in seconds."""
    problem = log.problem
    modes = (mode for mode in problem.space.choices.get("compile_mode", ()) if mode != problem.baseline.compile_mode)
    return {mode: log.prices.first_seconds(with_knobs(problem.baseline, {"compile_mode": mode})) for mode in modes}
