"""The version of this package; a leaf, so that whoever records it imports nothing else."""

from __future__ import annotations

VERSION = "0.1.0"
