"""The parent of a final training, with real processes: their ends, their signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from record_factory import make_plan
from train_world import wait_until

from autotune.machine.cgroups import read_oom_kills
from autotune.records.config import TrainConfig
from autotune.records.layout import PLAN_FILE
from autotune.train.policy import TRAIN_POLICY, TrainPolicy
from autotune.train.recovery.attempts import Ended, Start, run_attempts
from autotune.train.recovery.child import AGAIN_STATUS
from autotune.train.recovery.workload import TrainingEnd, drop_settings, train_supervised
from autotune.train.runs.folder import read_plan

TIED = "import os, signal, sys, time\nfrom autotune.train.recovery.child import tie_to_parent\ntie_to_parent()\n"

LISTENER = (
    TIED
    + """
heard, seen = [], []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(number) != signal.SIG_IGN:
        signal.signal(number, lambda number, _frame: heard.append(number))
print("ready", os.getpid(), flush=True)
since = None
while since is None or time.monotonic() < since + 1.6:
    time.sleep(0.01)
    if len(heard) != len(seen):
        seen, since = list(heard), time.monotonic()
print("heard", sorted(heard), flush=True)
sys.exit(40 + len(heard))
"""
)

STUCK = (
    TIED
    + """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(60)
"""
)

DRIVER = """
import os, sys
from autotune.train.policy import TrainPolicy
from autotune.train.recovery.attempts import Start, run_attempts
kills, policy = len(sys.argv) > 2, TrainPolicy(kill_after_seconds=float((*sys.argv, 5.0)[2]))
start = lambda attempt: Start([sys.executable, "-c", sys.argv[1]], os.environ)
again = lambda ended: ended.status < 0 and print("again", flush=True) is None
ended = run_attempts(start, next_attempt=again, kills_on_ctrl_c=kills, policy=policy)
print("told", ended.was_asked, flush=True)
sys.exit(ended.exit_status)
"""


def hear_signals() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start_driver(child: str, *more: str, prepare: Callable[[], object] = hear_signals) -> subprocess.Popen[str]:
    """Start a parent with a child in a session of their own."""
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, child, *more],
        stdout=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=prepare,
        text=True,
    )


def await_ready(driver: subprocess.Popen[str]) -> int:
    """Return the process of the child, once it listens."""
    assert driver.stdout is not None
    line = driver.stdout.readline()
    assert line.startswith("ready")
    return int(line.split()[1])


def finish(driver: subprocess.Popen[str]) -> tuple[int, str]:
    """Return how a driver ended and what it printed since."""
    with driver:
        printed, _ = driver.communicate(timeout=60)
    return driver.returncode, printed


def run_code(code: str, *, again: Callable[[Ended], bool] = lambda _ended: False) -> Ended:
    """Supervise a program in this process."""
    return run_attempts(lambda _attempt: Start([sys.executable, "-c", code], os.environ), next_attempt=again)


@pytest.mark.parametrize(
    ("code", "status", "exit_status"),
    [
        ("pass", 0, 0),
        ("import sys; sys.exit(7)", 7, 7),
        ("import os; os.kill(os.getpid(), 9)", -9, 137),
        ("import os; os.kill(os.getpid(), 11)", -11, 139),
        ("import os; os.abort()", -6, 134),
        ("import os; os.kill(os.getpid(), 15)", -15, 143),
    ],
)
def test_the_exit_status_is_the_trainings_own(code: str, status: int, exit_status: int) -> None:
    asked: list[Ended] = []

    def note(ended: Ended) -> bool:
        asked.append(ended)
        return False

    ended = run_code(code, again=note)
    assert (ended.status, ended.exit_status, ended.was_asked) == (status, exit_status, False)
    assert asked == [ended]  # nobody told it to end, not even where it was by SIGTERM


def test_another_process_is_started_for_as_long_as_that_is_wanted(tmp_path: Path) -> None:
    code = f"import os; open({str(tmp_path / 'log')!r}, 'a').write('x'); os.kill(os.getpid(), 9)"
    ended = run_code(code, again=lambda ended: ended.attempt < 2)
    assert (ended.attempt, (tmp_path / "log").read_text()) == (2, "xxx")


def test_signals_of_the_process_are_put_back() -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    run_code("pass")
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.set_wakeup_fd(-1) == -1


NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@pytest.mark.parametrize("to_group", [False, True])
def test_each_signal_reaches_the_training_once(to_group: bool) -> None:
    driver = start_driver(LISTENER)
    await_ready(driver)
    for number in NUMBERS:
        (os.killpg if to_group else os.kill)(driver.pid, number)
    status, printed = finish(driver)
    assert f"heard {sorted(map(int, NUMBERS))}" in printed
    assert status == 45


@pytest.mark.fault("21", injected="Ctrl-C at a pseudo-terminal", outcome="heard once by the training")
def test_ctrl_c_at_the_terminal_reaches_the_training_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        hear_signals()  # whoever runs the tests in the background may have them ignored
        os.execv(sys.executable, [sys.executable, "-c", DRIVER, LISTENER])
    printed = b""
    while b"ready" not in printed:
        printed += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 41


def test_what_was_asked_to_end_is_not_started_again() -> None:
    driver = start_driver(TIED + "print('ready', os.getpid(), flush=True)\ntime.sleep(60)")
    await_ready(driver)
    driver.terminate()
    status, printed = finish(driver)
    assert status == 143
    assert "told True" in printed
    assert "again" not in printed


@pytest.mark.fault("22", injected="SIGHUP under nohup", outcome="ignored")
def test_an_ignored_hang_up_stays_ignored() -> None:
    driver = start_driver(LISTENER, prepare=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    await_ready(driver)
    os.killpg(driver.pid, signal.SIGHUP)
    os.killpg(driver.pid, signal.SIGUSR2)
    status, printed = finish(driver)
    assert (status, f"heard [{int(signal.SIGUSR2)}]" in printed) == (41, True)


@pytest.mark.fault("21", injected="two Ctrl-C to a training that ignores them", outcome="killed, 137")
def test_a_second_ctrl_c_ends_a_process_that_hears_nothing() -> None:
    driver = start_driver(STUCK, "0.2")
    child = await_ready(driver)
    for _ in range(2):
        os.killpg(driver.pid, signal.SIGINT)
        time.sleep(0.1)  # two of one kind that come together are one to the kernel
    status, _ = finish(driver)
    assert status == 137
    assert not psutil.pid_exists(child)


def test_requests_to_end_of_other_kinds_leave_time_for_a_checkpoint() -> None:
    driver = start_driver(LISTENER, "0.1")
    await_ready(driver)
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.killpg(driver.pid, number)
    assert finish(driver)[0] == 42  # it heard both, and was not killed


@pytest.mark.fault("20", injected="SIGKILL to the training's parent", outcome="the training is gone")
def test_the_training_does_not_survive_its_parent() -> None:
    driver = start_driver(STUCK)
    child = psutil.Process(await_ready(driver))
    driver.kill()
    finish(driver)
    assert wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, seconds=10)


PROGRAM = """
import subprocess
program = subprocess.Popen(["sleep", "1000"], env={}, start_new_session=True, stdout=subprocess.DEVNULL)
"""


@pytest.mark.fault("F7", injected="kill -9 of the parent of `train`", outcome="programs of the training end with it")
def test_programs_that_the_training_has_started_end_with_the_parent() -> None:
    driver = start_driver(TIED + PROGRAM + "print('ready', program.pid, flush=True)\ntime.sleep(1000)")
    program = psutil.Process(await_ready(driver))
    driver.kill()
    finish(driver)
    assert wait_until(lambda: not program.is_running() or program.status() == psutil.STATUS_ZOMBIE, seconds=10)


def test_programs_that_the_training_leaves_at_its_end_are_the_users_own() -> None:
    driver = start_driver(TIED + PROGRAM + "print('ready', program.pid, flush=True)\nos._exit(0)")
    program = psutil.Process(await_ready(driver))
    status, _ = finish(driver)
    try:
        assert status == 0
        assert program.is_running()
        assert program.status() != psutil.STATUS_ZOMBIE
    finally:
        program.kill()


def test_what_the_training_starts_is_tied_to_nobody() -> None:
    code = TIED + "sys.exit('AUTOTUNE_PARENT' in os.environ)"
    assert run_code(code).status == 0


def test_a_training_that_closes_everything_costs_the_parent_nothing() -> None:
    began = time.process_time()
    ended = run_code("import os, time; os.closerange(3, 64); time.sleep(1.0)")
    assert time.process_time() - began < 0.5 * ended.seconds


@pytest.mark.parametrize(
    ("status", "kills", "cause"),
    [
        (-9, 1, "oom-killed"),
        (-9, None, "oom-killed"),
        (-9, 0, "crash-signal"),
        (-11, 0, "crash-signal"),
        (-7, 0, "shm"),
        (1, 1, "oom-killed"),
        (1, 0, "crash-exit"),
    ],
)
@pytest.mark.fault(
    "3",
    injected="SIGKILL with and without a count of the kernel's",
    outcome="oom-killed only where the kernel may have done it",
)
def test_a_death_without_a_word_has_a_cause(status: int, kills: int | None, cause: str) -> None:
    found, sentence = Ended(0, status, False, kills, 1.0).explain()
    assert found == cause
    assert "printed nothing" not in sentence


def test_without_workers_a_bus_error_is_not_their_shared_memory() -> None:
    assert Ended(0, -signal.SIGBUS, False, 0, 1.0).explain(has_workers=False) == (
        "crash-signal",
        "it was killed by SIGBUS",
    )


ASYNC = (
    TIED
    + """
