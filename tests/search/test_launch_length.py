"""How long launches measure: as they were told, longer where their blocks differ much, and all of a search alike."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulated import BASELINE, Machine, Search, open_search, run_simulated

from autotune.search.finals.plan import count_samples
from autotune.search.launch.length import find_measured_seconds

TOLD = 2.0


def open_noisy(block_noise: float, rest: float, machine: Machine | None = None) -> Search:
    """Return a search whose first launch has blocks that differ, and took some seconds beside them."""
    search = open_search(machine or Machine(block_noise=block_noise, seed=3))
    result = search.starter.launch(BASELINE, "measure", 60.0)
    assert result.measurement is not None
    search.log.add_launch(result.replace(elapsed_seconds=result.measurement.seconds + rest))
    return search


def test_before_the_first_launch_it_is_what_was_told() -> None:
    search = open_search(Machine(block_noise=0.5))
    assert find_measured_seconds(search.log) == search.log.problem.state.measure_seconds == TOLD


@pytest.mark.parametrize(
    ("block_noise", "rest", "least", "most"),
    [
        (0.0, 8.0, TOLD, TOLD),
        (0.01, 8.0, TOLD, TOLD),
        (0.25, 5.0, 5.0, 5.0),  # no more than starting costs
        (0.25, 1.0, TOLD, TOLD),  # what costs little is rather started again
        (0.25, 60.0, 3 * TOLD, 3 * TOLD),  # what the budget can bear
    ],
)
def test_it_is_longer_where_blocks_differ_and_starting_is_dear(
    block_noise: float, rest: float, least: float, most: float
) -> None:
    search = open_noisy(block_noise, rest)
    assert least <= find_measured_seconds(search.log) <= most


def test_the_finals_measure_as_many_samples_as_that_takes() -> None:
    quiet, noisy = open_noisy(0.0, 8.0), open_noisy(0.25, 60.0)
    own, usual = (one.log.judged[0].result.measurement for one in (noisy, quiet))
    assert own is not None
    assert usual is not None
    assert count_samples(noisy.log) == pytest.approx(3 * TOLD * own.samples_per_second, rel=0.01)
    assert count_samples(quiet.log) == usual.samples


def test_the_finals_of_a_candidate_whose_blocks_differ_more_measure_longer() -> None:
    machine = Machine(seed=3)
    search = open_noisy(0.0, 8.0, machine)
    noisy = BASELINE.replace(precision="bf16")
    usual = count_samples(search.log, noisy)
    assert usual == count_samples(search.log)  # nothing is known of it
    machine.block_noise = 0.25
    search.log.add_launch(search.starter.launch(noisy, "measure", 60.0))
    assert count_samples(search.log, noisy) > 2 * usual
    assert count_samples(search.log) == usual
    search.log.takes_turns = True  # what makes its blocks differ, makes the baseline's differ beside it
    assert count_samples(search.log, noisy) == usual


@pytest.mark.parametrize("block_noise", [0.0, 0.25])
def test_every_launch_after_the_first_measures_equally_long(tmp_path: Path, block_noise: float) -> None:
    machine = Machine(block_noise=block_noise, seconds=8.0)
    run_simulated(machine, tmp_path)
    own = next(
        place for place, spec in enumerate(machine.specs) if spec.config == BASELINE and spec.purpose == "measure"
    )
    lengths = {spec.limits.measure_seconds for spec in machine.specs[own + 1 :]}
    assert len(lengths) == 1
    assert (max(lengths) > TOLD) == (block_noise > 0.0)
