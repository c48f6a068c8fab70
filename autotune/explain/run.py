"""`explain` and `run_explain`: what an answer's changes are worth, from what is known, and from launches on demand.

    round 1: answer, without a, without b     round 2: without b, without a, answer     ...     in fresh processes

Rounds go on until each change is known well enough, there are as many as are worth it, or the time is up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from autotune.errors import UsageError
from autotune.explain.changes import Change, list_changes
from autotune.explain.derive import choose_config, derive, is_settled, read_effect
from autotune.explain.readings import LEAST_PAIRS, Readings
from autotune.format import count, format_budget
from autotune.measure.confidence import NO_PILOT
from autotune.records.codec import make_folder
from autotune.records.config import TrainConfig
from autotune.records.explanation import Explanation
from autotune.records.profile import Profile
from autotune.records.secrets import is_masked
from autotune.records.trial import TrialResult
from autotune.search.finals.finalist import Finalist
from autotune.search.finals.plan import count_samples
from autotune.search.finals.risk import open_purse, pilot_of
from autotune.search.finals.rounds import run_finals
from autotune.search.finals.stage import make_launch
from autotune.search.launch.budget import Budget
from autotune.search.launch.starter import RunTrial, SearchContext, TrialStarter
from autotune.search.launch.together import add_first_launch, find_first_launch
from autotune.search.launch.turns import leave_out_excused
from autotune.search.log import SearchLog
from autotune.search.policy import USUAL_POLICY
from autotune.search.problem import make_problem
from autotune.search.progress import SearchReporter
from autotune.search.run import find_difference, open_runner
from autotune.search.store.folder import SearchFolder, lock_searches
from autotune.search.store.seal import is_sealed
from autotune.sentences.noise import describe_interference

MOST_ROUNDS = 12
_AT_ONCE = 2
"""Rounds that are run before their figures are looked at: an order and its reverse."""
_SPARE = 1.2


def explain(place: SearchFolder, profile: Profile | None = None) -> Explanation:
    """Return why a search's answer is what it is, as far as its launches tell; nothing is run or written.

    Args:
        place: the search.
        profile: its answer; None to read it.

    Raises:
        AutotuneError: the search's files are damaged.
        UsageError: the search did not get past its probe.
    """
    answer = profile or Profile.load(place.profile)
    readings = _read(place, answer)
    found = derive(answer, readings)
    return found.replace(note=_describe_rest(readings, lambda: False)) if found.is_proven else found


def run_explain(
    place: SearchFolder,
    budget_seconds: float,
    *,
    reporter: SearchReporter | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Explanation:
    """Return the same after launching what is not known well enough, and keep it beside the search.

    Args:
        place: the search.
        budget_seconds: that the launches may take.
        reporter: hears what happens.
        should_stop: polled; True ends it, finished rounds are kept.

    Raises:
        AutotuneError: the search's files are damaged.
        UsageError: the search did not get past its probe.
        BusyError: a search is at work in the folder.
        OSError: the search's folder cannot be written.
    """
    profile = Profile.load(place.profile)
    readings = _read(place, profile)
    known = derive(profile, readings)
    if all(is_settled(one) for one in known.changes):
        return known
    reason = _why_not(place, profile)
    if reason:
        return known.replace(note=f"nothing was launched: {reason}")
    state, trials = place.read_state(), place.explanation.trials
    reporter, started = reporter or SearchReporter(), time.monotonic()
    with lock_searches(place.path.parents[1]):
        make_folder(trials)
        with open_runner(place, state, reporter, should_stop, trials) as runner:
            budget = Budget(budget_seconds, started)
            return measure(place, profile, readings, runner, budget, reporter=reporter, should_stop=should_stop)


def measure(
    place: SearchFolder,
    profile: Profile,
    readings: Readings,
    run_trial: RunTrial,
    budget: Budget,
    *,
    reporter: SearchReporter,
    should_stop: Callable[[], bool] = lambda: False,
) -> Explanation:
    """Return the explanation after launches that a callable runs, saved after every two rounds; arguments as above."""
    log = readings.log
    reporter.probed(log.problem.report)
    starter = TrialStarter(
        log, SearchContext(budget, run_trial, reporter, should_stop), number=place.explanation.next_number()
    )
    while True:
        arms = _choose_affordable(readings, list_open(readings), budget)
        if not arms:
            break
        starter.enter("explain", f"rounds of {1 + len(arms)} fresh processes: the answer, and without each change")
        results, rounds = _run_rounds(readings, starter, arms)
        readings = replace(readings, launched=(*readings.launched, *results), rounds=(*readings.rounds, *rounds))
        place.write_explanation(derive(profile, readings))
        if len(rounds) < _AT_ONCE:
            break
    found = derive(profile, readings).replace(note=_describe_rest(readings, should_stop))
    place.write_explanation(found)
    return found


def list_open(readings: Readings) -> list[Change]:
    """Return the changes that are worth more launches, those first of which least is known."""
    target = readings.log.problem.report.target
    changes = list_changes(readings.config, target.baseline, target.numerics)
    paired = {one.without.key: len(readings.launched_ratios(one.without)) for one in changes}
    left = [
        one for one in changes if paired[one.without.key] < MOST_ROUNDS and not is_settled(read_effect(one, readings))
    ]
    return sorted(left, key=lambda one: paired[one.without.key])


def _run_rounds(
    readings: Readings, starter: TrialStarter, arms: Sequence[Change]
) -> tuple[list[TrialResult], list[tuple[int, ...]]]:
    """Return the launches of some rounds, failed ones among them, and the numbers of those of each whole round."""
    log, launched = readings.log, list[TrialResult]()
    launch = make_launch(log, starter, count_samples(log))

    def launch_and_keep(config: TrainConfig) -> TrialResult | None:
        result = launch(config)
        launched.extend([] if result is None else [result])
        return result

    seed = log.problem.state.seed + len(readings.rounds)
    outcome = run_finals([one.without for one in arms], readings.config, launch_and_keep, rounds=_AT_ONCE, seed=seed)
    base: Finalist = outcome.baseline
    rounds = [
        tuple(one.results[place].spec.number for one in (base, *outcome.candidates) if place < len(one.results))
        for place in range(len(base.results))
    ]
    return launched, rounds


def _choose_affordable(readings: Readings, todo: Sequence[Change], budget: Budget) -> list[Change]:
    """Return the first of some changes, as many as enough rounds fit for into the time left."""
    arms = list(todo)
    while arms and price_rest(readings, arms) > budget.remaining_seconds:
        arms.pop()
    return arms


def price_rest(readings: Readings, arms: Sequence[Change]) -> float:
    """Return what the rounds take, in seconds, that some changes have to have at least, one more in any case."""
    prices = readings.log.prices
    done = min(len(readings.launched_ratios(one.without)) for one in arms)
    each = sum(prices.launch_seconds(one) for one in (readings.config, *(arm.without for arm in arms)))
    return max(1, LEAST_PAIRS - done) * each


def _describe_rest(readings: Readings, should_stop: Callable[[], bool]) -> str:
    """Return what was left open, and the time that would tell more; empty where nothing was."""
    left = list_open(readings)
    if not left:
        return ""
    if should_stop():
        return "stopped; the same command goes on where it was"
    what = count(len(left), "change is", "changes are")
    more = format_budget(_SPARE * price_rest(readings, left))
    found = [one.measurement for one in readings.launched if one.measurement is not None]
    disturbed = describe_interference([block.interference for one in found for block in one.blocks])
    why = f" ({', '.join(disturbed)} while that was measured)" if disturbed else ""
    return f"{what} not known well{why}; autotune explain --budget {more} would tell more"


def _why_not(place: SearchFolder, profile: Profile) -> str:
    """Return why nothing may be launched; empty where it may. A target is started, so it has to be the user's own."""
    if profile.verdict != "improved":
        return "nothing is proven, so that there is no answer to take apart"
    target = place.read_state().target
    if not is_sealed(place):
        return "nothing in your cache folder tells that this search was made for you, here"
    if target.script is not None and is_masked(target.script.command):
        return "the command has secrets, which no file holds"
    return find_difference(place, target) or ""


