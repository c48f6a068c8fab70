"""What is seen of a running training: every figure, on any terminal, and never at the training's cost."""

from __future__ import annotations

import io
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import fields
from datetime import datetime
from pathlib import Path

import pytest
from consoles import HOSTILE, Broken, make_console, read, strip
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, Group
from training_records import BEST, OUT_OF_MEMORY, make_live_report

from autotune.cli.view import refresh_thread, training
from autotune.cli.view.console import RaisingConsole, attempt
from autotune.cli.view.live import BlockView
from autotune.cli.view.refresh_thread import DRAWING, RefreshThread
from autotune.cli.view.stdout_proxy import StdoutProxy
from autotune.cli.view.training import TrainingView, training_view
from autotune.cli.view.training_block import Figures, Trend, list_block_lines
from autotune.cli.view.training_words import describe_line, describe_position, list_metrics
from autotune.sentences.training import judge_throughput
from autotune.train.report import Report

NOON = datetime(2026, 3, 1, 12, 0)


def draw(report: Report, width: int = 100, *, promised: float | None = None, is_plain: bool = False) -> list[str]:
    trend = Trend()
    for step in range(100):
        trend.add(10.0 - step / 20)
    return [line.plain for line in list_block_lines(Figures(report, promised, trend), width, is_plain=is_plain)]


def draw_block(view: TrainingView) -> Group:
    assert isinstance(view.view, BlockView)
    return view.view.draw()


# The block


@pytest.mark.parametrize(
    "words",
    [
        "training",
        "12,340 of 30,000 steps, 41 %",
        "3 of 8",
        "1,579,520 samples",
        "12,480 samples/s   1.02x of the expected 12,200",
        "1.8342   learning rate 0.000275",
        "bits_per_byte 1.2034   best 1.1987 at step 11,250   accuracy 0.4127",
        "data wait 2 %   MFU 41 %   memory 31.2 of 80 GiB (39 %)",
        "1h03m left   42m10s so far   until about ",
        "123 gradients checked, all as under your own numerics",
    ],
)
def test_the_block_shows_every_figure(words: str) -> None:
    shown = draw(make_live_report(), promised=12_200.0)
    assert words in "\n".join(shown)
    assert "trouble" not in "\n".join(shown)
    assert "not counted" not in "\n".join(shown)
    assert max(map(cell_len, shown)) == 100  # the bar takes what is left


def test_what_went_wrong_is_kept_in_the_block() -> None:
    report = make_live_report(step_downs=(OUT_OF_MEMORY,), skipped_steps=1, allocator_retries=3)
    trouble = next(line for line in draw(report) if line.startswith("trouble"))
    assert "1 step down, last oom-device at step 4,210   3 allocator retries   1 skipped step" in trouble


@pytest.mark.parametrize("width", [60, 80, 100])
def test_an_estimate_that_leaves_evaluations_out_says_so(width: int) -> None:
    lines = draw(make_live_report(knows_evaluation=False), width)
    assert any("1h03m left, evaluations not counted yet" in line for line in lines)


@pytest.mark.parametrize("width", [60, 80])
def test_what_matters_most_has_room_on_a_narrow_terminal(width: int) -> None:
    shown = "\n".join(draw(make_live_report(), width, promised=12_200.0))
    for words in ("41 %", "3 of 8", "12,480 samples/s", "1.02x", "1.8342", "1.2034", "data wait 2 %", "1h03m left"):
        assert words in shown


@pytest.mark.parametrize("name", [field.name for field in fields(Report)])
def test_a_figure_that_is_not_known_is_left_out(name: str) -> None:
    empty = {"metrics": {}, "step_downs": (), "guard": "", "phase": "evaluating"}
    numbers = {
        "step": 0,
        "samples": 0,
        "epoch": 0,
        "loss": float("nan"),
        "learning_rate": 0.0,
        "samples_per_second": 0,
        "elapsed_seconds": 0.0,
    }
    report = make_live_report(**{name: (empty | numbers | {"loss": float("nan")}).get(name)})
    for width in (100, 20):
        assert "None" not in "\n".join(draw(report, width, promised=100.0))
    assert "None" not in describe_line(report, 100.0, NOON)


def test_without_a_planned_number_of_steps_there_is_no_bar() -> None:
    lines = draw(make_live_report(total_steps=None, epochs=None))
    assert lines[1] == "training    12,340 steps"
    assert lines[2].startswith("epoch       3   ")


