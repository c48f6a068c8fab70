"""What a search would do, on stdout: what is varied, how it would begin, and what its proof costs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable

from autotune.cli.view.console import result_console
from autotune.cli.view.terminal import printable_text
from autotune.format import count, format_budget, format_duration, format_rough_factor
from autotune.records.search import ExpectedLaunch, SearchForecast
from autotune.sentences.settings import describe_changes, name_setting


def print_forecast(forecast: SearchForecast) -> None:
    """Print what a search would do."""
    console = result_console()
    budget = format_budget(forecast.budget_seconds)
    console.print(
        printable_text(f"{forecast.label}: a search of {budget} would begin so; nothing was launched", "bold")
    )
    for line in _list_lines(forecast):
        console.print(printable_text(f"  {line}"))
    sys.stdout.flush()


def _list_lines(forecast: SearchForecast) -> list[str]:
    varied = (f"{name_setting(name)}{_enumerate(map(str, values))}" for name, values in forecast.choices.items())
    left_out: dict[tuple[str, str], list[str]] = {}
    for one in forecast.ruled_out:
        values = left_out.setdefault((name_setting(one.knob), one.reason), [])
        values += [] if one.value is None else [str(one.value)]
    seen = Counter[str]()
    launches = [_describe_launch(place, one, forecast, seen) for place, one in enumerate(forecast.launches, start=1)]
    return [
        f"varied: {', '.join(varied) or 'nothing'}",
        *(f"left out: {name}{_enumerate(values)}: {reason}" for (name, reason), values in left_out.items()),
        "expected: what the probe and other trainings tell; what is read changes what follows",
        *launches,
        *_describe_proof(forecast),
    ]


def _enumerate(values: Iterable[str]) -> str:
    text = ", ".join(values)
    return f" ({text})" if text else ""


def _describe_launch(place: int, one: ExpectedLaunch, forecast: SearchForecast, seen: Counter[str]) -> str:
    seen[one.config.key] += 1
    again = " again" if seen[one.config.key] > 1 else ""
    expected = "" if math.isclose(one.speedup, 1.0) else f", expected {format_rough_factor(one.speedup)}"
    changes = describe_changes(one.config, forecast.baseline_config)
    return f"{place:>2}  {changes}{again}{expected}, {format_duration(one.seconds)}"


def _describe_proof(forecast: SearchForecast) -> list[str]:
    launched = math.fsum(one.seconds for one in forecast.launches)
    done = f"{count(len(forecast.launches), 'launch', 'launches')}: {format_duration(launched)}"
    if forecast.leader is None:
        return [done, "nothing is expected to be faster than your settings"]
    proof = forecast.check_seconds + forecast.pairs_seconds
    left = max(0.0, forecast.budget_seconds - launched - proof)
    check = f"loss check about {format_duration(forecast.check_seconds)}, " if forecast.check_seconds else ""
    return [
        f"{done}; then the proof of {describe_changes(forecast.leader, forecast.baseline_config)}: "
        f"{check}{count(forecast.pairs, 'pair')} of launches about {format_duration(forecast.pairs_seconds)}",
        f"left for more of both: {format_duration(left)}",
    ]
