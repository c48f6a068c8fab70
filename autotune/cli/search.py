"""`autotune search`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from autotune.cli.stopping import StopFlag, stop_on_signals
from autotune.cli.target import (
    Device,
    Direction,
    Knobs,
    Loggers,
    MetricKey,
    MetricRegex,
    QualityEpochs,
    QualitySteps,
    Target,
    announce_target,
    read_nproc_per_node,
    read_target,
    set_device,
    show_target,
)
from autotune.cli.view.help import BASICS, CHANGES, OUTPUT, Quiet
from autotune.cli.view.terminal import print_json, reported_errors, say
from autotune.errors import AutotuneError, NothingFeasibleError, UsageError
from autotune.loggers import LoggerName, read_loggers

if TYPE_CHECKING:
    from autotune.records.profile import Profile
    from autotune.records.quality import DriftLimits
    from autotune.records.script import Script
    from autotune.records.search import PlannedRun
    from autotune.search.run import SearchOptions
    from autotune.targets.drift_limits import GivenLimits
    from autotune.targets.resolve import ProjectSettings


def search(
    target: Target = None,
    budget: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="TIME",
            help="Deadline of the whole command: 90s, 20m, 1h30m.",
            show_default="20m",
        ),
    ] = None,
    max_loss_increase: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CHANGES,
            help="How much higher than yours the training loss may be.",
            show_default="0.5%",
            metavar="LIMIT",
        ),
    ] = None,
    metric_limit: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=CHANGES,
            help="How much worse metrics may get: 1%, or one of them accuracy=0.1pp (in its own unit), "
            "max-degradation=0.001, min-improvement=0.01. Repeatable.",
            show_default="0.5%",
            metavar="LIMIT",
        ),
    ] = None,
    max_drift: Annotated[
        list[str] | None, typer.Option(hidden=True, help="--max-loss-increase and --metric-limit in one.")
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CHANGES,
            metavar="SIZE",
            help="Of the GPU, else of the host: 16GiB.",
            show_default="what is there",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            rich_help_panel=BASICS,
            metavar="FILE",
            help="Where the answer goes.",
            show_default="best.json",
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            rich_help_panel=BASICS, metavar="N", min=0, max=2**31 - 1, help="Seed of proposals, weights and data order."
        ),
    ] = 0,
    nnodes: Annotated[int | None, typer.Option(hidden=True, help="Refused: of autotune train.")] = None,
    device: Device = None,
    nproc_per_node: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="N",
            help="Processes of each launch, or gpu: one on each GPU.",
            show_default="1",
        ),
    ] = None,
    planned_run: Annotated[
        str | None,
        typer.Option(
            "--train-for",
            "--planned-run",
            rich_help_panel=CHANGES,
            metavar="LENGTH",
            help="Length of the final training: 8h, 30epochs, 2000000samples.",
        ),
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=CHANGES,
            metavar="NAME",
            help="throughput, memory, or time-to-finish (usual with --train-for).",
        ),
    ] = None,
    tune_batch_size: Annotated[
        bool,
        typer.Option(
            "--tune-batch-size",
            rich_help_panel=CHANGES,
            help="Try other effective batches too, judged by the samples they need.",
        ),
    ] = False,
    allow: Annotated[list[str] | None, typer.Option(hidden=True, help="batch: --tune-batch-size.")] = None,
    lr_scaling: Annotated[
        str,
        typer.Option(
            "--lr-scaling",
            "--learning-rate-rule",
            rich_help_panel=CHANGES,
            metavar="RULE",
            help="Learning rate of a larger effective batch: none, sqrt (Adam), linear (SGD).",
        ),
    ] = "none",
    preset: Annotated[
        list[str] | None,
        typer.Option(
            rich_help_panel=CHANGES,
            help="Try a recipe of yours first. Repeatable.",
            metavar="FILE",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=CHANGES, help="Vary this setting alone. Repeatable.", metavar="KNOB"),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(rich_help_panel=CHANGES, help="Leave this setting as it is. Repeatable.", metavar="KNOB"),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            rich_help_panel=BASICS,
            help="Launch nothing: print how a search would begin and what it takes.",
        ),
    ] = False,
    no_history: Annotated[
        bool,
        typer.Option(
            "--no-history",
            rich_help_panel=CHANGES,
            help="Begin anew, not where earlier searches of the like have ended.",
        ),
    ] = False,
    storage: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=BASICS,
            metavar="URL",
            help="Share one study with machines alike in a database (docs/scale.md).",
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", rich_help_panel=BASICS, help="Go on with this target's newest search in this folder."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", rich_help_panel=BASICS, help="Replace the output file whatever it is.")
    ] = False,
    knob: Knobs = None,
    metric_regex: MetricRegex = None,
    metric_key: MetricKey = None,
    direction: Direction = None,
    quality_steps: QualitySteps = None,
    quality_epochs: QualityEpochs = None,
    log: Loggers = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", rich_help_panel=OUTPUT, help="Name each launch's log, and why values are ruled out."
        ),
    ] = False,
    quiet: Quiet = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
) -> None:
    """Search for faster settings that learn the same, and write them to best.json.

    The exit status is 0 for any answer, and 3 where nothing but your own settings could be measured.
    """
    with reported_errors(as_json=json_output, quiet=quiet):
        if nnodes not in (None, 1):
            raise UsageError(
                f"--nnodes {nnodes}: a search measures on one machine",
                hint="search on one of the nodes, then train on all: autotune train --profile best.json --nnodes ...",
            )
        chosen = read_target(
            target,
            knobs=knob,
            metric_regexes=metric_regex,
            metric_keys=metric_key,
            directions=direction,
            quality_steps=quality_steps,
            quality_epochs=quality_epochs,
        )
        set_device(device, chosen)
        loggers = read_loggers(log or ())
        from autotune.presets import find_preset
        from autotune.records.objective import read_objective
        from autotune.targets.drift_limits import GivenLimits

        given = {"budget": budget, "memory_limit": memory_limit, "out": str(out) if out else None}
        options = read_options(
            given,
            limits=GivenLimits(max_loss_increase, metric_limit or (), max_drift or ()),
            seed=seed,
            resume=resume,
            force=force,
            planned_run=planned_run,
        )
        options = allow_changes(options, (*(allow or ()), *(["batch"] if tune_batch_size else [])), lr_scaling)
        options = dataclasses.replace(
            options,
            objective=None if objective is None else read_objective(objective, name="--objective"),
            presets=tuple(find_preset(name) for name in preset or ()),
            only=tuple(only or ()),
            exclude=tuple(exclude or ()),
            history=not no_history,
            nproc_per_node=None if nproc_per_node is None else read_nproc_per_node(nproc_per_node),
            storage=storage,
        )
        chosen = _announce(chosen, resume=resume)
        if dry_run and options.nproc_per_node not in (None, 1):
            raise UsageError("--dry-run looks ahead for one process only", hint="leave --nproc-per-node or it out")
        if dry_run:
            _print_forecast(chosen, options, json_output=json_output)
            return
        _run(chosen, options, json_output=json_output, verbose=verbose, log=loggers)


def _run(
    chosen: str | Script | None, options: SearchOptions, *, json_output: bool, verbose: bool, log: Sequence[LoggerName]
) -> None:
    """Search, print the answer, and exit as it ended."""
    from autotune.cli.pages.answer import print_answer
    from autotune.cli.pages.report import write_page_beside

    with stop_on_signals() as stop:
        try:
            profile = _search_shown(chosen, options, stop, verbose=verbose, log=log)
        except AutotuneError:
            if stop.signal_number is not None:
                again = f"autotune search --resume{show_target(chosen)}"
                say(f"stopped before your settings were measured: there is no answer yet; go on with: {again}")
            stop.exit_if_set()
            raise
        explanation, told = write_page_beside(profile, Path(options.out), force=options.force)
        if json_output:
            print_json(profile.to_json())
        else:
            print_answer(profile, Path(options.out), explanation, is_kept=_keeps_proof(profile, options.out))
        if told:
            say(told)
        stop.exit_if_set()
    if profile.verdict == "not-tested":
        raise typer.Exit(NothingFeasibleError.exit_code)


def _keeps_proof(profile: Profile, out: str | Path) -> bool:
    """Return whether a file holds a proven answer of before still, where a search has come to nothing."""
    from autotune.records.profile import Profile

    try:
        return profile.verdict != "improved" and Profile.load(out).verdict == "improved"
    except AutotuneError:
        return False


def _search_shown(
    chosen: str | Script | None, options: SearchOptions, stop: StopFlag, *, verbose: bool, log: Sequence[LoggerName]
) -> Profile:
    from autotune.cli.stopping import ended_in_time
    from autotune.cli.view.search import search_view
    from autotune.loggers.search_log import logged
    from autotune.search.run import run_search

    with (
        search_view(options.budget_seconds, verbose=verbose) as view,
        logged(log, view, view.told) as (reporter, finish),
        ended_in_time(options.budget_seconds, stop),
    ):
        profile = run_search(chosen, options, reporter=reporter, should_stop=stop)
        finish(profile)
        return profile


def _announce(chosen: str | Script | None, *, resume: bool) -> str | Script | None:
    """Return the target: to resume, without a name, the one of the search in this folder; say which it is."""
    from autotune.cli.target import announce_resolved
    from autotune.train.settings.target import resolve_remembered

    if not resume or chosen is not None:
        announce_target(chosen, Path.cwd())
        return chosen
    resolved = resolve_remembered(None, Path.cwd(), command="search --resume")
    if resolved.origin == "demo":
        raise UsageError("--resume: no search was made in this folder", hint="leave --resume out, or name its target")
    announce_resolved(resolved, Path.cwd(), command="search")
    return resolved.target.script or resolved.target.spec


def _print_forecast(chosen: str | Script | None, options: SearchOptions, *, json_output: bool) -> None:
    from autotune.cli.pages.forecast import print_forecast
    from autotune.selftest.rehearsal import rehearse_search

    forecast = rehearse_search(chosen, options, folder=Path.cwd())
    if json_output:
        print_json(forecast.to_json())
    else:
        print_forecast(forecast)


def read_options(
    given: dict[str, str | None],
    *,
    seed: int,
    resume: bool,
    force: bool,
    limits: GivenLimits | None = None,
    planned_run: str | None = None,
) -> SearchOptions:
    """Return the options: what was typed, else what [tool.autotune] says, else the defaults.

    Raises:
        UsageError: a value does not parse; it is named as it was given.
    """
    from autotune.search.run import DEFAULT_BUDGET_SECONDS, SearchOptions
    from autotune.targets.drift_limits import GivenLimits
    from autotune.targets.resolve import read_project_settings
    from autotune.units import parse_bytes, parse_duration

    settings = read_project_settings(Path.cwd())
    texts = {name: value if value is not None else getattr(settings, name) for name, value in given.items()}
    budget, memory = texts["budget"], texts["memory_limit"]

    def name(option: str, typed: object) -> str:
        return f"{settings.file}: {option}" if typed is None else f"--{option.replace('_', '-')}"

    return SearchOptions(
        budget_seconds=DEFAULT_BUDGET_SECONDS
        if budget is None
        else parse_duration(budget, name=name("budget", given["budget"])),
        max_drift=read_limits(limits or GivenLimits(), settings),
        memory_limit_bytes=None
        if memory is None
        else parse_bytes(memory, name=name("memory_limit", given["memory_limit"])),
        out=texts["out"] or "best.json",
        seed=seed,
        resume=resume,
        force=force,
        planned_run=None if planned_run is None else read_planned_run(planned_run),
    )


def read_limits(typed: GivenLimits, settings: ProjectSettings) -> DriftLimits:
    """Return what was typed allows, and what the settings do that no option was typed for.

    Raises:
        UsageError: a limit does not parse, or two are given for the same.
    """
    from autotune.targets.drift_limits import GivenLimits, join_limits

    set_there = GivenLimits(
        None if typed.loss is not None else settings.max_loss_increase,
        () if typed.metrics else settings.metric_limit or (),
        () if typed.older else settings.max_drift or (),
        name=lambda option: f"{settings.file}: {option}",
    )
    return join_limits({**set_there.read(), **typed.read()})


def allow_changes(options: SearchOptions, allow: Sequence[str], rule: str) -> SearchOptions:
    """Return the options with the changes of what is learned that the user allows.

    Raises:
        UsageError: a change or a rule is not known, or a rule is given where the batch is held.
    """
    from autotune.records.config import LearningRateRule

    wrong = [name for name in allow if name != "batch"]
    if wrong:
        raise UsageError(f"--allow {wrong[0]!r} is no change that can be allowed", hint="it is --tune-batch-size")
    rules: tuple[LearningRateRule, ...] = get_args(LearningRateRule)
    chosen = next((known for known in rules if known == rule), None)
    if chosen is None:
        raise UsageError(f"--lr-scaling {rule!r} is not known", hint=f"it is one of {', '.join(rules)}")
    if chosen != "none" and not allow:
        raise UsageError(f"--lr-scaling {rule} is given, and the effective batch is held", hint="add --tune-batch-size")
    allowed: tuple[Literal["batch"], ...] = ("batch",) if allow else ()
    return dataclasses.replace(options, allowed=allowed, learning_rate_rule=chosen)


def read_planned_run(text: str) -> PlannedRun:
    """Return the length of the final training.

    Raises:
        UsageError: it is neither a duration nor a number of epochs or samples.
    """
    from autotune.records.search import PlannedRun
    from autotune.units import parse_amount

    amount, unit = parse_amount(text, counts=("epochs", "samples"), name="--train-for")
    return PlannedRun(amount=amount, unit=unit)  # type: ignore[arg-type]
