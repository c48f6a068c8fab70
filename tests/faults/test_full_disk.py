"""A disk that is full, or a quota that is used up, under whole commands: exit 5, the old files whole, and then on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from bench import COMMAND, Bench, Done, can_mount, in_namespace, open_bench
from noisy_workload import SAMPLES
from simulated import Machine, run_simulated
from train_world import find_differences, read_state

from autotune.errors import MachineError
from autotune.records.profile import Profile
from autotune.search.store.folder import find_search_folder

pytestmark = pytest.mark.slow

FULL = MachineError.exit_code
STEPS_PER_EPOCH = -(-SAMPLES // 8)
WORKLOADS = Path(__file__).parents[1] / "train"

needs_mount = pytest.mark.skipif(not can_mount(), reason="no tmpfs can be mounted in a namespace here")

_ON_SMALL_DISK = """
cp -a "$FROM/." "$SMALL" && cd "$SMALL" || exit 99
head -c "$FILL" /dev/zero > "$SMALL/fill" 2>/dev/null
"$@"; status=$?
cp -a "$SMALL/." "$TO"
exit $status
"""


class SmallDisk:
    """A tmpfs that holds a copy of a folder and leaves so much free; what is on it in the end is copied back.

    Args:
        bench: runs the command; its folder is the one that is copied.
        size_bytes: of the tmpfs.
        free_bytes: left for the command.
    """

    def __init__(self, bench: Bench, *, free_bytes: int, size_bytes: int = 8 * 2**20) -> None:
        self._bench, self._free, self._size = bench, free_bytes, size_bytes
        self.after = bench.folder.parent / "after"

    def run(self, *words: str) -> Done:
        """Run a command on it."""
        bench, small = self._bench, self._bench.folder.parent / "small"
        small.mkdir()
        self.after.mkdir()
        used = sum(-(-path.stat().st_size // 4096) * 4096 for path in bench.folder.rglob("*") if path.is_file())
        fill = self._size - used - self._free
        places = {"FROM": bench.folder, "SMALL": small, "TO": self.after, "FILL": fill}
        bench.environment |= {name: str(value) for name, value in places.items()}
        shell = ["sh", "-c", _ON_SMALL_DISK, "sh", *COMMAND]
        return bench.run(*words, command=in_namespace(f"-t tmpfs -o size={self._size} tmpfs {small}", shell))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    found = open_bench(tmp_path)
    shutil.copy(WORKLOADS / "noisy_workload.py", found.folder)
    return found


def assert_said_in_one_line(done: Done, words: str) -> None:
    assert done.status == FULL, (done.status, done.said)
    errors = [line for line in done.said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, done.said
    assert words in errors[0]
    assert "Traceback" not in done.said


def list_temporary(folder: Path) -> list[str]:
    """Return files that were not moved into place."""
    return [path.name for path in folder.rglob("*") if path.name.endswith(".tmp") or path.name.startswith(".tmp-")]


@needs_mount
@pytest.mark.fault(
    "25", injected="tmpfs of 8 MiB with nothing free under a search", outcome="exit 5 in one line, at once"
)
def test_a_search_on_a_full_disk_ends_at_once(bench: Bench) -> None:
    disk = SmallDisk(bench, free_bytes=0)
    done = disk.run("search", "tiny.py:tiny", "--budget", "60s")
    assert_said_in_one_line(done, "No space left on device")
    assert list_temporary(disk.after) == []


@needs_mount
@pytest.mark.parametrize("free_kib", [60, 150, 300, 420, 800])
@pytest.mark.fault(
    "25",
    injected="tmpfs with 60 to 800 KiB free under a search",
    outcome="an answer, or exit 5; nothing half-written; --resume goes on",
)
def test_a_search_whose_disk_fills_up_keeps_what_it_has(bench: Bench, free_kib: int) -> None:
    earlier = run_simulated(Machine(stop_after=3), bench.folder).profile
    made = find_search_folder(bench.folder, "toy.py:workload")
    assert made is not None
    earlier.save(made.profile)
    disk = SmallDisk(bench, free_bytes=free_kib * 1024)
    done = disk.run("search", "tiny.py:tiny", "--budget", "40s", "--out", "other.json")
    assert done.status in (0, 3, FULL), (done.status, done.said)
    assert "Traceback" not in done.said
    if done.status == FULL:
        assert_said_in_one_line(done, "No space left on device")
    assert list_temporary(disk.after) == []
    if (disk.after / "other.json").exists():
        assert Profile.load(disk.after / "other.json").target.label == "tiny.py:tiny"
    kept = find_search_folder(disk.after, "toy.py:workload")
    assert kept is not None
    assert Profile.load(kept.profile) == earlier


@needs_mount
@pytest.mark.fault(
    "25",
    injected="tmpfs of 8 MiB that fills up under a training",
    outcome="exit 5; old checkpoints whole; resumed, it ends bit for bit alike",
)
def test_a_training_whose_disk_fills_up_goes_on_later(bench: Bench) -> None:
    words = ("train", "noisy_workload.py:noisy", "--epochs", "3", "--seed", "0")
    straight = bench.run(*words, "--run-dir", "straight")
    assert straight.status == 0, straight.said
    (bench.folder / "straight").rename(bench.folder.parent / "straight")
    one = sum(path.stat().st_size for path in (bench.folder.parent / "straight").glob("checkpoints/step-*18/*"))
    disk = SmallDisk(bench, free_bytes=3 * one)
    done = disk.run(*words, "--run-dir", "run")
    assert_said_in_one_line(done, "No space left on device")
    assert "--resume" in done.said
    run = disk.after / "run"
    assert list_temporary(run) == []
    assert list(run.glob("checkpoints/step-*/manifest.json"))
    resumed = Bench(disk.after, bench.scratch).run("train", words[1], "--resume", "--run-dir", "run")
    assert resumed.status == 0, resumed.said
    assert find_differences(read_state(bench.folder.parent / "straight"), read_state(run)) == []


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a search that has an answer."""
    folder = tmp_path_factory.mktemp("answered")
    answer = run_simulated(Machine(), folder)
    answer.profile.save(folder / "best.json")
    answer.profile.save(answer.folder.profile)
    return folder


