from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from record_factory import make_state, make_target
from simulated import Machine, run_simulated

from autotune.errors import BusyError, FolderError, MachineError, UsageError
from autotune.records.codec import write_record
from autotune.search.run import SearchOptions, _describe_damage, run_search
from autotune.search.store.folder import (
    check_output,
    create_search_folder,
    find_search_folder,
    list_searches,
    lock_searches,
    write_report,
)


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


@pytest.mark.fault("33", injected=".autotune is a link", outcome="exit 8 with the path")
def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / ".autotune").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FolderError, match="is a link"):
        create_search_folder(tmp_path, "a:b")


@pytest.mark.fault("33", injected=".autotune of somebody else", outcome="exit 8 with the path")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / ".autotune").mkdir(mode=0o700)
    os.chown(tmp_path / ".autotune", 65534, 65534)
    for take in (find_search_folder, lambda folder: create_search_folder(folder, "a:b")):
        with pytest.raises(FolderError, match="belongs to someone else") as caught:
            take(tmp_path)
        assert str(tmp_path / ".autotune") in caught.value.message
        assert caught.value.exit_code == 8


READ_ONLY = """
import sys
sys.argv[1:] = ["search", "demo", "--budget", "60s"]
from autotune.__main__ import main
main()
"""


@pytest.mark.fault("33", injected="the folder mounted read-only", outcome="exit 5 with the path, nothing elsewhere")
def test_a_folder_that_cannot_be_written_is_the_machines_fault(tmp_path):
    (tmp_path / "program.py").write_text(READ_ONLY)
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} && cd {tmp_path} && exec "
    words = ["unshare", "-m", "sh", "-c", f"{mount} {sys.executable} program.py"]
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    except FileNotFoundError:
        pytest.skip("there is no unshare")
    if ended.stderr.startswith(("unshare:", "mount:")):
        pytest.skip("mounting is not permitted")
    assert ended.returncode == 5, ended.stderr
    assert f"{tmp_path}/.autotune: Read-only file system" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.fault("31", injected="SIGKILL to the holder of the lock", outcome="free at once")
