"""Entry of a script's final training under torchrun: its agent, which starts each process as `scripted` does."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from autotune.isolation.causes import explain_exit
from autotune.train.recovery.child import PARENT_VARIABLE, tie_to_parent
from autotune.train.script.progress_files import Failure, ScriptProgress, read_progress

ENTRY = "autotune.train.script.entry"


def main(plan: dict[str, Any], arguments: list[str]) -> None:
    """Be torchrun.

    Raises:
        ChildFailedError: a process of the training failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_launcher

    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes of the training end with their agent
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        run_launcher([*plan["launcher_options"], "-m", ENTRY, json.dumps(plan), *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # with that one the agent ends the others
            _note_death(Path(plan["notes"]), rank, failure.exitcode)
        raise


def _note_death(notes: Path, rank: int, status: int) -> None:
    """Write down which signal killed a process, which cannot do so itself."""
    progress = next((one for one in read_progress(notes) if one.rank == rank), ScriptProgress(rank=rank))
    _, cause, sentence = explain_exit(status, log_tail=None)
    progress.failure = Failure(cause, f"process {rank} was {sentence}", time.time())
    progress.write(notes)


if __name__ == "__main__":
    tie_to_parent()
    main(json.loads(sys.argv[1]), sys.argv[2:])
