"""A search's answer on stdout: the verdict first, then the settings, what they rest on, and what to do next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from rich.text import Text

from autotune.cli.view.console import result_console
from autotune.cli.view.terminal import printable_text, say
from autotune.format import format_bytes, format_rate
from autotune.records.config import changed_fields, get_knob
from autotune.records.explanation import Explanation
from autotune.records.profile import Profile
from autotune.sentences.answer import describe_candidate, describe_speedup, list_evidence
from autotune.sentences.explanation import describe_worth
from autotune.sentences.loss_check import describe_check
from autotune.sentences.settings import describe_changes

_STYLES = {"improved": "bold green", "inconclusive": "bold yellow", "not-tested": "bold red", "keep": "bold"}


def print_answer(profile: Profile, out: Path, explanation: Explanation | None = None, *, is_new: bool = True) -> None:
    """Print a search's answer on stdout and the next command on stderr.

    Args:
        profile: the answer.
        out: where it is.
        explanation: what its changes are worth; None where that is not known.
        is_new: it was just written.
    """
    console = result_console()
    for line in list_answer(profile, explanation):
        console.print(line)
    sys.stdout.flush()
    usable = profile.candidate is not None and profile.candidate.passed_checks
    more = " (with --use-candidate for the candidate's settings)" if usable else ""
    written = f"{out} written; " if is_new else ""
    say(f"{written}next: autotune train --profile {out}{more}")
    if profile.verdict == "improved":
        say("autotune explain says what each change is worth, autotune report makes a page of it")
        say("autotune export --to torch prints it as code")


def _describe_worth(name: str, explanation: Explanation | None) -> str:
    """Return what a change is worth where that was measured, beside the first of the settings that make it."""
    found = () if explanation is None or not explanation.is_proven else explanation.changes
    own = [one for one in found if one.names[0] == name and (one.worth is not None or one.failure)]
    return "".join(f"   worth {text}" if one.worth else f"   {text}" for one in own for text in [describe_worth(one)])


def list_answer(profile: Profile, explanation: Explanation | None = None) -> Iterator[Text]:
    """Yield a search's answer line by line, with what each change is worth where that was measured."""
    yield printable_text(describe_speedup(profile), style=_STYLES[profile.verdict])
    for name in changed_fields(profile.config, profile.baseline_config):
        before, after = get_knob(profile.baseline_config, name), get_knob(profile.config, name)
        yield printable_text(f"  {name:<30}{before} -> {after}{_describe_worth(name, explanation)}")
    if profile.verdict != "improved" and profile.candidate_config is not None:
        changes = describe_changes(profile.candidate_config, profile.baseline_config)
        known = describe_candidate(profile)
        yield printable_text(f"  candidate: {changes}{f' ({known})' if known else ''}")
    for check in profile.quality:
        yield printable_text(f"  {describe_check(check)}")
    evidence = profile.evidence
    if evidence.baseline_samples_per_second is not None:
        now = f" -> {format_rate(evidence.samples_per_second)}" if evidence.samples_per_second else ""
        yield printable_text(f"  throughput {format_rate(evidence.baseline_samples_per_second)}{now}")
    if profile.memory is not None:
        yield printable_text(f"  peak memory {_describe_memory(profile)}")
    for line in list_evidence(profile):
        yield printable_text(f"  {line}")


def _describe_memory(profile: Profile) -> str:
    """Return the peak of the answer, after that of the own settings where it is another."""
    assert profile.memory is not None
    after, before = profile.memory.used_bytes, profile.baseline_memory
    first = "" if before is None or profile.verdict != "improved" else f"{format_bytes(before.used_bytes)} -> "
    return f"{first}{format_bytes(after)}"
