"""Entry of a script's final training under torchrun: its agent, which starts each process as `scripted` does."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from autotune.isolation.causes import explain_exit
from autotune.records.codec import parse_record
from autotune.records.training_process import Failure, ScriptPlan, TrainingProgress
from autotune.train.recovery.child import PARENT_VARIABLE, tie_to_parent
from autotune.train.script.progress import read_progress, write_progress

ENTRY = "autotune.train.script.entry"


def main(text: str, arguments: list[str]) -> None:
    """Be torchrun.

    Args:
        text: JSON of a `ScriptPlan`, handed on to each process of the training.
        arguments: of the script.

    Raises:
        ChildFailedError: a process of the training failed.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as run_launcher

    plan = parse_record(text, ScriptPlan, name="the training's plan")
    os.environ[PARENT_VARIABLE] = str(os.getpid())  # the processes of the training end with their agent
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        run_launcher([*(plan.launcher_options or ()), "-m", ENTRY, text, *arguments])
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # with that one the agent ends the others
            _record_death(Path(plan.progress_folder), rank, failure.exitcode)
        raise


def _record_death(folder: Path, rank: int, status: int) -> None:
    """Write down which signal killed a process, which cannot do so itself.

    Args:
        folder: of the progress files.
        rank: of the process.
        status: minus the signal's number.
    """
    progress = next((one for one in read_progress(folder) if one.rank == rank), TrainingProgress(rank=rank))
    _, cause, sentence = explain_exit(status, log_tail=None)
    failure = Failure(cause=cause, detail=f"process {rank} was {sentence}", at=time.time())
    write_progress(folder, progress.replace(failure=failure))


if __name__ == "__main__":
    tie_to_parent()
    main(sys.argv[1], sys.argv[2:])
