"""Names of the files in a trial's folder; both the supervisor, without torch, and the child read them."""

from __future__ import annotations

SPEC_FILE = "spec.json"
RESULT_FILE = "result.json"
LOG_FILE = "log.txt"
VIEW_FILE = "view.json"
PARTIAL_FILE = "partial.json"
"""What a probe knew before it tried what may end its process."""
