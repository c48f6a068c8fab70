"""Names of the files in a trial's folder; both the supervisor, without torch, and the child read them."""

from __future__ import annotations

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
VIEW_FILE = "view.json"
PARTIAL_FILE = "partial.json"
"""What a probe knew before it tried what may end its process."""

RECORD_FAILED_STATUS = 74
"""Exit status of a trial whose own record could not be written (EX_IOERR)."""
RECORD_FAILED = "the trial's record could not be written: "
"""Begins the line that such a trial prints last."""