@pytest.mark.parametrize(("step", "words"), [(0, "0 %"), (29_999, "99 %"), (30_000, "100 %"), (31_000, "100 %")])
def test_a_training_is_done_only_when_it_is(step: int, words: str) -> None:
    assert describe_position(make_live_report(step=step)).endswith(f", {words}")
    bar = draw(make_live_report(step=step))[1]
    assert bar.count("\N{BOX DRAWINGS LIGHT HORIZONTAL}") == 0 if step >= 30_000 else bar.count("\u2500") >= 1


def test_a_terminal_of_plain_signs_gets_plain_signs() -> None:
    assert all(line.isascii() for line in draw(make_live_report(), is_plain=True))


@given(
    width=st.integers(1, 150),
    name=st.one_of(st.just(HOSTILE), st.just("\N{CJK UNIFIED IDEOGRAPH-4E2D}" * 40), st.text(max_size=60)),
    loss=st.floats(),
    rate=st.floats(min_value=0),
    seconds=st.floats(min_value=0),
    total=st.one_of(st.none(), st.integers(0, 10**12)),
)
def test_nothing_that_a_training_reports_breaks_the_page(
    width: int, name: str, loss: float, rate: float, seconds: float, total: int | None
) -> None:
    report = make_live_report(
        loss=loss,
        samples_per_second=rate,
        remaining_seconds=seconds,
        total_steps=total,
        metrics={name: loss, f"{name}2": None},
        best=BEST.replace(metric=name),
        guard=name,
        phase=name,
    )
    console = make_console(width)
    view = TrainingView(console, is_live=True)
    with view.view.opened():
        view.show(report)
        view.warn(name)
        view.view.tick()
    pipe = make_console(is_terminal=False)
    lines = TrainingView(pipe, is_live=False)
    lines.show(report)
    lines.view.tick()
    for shown in (read(console), read(pipe)):
        assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1a\x7f\u202e]", shown)
    assert len(read(pipe).splitlines()) == 2


@pytest.mark.parametrize("width", [1, 5, 20, 60, 80, 100, 250])
def test_no_line_of_the_block_is_wider_than_the_terminal(width: int) -> None:
    console = make_console(width)
    view = TrainingView(console, is_live=True)
    view.show(make_live_report(metrics={HOSTILE: 1.0}, guard=HOSTILE, step_downs=(OUT_OF_MEMORY,)))
    with console.capture() as capture:
        console.print(draw_block(view))
    assert max(cell_len(line) for line in strip(capture.get()).splitlines()) <= width


def test_without_colours_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system="standard", no_color=True)
    view = TrainingView(console, is_live=True)
    view.show(make_live_report(step_downs=(OUT_OF_MEMORY,)))
    console.print(draw_block(view))
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", console.file.getvalue())  # type: ignore[attr-defined]


# Figures in words


@pytest.mark.parametrize(
    ("came", "words"),
    [
        (100.0, "as expected"),
        (103.0, "as expected"),
        (97.0, "as expected"),
        (103.1, "faster than expected"),
        (96.9, "slower than expected"),
    ],
)
def test_a_throughput_within_three_percent_is_as_promised(came: float, words: str) -> None:
    assert judge_throughput(came, 100.0) == words


@pytest.mark.parametrize(
    ("came", "words"),
    [(90.0, "as expected, within the noise"), (80.0, "slower than expected"), (0.0, "slower than expected")],
)
def test_a_throughput_within_the_noise_of_the_search_is_as_promised(came: float, words: str) -> None:
    assert judge_throughput(came, 100.0, 0.06) == words


def test_the_best_evaluation_stands_beside_the_metric_it_is_of() -> None:
    shown = list_metrics({"accuracy": 0.5, "bits_per_byte": 1.25}, BEST)
    assert shown == ["accuracy 0.5000", "bits_per_byte 1.2500", "best 1.1987 at step 11,250"]
    assert list_metrics({}, BEST) == ["best bits_per_byte 1.1987 at step 11,250"]


def test_a_trend_is_a_whole_session_in_a_few_signs() -> None:
    trend = Trend(points=8)
    levels = "01234567"
    assert trend.draw(8, levels) == ""
    for value in range(10_000):
        trend.add(float(value))
    trend.add(float("nan"))
    shown = trend.draw(4, levels)
    assert len(shown) == 4
    assert shown == "".join(sorted(shown))
    assert (shown[0], shown[-1]) == ("0", "7")
    assert trend.draw(1, levels) == ""


# In a pipe


