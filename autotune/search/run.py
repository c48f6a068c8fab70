"""`run_search`: find the best settings that learn the same, inside a budget, and write them down.

Record in: a target and options. Record out: a Profile, in best.json from the moment the baseline is measured.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from autotune.arguments import check_fields, shown_hints
from autotune.distributed.agent import count_ranks, find_cpu_share
from autotune.errors import AutotuneError, MachineError, UsageError
from autotune.format import count
from autotune.isolation.runner import TrialRunner, starts_warm
from autotune.machine.hardware import read_hardware, read_software
from autotune.records.codec import remove_unfinished
from autotune.records.config import Allowed, LearningRateRule
from autotune.records.layout import COMPILER_CACHE, STATE_FOLDER
from autotune.records.objective import Objective, usual_objective
from autotune.records.profile import Profile
from autotune.records.quality import DriftLimits
from autotune.records.script import Script
from autotune.records.search import PlannedRun, Preset, SearchState
from autotune.records.trial import DEVICE_VARIABLE, Target
from autotune.scratch import sweep_scratch
from autotune.search.launch.budget import Budget, measure_seconds_for
from autotune.search.launch.starter import SearchContext
from autotune.search.progress import SearchReporter
from autotune.search.session import run_session
from autotune.search.share.alone import Alone
from autotune.search.share.fleet import open_fleet
from autotune.search.store.folder import (
    SearchFolder,
    check_output,
    create_search_folder,
    list_searches,
    lock_searches,
)
from autotune.search.store.kept_probe import take_kept_probe
from autotune.search.store.seal import drop_compiled, is_sealed, seal_search
from autotune.sentences.loss_check import describe_limits
from autotune.space import require_knobs
from autotune.targets.drift_limits import require_metrics
from autotune.targets.resolve import resolve_target
from autotune.targets.source.fingerprint import fingerprint_target, is_older

_KEPT = (
    "target",
    "world_size",
    "seed",
    "max_drift",
    "memory_limit_bytes",
    "planned_run",
    "objective",
    "only",
    "exclude",
    "allowed",
    "learning_rate_rule",
    "presets",
)
"""What a resumed search is asked again and has to be asked alike."""

_NAMES = {"world_size": "nproc_per_node"}
"""Of these, by what they are asked for."""

LEAST_BUDGET_SECONDS = 20.0
DEFAULT_BUDGET_SECONDS = 20 * 60.0

_HINTS = {
    "budget_seconds": 'give seconds, as 1200; run_search(target, budget="20m") takes text too',
    "max_drift": 'DriftLimits(loss=Margin(amount=0.005)); run_search(target, max_drift="0.5%") takes text',
    "memory_limit_bytes": "give bytes, as 16 * 2**30",
    "only": 'give a list of knobs: ["num_workers"]',
    "exclude": 'give a list of knobs: ["precision"]',
    "planned_run": 'give PlannedRun(amount=30, unit="epochs")',
    "objective": 'give Objective.MEMORY; run_search(target, objective="memory") takes text',
}


@dataclass(frozen=True)
class SearchOptions:
    """What a search is asked to do.

    Attributes:
        budget_seconds: deadline of the whole search.
        max_drift: how much worse the training loss and each metric may get.
        memory_limit_bytes: of a trial, on the device or on the host without one; None for the machine's own.
        out: where the profile goes.
        nproc_per_node: processes that train together in each trial; `gpu` for one on each GPU; None for 1, or for as
            many as the search to go on with has.
        seed: of proposals, initial weights and data order.
        resume: go on with the newest search of this target in this folder.
        force: replace `out` whatever it is.
        planned_run: length of the final training; None where it is not known.
        objective: what is made best; None for the time of the training where its length is given, else for throughput,
            or for that of the search to go on with.
        only: knobs to vary; empty for all.
        exclude: knobs not to vary.
        measure_seconds: longest measurement of a launch; None for about two seconds.
        allowed: changes of what is learned that may be tried too; they are judged by samples to the same loss.
        learning_rate_rule: for effective batches other than the user's own.
        presets: of the user's own, tried first.
        history: begin with what earlier searches of the like have read, and leave what this one reads.
        storage: URL of a database in which searches of the same on machines alike share one study; None for none. It is
            written nowhere.
    """

    budget_seconds: float = DEFAULT_BUDGET_SECONDS
    max_drift: DriftLimits = field(default_factory=DriftLimits)
    memory_limit_bytes: int | None = None
    out: str | Path = "best.json"
    nproc_per_node: int | Literal["gpu"] | None = None
    seed: int = 0
    resume: bool = False
    force: bool = False
    planned_run: PlannedRun | None = None
    objective: Objective | None = None
    only: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    measure_seconds: float | None = None
    allowed: tuple[Allowed, ...] = ()
    learning_rate_rule: LearningRateRule = "none"
    presets: tuple[Preset, ...] = ()
    history: bool = True
    storage: str | None = field(default=None, repr=False)

    @shown_hints()
    def __post_init__(self) -> None:
        """Check what was given.

        Raises:
            UsageError: a field has another type, or is out of range.
        """
        check_fields(self, _HINTS)
        for name in ("budget_seconds", "memory_limit_bytes", "measure_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"SearchOptions: {name} is {value}", hint="it must be more than 0, and finite")
        if isinstance(self.nproc_per_node, int) and self.nproc_per_node < 1:
            raise UsageError(f"SearchOptions: nproc_per_node is {self.nproc_per_node}", hint="give 1 or more, or 'gpu'")
        if self.objective is Objective.TIME_TO_FINISH and self.planned_run is None:
            raise UsageError(
                "--objective time-to-finish needs the length of the training",
                hint="give it with --train-for, as planned_run in Python: 8h, 30epochs, 2000000samples",
            )


def run_search(
    target: str | Script | None = None,
    options: SearchOptions | None = None,
    *,
    folder: str | Path | None = None,
    reporter: SearchReporter | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Profile:
    """Search for faster settings of a target.

    Args:
        target: `file.py:attr`, `package.module:attr` or a script; None takes [tool.autotune]'s, else the built-in demo.
        options: budget, limits and paths.
        folder: working folder; None for the current one.
        reporter: hears what happens.
        should_stop: polled; True ends the search early, everything finished is kept.

    Raises:
        UsageError: the target or an option cannot be used as given, or the budget is too small.
        NothingFeasibleError: the user's own settings break the memory limit.
        TargetError: the training fails with its own settings.
        BusyError: another search is at work in the folder.
        FolderError: the state folder is not ours.
        MachineError: the disk is full or cannot be written, or the database of `storage` cannot be reached.
    """
    started = time.monotonic()
    chosen = options or SearchOptions()
    if chosen.budget_seconds < LEAST_BUDGET_SECONDS:
        raise UsageError(
            f"--budget is {chosen.budget_seconds:g} s, too short to start and measure anything",
            hint=f"give at least {LEAST_BUDGET_SECONDS:.0f}s; minutes are better",
        )
    sweep_scratch()
    work = Path(folder or Path.cwd()).resolve()
    resolved = resolve_target(target, folder=work).target
    if resolved.script is not None:
        _check_for_script(resolved.script, chosen)
    check_output(work / chosen.out, resolved.spec, force=chosen.force)
    try:
        with open_fleet(chosen.storage) as fleet, lock_searches(work):
            _remove_unfinished(work / STATE_FOLDER, work / chosen.out)
            place = _open_folder(work, resolved, chosen)
            told = _describe_damage(place) if chosen.resume else take_kept_probe(work, place.read_state(), place)
            reporter = reporter or SearchReporter()
            reporter.opened(place.path)
            if told is not None:
                reporter.told(told)
            fleet.settle(place, work / chosen.out)
            budget = Budget(chosen.budget_seconds, started)
            return _search(place, resolved, budget, work / chosen.out, reporter, should_stop, fleet)
    except OSError as error:
        text = f"{error.filename or work}: {error.strerror or error}"
        raise MachineError(text, hint="free some space or mend the permissions, then --resume") from error


def _check_for_script(script: Script, options: SearchOptions) -> None:
    """Make sure that what is asked can be had of a script; of a workload that is known once it is imported."""
    if options.learning_rate_rule != "none":
        raise UsageError(
            "--lr-scaling cannot reach the learning rate of a script",
            hint="make it a knob of the script's own: --knob lr=1e-3,2e-3:semantic -- python train.py --lr {lr}",
        )
    if options.nproc_per_node not in (None, 1):
        raise UsageError(
            "--nproc-per-node is for a workload",
            hint="a script is started by torchrun: autotune search ... -- torchrun --nproc-per-node 2 train.py",
        )
    require_metrics(options.max_drift, [metric.name for metric in script.metrics])
    require_knobs((*options.only, *options.exclude), [knob.name for knob in script.knobs])


def open_runner(
    place: SearchFolder,
    state: SearchState,
    reporter: SearchReporter,
    should_stop: Callable[[], bool],
    trials: Path | None = None,
) -> TrialRunner:
    """Return what starts the trials of a search, with its share of the CPUs and its store of compiled code.

    Args:
        place: of the search.
        state: what it searches.
        reporter: is told what is seen.
        should_stop: ends a trial.
        trials: folder of theirs; None for the search's own.
    """
    return TrialRunner(
        place.trials if trials is None else trials,
        host_allocators=read_hardware().host_allocators,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(place.compiled), **find_cpu_share(state.world_size)},
        should_stop=should_stop,
        on_poll=reporter.polled,
        say=reporter.told,
        warm=starts_warm(state.target, state.objective),
    )


def _search(
    place: SearchFolder,
    target: Target,
    budget: Budget,
    out: Path,
    reporter: SearchReporter,
    should_stop: Callable[[], bool],
    fleet: Alone,
) -> Profile:
    def save(profile: Profile) -> None:
        for path, searches_all in ((place.profile, True), (out, not (state.only or state.exclude))):
            proven = _read_proof(path, profile)
            if proven is None or _replaces(profile, proven, searches_all=searches_all):
                profile.save(path)

    state = place.read_state().replace(target=target)  # which has the words that no file holds
    with open_runner(place, state, reporter, should_stop) as runner:
        context = SearchContext(
            budget,
            runner,
            reporter,
            should_stop,
            place.find_log,
            runner.run_in_turns if runner.takes_turns() else None,
        )
        profile = run_session(place, state, context, save, number=place.next_number(), fleet=fleet).profile
    if place.database.exists():
        shown = f"optuna-dashboard sqlite:///{os.path.relpath(place.database)}"
        reporter.told(f"every launch, with optuna-dashboard installed: {shown}")
    return profile


def _remove_unfinished(root: Path, out: Path) -> None:
    """Remove what was being written when an earlier search died."""
    remove_unfinished(out.parent, out.name)
    for parent, folders, _ in os.walk(root):
        folders[:] = [name for name in folders if name != COMPILER_CACHE]
        remove_unfinished(Path(parent))


def _replaces(profile: Profile, proven: Profile, *, searches_all: bool) -> bool:
    """Return whether a search has come to something that takes the place of what was proven before.

    That nothing is better says so of what was searched, and by what makes it better.

    Args:
        profile: of the search.
        proven: before.
        searches_all: no knob was left out.
    """
    is_settled = profile.verdict == "keep" and profile.evidence.stop_reason in ("budget", "exhausted", "bound")
    return profile.verdict == "improved" or (is_settled and searches_all and profile.objective is proven.objective)


def _read_proof(path: Path, profile: Profile) -> Profile | None:
    """Return the proven answer in a file for the same target on the same machine and versions; None without one."""
    try:
        before = Profile.load(path)
    except AutotuneError:
        return None
    target = before.target.replace(launched_processes=profile.target.launched_processes)  # older files have it not
    same = (target, before.hardware.fingerprint, before.software.fingerprint) == (
        profile.target,
        profile.hardware.fingerprint,
        profile.software.fingerprint,
    )
    return before if same and before.verdict == "improved" else None


def describe_search(target: Target, options: SearchOptions) -> SearchState:
    """Return what a search is asked to do, as its folder remembers it."""
    return SearchState(
        target=target,
        world_size=count_ranks(str(options.nproc_per_node or 1), 0 if _is_for_cpu() else len(read_hardware().gpus)),
        seed=options.seed,
        max_drift=options.max_drift,
        memory_limit_bytes=options.memory_limit_bytes,
        planned_run=options.planned_run,
        objective=options.objective or usual_objective(is_length_known=options.planned_run is not None),
        only=options.only,
        exclude=options.exclude,
        allowed=options.allowed,
        learning_rate_rule=options.learning_rate_rule,
        presets=options.presets,
        measure_seconds=options.measure_seconds or measure_seconds_for(options.budget_seconds),
        budget_seconds=options.budget_seconds,
        uses_history=options.history,
    )


def _is_for_cpu() -> bool:
    return os.environ.get(DEVICE_VARIABLE) == "cpu"


def _open_folder(work: Path, target: Target, options: SearchOptions) -> SearchFolder:
    state = describe_search(target, options)
    if not options.resume:
        place = create_search_folder(work, target.spec)
        place.write_state(state)
        seal_search(place)
        return place
    found = _find_to_resume(work, target.spec)
    if options.nproc_per_node is None:
        state = state.replace(world_size=found.read_state().world_size)
    if options.objective is None:
        state = state.replace(objective=found.read_state().objective)
    _require_same_search(found, state)
    probe = found.read_probe()
    if _is_for_cpu() and probe is not None and probe.target.device != "cpu":
        raise UsageError("--device cpu: the search to resume is of the GPU", hint="leave it out, or leave --resume out")
    if not is_sealed(found):
        drop_compiled(found)
    return found


def _find_to_resume(work: Path, spec: str) -> SearchFolder:
    for search in list_searches(work):
        try:
            if search.read_state().target.spec == spec:
                return search
        except AutotuneError as error:
            if search.is_named_after(spec):  # the one before it is not what was meant
                hint = f"{error.hint}; or delete {search.path} to go on with the search before it"
                raise UsageError(f"--resume: the newest search cannot be read: {error.message}", hint=hint) from None
    raise UsageError(f"--resume: no search of {spec!r} was made in {work}", hint="leave --resume out")


def _describe_damage(found: SearchFolder) -> str | None:
    damaged = found.find_damaged()
    if not damaged:
        return None
    what = count(len(damaged), "result cannot", "results cannot")
    return f"{what} be read and {'is' if len(damaged) == 1 else 'are'} left out: of trial {', '.join(damaged[:5])}"


def _require_same_search(found: SearchFolder, now: SearchState) -> None:
    before = found.read_state()
    written = before.model_dump(), now.model_dump()  # in which another secret in a command is no other command
    for name in _KEPT:
        old, new = getattr(before, name), getattr(now, name)
        if written[0][name] != written[1][name]:
            was, now_is = _show_option(old), _show_option(new)
            raise UsageError(
                f"--resume: {_NAMES.get(name, name)} was {was} when the search began and is {now_is} now",
                hint="give the same as then, or leave --resume out",
            )
    reason = find_difference(found, now.target)
    if reason is not None:
        raise UsageError(f"--resume: {reason}", hint="leave --resume out")


def find_difference(search: SearchFolder, target: Target) -> str | None:
    """Return what has changed since a search was begun, so that nothing can be compared with it; None where nothing.

    Args:
        search: that was begun.
        target: of it, as it is now.
    """
    probe = search.read_probe()
    if probe is None:
        return None
    fingerprint = fingerprint_target(target)
    if fingerprint is not None and is_older(probe.target.fingerprint, fingerprint):
        return "the search was begun by an older version, which did not look at what the target imports"
    if fingerprint not in (None, probe.target.fingerprint):
        return "the target has changed since the search began"
    if read_hardware().fingerprint != probe.hardware.fingerprint or read_software() != probe.software:
        return "the machine or its software has changed since the search began"
    return None


def _show_option(value: object) -> object:
    if isinstance(value, DriftLimits):
        return describe_limits(value)
    if isinstance(value, tuple):
        return ", ".join(_show_preset(one) if isinstance(one, Preset) else str(one) for one in value) or "not given"
    return value.spec if isinstance(value, Target) else value


def _show_preset(preset: Preset) -> str:
    settings = " ".join(f"{name}={value}" for name, value in preset.settings.items())
    return f"{preset.name} ({settings})"