@pytest.mark.fault(
    "25",
    injected="/dev/full as the page's folder, as standard output",
    outcome="exit 5 or one line; nothing half-written",
)
@pytest.mark.parametrize("form", ["report", "export"])
def test_a_page_that_cannot_be_written_is_one_line(answered: Path, tmp_path: Path, form: str) -> None:
    small = tmp_path / "small"
    small.mkdir()
    report = ["report", "--out", str(small / "report.html")]
    command = [*COMMAND, *(report if form == "report" else ["export", "--profile", "best.json", "--to", "torch"])]
    if form == "report":
        if not can_mount():
            pytest.skip("no tmpfs can be mounted in a namespace here")
        shell = ["sh", "-c", '"$@"; status=$?; ls -A "$0"; exit $status', str(small), *command]
        command = in_namespace(f"-t tmpfs -o size=8k tmpfs {small}", shell)
    with Path("/dev/full").open("w") as full:
        stdout = subprocess.PIPE if form == "report" else full
        done = subprocess.run(
            command, cwd=answered, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=120
        )
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr
    if form == "report":
        assert (done.returncode, done.stdout) == (FULL, "")


@pytest.mark.fault("26", injected="ulimit -f 1 (KiB) under a training", outcome="exit 5 in one line: File too large")
def test_a_quota_under_a_training_is_the_machines_error(bench: Bench) -> None:
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *COMMAND]
    done = bench.run("train", "noisy_workload.py:noisy", "--epochs", "1", "--run-dir", "run", command=limited)
    assert_said_in_one_line(done, "File too large")
    assert list_temporary(bench.folder) == []


@pytest.mark.fault("26", injected="ulimit -f 1 (KiB) under a search", outcome="exit 5 in one line: File too large")
def test_a_quota_under_a_search_is_the_machines_error(bench: Bench) -> None:
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *COMMAND]
    done = bench.run("search", "tiny.py:tiny", "--budget", "60s", command=limited)
    assert_said_in_one_line(done, "File too large")
    assert list_temporary(bench.folder) == []