def _read(place: SearchFolder, profile: Profile) -> Readings:
    """Return the launches of a search, and of its explanation where that is of the same answer and machine."""
    report, trials = place.read_probe(), leave_out_excused(place.read_trials())
    probed = next((one for one in trials if one.facts is not None and one.curves), None)
    if report is None or probed is None:
        raise UsageError(f"{place.path} holds no probe report", hint="run autotune search again")
    state = place.read_state()
    launched = find_first_launch(trials, report.target) if state.world_size > 1 else None
    if launched is not None:
        report, probed = add_first_launch(report, probed, launched, place.find_log)
    log = SearchLog(make_problem(state, report, probed, USUAL_POLICY))
    for one in trials:
        if one.spec.purpose == "measure" and one.spec.config is not None:
            log.add_earlier_launch(one)
    for changes in place.read_screens().refused:
        log.refuse(frozenset(changes))
    config = choose_config(profile) or report.target.baseline
    purse = open_purse(place, report, trials)
    looks = purse.looks_at(config)
    # Of a claim that later pairs have left open, those that it was made by.
    claimed = (one for one in looks if len(one[1]) == profile.evidence.pairs)
    last, pairs = next(claimed, looks[-1] if looks else (None, []))
    earlier = place.read_explanation()
    machine = f"{report.hardware.fingerprint}-{report.software.fingerprint}"
    is_same = earlier is not None and (earlier.config, earlier.machine) == (config, machine)
    return Readings(
        log=log,
        config=config,
        pairs=pairs,
        pilot=pilot_of(last) if last else NO_PILOT,
        finals=[one for one in trials if one.spec.purpose == "final"],
        launched=place.explanation.read_trials() if is_same else [],
        rounds=earlier.rounds if is_same and earlier is not None else (),
    )
