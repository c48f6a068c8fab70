"""`autotune train`."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from autotune.cli.stopping import stop_on_signals
from autotune.cli.target import Device, Knobs, Loggers, Target, announce_resolved, read_target, set_device
from autotune.cli.training_session import choose_nodes, choose_ranks, follow_leader, is_relaunched
from autotune.cli.view.help import BASICS, OUTPUT, SCRIPTS, Quiet
from autotune.cli.view.terminal import (
    forgiven_output,
    print_error_json,
    print_json,
    reported_errors,
    say,
    warn,
)
from autotune.errors import AutotuneError, UsageError
from autotune.loggers import LoggerName, read_loggers
from autotune.scratch import sweep_scratch
from autotune.train.recovery.child import AGAIN_STATUS, tie_to_parent

if TYPE_CHECKING:
    from autotune.distributed.place import Place
    from autotune.records.nodes import Nodes
    from autotune.records.run import TrainingSummary
    from autotune.records.trial import Target as TargetRecord
    from autotune.targets.resolve import ResolvedTarget
    from autotune.train.options import TrainingOptions

OUT_OF_TIME_STATUS = 124
"""Exit status of a training that `--max-time` ended, as of timeout(1)."""


_OF_SCRIPT = "a script is started by torchrun: autotune train ... -- torchrun --nproc-per-node 2 train.py"


def train(
    target: Target = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile",
            rich_help_panel=BASICS,
            metavar="FILE",
            help="The settings to train with, e.g. best.json.",
            show_default="your own settings",
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="NAME",
            help="A shipped preset instead, e.g. balanced, or a file.",
            show_default=False,
        ),
    ] = None,
    use_candidate: Annotated[
        bool,
        typer.Option(
            "--use-candidate",
            rich_help_panel=BASICS,
            help="Take the profile's candidate, which learns as well and is not proven faster.",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(rich_help_panel=BASICS, metavar="N", min=1, help="Optimizer steps to take.", show_default=False),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="N",
            min=1,
            help="Epochs to train.",
            show_default="1 if --steps is not given",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            "--out",
            "-o",
            rich_help_panel=OUTPUT,
            metavar="FOLDER",
            help="Where the run goes.",
            show_default="a new folder under runs/",
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="N",
            min=0,
            max=2**31 - 1,
            help="Seed of weights, data order, dropout.",
            show_default="0",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", rich_help_panel=BASICS, help="Go on with --run-dir, or this target's newest numbered run."
        ),
    ] = False,
    max_time: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="TIME",
            help="End with a checkpoint before this, e.g. 3h50m.",
            show_default=False,
        ),
    ] = None,
    checkpoint_every: Annotated[
        str, typer.Option(rich_help_panel=OUTPUT, metavar="TIME", help="Longest time between two checkpoints.")
    ] = "5m",
    keep: Annotated[
        int,
        typer.Option(
            "--keep-checkpoints",
            "--keep",
            rich_help_panel=OUTPUT,
            metavar="N",
            min=2,
            help="Checkpoints kept, beside the best one.",
        ),
    ] = 2,
    log: Loggers = None,
    trust: Annotated[
        bool,
        typer.Option(
            "--skip-verification",
            "--trust",
            rich_help_panel=BASICS,
            help="Use a profile from elsewhere without a second look.",
        ),
    ] = False,
    device: Device = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="N",
            help="Processes that train together, or gpu for one on each GPU.",
            show_default="1, or as many as the run to resume has",
        ),
    ] = None,
    nnodes: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=BASICS, metavar="N", min=1, help="Machines that train together.", show_default="1"
        ),
    ] = None,
    rdzv_endpoint: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS, metavar="HOST:PORT", help="Where they meet: of node 0.", show_default=False
        ),
    ] = None,
    rdzv_id: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS, metavar="ID", help="The same on all of them, e.g. the job's.", show_default=False
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="K",
            min=0,
            help="Number of this machine; 0 leads.",
            show_default="0 where the endpoint is",
        ),
    ] = None,
    rank_timeout: Annotated[
        str, typer.Option(rich_help_panel=BASICS, metavar="TIME", help="Longest wait of one process for another.")
    ] = "10m",
    max_restarts: Annotated[
        int,
        typer.Option(
            rich_help_panel=SCRIPTS,
            metavar="N",
            min=0,
            help="Restarts of a script that goes on from its own checkpoints.",
        ),
    ] = 0,
    knob: Knobs = None,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", rich_help_panel=OUTPUT, help="Tell each look at the loss, and the settings."),
    ] = False,
    quiet: Quiet = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train with a profile's settings, a preset's or your own: checkpointed, resumable, guarded."""
    with reported_errors(as_json=json_output, quiet=quiet):
        is_watched = tie_to_parent()
        if not is_watched:
            sweep_scratch()
        chosen = read_target(target, command="train", knobs=knob)
        set_device(device, chosen)
        from autotune.train.options import TrainingOptions
        from autotune.train.settings.target import resolve_training_target
        from autotune.units import parse_duration

        options = TrainingOptions(
            profile=profile,
            preset=preset,
            use_candidate=use_candidate,
            steps=steps,
            epochs=epochs,
            out=out,
            resume=resume,
            seed=seed,
            trust=trust,
            max_time_seconds=None if max_time is None else parse_duration(max_time, name="--max-time"),
            checkpoint_seconds=parse_duration(checkpoint_every, name="--checkpoint-every"),
            checkpoints_kept=keep,
            rank_timeout_seconds=parse_duration(rank_timeout, name="--rank-timeout"),
        )
        options.check()
        loggers = read_loggers(log or ())
        options = options.classify_presets(Path.cwd())
        require_settings(options, is_shared=(nnodes or 1) > 1)
        resolved = resolve_training_target(chosen, Path.cwd())
        if not is_watched:
            mention_answer(options, resolved.target)
        if resolved.target.script is not None:
            announce_resolved(resolved, Path.cwd(), command="train")
            if nproc_per_node is not None:
                raise UsageError("--nproc-per-node is for a workload", hint=_OF_SCRIPT)
            if (nnodes, rdzv_endpoint, rdzv_id, node_rank) != (None, None, None, None):
                raise UsageError("--nnodes is for a workload", hint="a script's own launcher starts it on each node")
            train_script_target(resolved.target, options, max_restarts=max_restarts, as_json=json_output, log=loggers)
        if max_restarts:
            raise UsageError("--max-restarts is for a script", hint="a workload goes on by itself")
        assert chosen is None or isinstance(chosen, str)
        if not is_watched:
            nodes = choose_nodes(
                nnodes,
                rdzv_endpoint,
                rdzv_id,
                node_rank,
                nproc_per_node=nproc_per_node,
                patience_seconds=options.rank_timeout_seconds,
            )
            ranks = choose_ranks(nproc_per_node, options, resolved.target)
            if sys.argv[1:2] == ["train"]:
                train_in_child(sys.argv[2:], as_json=json_output, ranks=ranks, nodes=nodes)
        take_part(options, chosen, resolved, log=loggers, as_json=json_output, verbose=verbose)


