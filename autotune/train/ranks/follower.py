"""A rank that does not lead: it builds the same training, and does what the leader tells it."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from autotune.distributed.ends import explain_end
from autotune.distributed.evaluation import follow_evaluation
from autotune.distributed.place import Place
from autotune.distributed.shards import write_own_shards
from autotune.distributed.training import RankTraining
from autotune.distributed.world import Command, joined_world
from autotune.engine.data_fingerprint import build_dataset, mark_data
from autotune.engine.dataloader import find_random_sources
from autotune.engine.loop import backend_settings
from autotune.errors import UsageError
from autotune.machine.hardware import read_hardware
from autotune.records.profile import ProfileTarget
from autotune.records.run import RunPlan
from autotune.targets.load import load_workload
from autotune.targets.workload import LoadedWorkload
from autotune.train.loop.checkpoint import load_checkpoint
from autotune.train.loop.state import capture_generators, find_own_non_finite
from autotune.train.loop.user_code import blame_target
from autotune.train.options import TrainingOptions
from autotune.train.recovery.attempts import FORWARDED
from autotune.train.settings.choice import find_missing_environment
from autotune.train.settings.target import resolve_training_target

Relaunch = Callable[[Mapping[str, str]], None]
"""Given the environment variables that the settings need and the process lacks, starts it anew, or returns."""


def follow(place: Place, target: str | None, options: TrainingOptions, *, relaunch: Relaunch) -> int:
    """Train as one of the ranks that do not lead, and return what to exit with.

    What goes wrong is written down for who started this process, and told by it.

    Args:
        place: which rank this is.
        target: as typed.
        options: how to train.
        relaunch: starts the process anew with some variables set.
    """
    _be_quiet(place)
    try:
        _train(place, target, options, relaunch)
    except Exception as error:
        end = explain_end(error, place.rank)
        place.record_end(end)
        return end.status
    return 0


def _be_quiet(place: Place) -> None:
    """Print into a file."""
    log = os.open(place.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)


def _leave_signals_to_leader() -> None:
    """Do nothing on a stop, which is agreed on at the end of a step; who waits for a leader that is gone finds out."""
    for number in FORWARDED:
        signal.signal(number, _ignore)


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing; unlike SIG_IGN this is not handed down to programs that are started here."""


def _train(place: Place, target: str | None, options: TrainingOptions, relaunch: Relaunch) -> None:
    work = Path.cwd()
    loaded = load_workload(resolve_training_target(target, work).target.spec, folder=work)
    with blame_target(f"{loaded.label}: setting up"):
        dataset = build_dataset(loaded)
        sources = find_random_sources(dataset, loaded.collate)
        data = mark_data(dataset, loaded.collate, sources).fingerprint if place.nodes > 1 else None
    plan = place.await_plan()
    if place.nodes > 1:
        _require_same_target(
            ProfileTarget(label=loaded.label, fingerprint=loaded.fingerprint, data_fingerprint=data), plan
        )
    config = plan.current_config
    relaunch(find_missing_environment(config, read_hardware()))
    with joined_world(place.meeting, options.rank_timeout_seconds) as world, backend_settings(config):
        _leave_signals_to_leader()
        with blame_target(f"{loaded.label}: setting up"):
            training = RankTraining(
                loaded,
                config,
                world=world,
                seed=plan.seed,
                random_sources=sources,
                worker_timeout_seconds=options.worker_timeout_seconds,
            )
        _obey(training, loaded, plan)


def _require_same_target(here: ProfileTarget, plan: RunPlan) -> None:
    """Make sure that this node trains what the leader's does.

    Raises:
        UsageError: it has another source, or other data.
    """
    there = plan.target
    parts = {"source": (here.fingerprint, there.fingerprint), "data": (here.data_fingerprint, there.data_fingerprint)}
    for name, (mine, theirs) in parts.items():
        if mine != theirs:
            raise UsageError(
                f"{here.label}: the {name} on this node is not that of node 0", hint="copy it to all nodes"
            )


def _obey(training: RankTraining, loaded: LoadedWorkload, plan: RunPlan) -> None:
    """Do what the leader says, until it says that the training is over."""
    world, command = training.world, Command.PAUSE
    while True:
        command = world.hear(for_ever=command in (Command.PAUSE, Command.LOAD))
        if command == Command.STEP:
            with blame_target(f"{plan.target.label}: a step"):
                training.step()
        elif command == Command.STATE:
            world.gather(capture_generators(training))
        elif command == Command.LOAD:
            load_checkpoint(training, Path(world.share(None)))
        elif command == Command.SAVE:
            write_own_shards(training, Path(world.share(None)), capture_generators(training))
        elif command == Command.CHECK:
            world.gather(find_own_non_finite(training))
        elif command == Command.EVALUATE:
            follow_evaluation(loaded, training)
        elif command == Command.END:
            return
