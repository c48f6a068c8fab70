"""Presets, remembered searches, what is at work, and the machine, on stdout."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from autotune.cli.pages.layout import open_page
from autotune.cli.view.terminal import say
from autotune.format import count, format_bytes, format_duration, format_factor
from autotune.records.hardware import HardwareInfo, SoftwareInfo
from autotune.records.objective import Objective
from autotune.records.search import KnownEffect, PastSearch, Preset
from autotune.records.status import Status
from autotune.sentences.settings import describe_changes, name_setting
from autotune.sentences.status import describe_search, describe_training

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
        gain = f" in memory at{gain}" if gain and one.objective is Objective.MEMORY else gain
        page.heading(one.label, f"{format_duration(max(0.0, now - one.ended_at))} ago, {one.verdict}{gain}")
        page.facts("answer", [describe_changes(one.config, one.baseline)])
        told = sorted(one.effects, key=lambda effect: (effect.failed, -abs(effect.log_speedup)))
        page.facts("alone", [_describe_effect(effect) for effect in told[:_MOST_EFFECTS]])


def print_status(status: Status) -> None:
    """Print what is at work in a folder."""
    page = open_page()
    search = status.search
    page.heading("search", search.label if search else "")
    page.facts("now", [f"at work: {search.holder}" if search and search.holder else "none is at work in this folder"])
    if search is not None:
        page.facts("so far" if search.holder else "the last", [describe_search(search)])
    for training in status.trainings:
        page.heading("training", training.folder)
        page.facts("now", [f"at work: {training.holder}"])
        page.facts("so far", [describe_training(training)])


def print_environment(hardware: HardwareInfo, software: SoftwareInfo) -> None:
    """Print versions and machine."""
    page = open_page()
    page.heading("versions")
    for name, value in software.model_dump().items():
        page.facts(name, [str(value)] if value is not None else [])
    page.heading("machine")
    page.facts("cpu", [f"{hardware.cpu_name}, {count(hardware.usable_cpu_count, 'usable CPU')}"])
    page.facts("features", [" ".join(hardware.cpu_features)] if hardware.cpu_features else [])
    limit, total = format_bytes(hardware.memory_limit_bytes), format_bytes(hardware.memory_total_bytes)
    page.facts("memory", [f"{limit} usable of {total}"])
    for gpu in hardware.gpus:
        page.facts("gpu", [f"{gpu.name}, {format_bytes(gpu.memory_total_bytes)}"])
    page.facts("malloc", sorted(hardware.host_allocators))
    page.facts("runs in", hardware.environment)
    page.facts("not found", hardware.missing)


def _describe_effect(effect: KnownEffect) -> str:
    name = f"{name_setting(effect.knob)}={effect.value}"
    return f"{name} failed" if effect.failed else f"{name} {format_factor(math.exp(effect.log_speedup))}"
