"""Four workers on one PostgreSQL: one is killed, one is cut off for a while, and there is one answer."""

from __future__ import annotations

import functools
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import BaseStorage
from shared_worker import VALUES
from shared_workers import wait_until

from autotune.records.profile import Profile
from autotune.search.share.address import open_storage, read_address
from autotune.search.share.board import Board, Place
from autotune.search.store.folder import list_searches

pytestmark = pytest.mark.slow

WORKER = "shared_worker.py"
GRACE = 6.0
SEARCHED = r"autotune-[0-9a-f]{12}"
"""Name of the study that searches share; other tests have theirs on the same server."""


def find_binaries() -> Path | None:
    """Return the folder of PostgreSQL's programs; None where they are not installed."""
    known = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    on_path = shutil.which("initdb")
    folders = [*([Path(on_path).resolve().parent] if on_path else []), *known]
    return next((one for one in folders if (one / "initdb").exists() and (one / "postgres").exists()), None)


def find_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Server:
    """A PostgreSQL of the test's own.

    Attributes:
        port: on the loopback device.
        password: of its user.
    """

    port: int
    password: str

    def make_url(self, port: int | None = None) -> str:
        return f"postgresql+psycopg://postgres:{self.password}@127.0.0.1:{port or self.port}/postgres"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install 'autotune-torch[postgres]'")
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql")
    user: dict[str, Any] = {}
    folder = Path(tempfile.mkdtemp(prefix="autotune-postgres-"))
    if os.geteuid() == 0:  # which PostgreSQL refuses to be
        try:
            account = pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("there is no user that PostgreSQL could run as")
        user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": ()}
        os.chown(folder, account.pw_uid, account.pw_gid)
    found = Server(find_free_port(), secrets.token_hex(8))
    try:
        with run_server(binaries, folder, found, user):
            yield found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def run_server(binaries: Path, folder: Path, server: Server, user: dict[str, Any]) -> Iterator[None]:
    words = folder / "words"
    words.write_text(server.password)
    words.chmod(0o644)
    data = folder / "data"
    make = [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "scram-sha-256", "--pwfile", words]
    subprocess.run(make, check=True, capture_output=True, cwd=folder, **user)
    options = ["-c", "fsync=off", "-c", "listen_addresses=127.0.0.1", "-k", folder, "-p", str(server.port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [binaries / "postgres", "-D", data, *options], stdout=log, stderr=log, cwd=folder, **user
        )
    try:
        ready = [binaries / "pg_isready", "-h", "127.0.0.1", "-p", str(server.port)]
        wait_until(lambda: subprocess.run(ready, capture_output=True, check=False).returncode == 0)
        yield
    finally:
        process.send_signal(signal.SIGINT)  # ends the connections that there are
        process.wait(timeout=30)


@dataclass
class Wire:
    """A line to the server that can be cut without a word to either end.

    Attributes:
        port: of this end.
        is_cut: nothing gets through any more.
    """

    server: Server
    is_cut: bool = False
    _ends: list[socket.socket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for end in (self._listening, *self._ends):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self.server.port))
                self._ends += [near, far]
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(one, other), daemon=True).start()

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while found := one.recv(2**16):
                if self.is_cut:
                    return  # whoever waits for an answer on this connection waits for good
                other.sendall(found)
            other.shutdown(socket.SHUT_WR)


