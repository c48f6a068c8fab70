"""When a training has settled: the rule on given step times, and on simulated ones that scatter, stall or trend."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import pytest

from autotune.measure.warmup import WarmUp, have_settled

FIRST, BACKLOG, TIME, CLOCK = "the first steps", "what the loader had ready", "the time of a step", "the device's clock"
STEP, LONG = 0.125, 0.5
WARM, LONG_WARM = 11, 7
"""Even steps of 50 ms or more: the first, and two windows of five; of 0.3 s or more, two windows of three."""
FEW = (3,)
SIMULATED = 400
MOST = 300


def take_steps(
    warm_up: WarmUp,
    durations: Iterable[float],
    *,
    graphs: int = 0,
    compiled: Iterable[int] = (),
    watched: Callable[[int], Mapping[str, float | None]] = lambda step: {},
) -> list[str]:
    """Return what had not settled after each step, up to the first after which everything had."""
    said, compiled_at = [], set(compiled)
    for step, seconds in enumerate(durations):
        graphs += step in compiled_at
        warm_up.take(seconds, graphs=graphs, watched=watched(step))
        said.append(warm_up.find_unsettled())
        if not said[-1]:
            break
    return said


def take_all(warm_up: WarmUp, durations: Iterable[float], *, compiled: Iterable[int] = ()) -> None:
    """Take every step, settled or not."""
    graphs, compiled_at = 0, set(compiled)
    for step, seconds in enumerate(durations):
        graphs += step in compiled_at
        warm_up.take(seconds, graphs=graphs, watched={})


def forever(*durations: float) -> Iterable[float]:
    """Return the durations, the last one again and again."""
    return itertools.chain(durations, itertools.repeat(durations[-1], 2000))


def count_spans(spans: Iterable[float], *, windows: tuple[int, ...] = (5, 10)) -> int:
    """Return after how many spans they have settled; MOST when they have not by then."""
    seen: list[float] = []
    for span in itertools.islice(spans, MOST):
        seen.append(span)
        if have_settled(seen, windows=windows):
            break
    return len(seen)


def test_nothing_is_settled_before_the_first_step_was_taken() -> None:
    assert WarmUp(0).find_unsettled() == FIRST


def test_even_steps_settle_after_two_windows() -> None:
    assert take_steps(WarmUp(0), forever(STEP)) == [FIRST] * 4 + [TIME] * 6 + [""]


@pytest.mark.parametrize(("seconds", "steps"), [(0.25, 11), (0.296875, 11), (0.3, 7), (0.5, 7), (0.9375, 7)])
def test_where_a_step_is_long_windows_of_three_do(seconds: float, steps: int) -> None:
    assert take_steps(WarmUp(0), forever(seconds)) == [FIRST] * 4 + [TIME] * (steps - 5) + [""]


@pytest.mark.parametrize("slow", [0, 1, 3, 4, 5])
def test_a_change_of_speed_is_left_behind_by_long_steps_too(slow: int) -> None:
    said = take_steps(WarmUp(0), [64.0, *[0.9375] * slow, *[LONG] * 40])
    assert len(said) == 1 + slow + 6


def test_the_typical_step_says_how_long_the_windows_are() -> None:
    # After the sixth step most of the last five are long, but there are too few spans; from the next on most are short.
    assert len(take_steps(WarmUp(0), [LONG] * 4 + [STEP] * 40)) == 4 + 10
    # The other way round the short ones leave the windows of three.
    assert len(take_steps(WarmUp(0), [STEP] * 4 + [LONG] * 40)) == 4 + 6


@pytest.mark.parametrize(("backlog", "compiled", "steps"), [(0, [3], 10), (0, [0], 7), (9, [], 9), (9, [3], 13)])
def test_long_steps_wait_for_the_backlog_and_after_a_compilation(backlog: int, compiled: list[int], steps: int) -> None:
    assert len(take_steps(WarmUp(backlog), forever(LONG), compiled=compiled)) == steps


def test_long_steps_let_figures_stand_still_and_the_device_work() -> None:
    assert len(take_steps(WarmUp(0), forever(LONG), watched=lambda step: {"it": float(min(step, 9))})) == 13
    assert len(take_steps(WarmUp(0, least_seconds=4.5), forever(LONG))) == 9


def test_graphs_compiled_before_are_no_compilation() -> None:
    fresh, later = WarmUp(0), WarmUp(0, graphs=3)
    durations = [8.0, *[STEP] * 20]
    assert take_steps(later, durations, graphs=3) == take_steps(fresh, durations)
    assert (later.charged_seconds, later.compile_seconds) == (fresh.charged_seconds, 0.0) == (10 * STEP, 0.0)


def test_graphs_compiled_later_are_a_compilation_all_the_same() -> None:
    warm_up = WarmUp(0, graphs=3)
    said = take_steps(warm_up, [STEP, STEP, 8.0, *[STEP] * 20], graphs=3, compiled=[2])
    assert len(said) == 3 + 10
    assert warm_up.compile_seconds == 8.0 - STEP
    assert warm_up.charged_seconds == 11 * STEP


@pytest.mark.parametrize(
    ("durations", "seconds"),
    [
        ([8.0], 8.0),
        ([8.0, 4.0], 4.0),
        ([0.125, 0.0625] * 20, 0.0625),
        ([2.0] * 20 + [0.5] + [2.0] * 9, 0.5),
        ([2.0] * 20 + [0.5] + [2.0] * 10, 2.0),
        ([1.0] * 10 + [3.0] * 6 + [2.0] + [3.0] * 3, 2.0),
    ],
)
def test_a_block_is_counted_by_the_fastest_of_ten_steps(durations: list[float], seconds: float) -> None:
    warm_up = WarmUp(0)
    take_all(warm_up, durations)
    assert warm_up.block_step_seconds == seconds


@pytest.mark.parametrize(("backlog", "steps"), [(0, 11), (5, 11), (11, 11), (12, 12), (40, 40)])
def test_the_backlog_is_used_up(backlog: int, steps: int) -> None:
    said = take_steps(WarmUp(backlog), forever(STEP))
    assert len(said) == steps
    assert said.count(BACKLOG) == max(0, backlog - 5)


@pytest.mark.parametrize(
    ("backlog", "compiled", "steps"),
    [
        (0, [0], 1 + 10),
        (0, [1], 2 + 10),
        (0, [7], 8 + 10),
        (0, [3, 9], 10 + 10),
        (0, [10], 11 + 10),
        (12, [7], 8 + 12),
        (40, [0], 1 + 40),
        (40, [30], 31 + 40),
    ],
)
def test_a_compilation_starts_everything_anew(backlog: int, compiled: list[int], steps: int) -> None:
    said = take_steps(WarmUp(backlog), forever(STEP), compiled=compiled)
    assert len(said) == steps
    assert said[compiled[-1] : compiled[-1] + 5] == [FIRST] * 5


def test_steps_before_a_compilation_are_no_part_of_a_span() -> None:
    # Three of the four steps that make a span had been taken; afterwards it takes all four again.
    said = take_steps(WarmUp(0), forever(2.0**-6), compiled=[3])
    assert len(said) == 4 + 4 * 10


@pytest.mark.parametrize(
    ("seconds", "steps_in_a_span"), [(0.25, 1), (2.0**-4, 1), (2.0**-5, 2), (2.0**-6, 4), (2.0**-8, 13), (2.0**-10, 52)]
)
def test_a_span_is_as_many_steps_as_take_50_ms(seconds: float, steps_in_a_span: int) -> None:
    assert len(take_steps(WarmUp(0), forever(seconds))) == 1 + 10 * steps_in_a_span


def test_fast_steps_that_differ_settle_as_the_spans_do() -> None:
    fast, slow = 2.0**-6, 3 * 2.0**-6
    said = take_steps(WarmUp(0), [1.0, *[fast, slow] * 100])
    assert len(said) == 1 + 2 * 10


@pytest.mark.parametrize("name", ["the device's memory", "the loss scale"])
@pytest.mark.parametrize("last_move", [0, 5, 8, 14, 30])
def test_a_watched_figure_stands_still_for_three_steps(name: str, last_move: int) -> None:
    said = take_steps(WarmUp(0), forever(STEP), watched=lambda step: {name: float(min(step, last_move))})
    assert len(said) == max(WARM, last_move + 1 + 3)
    assert set(said) - {FIRST, TIME, ""} == ({name} if last_move + 3 >= 5 - 1 else set())


def test_a_figure_that_comes_back_has_moved_all_the_same() -> None:
    said = take_steps(WarmUp(0), forever(STEP), watched=lambda step: {"it": float(step == 9)})
    assert said[9:] == ["it"] * 4 + [""]


@pytest.mark.parametrize("before", [None, 2.0])
def test_a_figure_that_appears_or_goes_has_moved(before: float | None) -> None:
    after = 2.0 if before is None else None
    said = take_steps(WarmUp(0), forever(STEP), watched=lambda step: {"it": before if step < 10 else after})
    assert said[10:] == ["it"] * 3 + [""]


def test_what_there_is_not_stands_still() -> None:
    assert len(take_steps(WarmUp(0), forever(STEP), watched=lambda step: {"it": None})) == WARM


def test_the_first_of_two_figures_that_move_is_named() -> None:
    said = take_steps(
        WarmUp(0), forever(STEP), watched=lambda step: {"one": min(step, 12), "other": min(step, 14), "still": 1.0}
    )
    assert said[10:] == ["one"] * 5 + ["other"] * 2 + [""]


@pytest.mark.parametrize(("least_seconds", "steps"), [(0.0, 11), (1.375, 11), (1.4375, 12), (2.5, 20)])
def test_the_device_works_for_a_while(least_seconds: float, steps: int) -> None:
    said = take_steps(WarmUp(0, least_seconds=least_seconds), forever(STEP))
    assert len(said) == steps
    assert said[10:-1] == [CLOCK] * (steps - 11)


def test_a_compilation_is_no_load() -> None:
    said = take_steps(WarmUp(0, least_seconds=2.0), forever(30.0, 0.0625), compiled=[0])
    assert len(said) == 1 + 32


def test_reasons_come_in_the_order_of_what_takes_longest_to_tell() -> None:
    warm_up = WarmUp(8, least_seconds=2.5)
    said = take_steps(warm_up, forever(STEP), watched=lambda step: {"it": float(min(step, 6))})
    assert said == [FIRST] * 4 + [BACKLOG] * 3 + ["it"] * 2 + [TIME] + [CLOCK] * 9 + [""]


@pytest.mark.parametrize(
    ("durations", "compiled", "charged", "compile_seconds", "typical"),
    [
        ([8.0], [], 0.0, 0.0, 8.0),
        ([8.0, 1.0, 1.0, 1.0], [], 3.0, 0.0, 1.0),
        ([8.0, 1.0, 1.0, 1.0], [0], 3.0, 7.0, 1.0),
        ([8.0, 1.0, 4.0, 1.0, 1.0], [2], 3.0, 10.0, 1.0),
        ([8.0, 1.0, 4.0, 1.0, 1.0], [0, 2], 3.0, 10.0, 1.0),
        ([8.0, 1.0, 4.0], [0, 2], 1.0, 1.0, 4.0),
        ([8.0, 1.0, 2.0, 64.0, 4.0, 32.0, 16.0, 1.0], [0, 3, 5], 24.0, 60.0, 8.5),
        ([8.0, 4.0, 2.0], [0, 1, 2], 0.0, 2.0, 4.0),
        ([8.0, 8.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1], 15.0, 10.0, 3.0),
        ([2.0, 2.0], [1], 0.0, 0.0, 2.0),
        ([0.5, 1.0, 1.0, 1.0], [0], 3.0, 0.0, 1.0),
    ],
)
def test_compiling_and_the_first_step_are_not_charged_but_what_lies_between_is(
    durations: list[float], compiled: list[int], charged: float, compile_seconds: float, typical: float
) -> None:
    warm_up = WarmUp(0)
    take_all(warm_up, durations, compiled=compiled)
    assert warm_up.steps == len(durations)
    assert warm_up.charged_seconds == charged
    assert warm_up.step_seconds == typical
    assert warm_up.compile_seconds == compile_seconds


@pytest.mark.parametrize("count", range(10))
def test_fewer_than_two_windows_have_not_settled(count: int) -> None:
    assert not have_settled([1.0] * count)


def spans_but_one(count: int, position: int, value: float) -> list[float]:
    spans = [1.0] * count
    spans[position] = value
    return spans


@pytest.mark.parametrize(("value", "settled"), [(1.1875, True), (1.28125, False), (0.78125, True), (0.71875, False)])
def test_means_of_the_windows_agree_within_five_percent(value: float, settled: bool) -> None:
    # One span of ten leaves the scatter at nothing; it moves its window's mean by a fifth of what it is off.
    found = {position: have_settled(spans_but_one(10, position, value)) for position in range(1, 10)}
    assert found == dict.fromkeys(range(1, 10), settled)


@pytest.mark.parametrize(
    ("shift", "settled"),
    [
        (0.0, True),
        (1.0, True),
        (-1.0, True),
        (2.0, True),
        (2.125, False),
        (-4.0, True),
        (-4.125, False),
        (8.0, False),
        (-5.0, False),
        (64.0, False),
    ],
)
def test_means_of_the_windows_agree_within_the_scatter(shift: float, settled: bool) -> None:
    window = [10.0, 8.0, 9.0, 11.0, 12.0]
    assert have_settled(window + [span + shift for span in window]) == settled


@pytest.mark.parametrize(("oldest", "settled"), [(1.046875, True), (1.0625, False), (1.1875, False), (0.8125, True)])
def test_the_oldest_span_is_no_outlier(oldest: float, settled: bool) -> None:
    assert have_settled([oldest] + [1.0] * 9) == settled


def test_an_oldest_span_within_the_fence_is_no_outlier() -> None:
    # Quartiles 9 and 11: the fence is at 14, and the windows' means differ by half the scatter at most.
    rest = [8.0, 9.0, 10.0, 10.0, 10.0, 11.0, 9.0, 11.0, 10.0]
    assert have_settled([11.0, *rest])
    assert not have_settled([16.0, *rest])


@pytest.mark.parametrize(("value", "settled"), [(1.125, True), (1.1875, False), (0.875, True), (0.8125, False)])
def test_windows_of_three_agree_by_the_same_rules(value: float, settled: bool) -> None:
    each = {position: spans_but_one(6, position, value) for position in range(1, 6)}
    found = {position: have_settled(spans, windows=FEW) for position, spans in each.items()}
    assert found == dict.fromkeys(each, settled)
    assert [position for position, spans in each.items() if have_settled(spans)] == []


def test_one_length_of_window_that_agrees_is_enough() -> None:
    # One stall in nine spans: two in the twenty, one in each long window, but only one of the ten.
    spans = [1.0, *[1.0] * 5, 3.0, *[1.0] * 8, 3.0, *[1.0] * 4]
    assert len(spans) == 20
    assert not have_settled(spans, windows=(5,))
    assert have_settled(spans, windows=(10,))
    assert have_settled(spans)


def test_only_the_last_ten_spans_count() -> None:
    assert have_settled([64.0, 0.125, 9.0] * 5 + [1.0] * 10)


@pytest.mark.parametrize("slow", [0, 1, 3, 4])
def test_a_change_of_speed_is_left_behind(slow: int) -> None:
    assert count_spans([2.0] * slow + [1.0] * 40) == slow + 10


@pytest.mark.parametrize(("before", "after"), [(2.0, 1.0), (1.0, 2.0), (1.25, 1.0), (64.0, 1.0)])
def test_two_windows_of_different_speed_have_not_settled(before: float, after: float) -> None:
    assert not have_settled([before] * 5 + [after] * 5)


@pytest.mark.parametrize(
    "growth",
    [0.5, 0.9, 0.95, 0.97, 1.03, 1.1],
)
@pytest.mark.parametrize("windows", [(5, 10), FEW])
def test_a_trend_has_not_settled_before_it_stops(windows: tuple[int, ...], growth: float) -> None:
    trend = [growth**span for span in range(30)]
    assert count_spans(trend + [trend[-1]] * 40, windows=windows) > 30


@pytest.mark.parametrize("noise", [0.01, 0.02])
def test_a_noisy_trend_is_seldom_taken_for_settled(noise: float) -> None:
    rng = np.random.default_rng(3)
    levels = 0.97 ** np.minimum(np.arange(MOST), 40)
    needed = [count_spans(levels * np.exp(rng.normal(0.0, noise, MOST))) for _ in range(100)]
    early = sum(spans <= 30 for spans in needed) / 100
    print(f"3 % faster a span for 40 spans, noise {noise:.0%}: mean {statistics.fmean(needed):.1f}, early {early:.0%}")
    assert early <= 0.1


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_noise_alone_settles_soon(noise: float, correlation: float) -> None:
    rng = np.random.default_rng(1)
    needed = [count_spans(np.exp(noise * correlated(rng, correlation)).tolist()) for _ in range(SIMULATED)]
    late = sum(spans > 30 for spans in needed) / SIMULATED
    print(f"noise {noise:.0%}, correlation {correlation}: mean {statistics.fmean(needed):.2f}, beyond 30: {late:.1%}")
    assert statistics.fmean(needed) <= (11.0 if correlation < 0.9 else 13.0)  # so slow a noise looks like a trend
    assert late <= 0.01


def correlated(rng: np.random.Generator, correlation: float) -> np.ndarray:
    fresh = rng.normal(0.0, 1.0, MOST // 5)
    values = [fresh[0]]
    for one in fresh[1:]:
        values.append(correlation * values[-1] + math.sqrt(1 - correlation**2) * one)
    return np.array(values)


@pytest.mark.parametrize(("share", "slowdown"), [(0.03, 2.0), (0.1, 5.0), (0.3, 3.0)])
def test_spikes_settle_in_most_cases(share: float, slowdown: float) -> None:
    rng = np.random.default_rng(2)
    needed = [count_spans(np.where(rng.random(MOST) < share, slowdown, 1.0).tolist()) for _ in range(SIMULATED)]
    late = sum(spans > 30 for spans in needed) / SIMULATED
    print(f"{share:.0%} spikes of {slowdown}x: mean {statistics.fmean(needed):.2f}, beyond 30: {late:.1%}")
    assert statistics.fmean(needed) <= 16.0
    assert late <= 0.02


PERIODS = (2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 16, 32)


def stalling(period: int, phase: int, slowdown: float, count: int) -> list[float]:
    return [slowdown if (span + phase) % period == 0 else 1.0 for span in range(count)]


@pytest.mark.parametrize("slowdown", [3.0, 10.0])
def test_a_loader_that_stalls_regularly_settles(slowdown: float) -> None:
    most = {}
    for period in PERIODS:
        needed = [count_spans(stalling(period, phase, slowdown, MOST)) for phase in range(period)]
        print(f"one of {period} spans takes {slowdown}x: mean {statistics.fmean(needed):.1f}, most {max(needed)}")
        most[period] = max(needed)
    assert {period: spans for period, spans in most.items() if spans > 30} == {}


@pytest.mark.parametrize("slowdown", [3.0, 10.0])
def test_long_steps_that_stall_regularly_settle(slowdown: float) -> None:
    most = {}
    for period in PERIODS:
        each = [[LONG * span for span in stalling(period, phase, slowdown, 60)] for phase in range(period)]
        needed = [len(take_steps(WarmUp(0), durations)) for durations in each]
        print(f"one of {period} long steps takes {slowdown}x: mean {statistics.fmean(needed):.1f}, most {max(needed)}")
        most[period] = max(needed)
    assert {period: steps for period, steps in most.items() if steps > 31} == {}


@pytest.mark.parametrize("noise", [0.02, 0.1, 0.3])
def test_long_steps_that_scatter_settle_soon(noise: float) -> None:
    rng = np.random.default_rng(4)
    needed = [len(take_steps(WarmUp(0), LONG * np.exp(rng.normal(0.0, noise, 60)))) for _ in range(SIMULATED)]
    late = sum(steps > 20 for steps in needed) / SIMULATED
    print(f"long steps, noise {noise:.0%}: mean {statistics.fmean(needed):.2f}, beyond 20: {late:.1%}")
    assert statistics.fmean(needed) <= 9.0
    assert late <= 0.01


@pytest.mark.parametrize("seconds", [2.0**-4, 2.0**-7])
def test_every_eighth_step_stalls(seconds: float) -> None:
    # Fast steps share their spans, of which every one or every other has a stall.
    durations = [seconds * (8 if step % 8 == 3 else 1) for step in range(1000)]
    said = take_steps(WarmUp(0), durations)
    assert said[-1] == ""
    assert len(said) <= 200


SLOW, VERY_SLOW = 1.0, 5.0


@pytest.mark.parametrize(
    ("durations", "steps"),
    [
        ([SLOW], 3),
        ([2.0], 3),
        ([2.5], 2),
        ([VERY_SLOW], 2),
        ([64.0], 2),
        ([60.0, VERY_SLOW], 2),
        ([SLOW, 1.05], 3),
        ([VERY_SLOW, 6.0], 3),  # longer than the first: the third tells
        ([VERY_SLOW, 6.0, 7.0], 4),  # slower and slower
        ([9.0, 2.0, 1.75, 1.5], 5),  # faster and faster
        ([9.0, 2.0, 1.25, 1.75], 4),
    ],
)
def test_of_slow_steps_one_or_two_after_the_first_are_enough(durations: list[float], steps: int) -> None:
    assert len(take_steps(WarmUp(0), forever(*durations))) == steps


def test_slow_first_steps_of_a_fast_training_are_no_slow_steps() -> None:
    assert len(take_steps(WarmUp(0), [64.0, SLOW, *[STEP] * 40])) == 2 + 10


@pytest.mark.parametrize(("compiled", "steps"), [([0], 3), ([0, 1], 4), ([1], 4)])
def test_slow_steps_settle_anew_after_a_compilation(compiled: list[int], steps: int) -> None:
    warm_up, longest = WarmUp(0), [60.0, 40.0][: compiled[-1] + 1]
    assert len(take_steps(warm_up, [*longest, *[VERY_SLOW] * 9], compiled=compiled)) == steps
    assert warm_up.compile_seconds == sum(longest) - VERY_SLOW * len(longest)


@pytest.mark.parametrize(("sample_seconds", "steps"), [(None, 12), (3.0, 12), (2.5, 2), (0.0, 2)])
def test_slow_steps_need_no_backlog_used_up_where_one_worker_alone_keeps_up(
    sample_seconds: float | None, steps: int
) -> None:
    said = take_steps(WarmUp(12, sample_seconds=sample_seconds), forever(VERY_SLOW))
    assert len(said) == steps
    assert said.count(BACKLOG) == steps - 2


def test_a_fast_loader_spares_short_steps_no_backlog() -> None:
    assert len(take_steps(WarmUp(40, sample_seconds=0.0), forever(STEP))) == 40


def test_slow_steps_let_figures_stand_still_and_the_device_work() -> None:
    assert len(take_steps(WarmUp(0), forever(VERY_SLOW), watched=lambda step: {"it": float(min(step, 2))})) == 4
    assert len(take_steps(WarmUp(0, least_seconds=14.0), forever(VERY_SLOW))) == 3
