"""A process that searches as one worker of a study: python shared_worker.py FOLDER SEED GRACE_SECONDS.

With WORKER_HANGS=1 its launch of a third setting never ends; the file `hangs` says that it has begun.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from shared_workers import Heard, Worker

from autotune.records import TrialSpec

LAUNCH_SECONDS = 1.0
VALUES = tuple(range(30))


class Aloud(Heard):
    """Says at once what it is told."""

    def told(self, sentence: str) -> None:
        print(sentence, flush=True)


def main() -> None:
    """Search in a folder, each launch as long as it takes others to be killed or cut off in it."""
    folder, seed, grace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    begun: set[object] = set()

    def take_time(spec: TrialSpec) -> None:
        time.sleep(LAUNCH_SECONDS)
        value = spec.config.user_knobs["planted"] if spec.purpose == "measure" and spec.config is not None else 0
        is_new = value not in {0, *begun}  # a setting that is launched again is leased to nobody
        begun.add(value)
        if is_new and len(begun - {0}) == 3 and "WORKER_HANGS" in os.environ:
            (folder / "hangs").touch()
            threading.Event().wait()

    worker = Worker(folder, os.environ["WORKER_URL"], seed, before=take_time, values=VALUES)
    worker.heard = Aloud()
    run = worker.search(
        budget=300.0,
        fleet={"beat_seconds": 0.5, "grace_seconds": grace, "patience_seconds": 5.0, "stuck_seconds": 8.0},
    )
    run.profile.save(folder / "best.json")


if __name__ == "__main__":
    main()
