"""What the losses of a search's own launches show of a config that should be exact."""

from __future__ import annotations

import pytest
from simulated import BASELINE, make_judged

from autotune.drift.gate.exactness import LEAST_EQUAL_STEPS, does_repeat, find_equal_losses
from autotune.records import LossCurve, Margin, TrainConfig, TrialResult

TUNED = BASELINE.replace(host_allocator="glibc-tuned")
LOSSES: tuple[float | None, ...] = (2.0, 1.5, 1.25, 1.125, 1.0625, 1.03)


def launch(config: TrainConfig, *losses: float | None, seed: int = 0) -> TrialResult:
    curve = LossCurve(seed=seed, losses=losses, samples=32 * len(losses))
    return make_judged(config, 0.0).result.replace(curves=(curve,))


def steps_shown(*launches: TrialResult) -> int:
    """Return the steps whose losses were found to be equal; 0 where nothing is shown."""
    check = find_equal_losses(TUNED, BASELINE, launches, margin=Margin(amount=0.005))
    if check is None:
        return 0
    assert (check.test, check.verdict, check.seeds, check.margin.amount) == ("exact-losses", "non-inferior", 1, 0.005)
    assert check.reason.startswith(f"all {check.samples // 32} losses")
    return check.samples // 32


def test_as_many_steps_are_shown_as_both_arms_have() -> None:
    assert steps_shown(launch(BASELINE, *LOSSES), launch(TUNED, *LOSSES)) == 6
    assert steps_shown(launch(BASELINE, *LOSSES), launch(TUNED, *LOSSES[:5])) == 5
    assert steps_shown(launch(BASELINE, *LOSSES[:4]), launch(BASELINE, *LOSSES[:5]), launch(TUNED, *LOSSES)) == 5


@pytest.mark.parametrize(
    "launches",
    [
        (),
        (launch(BASELINE, *LOSSES),),
        (launch(TUNED, *LOSSES),),
        (launch(BASELINE, *LOSSES), make_judged(TUNED, None).result),
        (launch(BASELINE, *LOSSES), launch(TUNED, *LOSSES, seed=1)),
        (launch(BASELINE, *LOSSES), launch(TUNED, *LOSSES[:-1], 1.0300000000000002)),
        (launch(BASELINE, *LOSSES), launch(TUNED, *LOSSES), launch(TUNED, 2.0, 1.5, 1.24)),
        (launch(BASELINE, *LOSSES), launch(BASELINE, 2.0, 1.5, 1.24), launch(TUNED, *LOSSES)),
        (launch(BASELINE, *LOSSES[: LEAST_EQUAL_STEPS - 1]), launch(TUNED, *LOSSES)),
        (launch(BASELINE, *[0.7] * 6), launch(TUNED, *[0.7] * 6)),
        (launch(BASELINE, *LOSSES[:5], None), launch(TUNED, *LOSSES[:5], None)),
    ],
    ids=[
        "nothing",
        "no candidate",
        "no baseline",
        "a launch that failed",
        "another seed",
        "a last bit",
        "a launch of the candidate that differs",
        "a baseline that does not repeat itself",
        "too few steps",
        "losses that are all the same",
        "a loss that is not finite",
    ],
)
def test_nothing_is_shown_by(launches: tuple[TrialResult, ...]) -> None:
    assert steps_shown(*launches) == 0


CAST = BASELINE.replace(precision="bf16")


@pytest.mark.parametrize(
    ("launches", "repeats"),
    [
        ((), True),
        ((launch(BASELINE, *LOSSES),), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, *LOSSES[:2])), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, 2.0, 1.50001, 1.25)), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, 2.0, 1.5, 1.25, 99.0)), True),
        ((launch(BASELINE, *LOSSES), launch(TUNED, 2.0, 1.51)), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, 2.1, 1.51, seed=1)), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, 2.0, None)), True),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, *LOSSES), launch(BASELINE, 2.0, 1.501)), False),
        ((launch(BASELINE, *LOSSES), launch(BASELINE, 2.001)), False),
    ],
    ids=[
        "nothing",
        "one launch",
        "as far as both go",
        "rounding",
        "roundings that have grown",
        "another config",
        "another seed",
        "a loss that is not finite",
        "other batches from the second step on",
        "other batches from the first",
    ],
)
def test_a_baseline_repeats_itself_unless_its_first_losses_differ(
    launches: tuple[TrialResult, ...], *, repeats: bool
) -> None:
    assert does_repeat(BASELINE, launches) is repeats


def test_where_there_are_fewer_digits_losses_may_differ_by_more() -> None:
    assert does_repeat(CAST, (launch(CAST, 2.0, 1.5), launch(CAST, 2.0, 1.51)))
    assert not does_repeat(CAST, (launch(CAST, 2.0, 1.5), launch(CAST, 2.0, 1.6)))