def test_the_lock_is_free_after_its_holder_was_killed(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from autotune.search.store.folder import lock_searches
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


def plant_search(folder: Path, name: str, target: str = "toy.py:workload") -> Path:
    """Leave a search in a folder, under a name."""
    path = folder / ".autotune" / name
    (path / "trials").mkdir(parents=True)
    (folder / ".autotune").chmod(0o700)
    write_record(path / "search.json", make_state(target=make_target(target, folder)))
    return path


@pytest.mark.fault("F5", injected="holder.json and .gitignore are links", outcome="replaced, what they name untouched")
@pytest.mark.parametrize("name", ["holder.json", ".gitignore", "probe.json"])
@pytest.mark.parametrize("exists", [True, False])
def test_nothing_is_written_through_a_link(tmp_path, name, exists):
    root, victim = tmp_path / ".autotune", tmp_path / "victim"
    root.mkdir(mode=0o700)
    if exists:
        victim.write_text("theirs")
    (root / name).symlink_to(victim)
    with lock_searches(tmp_path):
        assert (root / "holder.json").read_text().startswith("{")
        write_report(tmp_path, run_simulated(Machine(stop_after=3), tmp_path).log.problem.report)
    assert (victim.read_text() if victim.exists() else None) == ("theirs" if exists else None)
    assert not (root / name).is_symlink()


@pytest.mark.fault("F5", injected="the lock is a link", outcome="exit 5, what it names untouched")
def test_a_lock_that_is_a_link_is_not_followed(tmp_path):
    (tmp_path / ".autotune").mkdir(mode=0o700)
    (tmp_path / ".autotune/lock").symlink_to(tmp_path / "victim")
    with pytest.raises(MachineError, match="lock: Too many levels of symbolic links"):
        run_search("autotune.targets.demo:workload", SearchOptions(), folder=tmp_path)
    assert not (tmp_path / "victim").exists()


@pytest.mark.fault("F5", injected="a search, its search.json or its trials are links", outcome="not taken as a search")
@pytest.mark.parametrize("link", ["", "search.json", "trials"])
def test_a_search_that_is_a_link_is_not_taken(tmp_path, link):
    older = plant_search(tmp_path, "toy-py-workload-20261122-100000")
    newer = plant_search(tmp_path, "toy-py-workload-20261122-110000")
    found = find_search_folder(tmp_path)
    assert found is not None
    assert found.path == newer
    (newer / link).rename(tmp_path / "elsewhere")
    (newer / link).symlink_to(tmp_path / "elsewhere")
    found = find_search_folder(tmp_path)
    assert found is not None
    assert found.path == older


@pytest.mark.fault("24", injected="the clock jumps by years between searches", outcome="the newest stays the newest")
@pytest.mark.fault("F18", injected="clock jump, search.json touched", outcome="the newest stays the newest")
def test_the_newest_search_is_the_one_made_last_whatever_the_clock_does(tmp_path, monkeypatch):
    stamps = ["20261122-100000", "20991231-235959", "20261122-100000", "19700101-000000", "20991231-235959"]
    made = []
    for number, stamp in enumerate(stamps):
        monkeypatch.setattr(time, "strftime", lambda _format, stamp=stamp: stamp)
        spec = ("toy.py:workload", "a.py:w")[number % 2]
        search = create_search_folder(tmp_path, spec)
        plant_search(tmp_path, search.path.name + "-new", spec)
        (tmp_path / ".autotune" / f"{search.path.name}-new" / "search.json").rename(search.path / "search.json")
        os.utime(search.path / "search.json", (1e9 - number, 1e9 - number))
        made.append(search.path)
        assert [one.path for one in list_searches(tmp_path)] == made[::-1]
    assert [path.name for path in made] == [
        "toy-py-workload-20261122-100000",
        "a-py-w-20991231-235959",
        "toy-py-workload-20991231-235959-2",
        "a-py-w-20991231-235959-3",
        "toy-py-workload-20991231-235959-4",
    ]
    found = find_search_folder(tmp_path, "a.py:w")
    assert found is not None
    assert found.path == made[3]


def test_names_that_are_not_ours_come_last_and_harm_nothing(tmp_path):
    plant_search(tmp_path, "renamed")
    plant_search(tmp_path, "x-99999999-999999-999999999999")
    made = [create_search_folder(tmp_path, "x") for _ in range(2)]
    assert [one.path.name for one in made] == [f"x-99999999-999999-100000000000{n}" for n in (0, 1)]
    assert list_searches(tmp_path)[-1].path.name == "renamed"


def test_a_trial_has_a_number_that_no_name_in_its_place_can_spoil(tmp_path):
    search = create_search_folder(tmp_path, "a:b")
    for name in ("1²", "0007", "\uff19" * 4, "99999999999999999999", "8"):
        (search.trials / name).mkdir()
    assert search.next_number() == 8


@pytest.mark.fault("F18", injected="the newest search.json is damaged", outcome="--resume refuses and names the folder")
@pytest.mark.parametrize(
    ("content", "message", "hint"),
    [
        ("{", "is not valid JSON", "delete {path} to go on with the search before it"),
        (
            '{"schema_version": 2}',
            "was written by a newer version (schema 2, this one reads 1)",
            "upgrade autotune; or",
        ),
    ],
)
def test_a_damaged_search_is_not_passed_over_when_it_is_to_be_resumed(tmp_path, content, message, hint):
    plant_search(tmp_path, "toy-py-workload-20261122-100000")
    newer = plant_search(tmp_path, "toy-py-workload-20261122-110000")
    (newer / "search.json").write_text(content)
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    with pytest.raises(UsageError) as caught:
        run_search("toy.py:workload", SearchOptions(resume=True, seed=3), folder=tmp_path)
    assert caught.value.message.startswith(f"--resume: the newest search cannot be read: {newer}/search.json")
    assert message in caught.value.message
    assert hint.format(path=newer) in caught.value.hint


def test_a_damaged_search_of_another_target_is_no_obstacle(tmp_path):
    plant_search(tmp_path, "toy-py-workload-20261122-100000")
    for name in ("toy-py-workload-2-20261122-110000", "other-py-w-20261122-110000"):
        (plant_search(tmp_path, name) / "search.json").write_text("{")
    (tmp_path / "toy.py").write_text("from elsewhere import *\n")
    with pytest.raises(UsageError, match="--resume: seed was 0 when the search began"):
        run_search("toy.py:workload", SearchOptions(resume=True, seed=3), folder=tmp_path)


@pytest.mark.fault("29", injected="a trial's result cut short", outcome="left out, named, kept as it is")
def test_results_that_are_damaged_are_named_and_left_as_they_are(tmp_path):
    search = run_simulated(Machine(stop_after=6), tmp_path).folder
    whole = search.read_trials()
    assert _describe_damage(search) is None
    torn = search.trials / "0003" / "result.json"
    torn.write_text(torn.read_text()[:200])
    assert _describe_damage(search) == "1 result cannot be read and is left out: of trial 0003"
    assert [one.spec.number for one in search.read_trials()] == [n.spec.number for n in whole if n.spec.number != 3]
    assert len(torn.read_text()) == 200
    assert search.next_number() > 3


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
