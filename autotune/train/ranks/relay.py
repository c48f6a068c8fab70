"""What one node's files and the other nodes tell each other, carried in a thread that nobody waits for.

    node 0:  plan.json ──▶ store        signal ◀── store ──▶ the leader
    others:  plan.json ◀── store        signal ──▶ store        is the run's folder there?

A network that is cut blocks whoever asks for something over it; the node's processes find that out by themselves.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

from autotune.distributed.nodes import LOOK_SECONDS, NodeStore
from autotune.distributed.place import find_plan, read_leader, write_plan
from autotune.errors import AutotuneError, MachineError
from autotune.records.layout import PLAN_FILE
from autotune.records.nodes import NodePlan, NodeReport
from autotune.train.ranks.ears import Ears
from autotune.train.recovery.child import read_opened_run

_FOLDER_SECONDS = 60.0
"""A shared file may be seen so much later on another machine: NFS keeps what it knows of a folder up to a minute."""


class NodeRelay:
    """Carries what concerns all nodes.

    Args:
        store: where they tell it.
        folder: of this node's processes.
        opened: file in which the leader tells of its run.
        ears: signals that this node hears.

    Attributes:
        error: why this node cannot go on; None while it can.
        failed: other nodes whose processes did not end well.
    """

    def __init__(self, store: NodeStore, folder: Path, opened: Path, ears: Ears) -> None:
        self._store, self._folder, self._opened, self._ears = store, folder, opened, ears
        self.error: AutotuneError | None = None
        self.failed: list[int] = []
        self._told: NodePlan | None = None
        self._told_at = 0.0
        self._has_plan = self._has_signal = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autotune-relay", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._done.wait(LOOK_SECONDS):
                if self._store.node == 0:
                    self._send_plan()
                    self._hand_on_signal()
                else:
                    self._take_plan()
                    self._send_signal()
                self.failed = self._store.list_failed()
        except AutotuneError as error:
            self.error = error

    def _send_plan(self) -> None:
        plan = None if self._has_plan else find_plan(self._folder)
        run = None if plan is None else read_opened_run(self._opened)
        if plan is not None and run is not None:
            self._store.publish(NodePlan(plan=plan, folder=run.folder))
            self._has_plan = True

    def _take_plan(self) -> None:
        """Hand the plan to this node's processes, once it is certain that they see the run's folder."""
        if self._has_plan:
            return
        if self._told is None:
            self._told, self._told_at = self._store.find_plan(), time.monotonic()
        if self._told is None:
            return
        if (Path(self._told.folder) / PLAN_FILE).exists():
            write_plan(self._folder, self._told.plan)
            self._has_plan = True
        elif time.monotonic() - self._told_at > _FOLDER_SECONDS:
            raise MachineError(
                f"node {self._store.node} does not see the run's folder {self._told.folder} of node 0",
                hint="start all nodes in a folder on a disk that they share, or give such a one as --run-dir",
            )

    def _hand_on_signal(self) -> None:
        number = None if self._has_signal or self._ears.heard else self._store.find_signal()
        leader = None if number is None else read_leader(self._folder)
        if number is not None and leader is not None:
            with suppress(ProcessLookupError):
                os.kill(leader, signal.Signals(number))
            self._has_signal = True

    def _send_signal(self) -> None:
        if self._ears.heard and not self._has_signal:
            self._store.ask_to_stop(self._ears.heard[0])
            self._has_signal = True

    def conclude(self, report: NodeReport, *, seconds: float, parting_seconds: float) -> tuple[NodeReport, ...]:
        """Return how the processes of all nodes ended that tell it in time; this one's alone where none does.

        Args:
            report: of this node.
            seconds: longest wait for the others.
            parting_seconds: longest wait of node 0 until they have read it as well.
        """
        self._done.set()
        found: list[tuple[NodeReport, ...]] = []

        def talk() -> None:
            with suppress(AutotuneError):
                found.append(self._store.exchange(report, seconds=seconds))
                if self._store.node == 0:
                    self._store.await_parting(len(found[0]), seconds=parting_seconds)

        thread = threading.Thread(target=talk, name="autotune-parting", daemon=True)
        thread.start()
        deadline = time.monotonic() + seconds + 2 * parting_seconds
        deadline, heard = math.inf if report.is_clean else deadline, len(self._ears.heard)
        while thread.is_alive() and time.monotonic() < deadline and len(self._ears.heard) == heard:
            thread.join(LOOK_SECONDS)
        return found[0] if found else (report,)
