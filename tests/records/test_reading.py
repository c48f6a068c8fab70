"""What a file may be that a record is read from. A reader that waits for a pipe would hang here: a timer ends it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.errors import ProfileError
from autotune.records import TrainConfig, read_record
from autotune.records.reading import _refuse_duplicate_keys, is_preset, parse_json, read_bytes


@pytest.fixture(autouse=True)
def nothing_waits() -> Iterator[None]:
    def end(_number: int, _frame: object) -> None:
        raise TimeoutError("it waited")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_a_file_is_read_up_to_one_byte_past_the_cap(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"12345")
    assert read_bytes(tmp_path / "it") == b"12345"
    assert read_bytes(tmp_path / "it", max_bytes=3) == b"1234"


@pytest.mark.fault("F13", injected="pipes, sockets, devices in place of a file", outcome="refused at once")
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for path, kind in (
            (tmp_path / "pipe", "is a pipe"),
            (Path("/dev/zero"), "is a device"),
            (tmp_path, "is a folder"),
            (tmp_path / "socket", "No such device"),
        ):
            with pytest.raises(OSError, match=kind):
                read_bytes(path)


def test_a_link_to_a_file_is_followed_and_one_to_a_device_is_not(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("{}")
    (tmp_path / "link").symlink_to("it")
    (tmp_path / "endless").symlink_to("/dev/zero")
    assert read_bytes(tmp_path / "link") == b"{}"
    with pytest.raises(OSError, match="is a device"):
        read_bytes(tmp_path / "endless")


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(OSError, match="not a file"):
            read_bytes(path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_record_and_a_preset_in_a_pipe_are_refused_in_one_line(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "best.json")
    with pytest.raises(ProfileError, match="is a pipe, not a file") as caught:
        read_record(tmp_path / "best.json", TrainConfig)
    assert "\n" not in caught.value.message
    assert not is_preset(tmp_path / "best.json")


@pytest.mark.fault("F10", injected="objects of very many keys", outcome="each key is looked at once")
def test_the_check_for_a_key_that_stands_twice_takes_a_look_at_each_key() -> None:
    """It was quadratic: twenty thousand keys took nineteen seconds."""
    looks = 0

    class Key(str):
        def __eq__(self, other: object) -> bool:
            nonlocal looks
            looks += 1
            return str.__eq__(self, other)

        __hash__ = str.__hash__

    pairs = [(Key(f"key {number}"), 1) for number in range(1000)]
    assert len(_refuse_duplicate_keys(pairs)) == 1000
    with pytest.raises(ValueError, match="'key 999' stands twice"):
        _refuse_duplicate_keys([*pairs, (Key("key 999"), 1)])
    assert looks < 10 * len(pairs)


@pytest.mark.fault("F14", injected="a text nested without end", outcome="one line")
def test_a_text_nested_without_end_is_a_value_error() -> None:
    for text in ("[" * 200_000, '{"a":' * 200_000, "[" * 33 + "]" * 33):
        with pytest.raises(ValueError, match="nested deeper than 32 levels"):
            parse_json(text)
    assert parse_json("[" * 32 + "]" * 32)


@pytest.mark.fault("F14", injected="whole numbers of more than 64 bits", outcome="refused, exit 7")
def test_a_number_that_no_count_can_have_is_refused() -> None:
    assert parse_json(f"[{2**63 - 1}, -{2**63 - 1}]") == [2**63 - 1, -(2**63) + 1]
    for number in (2**63, -(2**63), 10**39, 10**400):
        with pytest.raises(ValueError, match=r"the number -?\d+\.* is too large"):
            parse_json(f"[{number}]")