class Pipe:
    """A view in a pipe, with a clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(training.time, "monotonic", lambda: self.now)
        self.console = make_console(is_terminal=False)
        self.view = TrainingView(self.console, is_live=False)
        self._seen = 0

    def said(self) -> list[str]:
        """Return what was said since the last call."""
        self.view.view.tick()
        lines = read(self.console).splitlines()
        new, self._seen = lines[self._seen :], len(lines)
        return new


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    return Pipe(monkeypatch)


def test_a_view_tells_each_metric_by_name(pipe: Pipe) -> None:
    metrics = {"error": 0.25, "undefined": None, "size": 3.0}
    pipe.view.show(make_live_report(step=30, total_steps=60, epoch=1, epochs=2, loss=0.5, metrics=metrics, best=None))
    line, evaluation = pipe.said()
    assert line == "30/60  50 %  loss 0.5000  12,480/s  1h03m left"
    assert evaluation == "  error 0.2500, undefined not finite, size 3.0000"


def test_a_line_fits_a_terminal_of_80_columns(pipe: Pipe) -> None:
    pipe.view.promise(12_200.0)
    pipe.view.show(make_live_report(step=123_456, total_steps=300_000, metrics={}))
    assert pipe.said() == ["123,456/300,000  41 %  loss 1.8342  12,480/s (102 % of expected)  1h03m left"]


def test_a_line_has_the_figures_of_the_block_where_all_is_to_be_told(pipe: Pipe) -> None:
    pipe.view.promise(12_200.0)
    pipe.view.verbose = True
    pipe.view.show(make_live_report(step_downs=(OUT_OF_MEMORY,), phase="evaluating", knows_evaluation=False))
    (line,) = pipe.said()
    for words in (
        "evaluating, 12,340 of 30,000 steps, 41 %: epoch 3 of 8, 12,480 samples/s, 1.02x of the expected 12,200, ",
        "bits_per_byte 1.2034, best 1.1987 at step 11,250, accuracy 0.4127, data wait 2 %, MFU 41 %, memory ",
        "1h03m left, evaluations not counted yet, 42m10s so far, until about ",
        "guard: 123 gradients checked, all as under your own numerics, 1 step down, last oom-device at step 4,210",
    ):
        assert words in line
    assert line.isascii()


def test_a_pipe_hears_often_at_first_and_each_minute_later(pipe: Pipe) -> None:
    spoken = []
    began = pipe.now
    for second in range(600):
        pipe.now = began + second
        pipe.view.show(make_live_report(step=second))
        spoken += [second for line in pipe.said() if not line.startswith("  ")]
    assert spoken == [*range(0, 120, 15), *range(165, 600, 60)]


def test_each_report_is_told_where_all_is_to_be_told(pipe: Pipe) -> None:
    pipe.view.verbose = True
    for step in range(1, 6):
        pipe.view.show(make_live_report(step=step))
        assert len(pipe.said()) == 1
    assert pipe.said() == []


def test_a_new_evaluation_is_told_soon(pipe: Pipe) -> None:
    pipe.now += 300.0
    pipe.view.show(make_live_report())
    assert len(pipe.said()) == 2
    pipe.now += 20.0
    pipe.view.show(make_live_report(step=12_350))
    assert pipe.said() == []
    pipe.view.show(make_live_report(step=12_360, metrics={"bits_per_byte": 1.0}))
    _, evaluation = pipe.said()
    assert "bits_per_byte 1.0000" in evaluation


def test_a_training_that_reports_nothing_is_still_alive(pipe: Pipe) -> None:
    pipe.now += 61.0
    assert pipe.said() == ["... still setting up, 1m01s so far"]
    pipe.view.show(make_live_report(phase="evaluating"))
    pipe.now += 61.0
    assert "12,340/30,000" in pipe.said()[0]
    pipe.now += 61.0
    assert pipe.said() == ["... still evaluating: 12,340 of 30,000 steps, 41 %; 2m02s since the last report"]
    pipe.now += 1.0
    assert pipe.said() == []


def test_warnings_and_steps_down_are_told_in_order_and_at_once(pipe: Pipe) -> None:
    pipe.view.plan("8 epochs of train.py:gpt")
    pipe.view.warn("the data changed")
    pipe.view.step_down(OUT_OF_MEMORY)
    assert pipe.said() == [
        "8 epochs of train.py:gpt",
        "warning: the data changed",
        f"step down: {OUT_OF_MEMORY.sentence}",
    ]


# On the terminal


def test_what_lasts_stands_above_the_block() -> None:
    console = make_console()
    view = TrainingView(console, is_live=True)
    with view.view.opened():
        view.plan("8 epochs")
        view.show(make_live_report())
        view.step_down(OUT_OF_MEMORY)
        view.view.tick()
        shown = strip(read(console))
        assert shown.index("8 epochs") < shown.index("step down: the device") < shown.rindex("12,340 of 30,000")
    assert read(console).rstrip().endswith("\x1b[2K") or "\x1b[?25h" in read(console)


@pytest.mark.parametrize("is_live", [False, True])
def test_a_terminal_that_is_gone_ends_no_training(is_live: bool) -> None:
    console = RaisingConsole(file=Broken(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = TrainingView(console, is_live=is_live)
    if is_live:
        with view.view.opened():
            view.show(make_live_report())
            view.warn("something")
            view.view.tick()
    view.show(make_live_report())
    view.view.tick()
    assert not DRAWING._lock._is_owned()  # type: ignore[attr-defined]


def test_what_nobody_reads_is_forgotten_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr(Broken, "write", lambda _self, _text: tries.append(1) or Broken().flush())
    console = RaisingConsole(file=Broken(), force_terminal=True, width=80, _environ={"TERM": "xterm"})
    view = TrainingView(console, is_live=True)
    view.show(make_live_report())
    with view.view.opened():
        for _second in range(100):
            view.warn("something")
            view.view.tick()
    assert len(tries) == 1
    assert console._buffer == []


def test_a_terminal_that_could_not_take_it_once_is_tried_again() -> None:
    console = make_console()
    attempt(console, lambda: console.print(1 / 0))
    attempt(console, lambda: console.print("again"))
    assert read(console) == "again\n"


def test_a_stderr_that_is_gone_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Broken())
    monkeypatch.setenv("TERM", "xterm")
    with training_view() as view:
        assert isinstance(view.view, BlockView)
        view.show(make_live_report())
        view.plan("8 epochs")
        view.view.tick()
    assert isinstance(sys.stderr, Broken)


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_pipe_and_a_dumb_terminal_get_lines(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: term == "dumb")
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", term)
    with training_view() as view:
        assert not isinstance(view.view, BlockView)
        view.show(make_live_report())
    assert "12,340/30,000  41 %  loss" in stream.getvalue()


def test_a_refresh_thread_that_is_woken_does_not_wait() -> None:
    calls = threading.Semaphore(0)
    with RefreshThread(calls.release, seconds=3600.0) as one:
        one.wake()
        assert calls.acquire(timeout=30.0)
        one.wake()
        assert calls.acquire(timeout=30.0)
    assert not calls.acquire(blocking=False)


def fork_and_try() -> bool:
    """Return whether a forked process finds the lock free."""
    process = os.fork()
    if not process:
        is_free = DRAWING._lock.acquire(timeout=10.0)
        os._exit(0 if is_free else 1)
    return os.waitpid(process, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_forked_worker_inherits_no_held_lock(monkeypatch: pytest.MonkeyPatch, is_stuck: bool) -> None:
    monkeypatch.setattr(refresh_thread, "_LONGEST_WAIT_SECONDS", 0.05 if is_stuck else 60.0)
    is_held, release = threading.Event(), threading.Event()
    is_over: list[bool] = []

    def hold() -> None:
        with DRAWING:
            is_held.set()
            release.wait(60.0 if is_stuck else 0.2)
            is_over.append(True)

    holder = threading.Thread(target=hold)
    holder.start()
    assert is_held.wait(30.0)
    assert fork_and_try()
    # A fork waits until what is being written is there; a terminal that was stopped holds it up for a moment only.
    assert bool(is_over) is not is_stuck
    release.set()
    holder.join()


# What the user's own code prints


def make_lines_above() -> tuple[StdoutProxy, Console]:
    console = make_console()
    return StdoutProxy(console, io.StringIO()), console


def test_whole_lines_of_the_users_go_above_as_they_are() -> None:
    above, console = make_lines_above()
    for text in ("[/x] half ", "a line [bold]\n", "two\nthree\nfo"):
        assert above.write(text) == len(text)
        above.flush()
    assert read(console) == "[/x] half a line [bold]\ntwo\nthree\n"
    above.finish()
    assert read(console).endswith("three\nfo\n")


def test_a_progress_bar_of_the_users_counts_as_it_ends() -> None:
    above, console = make_lines_above()
    for percent in range(0, 101, 10):
        above.write(f"\r{percent} %")
    assert read(console) == ""
    above.write("\n")
    for percent in range(0, 101, 10):
        above.write(f"{percent} percent\r")
    above.finish()
    assert read(console) == "100 %\n100 percent\n"


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    above, _ = make_lines_above()
    for _step in range(1000):
        above.write("x" * 1000)
    assert len(above._pending) < 100_000


def test_a_forked_worker_writes_past_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    console, stream = make_console(), io.StringIO()
    above = StdoutProxy(console, stream)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    above.write("of a worker\n")
    assert (stream.getvalue(), read(console)) == ("of a worker\n", "")


def test_what_is_no_text_is_refused_as_a_file_does() -> None:
    above, _ = make_lines_above()
    with pytest.raises(TypeError):
        above.write(b"bytes")  # type: ignore[arg-type]
    assert above.writable()


# A true terminal

PROGRAM = """
    import os, sys, time
    sys.path.insert(0, {tests!r})
    from training_records import OUT_OF_MEMORY, make_live_report
    from autotune.cli.view.training import training_view

    def fork_worker(number):
        process = os.fork()
        if not process:
            try:
                print(f"worker {{number}}\\n", end="", flush=True)
            finally:
                os._exit(0)
        assert os.waitpid(process, 0)[1] == 0

    with training_view() as view:
        view.plan("8 epochs of train.py:gpt")
        deadline = time.monotonic() + {seconds}
        step = 0
        while time.monotonic() < deadline:
            step += 10
            view.show(make_live_report(step=step))
            view.view.wake()
            if step == 50:
                view.step_down(OUT_OF_MEMORY)
            if step % 50 == 0:
                fork_worker(step)
                print("printed by the user at", step)
    open({done!r}, "w").write("to the end")
