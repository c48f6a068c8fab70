"""`autotune train` of a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from autotune.cli.stopping import stop_on_signals
from autotune.cli.view.terminal import forgiven_output, print_json, say, warn

if TYPE_CHECKING:
    from autotune.records.trial import Target as TargetRecord
    from autotune.train.options import TrainingOptions


def train_script_target(
    target: TargetRecord, options: TrainingOptions, *, max_restarts: int, as_json: bool, log: str | None = None
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
    from autotune.targets.source.fingerprint import fingerprint_target
    from autotune.train.script.recovery import train_script
    from autotune.train.script.run import prepare_script_run, refuse_workload_options
    from autotune.train.settings.candidate import load_profile
    from autotune.train.settings.choice import choose_script_settings
    from autotune.train.settings.presets import find_facts
    from autotune.train.settings.reverify import ReverifyOptions, reverify_in_processes

    refuse_workload_options({**_list_given(options), "--log": log}, target)
    with stop_on_signals() as stop:
        fingerprint = fingerprint_target(target)
        settings = choose_script_settings(
            target,
            profile=load_profile(options, Path.cwd(), warn),
            preset=options.preset,
            find_facts=lambda: find_facts(target, fingerprint=fingerprint, should_stop=stop, say=say),
            note=warn,
        )
        if settings.needs_reverification and not options.trust:
            verified = reverify_in_processes(settings, target, ReverifyOptions(should_stop=stop, say=say))
            settings = settings if verified.trusted else settings.fall_back()
        stop.exit_if_set()
    run = prepare_script_run(settings, target)
    end = train_script(run, say=lambda text: say(f"autotune: {text}"), max_restarts=max_restarts, as_json=as_json)
    if as_json:
        with forgiven_output():
            print_json(end.summary.to_json())
    else:
        print_summary(end.summary)
    raise typer.Exit(end.status)


def _list_given(options: TrainingOptions) -> dict[str, object]:
    from autotune.train.options import TrainingOptions

    default = TrainingOptions()
    return {
        "--steps": options.steps,
        "--epochs": options.epochs,
        "--max-time": options.max_time_seconds,
        "--out": options.out,
        "--resume": options.resume,
        "--seed": options.seed,
        "--checkpoint-every": options.checkpoint_seconds != default.checkpoint_seconds,
        "--keep": options.checkpoints_kept != default.checkpoints_kept,
    }