from autotune.cli.stopping import stop_on_signals
import socket
ours, theirs = socket.socketpair()
ours.setblocking(False)
with stop_on_signals() as stop:
    signal.set_wakeup_fd(ours.fileno())  # as asyncio does
    print("ready", os.getpid(), flush=True)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        time.sleep(0.01)
        if stop() and until > time.monotonic() + 2:
            until = time.monotonic() + 1.6
    assert signal.set_wakeup_fd(-1) == ours.fileno()
"""
)


@pytest.mark.slow
def test_a_ctrl_c_stays_one_where_user_code_takes_the_wakeup_descriptor() -> None:
    driver = start_driver(ASYNC)
    await_ready(driver)
    os.killpg(driver.pid, signal.SIGINT)
    status, printed = finish(driver)
    assert (status, "told True" in printed) == (0, True)  # a second one raises KeyboardInterrupt


@pytest.mark.fault("3", injected="SIGKILL by another process", outcome="the kernel's count stands still")
def test_this_machines_counter_stands_still_when_somebody_else_kills() -> None:
    before = read_oom_kills()
    ended = run_code("import os; os.kill(os.getpid(), 9)")
    if before is None:
        pytest.skip("the control group's counter cannot be read here")
    assert ended.oom_kills == 0


TRAINING = """
import json, os, pathlib, signal, sys
from autotune.train.recovery.child import session_began, tell_opened_run, tie_to_parent
assert tie_to_parent()
run = pathlib.Path(os.environ["RUN"])
log = run / "log.jsonl"
starts = log.read_text().splitlines() if log.exists() else []
with log.open("a") as file:
    file.write(json.dumps({"words": sys.argv[1:], "began": session_began()}) + chr(10))