"""


class OnTerminal:
    """A program on a terminal of its own."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.done = folder / "done"
        program = PROGRAM.format(tests=str(Path(__file__).parents[1]), seconds=seconds, done=str(self.done))
        (folder / "program.py").write_text(textwrap.dedent(program))
        self.master, slave = pty.openpty()
        os.set_blocking(self.master, False)
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            [sys.executable, str(folder / "program.py")],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        os.close(slave)

    def read_to_end(self, *, until: str = "") -> str:
        """Return what the program wrote, up to its end or to some words."""
        shown = b""
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not (until and until.encode() in shown):
            try:
                shown += os.read(self.master, 65536)
            except BlockingIOError:
                if self.process.poll() is not None:
                    break
                time.sleep(0.01)
            except OSError:  # the other end was closed
                break
        return shown.decode(errors="replace")


def test_a_training_on_a_true_terminal(tmp_path: Path) -> None:
    terminal = OnTerminal(tmp_path, seconds=1.5)
    shown = terminal.read_to_end()
    assert terminal.process.wait(timeout=30) == 0, shown
    os.close(terminal.master)
    assert terminal.done.exists()
    plain = strip(shown)
    assert "Traceback" not in plain
    assert "8 epochs of train.py:gpt" in plain
    assert "step down: the device ran out of memory" in plain
    assert "12,480 samples/s" in plain
    assert re.search(r"[\r\n]printed by the user at 50\r?\n", plain)
    assert "worker 50" in plain
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


