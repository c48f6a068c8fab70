"""The helpers of other tests, for injections that run whole commands."""

from __future__ import annotations

import sys
from pathlib import Path

for _name in ("faults", "isolation", "train", "search", "cli"):
    sys.path.append(str(Path(__file__).parents[1] / _name))