def take_part(
    options: TrainingOptions,
    target: str | None,
    resolved: ResolvedTarget,
    *,
    log: Sequence[LoggerName],
    as_json: bool,
    verbose: bool,
) -> None:
    """Train in this process: alone, or as one of several."""
    from autotune.train.ranks.handover import find_place

    place = find_place()
    if place is not None and not place.leads:
        follow_leader(place, target, options)
    if not is_relaunched():
        announce_resolved(resolved, Path.cwd(), command="train")
    from autotune.train.ranks.leading import leading

    with leading(place):
        train_workload(options, target, log=log, as_json=as_json, verbose=verbose, place=place)


def mention_answer(options: TrainingOptions, target: TargetRecord) -> None:
    """Say that a search's answer for the target is here, where the training is to be with the target's own settings."""
    from autotune.records.profile import Profile

    if options.resume or options.profile is not None or options.preset is not None:
        return
    try:
        answer = Profile.load(Path.cwd() / "best.json")
    except AutotuneError:
        return
    if answer.verdict == "improved" and answer.target.label == target.spec:
        say("your own settings are used: best.json has faster ones for this target, --profile best.json takes them")


def require_settings(options: TrainingOptions, *, is_shared: bool = False) -> None:
    """Make sure that the profile or the preset can be read, and the run made, before anything is started for it.

    Args:
        options: that were typed.
        is_shared: another node may have made the run already; the leader looks.

    Raises:
        UsageError: the run folder is in use.
        ProfileError: it is not there, or cannot be used.
    """
    from autotune.presets import find_preset
    from autotune.records.profile import Profile
    from autotune.train.runs.folder import require_free

    if options.out is not None and not options.resume and not is_shared:
        require_free(Path.cwd() / options.out)
    if isinstance(options.profile, str | Path):
        Profile.load(options.profile)
    if options.preset is not None:
        find_preset(options.preset)


