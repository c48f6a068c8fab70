"""The page on which a trial tells its supervisor what it is at, whatever the user's code does to the file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from autotune.isolation.channel.progress import PROGRESS_FILE, ProgressReader, open_progress
from autotune.measure.hopeless import Phase


def test_what_is_written_is_read(tmp_path: Path) -> None:
    with ProgressReader(tmp_path) as reader:
        assert (reader.read().phase, reader.read().steps) == (Phase.STARTING, 0)
        writer = open_progress(tmp_path)
        assert writer is not None
        began = time.monotonic()
        writer.enter(Phase.STEPPING)
        first = reader.read()
        assert (first.phase, first.steps) == (Phase.STEPPING, 0)
        assert began <= first.since <= time.monotonic()
        writer.enter(Phase.STEPPING)
        assert reader.read() == first
        writer.end_step(2.0)
        writer.enter(Phase.STEPPING)
        writer.end_step(0.5)
        beat = reader.read()
        assert (beat.phase, beat.steps) == (Phase.LOADING, 2)
        assert (beat.first_step_seconds, beat.latest_step_seconds) == (2.0, 0.5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [0, 3, 20, 64, 4096])
def test_half_a_page_and_junk_leave_the_beat_before(tmp_path: Path, length: int) -> None:
    with ProgressReader(tmp_path) as reader:
        writer = open_progress(tmp_path)
        assert writer is not None
        writer.end_step(1.0)
        before = reader.read()
        descriptor = os.open(tmp_path / PROGRESS_FILE, os.O_RDWR)
        os.pwrite(descriptor, b"\xff" * length, 0)
        if length == 0:
            os.ftruncate(descriptor, 0)
        os.close(descriptor)
        assert reader.read() == before


def test_what_the_users_code_puts_in_its_place_reaches_neither_end(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"0" * 64)
    page = tmp_path / PROGRESS_FILE
    with ProgressReader(tmp_path) as reader:
        writer = open_progress(tmp_path)
        assert writer is not None
        page.unlink()
        page.symlink_to(mine)
        writer.end_step(1.0)
        assert reader.read().steps == 1
        assert open_progress(tmp_path) is None
        page.unlink()
        os.mkfifo(page)
        assert open_progress(tmp_path) is None
        writer.end_step(1.0)
        assert reader.read().steps == 2
        page.unlink()
        page.mkdir()
    assert mine.read_bytes() == b"0" * 64


def test_a_page_of_an_earlier_trial_is_made_anew(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / PROGRESS_FILE)
    with ProgressReader(tmp_path) as reader:
        assert reader.read().phase is Phase.STARTING
        assert open_progress(tmp_path) is not None


def test_without_a_supervisor_there_is_no_page(tmp_path: Path) -> None:
    assert open_progress(tmp_path) is None
