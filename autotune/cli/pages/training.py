"""How a training ended, on stdout: what was expected and what came, where the time went, where everything is."""

from __future__ import annotations

import os

from autotune.cli.pages.layout import LinePage, Part, open_page
from autotune.cli.view.terminal import forgiven_output, one_line
from autotune.format import (
    count,
    format_bytes,
    format_duration,
    format_factor,
    format_figure,
    format_rate,
)
from autotune.records.config import TrainConfig, spread_config
from autotune.records.run import GuardSummary, RunPlan, TrainingSummary
from autotune.sentences.settings import describe_changes, describe_exchanges
from autotune.sentences.training import describe_best, judge_throughput, list_setbacks, list_use


def print_summary(summary: TrainingSummary, plan: RunPlan | None = None) -> None:
    """Print a training's summary on stdout; where that cannot be written, one line says so.

    Args:
        summary: of the run.
        plan: with which settings it was started; None when that is not known, and they are not compared then.
    """
    with forgiven_output():
        _show_summary(summary, plan)


def _show_summary(summary: TrainingSummary, plan: RunPlan | None) -> None:
    page = open_page()
    target = summary.target.label if summary.target is not None else ""
    page.heading("trained" if summary.finished else "stopped", one_line(target))
    loss = "-" if summary.loss is None else format_figure(summary.loss)
    page.sentence(
        f"trained {count(summary.steps, 'step')}, {count(summary.samples, 'sample')}: loss {loss}", style="bold"
    )
    _show_metrics(page, summary)
    _show_step_downs(page, summary)
    _show_promises(page, summary, plan)
    _show_time(page, summary)
    page.notes(summary.warnings)
    _show_places(page, summary)


def _show_metrics(page: LinePage, summary: TrainingSummary) -> None:
    for name, value in summary.metrics.items():
        page.facts(name, [format_figure(value)])
    best = summary.best
    if best is not None:
        page.facts("best", [f"{best.metric} {describe_best(best)}"])


def _show_step_downs(page: LinePage, summary: TrainingSummary) -> None:
    if summary.step_downs:
        page.heading("steps down", f"{len(summary.step_downs):,}")
    for step_down in summary.step_downs:
        badge = f"went on from step {step_down.resumed_step:,}"
        page.entry(step_down.cause, step_down.sentence, badge=badge, style="bold yellow")


def _show_promises(page: LinePage, summary: TrainingSummary, plan: RunPlan | None) -> None:
    page.heading("expected and measured", f"settings: {one_line(summary.origin)}")
    page.facts("throughput", [describe_throughput(summary)])
    page.facts("drift", [describe_guard(summary.guard)])
    if plan is not None and summary.config is not None:
        page.facts("settings", [describe_settings(plan, summary.config)])
    again = summary.reverification
    for difference in () if again is None else (*again.differences, again.reason):
        page.sentence(difference, bullet=True)


def describe_throughput(summary: TrainingSummary) -> str:
    """Return how the throughput compares with what the search measured, the verdict first."""
    came, promised = summary.samples_per_second, summary.promised_samples_per_second
    if came is None:
        return "not compared: no step was taken"
    if not promised:
        return f"{format_rate(came)}; the search did not measure these settings"
    noise = summary.promised_noise
    verdict = f"{judge_throughput(came, promised, noise)} ({format_factor(came / promised)})"
    differing = "" if noise is None else f"; its launches differed by {100 * noise:.1f} %"
    return f"{verdict}: {format_rate(came)}, the search measured {format_rate(promised, unit='')}{differing}"


def describe_guard(guard: GuardSummary | None) -> str:
    """Return what the drift guard saw, the verdict first."""
    if guard is None:
        return "not compared: a script's training is not guarded"
    if not guard.is_on:
        return f"nothing to guard: {guard.reason or 'these are your own numerics'}"
    checks = f"{count(guard.gradient_checks, 'gradient')} checked against your own numerics"
    if guard.cost_fraction is not None:
        checks += f", {100 * guard.cost_fraction:.1g} % of the time"
    missing = f"; {guard.reason}" if guard.reason else ""
    if guard.alarms:
        return f"not as expected: rolled back {count(guard.alarms, 'time')}, {checks}{missing}"
    if not guard.gradient_checks:
        return f"not looked at{missing}"
    return f"as expected up to step {guard.last_clean_step:,}: {checks}{missing}"


def describe_settings(plan: RunPlan, config: TrainConfig) -> str:
    """Return the settings in force where they are not those that were asked for."""
    changes = describe_exchanges(spread_config(plan.asked_config, plan.world_size), config)
    if not changes:
        return f"as asked for: {describe_changes(config, plan.baseline_config)}"
    return f"not as asked for: {changes}"


def _show_time(page: LinePage, summary: TrainingSummary) -> None:
    steps, evaluation, checkpoints = (
        summary.training_seconds,
        summary.evaluation_seconds,
        summary.checkpoint_seconds,
    )
    known = steps + evaluation + checkpoints
    page.heading("time", f"{format_duration(summary.elapsed_seconds)} in this session")
    # The parts are of all sessions: only in a single one is what is left of it set-up.
    whole = max(known, summary.elapsed_seconds)
    parts = (
        Part("steps", steps / whole, format_duration(steps), "cyan"),
        Part("evaluation", evaluation / whole, format_duration(evaluation), "magenta"),
        Part("checkpoints", checkpoints / whole, format_duration(checkpoints), "yellow"),
        Part("set-up, rest", 1.0 - known / whole, format_duration(whole - known), ""),
    ) if whole > 0 else ()  # fmt: skip
    if known > 0:
        page.parts("where it went", [part for part in parts if part.share > 0])
    page.facts("machine", _list_machine(summary))


def _list_machine(summary: TrainingSummary) -> list[str]:
    facts = list_use(summary.data_wait_fraction, summary.mfu)
    if summary.peak_memory_bytes is not None:
        facts.append(f"peak memory {format_bytes(summary.peak_memory_bytes)}")
    return facts + list_setbacks(summary.skipped_steps, summary.allocator_retries)


def _show_places(page: LinePage, summary: TrainingSummary) -> None:
    if not summary.checkpoint and not (summary.folder and summary.finished):
        return  # of a script, which has its checkpoints itself, there is no more to show
    page.heading("next")
    if summary.checkpoint:
        page.facts("checkpoint", [summary.checkpoint])
    if summary.best is not None and summary.best.checkpoint != summary.checkpoint:
        page.facts("best", [summary.best.checkpoint])
    if summary.weights:
        page.facts("weights", [summary.weights, "load them with safetensors.torch.load_model(model, FILE)"])
    if summary.finished:
        page.facts("compare", [f"autotune compare {_show_path(summary.folder)} ANOTHER-RUN"])


def _show_path(path: str) -> str:
    """Return a path as it is typed here: from this folder where it is in it."""
    near = os.path.relpath(path)
    return path if near.startswith("..") else near
