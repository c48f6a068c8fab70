"""`autotune train` as a process: killed, told to stop, or started with the wrong thing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from noisy_workload import SAMPLES
from train_world import CONFIG, Workplace, find_differences, open_workplace, read_metrics, read_state, wait_until

from autotune.cli.stopping import stop_on_signals

EPOCHS = 6
STEPS_PER_EPOCH = -(-SAMPLES // 8)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Return a workplace whose run `straight` was never stopped; its profile asks for two workers."""
    workplace = open_workplace(tmp_path_factory.mktemp("straight"), "slow")
    workplace.save_profile(CONFIG.replace(num_workers=2))
    status, _, said = workplace.run_command("--epochs", str(EPOCHS), "--run-dir", "straight")
    assert status == 0, said
    return workplace


def assert_same_end(workplace: Workplace, name: str) -> None:
    states = [read_state(workplace.folder / run) for run in ("straight", name)]
    assert find_differences(*states) == []
    lines = Counter((line["step"], "error" in line) for line in read_metrics(workplace.folder / name))
    assert set(lines.values()) == {1}
    assert lines.keys() >= {(STEPS_PER_EPOCH * (epoch + 1), True) for epoch in range(EPOCHS)}


def has_steps(run: Path, steps: int) -> bool:
    """Return whether the metrics tell of so many steps."""
    try:
        return any(line["step"] >= steps for line in read_metrics(run))
    except (OSError, ValueError):
        return False


def has_checkpoint(run: Path, step: int) -> bool:
    return any(int(path.name[-8:]) >= step for path in (run / "checkpoints").glob("step-*"))


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list of processes whose groups are killed at the end."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=60)


@pytest.mark.slow
@pytest.mark.fault(
    "20", injected="SIGKILL in three epochs", outcome="the end is bit for bit that of a run never killed"
)
def test_kills_in_mid_training_change_nothing(straight: Workplace, started: list[subprocess.Popen[str]]) -> None:
    run = straight.folder / "killed"
    resume: tuple[str, ...] = ("--epochs", str(EPOCHS))
    for checkpoint, pause in ((1, 0.04), (STEPS_PER_EPOCH + 1, 0.1), (2 * STEPS_PER_EPOCH + 1, 0.0)):
        process = straight.start_command("--run-dir", "killed", *resume)
        started.append(process)
        assert wait_until(lambda least=checkpoint: has_checkpoint(run, least)), process.poll()
        time.sleep(pause)
        process.kill()  # the workers must go by themselves
        assert process.wait(60) == -signal.SIGKILL
        resume = ("--resume",)
    status, _, said = straight.run_command("--run-dir", "killed", *resume)
    assert status == 0, said
    assert_same_end(straight, "killed")


