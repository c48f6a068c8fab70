"""`run_selftest`: searches in which the truth is known, real or replayed, counted.

aa      40 settings that do nothing: every claim is false          power   a busy wait planted in the baseline
real    whole searches in processes, on this machine, now          replay  the same decisions on drawn launches
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.records.codec import read_record, write_record
from autotune.records.selftest import Outcome, RecordedLaunches, SelftestReport, Tally
from autotune.scratch import scratch_folder, sweep_scratch
from autotune.search.run import SearchOptions, run_search
from autotune.search.store.folder import find_search_folder
from autotune.selftest.machines import MACHINES, Machine, Recorded, read_paces
from autotune.selftest.placebo import KNOB, PLANTED_PERCENT
from autotune.selftest.replay import Case, replay
from autotune.selftest.tally import count_outcomes, read_outcome

RUN_BUDGET_SECONDS = 40.0
RUN_MEASURE_SECONDS = 0.75
_CHUNK = 500

ALLOWED_FALSE_RATE = 0.001
"""Share of searches that may claim more than there is."""


@dataclass(frozen=True)
class SelftestOptions:
    """What a self-test is asked to do.

    Attributes:
        power: plant a gain of 3, 5, 10 and 20 %; otherwise nothing is faster.
        runs: real searches, for each planted gain; 0 to replay.
        replays: replayed searches, for each machine and planted gain.
        budget_seconds: of each real search.
        recorded: a file of recorded launches to replay beside the simulated machines.
        record: where to keep the launches of real A/A searches; None to forget them.
    """

    power: bool = False
    runs: int = 0
    replays: int = 1000
    budget_seconds: float = RUN_BUDGET_SECONDS
    recorded: Path | None = None
    record: Path | None = None


@dataclass
class _Real:
    """Real searches so far."""

    outcomes: list[Outcome] = field(default_factory=list)
    paces: list[tuple[float, ...]] = field(default_factory=list)


def run_selftest(
    options: SelftestOptions,
    *,
    heard: Callable[[str], None] = lambda _line: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> SelftestReport:
    """Run searches whose truth is known and count what they claimed.

    Args:
        options: which and how many.
        heard: told each result in a line.
        should_stop: polled; True ends it early, what is finished counts.

    Raises:
        UsageError: there is nothing to run, or a file cannot be used.
        AutotuneError: not one search gave an answer; this is why the last one did not.
    """
    began = time.monotonic()
    sweep_scratch()
    if options.runs:
        real = _run_real(options, heard, should_stop)
        outcomes, tallies = tuple(real.outcomes), count_outcomes(real.outcomes)
    else:
        outcomes, tallies = (), _replay_all(options, heard, should_stop)
    return SelftestReport(
        kind="power" if options.power else "aa",
        tallies=tallies,
        outcomes=outcomes,
        elapsed_seconds=time.monotonic() - began,
    )


def _run_real(options: SelftestOptions, heard: Callable[[str], None], should_stop: Callable[[], bool]) -> _Real:
    names = [f"planted_{percent}" for percent in PLANTED_PERCENT] if options.power else ["placebo"]
    truths = [1 + percent / 100 for percent in PLANTED_PERCENT] if options.power else [1.0]
    real = _Real()
    failure: AutotuneError | None = None
    if options.record is not None and not options.record.absolute().parent.is_dir():
        raise UsageError(f"--record {options.record}: there is no such folder", hint="create it first")
    for number in range(options.runs):
        for name, truth in zip(names, truths, strict=True):
            if should_stop():
                return real
            try:
                outcome = _search_once(name, truth, number, options, should_stop, real.paces)
            except AutotuneError as error:
                # One slow probe on a busy machine is no reason to lose the other runs.
                heard(f"{name} {number + 1} of {options.runs}: no answer, {error.message}")
                failure = error
                continue
            if should_stop():
                return real  # it was cut, so it says nothing
            real.outcomes.append(outcome)
            _keep_paces(real.paces, options)
            heard(f"{name} {number + 1} of {options.runs}: {describe_outcome(outcome)}")
    if not real.outcomes and failure is not None:
        raise failure
    return real


def _keep_paces(paces: list[tuple[float, ...]], options: SelftestOptions) -> None:
    if options.record is None or options.power:
        return
    try:
        write_record(options.record, RecordedLaunches(launches=tuple(paces)))
    except OSError as error:
        raise MachineError(f"{options.record}: {error.strerror or error}", hint="free some space") from error


def _search_once(
    name: str,
    truth: float,
    seed: int,
    options: SelftestOptions,
    should_stop: Callable[[], bool],
    paces: list[tuple[float, ...]],
) -> Outcome:
    spec = f"autotune.selftest.placebo:{name}"
    search = SearchOptions(
        history=False,
        budget_seconds=options.budget_seconds,
        seed=seed,
        only=(f"user_knobs.{KNOB}",),
        measure_seconds=RUN_MEASURE_SECONDS,
    )
    with scratch_folder() as folder:
        profile = run_search(spec, search, folder=folder, should_stop=should_stop)
        found = find_search_folder(folder, spec)
        if found is not None and truth == 1.0:
            paces += [tuple(blocks) for blocks in read_paces(found.read_trials())]
    return read_outcome(profile, truth=truth, noise="real")


def describe_outcome(outcome: Outcome) -> str:
    """Return what a search said, in a line."""
    if outcome.estimate is None or outcome.low is None:
        pairs = f"{outcome.pairs} pairs, too few to tell" if outcome.pairs else "no finals"
        return f"{outcome.verdict}, {pairs} ({outcome.launches} launches)"
    return (
        f"{outcome.verdict}, {outcome.estimate:.3f}x where {outcome.truth:.2f}x is true, at least {outcome.low:.3f}x, "
        f"{outcome.pairs} pairs ({outcome.launches} launches)"
    )


def _replay_all(
    options: SelftestOptions, heard: Callable[[str], None], should_stop: Callable[[], bool]
) -> tuple[Tally, ...]:
    if options.replays < 1:
        raise UsageError("there is nothing to run", hint="give --runs or --replay a number above 0")
    machines: dict[str, Machine] = dict(MACHINES)
    if options.recorded is not None:
        machines["recorded"] = _read_machine(options.recorded)
    tallies: list[Tally] = []
    for name, machine in machines.items():
        for percent in PLANTED_PERCENT if options.power else (0,):
            outcomes: list[Outcome] = []
            while len(outcomes) < options.replays and not should_stop():
                seeds = range(len(outcomes), min(len(outcomes) + _CHUNK, options.replays))
                outcomes += replay(Case(name, machine, percent), seeds)
            tallies += count_outcomes(outcomes)
            if outcomes:
                last = tallies[-1]
                heard(f"{name}, true {last.truth:.2f}x: {last.claims} claims in {last.runs} replayed searches")
    return tuple(tallies)


def _read_machine(path: Path) -> Recorded:
    try:
        return Recorded(read_record(path, RecordedLaunches).launches)
    except ValueError as error:
        raise UsageError(
            f"{path}: {error}", hint="record more: autotune selftest --aa --runs 60 --record FILE"
        ) from None
