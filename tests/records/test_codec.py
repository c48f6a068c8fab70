from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.errors import FolderError, ProfileError
from autotune.records import (
    SCHEMA_VERSION,
    Interval,
    Profile,
    TrainConfig,
    codec,
    parse_record,
    read_record,
    write_record,
)
from autotune.records.codec import remove_unfinished, sync_folder, write_text
from autotune.scratch import claim

GOOD = '{"micro_batch_size": 8}'


def _parse(text: str, **arguments: Any) -> TrainConfig:
    return parse_record(text, TrainConfig, name="best.json", **arguments)


def _refusal(text: str, **arguments: Any) -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        _parse(text, **arguments)
    assert caught.value.message.startswith("best.json")
    assert caught.value.hint
    assert "\n" not in caught.value.message
    return caught.value


def test_a_good_text_is_read() -> None:
    assert _parse(GOOD) == TrainConfig(micro_batch_size=8)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("\ufeff" + GOOD, "not valid JSON"),
        (GOOD + GOOD, "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"micro_batch_size": ' + "9" * 5000 + "}", "not valid JSON"),
        ('{"micro_batch_size": NaN}', "NaN is not a number"),
        ('{"user_knobs": {"lr": Infinity}}', "Infinity is not a number"),
        ('{"user_knobs": {"lr": -Infinity}}', "-Infinity is not a number"),
        ('{"micro_batch_size": 8, "micro_batch_size": 16}', "the key 'micro_batch_size' stands twice"),
        ('{"user_knobs": {"lr": 1, "lr": 2}}', "the key 'lr' stands twice"),
        ('{"user_knobs": {"lr": ' + "[" * 31 + "]" * 31 + "}}", "nested deeper than 32 levels"),
        ('{"user_knobs": {"lr": ' + '{"a":' * 40 + "1" + "}" * 42, "nested deeper than 32 levels"),
        ("null", "the whole file"),
        ("[]", "the whole file"),
        ("8", "the whole file"),
        ('{"micro_batch_size": "8"}', "micro_batch_size: Input should be a valid integer"),
        ('{"micro_batch_size": true}', "micro_batch_size: Input should be a valid integer"),
        ('{"micro_batch_size": 8.0}', "micro_batch_size: Input should be a valid integer"),
        ('{"micro_batch_size": null}', "micro_batch_size: Input should be a valid integer"),
        ('{"micro_batch_size": 0}', "micro_batch_size: Input should be greater than or equal to 1"),
        ('{"pin_memory": 1}', "pin_memory: Input should be a valid boolean"),
        ('{"pin_memory": "yes"}', "pin_memory: Input should be a valid boolean"),
        ('{"precision": "fp8"}', "precision: Input should be 'fp32', 'bf16' or 'fp16'"),
        ('{"user_knobs": {"lr": 1e999}}', "user_knobs.lr"),
        ('{"user_knobs": {"lr": [1]}}', "user_knobs.lr"),
        ('{"user_knobs": {"lr": "\\ud800"}}', "not valid JSON|the whole file"),
        ('{"num_wrokers": 2}', "unknown key 'num_wrokers', did you mean 'num_workers'?"),
        ('{"_target_": "os.system"}', "json: unknown key '_target_'"),
    ],
    ids=lambda value: value[:40],
)
@pytest.mark.fault(
    "37",
    injected="NaN, duplicate keys, deep nesting, wrong types, unknown fields, a BOM, huge numbers",
    outcome="one line with the place",
)
def test_a_bad_text_is_refused_with_its_place(text: str, part: str) -> None:
    message = _refusal(text).message
    assert any(option in message for option in part.split("|")), message


def test_a_nested_place_is_named_in_full() -> None:
    text = '{"schema_version": 1, "verdict": "keep", "config": {"micro_batch_size": "8"}}'
    with pytest.raises(ProfileError, match=r"config\.micro_batch_size"):
        parse_record(text, Profile, name="best.json")


@pytest.mark.parametrize(
    "text", ['{"\\u001b[31mred": 1}', '{"a\\u001b]0;x\\u0007": 1, "a\\u001b]0;x\\u0007": 2}', "\x1b[2J"]
)
@pytest.mark.fault("37", injected="escape sequences in keys and text", outcome="never echoed")
def test_control_characters_are_not_echoed(text: str) -> None:
    assert _refusal(text).message.isprintable()


def test_a_long_key_is_cut() -> None:
    assert len(_refusal('{"' + "k" * 100_000 + '": 1}').message) < 500