@contextmanager
def start_worker(work: Path, url: str, seed: int, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    work.mkdir(parents=True)
    program = Path(__file__).with_name(WORKER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "WORKER_URL": url, **more}
    with (work / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, program, str(work), str(seed), str(GRACE)], env=environment, stdout=said, stderr=said
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@functools.cache
def open_server(server: Server) -> BaseStorage:
    """Return its storage, opened once: each has connections of its own."""
    return open_storage(read_address(server.make_url()))


def read_leases(server: Server) -> list[Any]:
    return read_study(server, SEARCHED + "-leases")


def read_study(server: Server, name: str) -> list[Any]:
    """Return the trials of the study whose name matches; none before it is there."""
    storage = open_server(server)
    found = [one._study_id for one in storage.get_all_studies() if re.fullmatch(name, one.study_name)]
    return storage.get_all_trials(found[0]) if found else []


def list_launches(server: Server, host: str) -> list[Any]:
    leases = read_leases(server)
    sessions = {one._trial_id for one in leases if one.user_attrs.get("worker") == host}
    return [one for one in leases if one.user_attrs["role"] == "launch" and one.user_attrs["session"] in sessions]


def open_board(
    server: Server, name: str, *, study: str = "races", clock: Callable[[], float] = time.monotonic
) -> Board:
    """Return a worker with a connection of its own."""
    return Board(open_storage(read_address(server.make_url())), study, Place(name, name, name), GRACE, clock)


def do_at_once(boards: list[Board], do: Callable[[Board], Any]) -> list[Any]:
    """Return what workers come to that do one thing at the same moment, each in a thread."""
    start = threading.Barrier(len(boards))

    def wait_and_do(board: Board) -> Any:
        start.wait()
        return do(board)

    with ThreadPoolExecutor(len(boards)) as pool:
        return list(pool.map(wait_and_do, boards))


def says(work: Path, words: str) -> bool:
    return words in (work / "said").read_text()


def launch_count(work: Path) -> int:
    return len(list(work.glob(".autotune/*/trials/*/result.json")))


@dataclass(frozen=True)
class Outcome:
    """What four workers came to.

    Attributes:
        works: their folders: the killed one's, the cut one's, and the others'.
        running: params of the launch that the killed one left.
        leases: all that there were.
        readings: all launches.
    """

    works: tuple[Path, ...]
    running: dict[str, Any]
    leases: list[Any]
    readings: list[Any]


@pytest.fixture(scope="module")
def outcome(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    root = tmp_path_factory.mktemp("workers")
    works = tuple(root / name for name in ("killed", "cut", "third", "fourth"))
    killed, cut, third, fourth = works
    wire = Wire(server)
    with (
        start_worker(killed, server.make_url(), 1, WORKER_HANGS="1") as victim,
        start_worker(cut, server.make_url(wire.port), 2) as lonely,
        start_worker(third, server.make_url(), 3) as other,
        start_worker(fourth, server.make_url(), 4) as last,
    ):
        wait_until((killed / "hangs").exists)
        running = [one for one in list_launches(server, "killed") if one.state.name == "RUNNING"]
        victim.send_signal(signal.SIGKILL)
        victim.wait()
        wait_until(lambda: launch_count(cut) >= 3)
        wire.is_cut = True
        wait_until(lambda: says(cut, " is away ("))
        before = launch_count(cut)
        wait_until(lambda: launch_count(cut) >= before + 2)
        wire.is_cut = False
        for process in (lonely, other, last):
            assert process.wait(timeout=150) == 0
        readings = read_study(server, SEARCHED)
        yield Outcome(works, running[0].user_attrs["params"] if running else {}, read_leases(server), readings)
    wire.close()


def test_of_many_that_begin_a_launch_at_once_one_has_it(server: Server) -> None:
    boards = [open_board(server, f"w{number}") for number in range(6)]
    for turn in range(10):
        claims = do_at_once(boards, lambda board, turn=turn: board.claim({"knob": turn}))
        assert sum(claims) == 1, turn
    holders = do_at_once(boards, Board.take_finals)
    assert holders.count(None) == 1


def test_of_many_that_see_a_death_one_takes_over(server: Server) -> None:
    now = [0.0]
    dead = open_board(server, "dead", study="deaths")
    assert dead.claim({"knob": 1})
    boards = [open_board(server, f"w{number}", study="deaths", clock=lambda: now[0]) for number in range(6)]
    now[0] = 0.6 * GRACE
    for board in boards:
        board.beat()
    now[0] = 1.2 * GRACE
    inherited = [found.inherited for found in do_at_once(boards, Board.look)]
    assert [one for one in inherited if one is not None] == [{"knob": 1}]


def test_there_is_one_answer_and_the_others_say_where(outcome: Outcome) -> None:
    _, cut, *rest = outcome.works
    profiles = {work: Profile.load(work / "best.json") for work in (cut, *rest)}
    proven = [work for work, one in profiles.items() if one.verdict == "improved"]
    assert proven
    assert len([work for work in proven if work != cut]) <= 1, "the one that was cut off may have proven it alone"
    for work, profile in profiles.items():
        if work in proven:
            assert profile.config.user_knobs == {"planted": 7}
        else:
            assert any(f"{place}/best.json" in note for note in profile.evidence.notes for place in proven)
            assert profile.config.user_knobs == {"planted": 0}


@pytest.mark.fault("F20", injected="kill -9 of one of four workers", outcome="one other launches what it ran")
def test_what_the_killed_worker_ran_was_taken_over_exactly_once(outcome: Outcome) -> None:
    assert outcome.running
    launches = [one for one in outcome.leases if one.user_attrs["role"] == "launch"]
    own = {one._trial_id for one in outcome.leases if one.user_attrs.get("worker") == "killed"}
    (left,) = (one for one in launches if one.user_attrs["session"] in own and one.user_attrs.get("died"))
    assert left.user_attrs["params"] == outcome.running
    heirs = [one for one in launches if one.user_attrs["takes_over"] == left.number and one.state.name == "COMPLETE"]
    readers = [one.user_attrs["worker"] for one in outcome.readings if one.params == outcome.running]
    assert readers
    # Whoever is cut off sees no leases: what is read there meanwhile needs no heir any more.
    assert len(heirs) == 1 or (not heirs and readers[0] == "cut"), (left, launches)


@pytest.mark.fault(
    "F20",
    injected="a connection to PostgreSQL is cut without a word",
    outcome="said once; every launch is sent when it is back",
)
def test_the_worker_that_was_cut_off_went_on_alone_and_joined_again(outcome: Outcome) -> None:
    _, cut, *_ = outcome.works
    said = (cut / "said").read_text()
    assert said.count(" is away (") == 1
    assert said.count(" is back: ") == 1
    (folder,) = list_searches(cut)
    launched = {
        one.spec.number
        for one in folder.read_trials()
        if one.spec.purpose == "measure" and one.spec.config is not None and one.spec.config.user_knobs["planted"]
    }
    sent = [one.user_attrs["number"] for one in outcome.readings if one.user_attrs["worker"] == "cut"]
    assert len(sent) == len(set(sent))
    assert {*sent} == launched


def test_every_setting_was_launched(outcome: Outcome) -> None:
    assert {one.params["user_knobs.planted"] for one in outcome.readings} == {*VALUES} - {0}


def test_no_password_is_in_any_file(outcome: Outcome, server: Server) -> None:
    files = [path for work in outcome.works for path in work.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert [path for path in files if server.password.encode() in path.read_bytes()] == []
    assert server.password not in repr([one.user_attrs for one in (*outcome.leases, *outcome.readings)])