def train_in_child(words: list[str], *, as_json: bool, ranks: str | None, nodes: Nodes | None) -> NoReturn:
    """Train in a process of its own, which this one watches over: it is started again if it is killed.

    Args:
        words: as typed after `autotune train`.
        as_json: an error goes to standard output.
        ranks: several processes, as many as this says; None for one.
        nodes: how those of several nodes meet; None without others.
    """
    from autotune.train.recovery.workload import NO_NODES, RANKS, TRAIN, train_supervised

    met = NO_NODES if nodes is None else nodes.model_dump_json()
    alone = ranks is None and nodes is None
    command = TRAIN if alone else (*RANKS, ranks or "1", met)
    end = train_supervised(words, say=warn, command=command, restarts=nodes is None)
    if end.message and as_json:
        print_error_json(end.status, "TrainingDied", end.message, end.hint)
    elif end.message:
        say(f"error: {end.message}", style="red", is_error=True)
        say(f"  {end.hint}", is_error=True)
    raise typer.Exit(end.status)


def train_script_target(
    target: TargetRecord, options: TrainingOptions, *, max_restarts: int, as_json: bool, log: Sequence[LoggerName] = ()
) -> NoReturn:
    """Run a script to its end under its settings, and exit as it does.

    Args:
        target: the script.
        options: that were typed.
        max_restarts: times it is started again after steps were taken.
        as_json: print the summary as JSON.
        log: of `--log`, which is for a workload.

    Raises:
        UsageError: an option is given that only the script's own command can set.
    """
    from autotune.cli.pages.training import print_summary
    from autotune.sentences.settings import describe_changes
    from autotune.train.script.recovery import train_script
    from autotune.train.script.run import list_workload_options, prepare_script_run, refuse_workload_options
    from autotune.train.script.settings import choose_settings

    refuse_workload_options({**list_workload_options(options), "--log": bool(log)}, target)
    with stop_on_signals() as stop:
        settings = choose_settings(target, options, Path.cwd(), warn=warn, say=say, should_stop=stop)
        stop.exit_if_set()
    run = prepare_script_run(settings, target)
    if run.knows_settings:
        say(f"autotune: trains with {describe_changes(run.config, run.baseline_config)} ({run.origin})")
    end = train_script(run, say=lambda text: say(f"autotune: {text}"), max_restarts=max_restarts, as_json=as_json)
    if as_json:
        with forgiven_output():
            print_json(end.summary.to_json())
    else:
        print_summary(end.summary)
    raise typer.Exit(end.status)


def train_workload(
    options: TrainingOptions,
    target: str | None,
    *,
    log: Sequence[LoggerName],
    as_json: bool,
    verbose: bool = False,
    place: Place | None = None,
) -> None:
    """Train a workload in this process, and exit as it ended."""
    from autotune.cli.training_session import make_callbacks, take_reverification, training_log

    options = replace(options, reverification=take_reverification())
    from autotune.cli.view.training import training_view
    from autotune.train.recovery.steps_down import FreshProcessNeeded
    from autotune.train.run import run_training

    with stop_on_signals(signal.SIGUSR1, signal.SIGUSR2) as stop:
        if place is not None:
            place.announce()
        try:
            with training_view(verbose=verbose) as view, training_log(log, view) as sink:
                summary = run_training(options, target, callbacks=make_callbacks(stop, view, sink), place=place)
        except KeyboardInterrupt:
            say("stopped at once: what was trained since the last checkpoint is lost", style="yellow")
            raise typer.Exit(128 + signal.SIGINT) from None
        except FreshProcessNeeded as error:
            say(f"step down: {error.message}", style="yellow")
            raise typer.Exit(AGAIN_STATUS) from None
        except UsageError:
            stop.exit_if_set()  # a probe that a stop has ended is no error
            raise
        _print_end(summary, as_json=as_json)
        stop.exit_if_set()
    if not summary.finished:
        raise typer.Exit(OUT_OF_TIME_STATUS)


def _print_end(summary: TrainingSummary, *, as_json: bool) -> None:
    from autotune.cli.pages.training import print_summary
    from autotune.train.runs.folder import read_plan

    if as_json:
        with forgiven_output():
            print_json(summary.to_json())
    else:
        print_summary(summary, read_plan(Path(summary.folder)))