def test_the_size_is_capped_in_bytes() -> None:
    assert _parse(GOOD, max_bytes=len(GOOD)) == _parse(GOOD)
    assert "larger than 22 bytes" in _refusal(GOOD, max_bytes=len(GOOD) - 1).message
    assert "larger than 6 bytes" in _refusal("\u20ac\u20ac\u20ac", max_bytes=6).message


@pytest.mark.fault("52", injected="a record of a newer schema", outcome="refused with both versions: upgrade")
def test_a_newer_schema_is_named_before_its_unknown_fields() -> None:
    with pytest.raises(ProfileError) as caught:
        parse_record('{"schema_version": 7, "unheard_of": 1}', Profile, name="best.json")
    expected = f"best.json was written by a newer version (schema 7, this one reads {SCHEMA_VERSION})"
    assert caught.value.message == expected
    assert "upgrade" in caught.value.hint


@pytest.mark.parametrize("version", ["0", "-1", '"2"', "true", "1.0", "null"])
def test_a_schema_version_that_is_none_is_refused(version: str) -> None:
    with pytest.raises(ProfileError, match="schema_version"):
        parse_record(f'{{"schema_version": {version}}}', Profile, name="best.json")


def test_the_caller_chooses_the_error() -> None:
    with pytest.raises(FolderError):
        _parse("{", error=FolderError)


def test_a_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_record(path, TrainConfig(user_knobs={"name": "\u00fc\u20ac\U0001f600"}))
    assert read_record(path, TrainConfig).user_knobs == {"name": "\u00fc\u20ac\U0001f600"}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    for path, part in ((tmp_path / "no.json", "No such file"), (tmp_path, "is a folder, not a file")):
        with pytest.raises(ProfileError, match=part) as caught:
            read_record(path, TrainConfig)
        assert str(path) in caught.value.message


@pytest.mark.parametrize("raw", [b"\x80\xff", b"\x00", GOOD.encode("utf-16"), b"\xff" * 100])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "best.json"
    path.write_bytes(raw)
    with pytest.raises(ProfileError):
        read_record(path, TrainConfig)


