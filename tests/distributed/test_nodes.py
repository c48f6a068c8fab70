"""`autotune train --nnodes 2`: two nodes on this machine, over the loopback; faults, refusals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from test_shared_training import EPOCHS, Place, await_steps, make_place, read_losses

from autotune.cli.training_session import choose_nodes
from autotune.distributed.nodes import require_alike
from autotune.distributed.verdict import judge_nodes
from autotune.errors import UsageError
from autotune.records.nodes import NodeFacts, NodeReport, read_endpoint
from autotune.records.training_process import RankEnd
from autotune.train.options import TrainingOptions
from autotune.train.run import run_training


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return make_place(tmp_path)


def find_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def start_nodes(
    place: Place, name: str, *words: str, numbered: bool = True, ranks: str = "2"
) -> list[subprocess.Popen[str]]:
    more = ["--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_port()}", *words]
    numbers = [["--node-rank", str(node)] if numbered else [] for node in range(2)]
    return [place.start(name, *more, *number, ranks=ranks, group=True) for number in numbers]


def await_ends(nodes: list[subprocess.Popen[str]]) -> list[str]:
    """Return what each node said, once all have ended."""
    try:
        return [process.communicate(timeout=240)[1] for process in nodes]
    finally:
        for process in nodes:
            process.kill()


def list_ranks(node: subprocess.Popen[str]) -> dict[int, psutil.Process]:
    return {
        int(process.environ()["RANK"]): process
        for process in psutil.Process(node.pid).children(recursive=True)
        if "RANK" in process.environ() and "autotune" in process.cmdline()
    }


@pytest.mark.slow
def test_the_loss_curve_is_that_of_one_process(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_training(TrainingOptions(epochs=EPOCHS, out="one"), "shared_workloads.py:counted", folder=place.folder)
    nodes = start_nodes(place, "counted", "--epochs", str(EPOCHS), "--out", "run", numbered=False)
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [0, 0], said
    assert "4 processes on 2 nodes, each with micro batch 3, accumulation 1: effective batch 12" in said[0] + said[1]
    one, four = (read_losses(place.folder / name) for name in ("one", "run"))
    assert four == pytest.approx(one, rel=1e-4)
    assert json.loads((place.folder / "run" / "summary.json").read_text())["world_size"] == 4


@pytest.mark.slow
@pytest.mark.fault("41", injected="SIGKILL to a process of another node", outcome="node and process named; --resume")
def test_a_killed_process_of_another_node_ends_all_and_is_named(place: Place) -> None:
    words = ("slow", "--epochs", "8", "--out", "run")
    nodes = start_nodes(place, *words)
    await_steps(place.folder / "run", 8, nodes[0])
    for node in nodes:
        processes = psutil.Process(node.pid).children(recursive=True)
        connections = [one for each in processes for one in each.net_connections("inet")]
        assert {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN} <= {"127.0.0.1", "::1"}
    list_ranks(nodes[1])[3].kill()
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [5, 5], said
    for text in said:
        assert f"node 1 ({socket.gethostname()}): process 3 of 4 was killed by SIGKILL" in text
        assert "--resume on every node" in text
        assert "Traceback" not in text
    nodes = start_nodes(place, *words, "--resume")
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [0, 0], said
    assert max(read_losses(place.folder / "run")) == 32


@pytest.mark.slow
def test_the_shards_of_two_nodes_lie_in_one_folder_and_one_machine_goes_on(place: Place) -> None:
    nodes = start_nodes(place, "sharded", "--epochs", "2", "--out", "run", ranks="1")
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [0, 0], said
    newest = max((place.folder / "run" / "checkpoints").glob("step-*"))
    assert {"__0_0.distcp", "__1_0.distcp"} <= {file.name for file in newest.iterdir()}
    status, _, text = place.train("sharded", "--epochs", "3", "--out", "run", "--resume", ranks=None)
    assert status == 0, text
    assert max(read_losses(place.folder / "run")) == 12


def _children(node: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(node.pid).children(recursive=True) if psutil.pid_exists(node.pid) else []


@pytest.mark.slow
@pytest.mark.fault("41", injected="SIGSTOP to a process of another node", outcome="named within --rank-timeout")
def test_a_hanging_process_of_another_node_ends_the_training_within_its_limit(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOPS", "3:loss:6")
    nodes = start_nodes(place, "stopping", "--epochs", "3", "--out", "run", "--rank-timeout", "20s")
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [5, 5], said
    for text in said:
        assert "process 3 of 4 has not answered within 20 s; the training was ended" in text


@pytest.mark.slow
@pytest.mark.fault("41", injected="SIGKILL to all of another node", outcome="the node is named; --resume")
@pytest.mark.parametrize("lost", [0, 1])
def test_a_node_that_is_gone_is_named(place: Place, lost: int) -> None:
    nodes = start_nodes(place, "slow", "--epochs", "90", "--out", "run")
    await_steps(place.folder / "run", 4, nodes[0])
    for process in [psutil.Process(nodes[lost].pid), *_children(nodes[lost])]:
        process.kill()
    said = await_ends(nodes)[1 - lost]
    assert nodes[1 - lost].returncode == 5, said
    assert f"node {lost} of 2 is gone or cut off" in said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("asked", [0, 1])
def test_a_signal_to_either_node_stops_both_with_a_checkpoint(place: Place, asked: int) -> None:
    nodes = start_nodes(place, "slow", "--epochs", "90", "--out", "run")
    await_steps(place.folder / "run", 4, nodes[0])
    nodes[asked].send_signal(signal.SIGUSR1)
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [128 + signal.SIGUSR1] * 2, said
    assert "stopped at step" in said[0]
    assert list((place.folder / "run" / "checkpoints").glob("step-*"))


@pytest.mark.slow
def test_a_node_without_the_others_gives_up(place: Place) -> None:
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_port()}", "--rank-timeout", "2s")
    for node, sentence in (("0", "node 1 of 2 did not come to"), ("1", "node 0 did not answer at")):
        status, _, said = place.train("counted", *words, "--node-rank", node)
        assert (status, sentence in said) == (5, True), said


@pytest.mark.slow
def test_a_folder_that_another_node_does_not_see_or_another_source_is_told(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
    places = [make_place(folder) for folder in folders]
    source = folders[1] / "shared_workloads.py"
    source.write_text(source.read_text() + "\n\nADDED = 1\n")
    words = ("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{find_port()}")
    nodes = [one.start("counted", *words, "--node-rank", str(node)) for node, one in enumerate(places)]
    said = await_ends(nodes)
    assert [process.returncode for process in nodes] == [2, 2], said
    for text in said:
        assert "the source on this node is not that of node 0" in text


def make_facts(node: int, **changes: str) -> NodeFacts:
    facts = {"torch": "2.13.0", "CPU": "Xeon", **changes}
    return NodeFacts(node=node, host=f"host{node}", process=1, facts=tuple(facts.items()))


def test_nodes_that_are_not_alike_are_refused() -> None:
    require_alike([make_facts(0), make_facts(1)])
    with pytest.raises(UsageError, match=r"node 1 \(host1\) has torch 2.6.0, node 0 \(host0\) has 2.13.0"):
        require_alike([make_facts(0), make_facts(1, torch="2.6.0")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [("node0:29500", ("node0", 29500)), ("10.0.0.1:1", ("10.0.0.1", 1)), ("[::1]:80", ("::1", 80))],
)
def test_an_endpoint_has_a_host_and_a_port(text: str, expected: tuple[str, int]) -> None:
    assert read_endpoint(text) == expected


@pytest.mark.parametrize("text", ["node0", "node0:0", "node0:99999", ":29500", "a b:1", "::1:80", "tcp://a:1"])
def test_what_is_no_endpoint_is_told(text: str) -> None:
    with pytest.raises(UsageError, match="no HOST:PORT"):
        read_endpoint(text)


@pytest.mark.parametrize(
    ("count", "endpoint", "node", "nproc", "sentence"),
    [
        (2, None, None, "1", "needs a place where they meet"),
        (2, "a:1", None, None, "needs --nproc-per-node"),
        (2, "a:1", 2, "1", "there are 2 nodes"),
        (None, "a:1", None, "1", "--rdzv-endpoint is for several nodes"),
        (1, None, 0, "1", "--node-rank is for several nodes"),
    ],
)
def test_what_is_missing_of_several_nodes_is_told(
    count: int | None, endpoint: str | None, node: int | None, nproc: str | None, sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        choose_nodes(count, endpoint, None, node, nproc_per_node=nproc, patience_seconds=1.0)


def make_echo(rank: int) -> RankEnd:
    return RankEnd(rank=rank, status=5, cause="crash-exit", detail="another process is gone", saw="gone")


def test_a_process_that_its_own_agent_ended_is_not_blamed() -> None:
    first = NodeReport(node=0, host="a", ends=(make_echo(0),), exits=((0, 5), (1, -15)))
    second = NodeReport(node=1, host="b", ends=(make_echo(2),), exits=((2, 5), (3, -9)))
    verdict = judge_nodes([first, second], count=2, per_node=2)
    assert verdict.end is not None
    assert (verdict.end.rank, "process 3 of 4 was killed by SIGKILL" in verdict.end.detail) == (3, True)


def test_a_node_without_a_word_is_blamed_where_nobody_else_is() -> None:
    alone = NodeReport(node=0, host="a", ends=(make_echo(0), make_echo(1)), exits=((0, 5), (1, 5)))
    verdict = judge_nodes([alone], count=2, per_node=2)
    assert verdict.end is not None
    assert verdict.end.detail == "node 1 of 2 is gone or cut off, and processes 2 to 3 of 4 with it"
    told = alone.replace(ends=(RankEnd(rank=1, status=4, cause="user-error", detail="its own words"), make_echo(0)))
    verdict = judge_nodes([told], count=2, per_node=2)
    assert verdict.end is not None
    assert (verdict.status, verdict.end.detail) == (4, "its own words")


def test_a_training_that_its_leader_has_ended_is_done_whatever_comes_later() -> None:
    clean = NodeReport(node=0, host="a")
    assert judge_nodes([clean], count=2, per_node=1).status == 0
    late = NodeReport(node=1, host="b", exits=((1, -9),))
    assert judge_nodes([clean, late], count=2, per_node=1).end is None


def test_how_the_leader_ended_counts_for_all_nodes() -> None:
    reports = [NodeReport(node=0, host="a", exits=((0, 138),)), NodeReport(node=1, host="b")]
    assert judge_nodes(reports, count=2, per_node=1).status == 138


def test_processes_that_were_cut_off_are_none_that_ended_well() -> None:
    """Node 0 waits for a process of another node that has refused to train."""
    cut = NodeReport(node=0, host="host0", is_cut=True)
    end = RankEnd(rank=1, status=2, cause="usage", detail="the source on this node is not that of node 0")
    verdict = judge_nodes([cut, NodeReport(node=1, host="host1", ends=(end,))], count=2, per_node=1)
    assert (verdict.status, verdict.end) == (2, end)
