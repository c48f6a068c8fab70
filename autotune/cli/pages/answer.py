"""A search's answer on stdout: the verdict first, then the settings, what they rest on, and what to do next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from autotune.cli.view.console import result_console
from autotune.cli.view.terminal import printable_text, say
from autotune.explain.derive import is_settled
from autotune.format import format_budget, format_bytes, format_duration, format_rate
from autotune.records.config import changed_fields, get_knob
from autotune.records.explanation import Explanation
from autotune.records.measurement import PeakMemory
from autotune.records.profile import Profile
from autotune.sentences.answer import describe_candidate, describe_speedup, list_evidence
from autotune.sentences.explanation import describe_worth
from autotune.sentences.loss_check import describe_check
from autotune.sentences.saving import find_run_seconds, shorten_run
from autotune.sentences.settings import describe_changes, describe_share, name_setting

_LITTLE = 3
"""Launches that were timed, those of the user's own settings among them."""

_STYLES = {"improved": "bold green", "inconclusive": "bold yellow", "not-tested": "bold red", "keep": "bold"}


def print_answer(
    profile: Profile,
    out: Path,
    explanation: Explanation | None = None,
    *,
    is_new: bool = True,
    is_kept: bool = False,
) -> None:
    """Print a search's answer on stdout and the next command on stderr.

    Args:
        profile: the answer.
        out: where it is.
        explanation: what its changes are worth; None where that is not known.
        is_new: it was just written.
        is_kept: what was proven before is there still.
    """
    console = result_console()
    print_lines(console, list_answer(profile, explanation))
    sys.stdout.flush()
    if is_kept:
        say(f"{out} keeps what was proven before; next: autotune train --profile {shlex.quote(str(out))}")
        return
    say(f"{f'{out} written; ' if is_new else ''}{describe_next(profile, out)}")
    if profile.verdict == "improved":
        say("autotune explain says what each change is worth, autotune report makes a page of it")
        say("autotune export --to torch prints it as code")


def describe_next(profile: Profile, out: Path) -> str:
    """Return what to do after an answer: the next command, or nothing where it changes nothing."""
    if profile.verdict == "improved":
        return f"next: autotune train --profile {shlex.quote(str(out))}"
    if profile.candidate is not None and profile.candidate.passed_checks:
        train = f"autotune train --profile {shlex.quote(str(out))} --use-candidate"
        return f"next: {train}, for settings that are not proven faster"
    more = format_budget(max(60.0, profile.one_off.search_seconds))
    if profile.verdict == "inconclusive" and profile.evidence.confirmation is None:
        return f"next: autotune search --resume --budget {more}, which goes on where this one ended"
    if profile.verdict == "keep" and _was_cut_short(profile):
        return f"next: train as before, or autotune search --resume --budget {more}: there was time for little"
    return "nothing to change: train as before"


def _was_cut_short(profile: Profile) -> bool:
    """Return whether next to nothing was measured when the budget was used up."""
    evidence = profile.evidence
    measured = evidence.trials.get("completed", 0)
    return evidence.stop_reason == "budget" and not evidence.pairs and measured <= _LITTLE


def print_lines(console: Console, lines: Iterable[Text]) -> None:
    """Print lines; on a terminal, one that is too long goes on as far in as it begins."""
    for line in lines:
        inset = len(line.plain) - len(line.plain.lstrip())
        console.print(line if console.soft_wrap or not inset else Padding(line[inset:], (0, 0, 0, inset)))


def _describe_worth(name: str, explanation: Explanation | None) -> str:
    """Return what a change is worth where that is known well enough, beside the first of the settings that make it."""
    found = () if explanation is None or not explanation.is_proven else filter(is_settled, explanation.changes)
    own = [one for one in found if one.names[0] == name and (one.worth is not None or one.failure)]
    return "".join(f"   worth {text}" if one.worth else f"   {text}" for one in own for text in [describe_worth(one)])


def list_answer(profile: Profile, explanation: Explanation | None = None) -> Iterator[Text]:
    """Yield a search's answer line by line, with what each change is worth where that was measured."""
    yield printable_text(describe_speedup(profile), style=_STYLES[profile.verdict])
    for name in changed_fields(profile.config, profile.baseline_config):
        before, after = get_knob(profile.baseline_config, name), get_knob(profile.config, name)
        yield printable_text(f"  {name_setting(name):<20}{before} -> {after}{_describe_worth(name, explanation)}")
    if profile.verdict != "improved" and profile.candidate_config is not None:
        changes = describe_changes(profile.candidate_config, profile.baseline_config)
        known = describe_candidate(profile)
        yield printable_text(f"  candidate: {changes}{f' ({known})' if known else ''}")
    for check in profile.quality:
        yield printable_text(f"  {describe_check(check)}")
    if profile.world_size > 1:
        yield printable_text(f"  {describe_share(profile.config, profile.world_size)}")
    for line in list_before_and_after(profile):
        yield printable_text(f"  {line}")
    for line in list_evidence(profile):
        yield printable_text(f"  {line}")


def list_before_and_after(profile: Profile) -> list[str]:
    """Return throughput and peak memory of the user's own settings, and of the answer where that is another.

    With the length of the final training, as far as that was told, comes how long it takes.
    """
    before, after = profile.evidence.baseline_samples_per_second, profile.evidence.samples_per_second
    if profile.verdict != "improved":
        own = _list_figures(before, profile.memory)
        return [f"your settings  {own}"] if own else []
    aside, run = profile.one_off.aside_fraction, ""
    seconds = find_run_seconds(profile, before, aside=aside) if before else None
    if seconds is not None and profile.speedup is not None:
        shorter = format_duration(shorten_run(seconds, profile.speedup.estimate, aside))
        run = f"   your run of {format_duration(seconds)} takes about {shorter}"
    rows = {"before": _list_figures(before, profile.baseline_memory), "after": _list_figures(after, profile.memory)}
    shown = [f"{name:<8}{text}" for name, text in rows.items() if text]
    return [*shown[:-1], shown[-1] + run] if shown else []


def _list_figures(rate: float | None, memory: PeakMemory | None) -> str:
    rates = [] if rate is None else [format_rate(rate)]
    return "   ".join([*rates, *([] if memory is None else [format_bytes(memory.used_bytes)])])
