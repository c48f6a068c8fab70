"""What the tests of all examples share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def every_test_has_one_thread(one_thread: None) -> None:
    """As `one_thread` says."""
