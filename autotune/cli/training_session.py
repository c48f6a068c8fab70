"""What ties a training in this process to the terminal: its signals, its logs, its environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from autotune.cli.stopping import StopFlag, ended_by_alarm
from autotune.cli.target import read_nproc_per_node
from autotune.errors import UsageError
from autotune.records.config import list_settings
from autotune.train.recovery.child import keep_tie

if TYPE_CHECKING:
    from autotune.cli.view.training import TrainingView
    from autotune.distributed.place import Place
    from autotune.loggers import LoggerName
    from autotune.loggers.point_log import PointLog, Value
    from autotune.records.nodes import Nodes
    from autotune.records.profile import Profile
    from autotune.records.run import Reverification
    from autotune.records.trial import Target
    from autotune.train.options import TrainingCallbacks, TrainingOptions
    from autotune.train.runs.folder import RunFolder

_RELAUNCHED = "AUTOTUNE_RELAUNCHED"
_VERIFIED = "AUTOTUNE_REVERIFIED"


class TrainingLog:
    """Hands the lines of metrics.jsonl on to loggers.

    Args:
        names: of the loggers.
        warn: told when one cannot be written any more.
    """

    def __init__(self, names: Sequence[LoggerName], warn: Callable[[str], None]) -> None:
        self._names, self._warn = names, warn
        self._run: RunFolder | None = None
        self._logs: list[PointLog] = []

    def open(self, run: RunFolder) -> None:
        """Remember the run."""
        self._run = run

    def begin(self, step: int) -> None:
        """Write on from a step; what was written after it is going to be trained again."""
        from autotune.loggers import find_logger

        for log in self._logs:
            log.rewind(step)
        if self._run is None or self._logs:
            return
        plan = self._run.plan
        config: dict[str, Value] = {"target": plan.target.label, "seed": plan.seed, "settings": plan.origin}
        config |= {f"config/{name}": value for name, value in list_settings(plan.current_config)}
        for name in self._names:
            self._logs.append(find_logger(name)(self._run.path, resumed_step=step, warn=self._warn, config=config))

    def write(self, line: Mapping[str, Any]) -> None:
        """Write a line."""
        for log in self._logs:
            log(line)

    def close(self) -> None:
        """Close them."""
        for log in self._logs:
            log.close()


@contextmanager
def training_log(names: Sequence[LoggerName], view: TrainingView) -> Iterator[TrainingLog | None]:
    """Return what lines of metrics.jsonl are handed to; None for nothing."""
    if not names:
        yield None
        return
    log = TrainingLog(names, view.warn)
    try:
        yield log
    finally:
        log.close()


def make_callbacks(stop: StopFlag, view: TrainingView, log: TrainingLog | None) -> TrainingCallbacks:
    """Return what ties a training to the terminal, its signals and its logs."""
    from autotune.engine.allocator import describe_exchange
    from autotune.train.options import TrainingCallbacks
    from autotune.train.recovery.child import tell_opened_run
    from autotune.train.report import StopNow

    # Once it is read it is nobody's: an autotune that the user's own code starts would take itself for this one.
    is_second = os.environ.pop(_RELAUNCHED, None) is not None

    def open_run(folder: RunFolder) -> None:
        tell_opened_run(folder.path)
        if log is not None:
            log.open(folder)
        told = f"{folder.plan.target.label}: settings of the {folder.plan.origin}, run folder {folder.path}"
        view.plan(told, folder.plan)

    def start_anew(missing: Mapping[str, str], verified: Reverification | None) -> None:
        stop.exit_if_set()  # what it has cut short is nothing to train on, and a new process would not know of it
        if missing and not is_second:
            if (exchanged := describe_exchange(missing)) is not None:
                view.warn(exchanged)
            view.close()
            relaunch(missing, verified)

    @contextmanager
    def interruptible(seconds: float | None) -> Iterator[None]:
        with stop.raising(StopNow), ended_by_alarm(seconds, StopNow):
            yield

    plain = TrainingCallbacks(
        should_stop=stop,
        report=view.show,
        warn=view.warn,
        say=view.plan,
        step_down=view.step_down,
        opened=open_run,
        interruptible=interruptible,
        relaunch=start_anew,
    )
    return plain if log is None else replace(plain, log=log.write, begins=log.begin)


def choose_ranks(nproc_per_node: str | None, options: TrainingOptions, target: Target) -> str | None:
    """Return how many processes are to train, as the launcher takes it; None for one.

    Args:
        nproc_per_node: as typed.
        options: how to train.
        target: the workload.

    Raises:
        UsageError: it is no number of processes, or there is no run to resume.
        ProfileError: the profile, or the plan of the run to resume, is damaged or of a newer version.
    """
    from autotune.train.runs.folder import find_run, read_plan

    if nproc_per_node is not None:
        size = read_nproc_per_node(nproc_per_node)
    elif options.resume:
        size = read_plan(find_run(Path.cwd(), target.spec, options.out)).world_size
    else:
        size = 1 if options.profile is None else _load(options.profile).world_size
    return None if size == 1 else str(size)


def choose_nodes(
    count: int | None,
    endpoint: str | None,
    rdzv_id: str | None,
    node: int | None,
    *,
    nproc_per_node: str | None,
    patience_seconds: float,
) -> Nodes | None:
    """Return how the nodes of a training meet; None for one alone.

    Args:
        count: as typed, as what follows.
        endpoint: `HOST:PORT` of the first.
        rdzv_id: tells this training from others there.
        node: number of this one.
        nproc_per_node: processes on each.
        patience_seconds: longest wait for the others.

    Raises:
        UsageError: something is missing, or there is no such node.
    """
    from autotune.records.nodes import Nodes, read_endpoint

    alone = {"--rdzv-endpoint": endpoint, "--rdzv-id": rdzv_id, "--node-rank": node}
    given = [name for name, value in alone.items() if value is not None]
    if count in (None, 1):
        if given:
            raise UsageError(f"{given[0]} is for several nodes", hint="say how many there are: --nnodes 2")
        return None
    assert count is not None
    if endpoint is None:
        raise UsageError(
            f"--nnodes {count} needs a place where they meet",
            hint="give the first node's address and a free port: --rdzv-endpoint node0:29500",
        )
    read_endpoint(endpoint)
    if nproc_per_node is None:
        raise UsageError(f"--nnodes {count} needs --nproc-per-node", hint="give the processes of each node, or gpu")
    if node is not None and node >= count:
        raise UsageError(f"--node-rank {node}: there are {count} nodes", hint=f"give 0 to {count - 1}")
    return Nodes(
        count=count,
        endpoint=endpoint,
        rdzv_id=rdzv_id or "autotune",
        node=node,
        patience_seconds=patience_seconds,
    )


def _load(given: str | Path | Profile) -> Profile:
    from autotune.records.profile import Profile

    return given if isinstance(given, Profile) else Profile.load(Path.cwd() / given)


def follow_leader(place: Place, target: str | None, options: TrainingOptions) -> NoReturn:
    """Train as one of several processes, and exit as it ended."""
    from autotune.train.ranks.follower import follow

    is_second = os.environ.pop(_RELAUNCHED, None) is not None

    def start_anew(missing: Mapping[str, str]) -> None:
        if missing and not is_second:
            relaunch(missing, None)

    status = follow(place, target, options, relaunch=start_anew)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # past what waits for a connection that is not there any more


def take_reverification() -> Reverification | None:
    """Return what this command found before it started itself anew; None where it did not."""
    found = os.environ.pop(_VERIFIED, None)
    if found is None:
        return None
    from autotune.records.run import Reverification

    return Reverification.model_validate_json(found)


def is_relaunched() -> bool:
    """Return whether this command was started anew by itself, and has said by then what it trains."""
    return _RELAUNCHED in os.environ


def relaunch(missing: Mapping[str, str], verified: Reverification | None) -> None:
    """Start this command anew with some variables set."""
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "autotune", *sys.argv[1:]]
    told = {} if verified is None else {_VERIFIED: verified.model_dump_json()}
    os.execve(sys.executable, command, {**os.environ, **keep_tie(), **missing, **told, _RELAUNCHED: "1"})
