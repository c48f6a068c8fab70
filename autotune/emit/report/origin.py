"""Where an answer is from and how to get it again: what the page says of its search. Records in, rows of text out."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from autotune.emit.report.command import describe_command
from autotune.emit.report.wording import shorten
from autotune.format import format_duration
from autotune.records import ProbeReport, Profile
from autotune.records.search import SearchState
from autotune.sentences.saving import describe_price, describe_saving

_MOST_COMMAND = 2000


@dataclass(frozen=True)
class Origin:
    """What is known of a search beside its records.

    Attributes:
        state: what it was asked; None where that is not known.
        began: when, by its machine's clock.
        folder: where it is.
        price: of an hour of the machine, in any currency; None where money is not asked for.
    """

    state: SearchState | None = None
    began: datetime | None = None
    folder: str = ""
    price: float | None = None


def describe_gain(profile: Profile, probe: ProbeReport, origin: Origin) -> list[str]:
    """Return what the answer saves of a training, in time and in money where that was asked for."""
    rate = profile.evidence.baseline_samples_per_second or probe.measurement.samples_per_second
    aside, costs, state = probe.target.aside_fraction, profile.one_off, origin.state
    planned = None if state is None else state.planned_run
    if costs.planned_seconds is None and planned is not None and planned.unit == "seconds":  # of an older search
        profile = profile.replace(one_off=costs.replace(planned_seconds=planned.amount))
    saved = describe_saving(profile, rate, aside=aside)
    paid = ""
    if origin.price is not None:
        paid = describe_price(profile, rate, aside=aside, price=origin.price)
    return [text for text in (saved, paid) if text]


def find_command(origin: Origin) -> str:
    """Return the command that makes the search again; empty where it is not known."""
    return "" if origin.state is None else shorten(describe_command(origin.state), _MOST_COMMAND)


def list_origin(profile: Profile, origin: Origin) -> list[tuple[str, str]]:
    """Return when, for how long, with which seed, on what and with what the search was made."""
    hardware, software = profile.hardware, profile.software
    gpus = "".join(f", {gpu.name}" for gpu in hardware.gpus) or ", no GPU"
    state = origin.state
    rows = [("date", f"{origin.began:%Y-%m-%d %H:%M}")] if origin.began is not None else []
    if state is not None and state.budget_seconds is not None:
        used = profile.one_off.search_seconds
        rows.append(("budget", f"{format_duration(state.budget_seconds)}, {format_duration(used)} used"))
    rows += [("seed", str(state.seed))] if state is not None else []
    rows.append(("machine", f"{hardware.cpu_name}, {hardware.usable_cpu_count} CPUs{gpus}"))
    rows.append(("versions", f"PyTorch {software.torch}, Python {software.python}, autotune {software.autotune}"))
    rows += [("records", origin.folder)] if origin.folder else []
    return [(name, shorten(value)) for name, value in rows]