tell_opened_run(run)
steps, deaths = json.loads(os.environ["STEPS"]), os.environ["DEATHS"].split()
checkpoint = run / "checkpoints" / f"step-{steps[len(starts)]:08d}"
checkpoint.mkdir(parents=True, exist_ok=True)
(checkpoint / "manifest.json").touch()
(run / "checkpoints/step-00009999").mkdir(exist_ok=True)  # it has no manifest, and counts for nothing
if len(starts) < len(deaths):
    death = int(deaths[len(starts)])
    if death == 75 and "ASKS" in os.environ:
        plan = json.loads((run / "run.json").read_text())
        down = {"step": 9, "resumed_step": 5, "cause": "device-error", "detail": "", "action": os.environ["ASKS"]}
        plan["step_downs"].append(down | {"sentence": "", "config": plan["config"]})
        (run / "run.json").write_text(json.dumps(plan))
    os.kill(os.getpid(), -death) if death < 0 else sys.exit(death)
"""


def train(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    steps: list[int],
    deaths: str,
    *,
    typed: tuple[str, ...] = (),
    policy: TrainPolicy = TRAIN_POLICY,
) -> tuple[TrainingEnd, list[str]]:
    """Supervise a training that stands at `steps` when it dies of each of `deaths`, and then ends well."""
    config = TrainConfig(micro_batch_size=64, num_workers=2)
    plan = make_plan(config, baseline_config=TrainConfig(micro_batch_size=64))
    (folder / PLAN_FILE).write_text(plan.to_json())
    monkeypatch.setenv("RUN", str(folder))
    monkeypatch.setenv("STEPS", json.dumps(steps))
    monkeypatch.setenv("DEATHS", deaths)
    said: list[str] = []
    command = (sys.executable, "-c", TRAINING)
    words = ["a.py:b", *typed, "--epochs", "3"]
    return train_supervised(words, say=said.append, command=command, policy=policy), said


@pytest.mark.fault("4", injected="two deaths by SIGSEGV", outcome="resumed, then with safer settings")
def test_a_killed_training_is_resumed_with_a_step_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = train(tmp_path, monkeypatch, [500, 700, 900], "-11 -11")
    assert (end.status, end.message) == (0, "")
    starts = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    resumed = ["--resume", "--run-dir", str(tmp_path.resolve()), "a.py:b", "--epochs", "3"]
    assert [start["words"] for start in starts] == [["a.py:b", "--epochs", "3"], resumed, resumed]
    assert len({start["began"] for start in starts}) == 1  # the time of the session counts from its first process
    downs = read_plan(tmp_path).step_downs
    assert [(down.action, down.resumed_step) for down in downs] == [("again", 500), ("baseline", 700)]
    assert downs[-1].config.num_workers == 0
    assert said == [down.sentence for down in downs]


@pytest.mark.fault(
    "4", injected="deaths by SIGSEGV without progress", outcome="given up after three, with the cause and the folder"
)
def test_a_training_that_dies_on_the_spot_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, _ = train(tmp_path, monkeypatch, [500, 900, 950, 990, 995], "-11 -11 -11 -11 -11")
    assert end.status == 139
    assert "SIGSEGV" in end.message
    assert str(tmp_path) in end.hint
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 3  # no third step down is known


def test_a_process_that_asks_for_a_fresh_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKS", "again")
    end, said = train(tmp_path, monkeypatch, [5, 6], f"{AGAIN_STATUS}")
    assert (end.status, said, len(read_plan(tmp_path).step_downs)) == (0, [], 1)
    (tmp_path / "log.jsonl").unlink()
    end, _ = train(tmp_path, monkeypatch, [5, 6, 7, 8], " ".join([f"{AGAIN_STATUS}"] * 4))
    assert end.status == 5
    assert "3. time" in end.message


def test_steps_down_that_change_something_are_never_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASKS", "fewer-samples")
    deaths = " ".join([f"{AGAIN_STATUS}"] * 5)
    end, _ = train(tmp_path, monkeypatch, [5] * 6, deaths, policy=TrainPolicy(most_deaths=2))
    assert (end.status, end.message) == (0, "")


def test_a_status_of_the_users_own_is_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = train(tmp_path, monkeypatch, [5, 6], f"{AGAIN_STATUS}")
    assert (end.status, end.message, said) == (AGAIN_STATUS, "", [])
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1
    # Neither is one that comes after a step down of an earlier process.
    (tmp_path / "log.jsonl").unlink()
    end, said = train(tmp_path, monkeypatch, [5, 6, 7], f"-11 {AGAIN_STATUS}")
    assert (end.status, end.message, len(said)) == (AGAIN_STATUS, "", 1)


def test_a_run_that_goes_on_takes_its_settings_from_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ("--profile", "best.json", "--skip-verification", "--preset=balanced", "--keep-checkpoints", "3")
    train(tmp_path, monkeypatch, [5, 6], "-11", typed=typed)
    starts = [json.loads(line)["words"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert starts[0] == ["a.py:b", *typed, "--epochs", "3"]
    assert starts[1] == [
        "--resume",
        "--run-dir",
        str(tmp_path.resolve()),
        "a.py:b",
        "--keep-checkpoints",
        "3",
        "--epochs",
        "3",
    ]
    assert drop_settings(["--", "python", "x.py", "--profile", "y"]) == ["--", "python", "x.py", "--profile", "y"]


def test_a_refusal_to_go_on_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end, said = train(tmp_path, monkeypatch, [5, 6], "-11 7")
    assert (end.status, end.message) == (7, "")
    assert said[-1].startswith("put the source back")
    (tmp_path / "log.jsonl").unlink()
    assert train(tmp_path, monkeypatch, [5], "7")[1] == []


@pytest.mark.parametrize("status", [0, 4, 130])
def test_an_ordinary_end_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    end, said = train(tmp_path, monkeypatch, [5], f"{status}")
    assert (end.status, end.message, said) == (status, "", [])