@pytest.mark.parametrize(
    ("number", "to_group"),
    [
        pytest.param(signal.SIGTERM, False, id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, True, id="SIGTERM to the group", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, True, id="SIGINT to the group", marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, False, id="SIGUSR1", marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, True, id="SIGHUP to the group", marks=pytest.mark.slow),
    ],
)
@pytest.mark.fault(
    "22",
    injected="SIGTERM, SIGINT, SIGUSR1, SIGHUP, to the process and to its group",
    outcome="a checkpoint, 128 + N, the command that goes on",
)
@pytest.mark.fault("39", injected="the same, resumed", outcome="the end is bit for bit that of a run never stopped")
def test_a_signal_saves_and_the_run_goes_on(
    straight: Workplace, started: list[subprocess.Popen[str]], number: signal.Signals, to_group: bool
) -> None:
    name = f"signal-{number.name}-{to_group}"
    process = straight.start_command("--epochs", str(EPOCHS), "--run-dir", name)
    started.append(process)
    assert wait_until(lambda: has_steps(straight.folder / name, STEPS_PER_EPOCH)), process.poll()
    (os.killpg if to_group else os.kill)(process.pid, number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 128 + number, said
    assert "--resume" in said
    assert "Traceback" not in said
    step = read_state(straight.folder / name)["step"]
    assert STEPS_PER_EPOCH <= step < EPOCHS * STEPS_PER_EPOCH
    if to_group and number == signal.SIGTERM:
        status, _, said = straight.run_command("--run-dir", name, "--resume")
        assert status == 0, said
        assert_same_end(straight, name)


@pytest.mark.slow
def test_a_time_limit_ends_it_in_time_and_the_run_goes_on(straight: Workplace) -> None:
    status, printed, said = straight.run_command(
        "--epochs", str(EPOCHS), "--run-dir", "limited", "--max-time", "1s", "--json"
    )
    assert status == 124, said
    summary = json.loads(printed)
    assert not summary["finished"]
    assert 1 <= summary["steps"] < EPOCHS * STEPS_PER_EPOCH
    assert f"autotune train {straight.target} --resume --run-dir {straight.folder / 'limited'}" in said
    status, _, said = straight.run_command("--run-dir", "limited", "--resume")
    assert status == 0, said
    assert_same_end(straight, "limited")


@pytest.mark.slow
def test_an_evaluation_does_not_overrun_the_time_nor_stand_in_the_way(workplace: Workplace) -> None:
    workplace.toy = "evaluates_for_long"
    workplace.save_profile()
    status, printed, said = workplace.run_command("--epochs", "2", "--run-dir", "run", "--max-time", "25s", "--json")
    assert status == 124, said
    assert json.loads(printed)["steps"] == STEPS_PER_EPOCH
    status, printed, said = workplace.run_command("--resume", "--run-dir", "run", "--max-time", "25s", "--json")
    assert "does not fit into the time limit" in said
    assert json.loads(printed)["steps"] == 2 * STEPS_PER_EPOCH


@pytest.mark.slow
@pytest.mark.fault(
    "44",
    injected="a device that answers nothing any more",
    outcome="a fresh process goes on from the last checkpoint; same end",
)
def test_a_device_that_is_lost_needs_a_fresh_process(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace.folder)
    workplace.toy = "loses_its_device"
    workplace.save_profile()
    status, printed, said = workplace.run_command("--epochs", "3", "--json", "--run-dir", "run")
    assert status == 0, said
    summary = json.loads(printed)
    (step_down,) = summary["step_downs"]
    assert (step_down["cause"], step_down["action"], step_down["resumed_step"]) == (
        "device-error",
        "again",
        STEPS_PER_EPOCH,
    )
    workplace.train(epochs=3, out="straight")
    states = [read_state(workplace.folder / run) for run in ("straight", "run")]
    assert find_differences(*states) == []


def test_a_hang_up_that_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        with stop_on_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_first_signal_asks_and_a_second_ctrl_c_interrupts() -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    with stop_on_signals(signal.SIGUSR1) as stop:
        assert not stop()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop()
        os.kill(os.getpid(), signal.SIGTERM)  # a scheduler announces the end of a job's time, and then asks for it
        assert stop.signal_number == signal.SIGUSR1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert {number: signal.getsignal(number) for number in handlers} == handlers


@pytest.mark.fault("50", injected="a signal handler of the user's own", outcome="called too; the stop is heard")
def test_a_signal_that_the_users_code_has_taken_is_taken_back() -> None:
    heard: list[int] = []

    def leave(number: int, _frame: object) -> None:
        heard.append(number)
        raise SystemExit(3)

    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        signal.signal(signal.SIGTERM, leave)
        assert not stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop()
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


class Stopped(BaseException):
    pass


def test_a_signal_ends_at_once_what_may_be_interrupted() -> None:
    with stop_on_signals() as stop:
        with pytest.raises(Stopped), stop.raising(Stopped):
            os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal_number == signal.SIGTERM
        with pytest.raises(Stopped), stop.raising(Stopped):
            pytest.fail("it was told to stop before")


@pytest.mark.slow
def test_malloc_settings_are_there_before_python_starts(workplace: Workplace) -> None:
    workplace.toy = "prints_environment"
    workplace.save_profile(CONFIG.replace(host_allocator="glibc-tuned"))
    status, printed, said = workplace.run_command("--steps", "1")
    assert status == 0, said
    assert "'MALLOC_MMAP_THRESHOLD_': '1073741824'" in printed
    assert "no effect" not in said


def test_the_users_error_is_shown_with_the_users_frames_only(workplace: Workplace) -> None:
    workplace.toy = "failing"
    workplace.save_profile()
    status, printed, said = workplace.run_command("--steps", "5")
    assert status == 4
    assert printed == ""
    assert "error: noisy_workload.py:failing: step 3 raised FileNotFoundError" in said
    assert "in compute_loss" in said
    assert "autotune/engine" not in said


@pytest.mark.fault("37", injected="a profile of schema 99", outcome="exit 7, one error")
def test_a_bad_profile_is_one_error_and_no_traceback(workplace: Workplace) -> None:
    profile = workplace.save_profile()
    plain = json.loads(profile.to_json()) | {"schema_version": 99}
    (workplace.folder / "best.json").write_text(json.dumps(plain))
    status, printed, said = workplace.run_command("--json")
    assert status == 7
    assert json.loads(printed)["error"]["code"] == 7
    assert "Traceback" not in said
