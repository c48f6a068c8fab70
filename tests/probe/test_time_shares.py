from __future__ import annotations

import signal
import threading
import time

import pytest

from autotune.probe.time_shares import OutOfTimeError, TimeShares, time_limit


@pytest.mark.parametrize(("limit", "expected"), [(300.0, 8.0), (120.0, 8.0), (60.0, 4.0), (15.0, 1.0)])
def test_a_short_probe_has_short_parts(limit: float, expected: float) -> None:
    assert TimeShares(time.monotonic(), limit).grant(8.0) == pytest.approx(expected)


def test_what_is_not_begun_in_time_is_left_out() -> None:
    assert TimeShares(time.monotonic() - 61.0, 100.0).grant(8.0) == 0.0
    assert TimeShares(time.monotonic() - 50.0, 100.0).grant(8.0) > 0.0


def run_users_code() -> None:
    try:
        time.sleep(30.0)
    except Exception:
        pytest.fail("an exception of the user's caught the limit")


def test_a_limit_interrupts_and_is_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OutOfTimeError), time_limit(0.05):
        run_users_code()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_limit_that_is_kept_leaves_nothing() -> None:
    with time_limit(30.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_outside_of_the_main_thread_there_is_no_limit() -> None:
    ended: list[bool] = []

    def run() -> None:
        with time_limit(0.01):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert ended == [True]