@pytest.mark.fault("48", injected="a terminal that is closed", outcome="the training goes on")
def test_a_terminal_that_is_closed_ends_no_training(tmp_path: Path) -> None:
    terminal = OnTerminal(tmp_path, seconds=1.5)
    terminal.read_to_end(until="12,480 samples/s")
    os.close(terminal.master)
    # What the user prints into nothing is the user's own: the view has to survive.
    assert terminal.process.wait(timeout=30) == 0
    assert terminal.done.exists()


@pytest.mark.fault("48", injected="a terminal stopped by Ctrl-S", outcome="the training goes on")
def test_a_terminal_that_is_stopped_holds_up_no_training() -> None:
    console = make_console()
    view = TrainingView(console, is_live=True)
    is_held, release = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        release.wait(30.0)

    holder = threading.Thread(target=lambda: attempt(console, hold))
    holder.start()
    try:
        assert is_held.wait(30.0)
        for step in range(100):
            view.show(make_live_report(step=step))
            view.warn("something")
        assert read(console) == ""
    finally:
        release.set()
        holder.join()
    view.view.tick()
    assert read(console).count("warning: something") == 100


def test_a_view_that_is_closed_has_said_everything_and_leaves_the_terminal_as_it_was() -> None:
    console = make_console()
    view = TrainingView(console, is_live=True)
    with view.view.opened():
        view.show(make_live_report())
        view.view.tick()
        view.warn("said last")
        view.close()
        shown = read(console)
        assert "said last" in shown
        assert shown.count("\x1b[?25h") == 1
        view.view.tick()
    assert read(console) == shown
