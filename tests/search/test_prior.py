"""What is expected of changes before anything was launched."""

from __future__ import annotations

from simulated import Machine, make_report

from autotune.records import Advice, GainRange
from autotune.search.explore.prior import OWN, PAIRS, SHARED_CPUS, USUAL, make_prior

TOGETHER = (("num_workers", None), ("num_threads", None))


def test_a_knob_of_ones_own_is_taken_for_the_bottleneck() -> None:
    prior = make_prior(make_report(Machine(knobs={"kernel": ("old", "new")})))
    assert prior.find("user_knobs.kernel", "new") == OWN
    assert prior.find("num_threads", 1) == USUAL["num_threads", None]


def test_workers_with_fewer_threads_are_expected_to_pay_where_the_loader_is_waited_for() -> None:
    report = make_report(Machine())
    advice = Advice(knob="num_workers", reason="the loader waits", gain=GainRange(low=1.2, high=2.0))
    assert make_prior(report.replace(advice=(advice,))).pairs[TOGETHER] == SHARED_CPUS
    assert make_prior(report.replace(advice=())).pairs[TOGETHER] == PAIRS[TOGETHER]
