"""The presets and the searches that are remembered, on stdout."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from autotune.cli.pages.layout import open_page
from autotune.cli.view.terminal import say
from autotune.format import format_duration, format_factor
from autotune.records.search import KnownEffect, PastSearch, Preset
from autotune.sentences.settings import describe_changes, name_setting

_MOST_EFFECTS = 6


def print_presets(presets: Sequence[Preset]) -> None:
    """Print the presets with their settings."""
    page = open_page()
    for one in presets:
        page.heading(one.name, one.description)
        page.facts("settings", [f"{name}={value}" for name, value in one.settings.items()] or ["none"])


def print_history(past: Sequence[PastSearch]) -> None:
    """Print the remembered searches, the newest first."""
    if not past:
        say("no search is remembered yet")
        return
    page, now = open_page(), time.time()
    for one in past:
        gain = f" {format_factor(one.speedup.estimate)}" if one.verdict == "improved" and one.speedup else ""
        page.heading(one.label, f"{format_duration(max(0.0, now - one.ended_at))} ago, {one.verdict}{gain}")
        page.facts("answer", [describe_changes(one.config, one.baseline)])
        told = sorted(one.effects, key=lambda effect: (effect.failed, -abs(effect.log_speedup)))
        page.facts("alone", [_describe_effect(effect) for effect in told[:_MOST_EFFECTS]])


def _describe_effect(effect: KnownEffect) -> str:
    name = f"{name_setting(effect.knob)}={effect.value}"
    return f"{name} failed" if effect.failed else f"{name} {format_factor(math.exp(effect.log_speedup))}"
