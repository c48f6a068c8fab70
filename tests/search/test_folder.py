from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import Machine, run_simulated

from autotune.errors import BusyError, FolderError, UsageError
from autotune.search.folder import check_output, create_search_folder, find_search_folder, lock_searches


def test_the_state_folder_is_private_and_hides_from_git(tmp_path):
    folder = create_search_folder(tmp_path, "train.py:workload")
    root = tmp_path / ".autotune"
    assert root.stat().st_mode & 0o777 == 0o700
    assert (root / ".gitignore").read_text() == "*\n"
    assert folder.path.name.startswith("train-py-workload-")


def test_two_searches_of_one_second_get_two_folders(tmp_path):
    paths = {create_search_folder(tmp_path, "a:b").path for _ in range(3)}
    assert len(paths) == 3


@pytest.mark.parametrize("mode", [0o777, 0o720])
@pytest.mark.fault("33", injected=".autotune writable by others", outcome="refused, with the path")
def test_a_folder_others_can_write_is_refused(tmp_path, mode):
    (tmp_path / ".autotune").mkdir()
    (tmp_path / ".autotune").chmod(mode)
    with pytest.raises(FolderError, match="writable by others"):
        create_search_folder(tmp_path, "a:b")


@pytest.mark.fault("33", injected="a link in place of .autotune", outcome="refused, with the path")
def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / ".autotune").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="is a link"):
        create_search_folder(tmp_path, "a:b")


@pytest.mark.fault(
    "31", injected="a second search in the folder", outcome="refused at once, with the process that holds it"
)
def test_a_second_search_is_told_who_holds_the_folder(tmp_path):
    code = f"""
from pathlib import Path
from autotune.search.folder import lock_searches
from autotune.errors import BusyError
try:
    lock_searches(Path({str(tmp_path)!r})).__enter__()
except BusyError as error:
    print(error.message)
"""
    with lock_searches(tmp_path):
        answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"process {os.getpid()}" in answer.stdout
    with lock_searches(tmp_path):
        pass


@pytest.mark.fault("31", injected="SIGKILL to the holder of the lock", outcome="free at once")
def test_the_lock_is_free_after_its_holder_was_killed(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from autotune.search.folder import lock_searches
lock = lock_searches(Path({str(tmp_path)!r}))
lock.__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code], check=False)
    with lock_searches(tmp_path):
        pass


def test_the_newest_search_of_a_target_is_found(tmp_path):
    assert find_search_folder(tmp_path) is None
    run_simulated(Machine(stop_after=3), tmp_path)
    latest = run_simulated(Machine(stop_after=3), tmp_path).folder
    found = find_search_folder(tmp_path, "toy.py:workload")
    assert found is not None
    assert found.path == latest.path
    assert find_search_folder(tmp_path, "other.py:workload") is None


@pytest.mark.parametrize("content", ["", "no json", json.dumps({"target": {"label": "other.py:workload"}}), "[]"])
def test_a_file_that_is_not_this_targets_profile_is_not_overwritten(tmp_path, content):
    out = tmp_path / "best.json"
    out.write_text(content)
    with pytest.raises(UsageError, match=r"best.json exists and (is not a profile|belongs to 'other.py:workload')"):
        check_output(out, "train.py:workload", force=False)
    check_output(out, "train.py:workload", force=True)


def test_this_targets_own_profile_may_be_replaced(tmp_path):
    out = tmp_path / "best.json"
    check_output(out, "toy.py:workload", force=False)
    run_simulated(Machine(stop_after=3), tmp_path).profile.save(out)
    check_output(out, "toy.py:workload", force=False)
    with pytest.raises(UsageError, match="there is no folder"):
        check_output(tmp_path / "missing" / "best.json", "toy.py:workload", force=False)


def test_an_already_held_lock_is_busy_in_the_same_process_too(tmp_path):
    with lock_searches(tmp_path), pytest.raises(BusyError), lock_searches(tmp_path):
        pass


def test_the_lock_is_given_back_at_the_end_not_when_the_last_reference_to_it_goes(tmp_path):
    holder = lock_searches(tmp_path)
    with holder:
        pass
    with lock_searches(tmp_path):
        pass
    assert holder is not None  # still here


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.fault("F13", injected="a pipe, a device, a folder as --out", outcome="one line, at once")
def test_an_answer_goes_into_a_file_and_never_in_place_of_a_pipe_or_a_device(tmp_path, force):
    """A pipe was waited for, deaf to SIGTERM; with --force a device would have been replaced by a file."""
    os.mkfifo(tmp_path / "pipe")
    for out, kind in ((tmp_path / "pipe", "a pipe"), (Path("/dev/null"), "a device"), (tmp_path, "a folder")):
        with pytest.raises(UsageError, match=f"--out {out} is {kind}, not a file"):
            check_output(out, "toy.py:workload", force=force)


@pytest.mark.fault("F14", injected="a best.json of a sparse terabyte, and one nested 100,000 deep", outcome="one line")
def test_an_answer_that_is_there_is_read_only_so_far_and_so_deep(tmp_path):
    deep, long = tmp_path / "deep.json", tmp_path / "long.json"
    deep.write_text("[" * 100_000)
    with long.open("wb") as file:
        file.truncate(2**40)
    for out in (deep, long):
        with pytest.raises(UsageError, match="exists and is not a profile"):
            check_output(out, "toy.py:workload", force=False)