@pytest.mark.fault("37", injected="a sparse terabyte", outcome="read up to the cap, refused")
def test_no_more_than_the_cap_is_read(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse terabyte
    with pytest.raises(ProfileError, match="larger than 1000 bytes"):
        read_record(path, TrainConfig, max_bytes=1000)


class _FullDisk(io.BufferedWriter):
    def write(self, content: Any) -> int:
        super().write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")


def _fail(error: BaseException) -> Any:
    def raise_it(*_arguments: object, **_options: object) -> None:
        raise error

    return raise_it


def _break_at(step: str, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    if step == "open":
        monkeypatch.setattr(Path, "open", _fail(error))
    elif step == "write":
        monkeypatch.setattr(Path, "open", lambda path, *_, **__: _FullDisk(io.FileIO(path, "x")))
    elif step == "fsync":
        monkeypatch.setattr(os, "fsync", _fail(error))
    else:
        monkeypatch.setattr(Path, "replace", _fail(error))


@pytest.mark.parametrize("step", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.fault(
    "25", injected="ENOSPC and Ctrl-C at open, write, fsync, rename", outcome="the old file whole, nothing beside it"
)
def test_a_failure_at_any_step_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    path = tmp_path / "best.json"
    path.write_text("old", encoding="utf-8")
    expected = OSError if step == "write" else type(error)
    with monkeypatch.context() as patch:
        _break_at(step, error, patch)
        with pytest.raises(expected):
            write_text(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"]


def test_a_text_that_cannot_be_encoded_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    path.write_text("old", encoding="utf-8")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"]


def test_a_missing_folder_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_record(tmp_path / "no" / "best.json", TrainConfig())


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync_folder(tmp_path / "no")
    monkeypatch.setattr(os, "fsync", _fail(OSError(errno.EINVAL, "Invalid argument")))
    sync_folder(tmp_path)


_WRITER = """
import sys
from pathlib import Path
from autotune.records.codec import write_text
write_text(Path(sys.argv[1]), "new" * 10_000)
"""


def _write_under_strace(path: Path, injection: str) -> int:
    call = injection.partition(":")[0]
    strace = ["strace", "-f", "-qq", "-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={injection}"]
    writer = [sys.executable, "-B", "-c", _WRITER, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(autotune.__file__).parents[1])}
    finished = subprocess.run([*strace, *writer], env=environment, capture_output=True, timeout=60, check=False)
    return finished.returncode


def _strace_works() -> bool:
    if shutil.which("strace") is None:
        return False
    return subprocess.run(["strace", "-qq", "true"], capture_output=True, timeout=20, check=False).returncode == 0


@pytest.fixture(scope="module")
def _strace() -> None:
    if not _strace_works():
        pytest.skip("strace is missing or may not trace here")


@pytest.mark.usefixtures("_strace")
@pytest.mark.parametrize("call", ["write", "fsync", "rename"])
@pytest.mark.fault(
    "25", injected="ENOSPC at each system call of a save (strace)", outcome="the old file whole, nothing beside it"
)
def test_a_full_disk_at_any_system_call_leaves_the_old_file_alone(tmp_path: Path, call: str) -> None:
    path = tmp_path / "best.json"
    path.write_text("old", encoding="utf-8")
    assert _write_under_strace(path, f"{call}:error=ENOSPC:when=1") == 1
    assert path.read_text(encoding="utf-8") == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"]


@pytest.mark.usefixtures("_strace")
@pytest.mark.parametrize(("call", "found"), [("write", "old"), ("fsync", "old"), ("rename", None)])
@pytest.mark.fault(
    "27", injected="SIGKILL at each system call of a save (strace)", outcome="the old file or the new one"
)
def test_a_kill_at_any_system_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, call: str, found: str | None
) -> None:
    path = tmp_path / "best.json"
    path.write_text("old", encoding="utf-8")
    assert _write_under_strace(path, f"{call}:signal=KILL:when=1") != 0
    text = path.read_text(encoding="utf-8")
    assert text in ({found} if found else {"old", "new" * 10_000})


_HALTED = """
import os, sys
from pathlib import Path
from autotune.records.codec import write_text
def halt(*_):
    if sys.argv[2] == "dies":
        os.kill(os.getpid(), 9)
    print("writing", flush=True)
    sys.stdin.read()
Path.replace = halt
write_text(Path(sys.argv[1]), "new")
"""


@pytest.mark.fault("F8", injected="kill -9 before the rename of a file", outcome="the next search removes what is left")
def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    path, other = tmp_path / "best.json", tmp_path / "other.json"
    for file in (path, other):
        killed = subprocess.run([sys.executable, "-c", _HALTED, str(file), "dies"], timeout=60, check=False)
        assert killed.returncode == -9
    assert len(list(tmp_path.iterdir())) == 2
    command = [sys.executable, "-c", _HALTED, str(path), "waits"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"writing\n"
            remove_unfinished(tmp_path, "best.json")
            assert len(list(tmp_path.glob(".best.json.*.tmp"))) == 1
            assert len(list(tmp_path.glob(".other.json.*.tmp"))) == 1
        finally:
            writer.kill()
    remove_unfinished(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_nothing_else_is_taken_for_an_unfinished_file(tmp_path: Path) -> None:
    for name in (
        "best.json",
        ".best.json.12345678",
        ".best.json.1234567.tmp",
        "best.json.12345678.tmp",
        ".12345678.tmp",
    ):
        (tmp_path / name).write_text("x")
    (tmp_path / ".a.12345678.tmp").symlink_to(tmp_path / "best.json")
    (tmp_path / ".b.12345678.tmp").mkdir()
    os.mkfifo(tmp_path / ".c.12345678.tmp")
    before = {*tmp_path.iterdir()}
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "nowhere")
    assert {*tmp_path.iterdir()} == before


def test_a_writer_whose_file_is_swept_at_once_takes_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    swept = []

    def sweep_first(descriptor: int, path: Path) -> bool:
        if not swept:
            swept.append(path)
            remove_unfinished(tmp_path)
        return claim(descriptor, path)

    monkeypatch.setattr(codec, "claim", sweep_first)
    write_text(tmp_path / "best.json", "new")
    assert swept
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("best.json", "new")]


def test_replace_validates_and_names_the_field() -> None:
    interval = Interval(estimate=1.0, low=0.9, high=1.1, confidence_level=0.9, method="m")
    assert interval.replace(low=0.8).low == 0.8
    for change in ({"low": float("nan")}, {"confidence_level": 1.0}, {"middle": 1.0}, {"method": 3}):
        with pytest.raises(ValueError, match=next(iter(change))):
            interval.replace(**change)
