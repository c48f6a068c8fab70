"""A demo that is probed once, trials of it, and the table that `make test-gpu` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from autotune.isolation.runner import TrialRunner
from autotune.machine.hardware import read_hardware
from autotune.probe.run import probe_target
from autotune.records import ProbeReport, TrainConfig, TrialLimits, TrialResult, TrialSpec
from autotune.records.trial import Target
from autotune.targets.resolve import resolve_target

Launch = Callable[..., TrialResult]

MEASURE_SECONDS = 1.5
_FIGURES: dict[str, str] = {}


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Note what a path has shown, for the table."""

    def note(text: str) -> None:
        _FIGURES[request.node.nodeid] = text

    return note


@pytest.fixture(scope="session")
def demo() -> Target:
    return resolve_target(None, folder=Path.cwd()).target


def open_runner(folder: Path) -> TrialRunner:
    return TrialRunner(
        folder / "trials",
        host_allocators=read_hardware().host_allocators,
        environment={"TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")},
    )


@pytest.fixture(scope="session")
def report(demo: Target, tmp_path_factory: pytest.TempPathFactory) -> ProbeReport:
    limits = TrialLimits(time_limit_seconds=120.0, measure_seconds=MEASURE_SECONDS)
    with open_runner(tmp_path_factory.mktemp("probe")) as runner:
        return probe_target(demo, runner, limits=limits)[0]


@pytest.fixture
def launch(demo: Target, report: ProbeReport, tmp_path: Path) -> Iterator[Launch]:
    """Launch configs of the demo, as a search does."""
    with open_runner(tmp_path) as runner:

        def run(config: TrainConfig, target: Target = demo, **limits: Any) -> TrialResult:
            spec = TrialSpec(
                number=len(list((tmp_path / "trials").glob("*"))) + 1,
                purpose="measure",
                target=target,
                config=config,
                device=report.target.device,
                random_sources=report.target.data.random_sources,
                training_loaders=report.target.training_loaders,
                limits=TrialLimits(time_limit_seconds=120.0, measure_seconds=MEASURE_SECONDS, **limits),
            )
            return runner(spec)

        yield run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [
        (outcome, one)
        for outcome in ("passed", "failed", "skipped")
        for one in terminalreporter.stats.get(outcome, [])
        if "tests/gpu/" in one.nodeid
    ]
    if not reports:
        return
    terminalreporter.section("what was shown on this device")
    for outcome, one in reports:
        told = _FIGURES.get(one.nodeid, "")
        if outcome == "skipped":
            told = str(one.longrepr[-1]).removeprefix("Skipped: ")
        terminalreporter.write_line(f"{outcome:<8} {one.nodeid.partition('::')[2]:<60} {told}")
