"""The drift guard of a final training."""

from __future__ import annotations
