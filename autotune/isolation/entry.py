"""Entry of a trial started cold: its life is tied to the supervisor's before the slow imports begin."""

from __future__ import annotations

import sys
from pathlib import Path

from autotune.lifeline import die_with_parent


def main(folder: Path, *, started: float, supervisor: int) -> None:
    """Run the trial whose spec is in a folder; does not return.

    Args:
        folder: the trial's own folder.
        started: `time.monotonic()` when the process was started.
        supervisor: process that started this one.
    """
    die_with_parent(supervisor)
    from autotune.records.codec import read_record
    from autotune.records.layout import SPEC_FILE
    from autotune.records.trial import TrialSpec

    if read_record(folder / SPEC_FILE, TrialSpec).target.script is None:
        from autotune.runs.workload import run_and_exit

        run_and_exit(folder, started=started)
    from autotune.isolation.script_entry import start_script

    start_script(folder, started=started)


if __name__ == "__main__":
    main(Path(sys.argv[1]), started=float(sys.argv[2]), supervisor=int(sys.argv[3]))
