"""A process that searches as one worker of a study: python shared_worker.py FOLDER SEED GRACE_SECONDS."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from shared_workers import Heard, Worker

LAUNCH_SECONDS = 0.4
VALUES = tuple(range(30))


class Aloud(Heard):
    """Says at once what it is told."""

    def told(self, sentence: str) -> None:
        print(sentence, flush=True)


def main() -> None:
    """Search in a folder, each launch as long as it takes others to be killed or cut off in it."""
    folder, seed, grace = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    worker = Worker(
        folder, os.environ["WORKER_URL"], seed, before=lambda _spec: time.sleep(LAUNCH_SECONDS), values=VALUES
    )
    worker.heard = Aloud()
    run = worker.search(
        budget=240.0,
        fleet={"beat_seconds": 0.3, "grace_seconds": grace, "patience_seconds": 1.0, "stuck_seconds": 2.0},
    )
    run.profile.save(folder / "best.json")


if __name__ == "__main__":
    main()
