"""The final training of scripts that fail, with real processes: what is done about it, said of it and left behind."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from train_world import wait_until

from autotune.errors import ProfileError, UsageError
from autotune.records.codec import parse_record, read_record
from autotune.records.config import TrainConfig
from autotune.records.layout import NEXT_FILE, SCRIPT_FILE
from autotune.records.profile import Profile
from autotune.records.run import RunPlan, TrainingSummary
from autotune.records.training_process import Failure, ScriptPlan, TrainingProgress
from autotune.records.trial import Target
from autotune.targets.script import read_script, script_label
from autotune.train.recovery.attempts import Ended, Start
from autotune.train.script.progress import write_progress
from autotune.train.script.recovery import ScriptEnd, train_script
from autotune.train.script.run import prepare_script_run, refuse_workload_options
from autotune.train.settings.choice import Settings

FLAGS = ("--batch-size", "{micro_batch_size:8}", "--accum", "{gradient_accumulation_steps:1}")
LOADER = "Squares[256] by RandomSampler"


@dataclass
class Bench:
    """A folder with the script, and what was said in the last training.

    Attributes:
        folder: the working folder.
        said: sentences.
    """

    folder: Path
    said: list[str] = field(default_factory=list)

    def target(self, *arguments: str) -> Target:
        """Return the script with some arguments."""
        command = (sys.executable, "faulty_script.py", *arguments)
        return Target(spec=script_label(command), folder=str(self.folder), script=read_script(command))

    def train(self, *arguments: str, restarts: int = 0, settings: Settings | None = None, **changes: Any) -> ScriptEnd:
        """Train it with some settings changed."""
        self.said.clear()
        chosen = settings or make_settings(**changes)
        run = prepare_script_run(chosen, self.target(*arguments))
        return train_script(run, say=self.said.append, max_restarts=restarts)

    @property
    def starts(self) -> list[str]:
        """Batch size, accumulation and workers of each start, as the script was given them."""
        return (self.folder / "starts.txt").read_text().splitlines()

    @property
    def plan(self) -> RunPlan:
        """The record of the only run."""
        return read_record(self.folder / "runs/faulty-script-001" / SCRIPT_FILE, RunPlan)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shutil.copy(Path(__file__).with_name("faulty_script.py"), tmp_path)
    return Bench(tmp_path)


def make_settings(**changes: Any) -> Settings:
    baseline = TrainConfig(micro_batch_size=8)
    return Settings(
        baseline.replace(**changes),
        baseline,
        "profile" if changes else "baseline",
        None,
        promised_samples_per_second=1300.0 if changes else None,
        differences=(),
        training_loaders=(LOADER,) if changes else (),
    )


Attempt = tuple[int, list[TrainingProgress]]
"""Exit status of a process, as `subprocess` gives it, and what the processes of the training told before it."""


@pytest.fixture
def play(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ScriptEnd]:
    """Return a training whose processes are not started: they end as they are told to, one after another."""

    def run(attempts: list[Attempt], *arguments: str, **options: Any) -> ScriptEnd:
        def run_attempts(
            start: Callable[[int], Start], *, next_attempt: Callable[[Ended], bool], **_options: Any
        ) -> Ended:
            for number, (status, processes) in enumerate(attempts):
                plan = parse_record(start(number).words[-1 - len(arguments)], ScriptPlan, name="plan")
                for one in processes:
                    write_progress(Path(plan.progress_folder), one)
                ended = Ended(number, status, False, 0, 1.0)
                if not next_attempt(ended):
                    break
            assert number == len(attempts) - 1
            return ended

        monkeypatch.setattr("autotune.train.recovery.supervisor.run_attempts", run_attempts)
        return bench.train(*arguments, **options)

    return run


def note(steps: int, cause: str = "", *, rank: int = 0, at: float = 1.0, **fields: Any) -> TrainingProgress:
    failure = Failure(cause=cause, detail=f"{cause} was seen", at=at) if cause else None
    return TrainingProgress(rank=rank, steps=steps, samples=8 * steps, failure=failure, **fields)


def test_before_the_first_step_it_is_started_again_with_a_step_down(
    bench: Bench, play: Callable[..., ScriptEnd]
) -> None:
    failing: Attempt = (1, [note(0, "oom-device")])
    end = play([failing, failing, (0, [note(24)])], *FLAGS, micro_batch_size=64)
    assert [down.action for down in bench.plan.step_downs] == ["fewer-samples", "fewer-samples"]
    assert end.summary.config == TrainConfig(micro_batch_size=16, gradient_accumulation_steps=4)
    assert (end.status, end.summary.steps, end.summary.samples) == (0, 24, 192)
    assert end.summary.promised_samples_per_second is None  # that was for other settings
    assert "micro_batch 64 -> 32, accumulation 1 -> 2" in bench.said[0]


def test_after_it_nothing_is_started_again_unless_that_was_allowed(
    bench: Bench, play: Callable[..., ScriptEnd]
) -> None:
    failing: Attempt = (1, [note(70, "oom-device")])
    assert play([failing], *FLAGS, micro_batch_size=64).status == 1
    end = play([failing, failing, failing], *FLAGS, micro_batch_size=64, restarts=2)
    assert (end.status, end.summary.steps) == (1, 210)
    assert "counted again" in " ".join(end.summary.warnings)
    assert end.summary.config == TrainConfig(micro_batch_size=16, gradient_accumulation_steps=4)
    assert "from its own checkpoints" in bench.said[0]
    assert "micro_batch 16 -> 8" in bench.said[2]


def test_restarts_end_where_nothing_goes_on(bench: Bench, play: Callable[..., ScriptEnd]) -> None:
    workers: Attempt = (1, [note(0, "dataloader-worker-died")])
    end = play([workers, workers, workers], num_workers=2)
    assert [down.action for down in end.summary.step_downs] == ["again", "no-workers"]
    assert "No setting of autotune's is known to help" in bench.said[2]


def test_of_several_processes_the_first_failure_counts(bench: Bench, play: Callable[..., ScriptEnd]) -> None:
    notes = [note(0, "user-error", at=9.0), note(0, "oom-device", rank=1, at=8.0)]
    assert play([(1, notes), (0, [note(5)])], precision="bf16").status == 0
    assert bench.plan.step_downs[0].cause == "oom-device"


def test_a_compilation_that_failed_is_in_the_record(bench: Bench, play: Callable[..., ScriptEnd]) -> None:
    eager = note(30, eager_step=2, eager_detail="no compiler", non_finite_step=20)
    end = play([(0, [eager])], compile_mode="default")
    down = end.summary.step_downs[0]
    assert (down.action, down.step, down.config.compile_mode) == ("eager", 2, "off")
    assert "the loss was not finite at step 20" in end.summary.warnings
    assert read_record(bench.folder / "runs/faulty-script-001" / "summary.json", TrainingSummary) == end.summary


def test_a_folder_that_cannot_be_made_does_not_stop_the_script(bench: Bench, play: Callable[..., ScriptEnd]) -> None:
    (bench.folder / "runs").write_text("not a folder")
    end = play([(0, [note(24)])])
    assert (end.status, end.summary.steps, end.summary.folder) == (0, 24, "")
    assert "no record of this training is kept" in bench.said[0]


@pytest.mark.slow
def test_a_script_with_its_own_settings_is_run_as_it_is_and_counted(bench: Bench, capfd: Any) -> None:
    end = bench.train()
    summary = end.summary
    assert capfd.readouterr().out.startswith("done 24")
    assert (end.status, summary.steps, summary.samples, summary.finished) == (0, 24, 192, True)
    assert summary.samples_per_second is not None
    assert (summary.config, summary.warnings) == (None, ())
    folder = bench.folder / "runs/faulty-script-001"
    assert sorted(path.name for path in folder.iterdir()) == [SCRIPT_FILE, "summary.json"]
    assert {path.name for path in bench.folder.iterdir()} == {"faulty_script.py", "starts.txt", "runs"}


@pytest.mark.slow
@pytest.mark.fault(
    "1",
    injected="a script out of device memory before its first step",
    outcome="a smaller micro batch by its own flags",
)
def test_out_of_memory_before_the_first_step_takes_a_smaller_micro_batch(bench: Bench) -> None:
    end = bench.train(*FLAGS, "--fault", "oom", micro_batch_size=64)
    assert (end.status, end.summary.steps) == (0, 24)
    assert bench.starts == ["64 1 0", "32 2 0", "16 4 0"]  # 64 samples a step, always
    assert [down.action for down in bench.plan.step_downs] == ["fewer-samples", "fewer-samples"]
    assert {down.cause for down in end.summary.step_downs} == {"oom-device"}
    assert "micro_batch 64 -> 32, accumulation 1 -> 2" in bench.said[0]
    assert end.summary.promised_samples_per_second is None  # it was for other settings
    assert end.summary.samples == 24 * 64


@pytest.mark.slow
def test_out_of_memory_without_flags_for_the_batch_takes_the_scripts_own_settings(bench: Bench) -> None:
    end = bench.train("--batch-size", "32", "--fault", "oom", "--once", precision="bf16")
    assert (end.status, end.summary.steps) == (0, 24)
    assert [down.action for down in end.summary.step_downs] == ["baseline"]
    assert end.summary.config == TrainConfig(micro_batch_size=8)


@pytest.mark.slow
def test_out_of_memory_of_its_own_settings_is_the_scripts_own_end(bench: Bench, capfd: Any) -> None:
    end = bench.train("--batch-size", "32", "--fault", "oom")
    assert (end.status, len(bench.starts)) == (1, 1)
    assert "OutOfMemoryError" in capfd.readouterr().err
    assert "No setting of autotune's is known to help" in bench.said[0]


@pytest.mark.slow
def test_after_its_first_step_a_script_ends_and_the_way_on_is_said(bench: Bench) -> None:
    end = bench.train(*FLAGS, "--fault", "oom", "--at", "7", micro_batch_size=64)
    assert (end.status, end.summary.steps, end.summary.finished) == (1, 7, False)
    assert len(bench.starts) == 1
    paragraph = bench.said[0]
    for part in ("after 7 steps", "oom-device", "its checkpoints are its own", "micro_batch 64 -> 32"):
        assert part in paragraph
    next_profile = Path("runs/faulty-script-001") / NEXT_FILE
    assert f"autotune train --profile {next_profile} -- {sys.executable} faulty_script.py" in paragraph
    profile = Profile.load(bench.folder / next_profile)
    assert (profile.config.micro_batch_size, profile.config.gradient_accumulation_steps) == (32, 2)
    again = Settings(profile.config, profile.baseline_config, "profile", profile, None, ())
    words = prepare_script_run(again, bench.target(*FLAGS)).start(profile.config, progress=bench.folder, as_json=False)
    assert words.words[-4:] == ("--batch-size", "32", "--accum", "2")


@pytest.mark.slow
def test_a_script_that_resumes_itself_may_be_started_again(bench: Bench, capfd: Any) -> None:
    end = bench.train("--fault", "kill", "--at", "12", "--once", "--own-checkpoint", restarts=1)
    assert (end.status, len(bench.starts)) == (0, 2)
    assert "done 24" in capfd.readouterr().out
    assert end.summary.steps in range(12 + 14 - 12, 12 + 14 + 1)  # what it counted before it was killed is told late
    assert "crash-signal" in bench.said[0]
    assert "from its own checkpoints" in bench.said[0]


@pytest.mark.slow
def test_a_killed_script_is_started_again_before_its_first_step_only(bench: Bench) -> None:
    assert bench.train("--fault", "kill", "--once").status == 0
    assert [down.action for down in bench.plan.step_downs] == ["again"]
    assert bench.train("--fault", "kill", "--at", "3").status == 128 + signal.SIGKILL


@pytest.mark.slow
def test_workers_that_die_are_tried_once_more_and_then_given_up(bench: Bench, capfd: Any) -> None:
    end = bench.train("--fault", "worker", num_workers=1)
    assert end.status == 0
    assert [down.action for down in end.summary.step_downs] == ["again", "no-workers"]
    assert {down.cause for down in end.summary.step_downs} == {"dataloader-worker-died"}
    assert "workers 0" in capfd.readouterr().out


@pytest.mark.slow
def test_what_is_the_scripts_own_is_left_to_it(bench: Bench) -> None:
    assert bench.train("--fault", "own").status == 1
    assert bench.train("--fault", "exit", "--at", "5", restarts=3).status == 11
    assert len(bench.starts) == 2
    assert not any("failed" in sentence for sentence in bench.said)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_told_once_with_its_step(bench: Bench, capfd: Any) -> None:
    end = bench.train("--fault", "nan", "--at", "12", "--steps", "45")
    assert end.status == 0
    assert end.summary.warnings == ("the loss was not finite at step 20",)  # every tenth step is looked at
    assert capfd.readouterr().err.count("not finite") == 1


@pytest.mark.slow
@pytest.mark.fault("45", injected="a compiler that fails in a script", outcome="trained without compiling")
def test_a_failing_compiler_costs_speed_only(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, capfd: Any
) -> None:
    bench.train()
    plain = capfd.readouterr().out
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
    end = bench.train(compile_mode="default")
    assert end.status == 0
    printed = capfd.readouterr()
    assert printed.out == plain  # bit for bit what the script computes without compilation
    assert printed.err.count("a compilation failed") == 1
    assert [(down.action, down.cause) for down in end.summary.step_downs] == [("eager", "compile-error")]
    assert len(bench.starts) == 2  # it was not started again for it


@pytest.mark.slow
@pytest.mark.fault("41", injected="SIGKILL to a rank of torchrun", outcome="named, with its step")
def test_the_processes_of_torchrun_are_counted_together_and_a_killed_one_has_a_name(bench: Bench) -> None:
    torchrun = Path(sys.executable).with_name("torchrun")
    if not torchrun.exists():
        pytest.skip("there is no torchrun beside this python")
    command = (str(torchrun), "--standalone", "--nproc-per-node", "2", "faulty_script.py", *FLAGS)
    target = Target(spec=script_label(command), folder=str(bench.folder), script=read_script(command))
    end = train_script(prepare_script_run(make_settings(), target), say=bench.said.append)
    assert (end.status, end.summary.steps, end.summary.samples) == (0, 24, 2 * 24 * 8)
    failing = (*command, "--fault", "kill", "--at", "3")
    target = Target(spec=script_label(failing), folder=str(bench.folder), script=read_script(failing))
    end = train_script(prepare_script_run(make_settings(), target), say=bench.said.append)
    assert end.status == 1
    assert any("killed by SIGKILL" in sentence for sentence in bench.said)


@pytest.mark.slow
def test_workers_of_a_fork_server_work(bench: Bench) -> None:
    script = bench.folder / "faulty_script.py"
    guarded = "if __name__ == '__main__':\n" + textwrap.indent(FORK_SERVED, "    ")
    script.write_text("import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n" + guarded)
    end = bench.train()
    assert (end.status, end.summary.steps, bench.said) == (0, 8, [bench.said[-1]])


FORK_SERVED = """
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = TensorDataset(torch.randn(64, 4))
for (inputs,) in DataLoader(data, batch_size=8, num_workers=1, multiprocessing_context="forkserver"):
    model(inputs).sum().backward()
    optimizer.step()
"""

PARENT = """
import sys
from types import SimpleNamespace
from autotune.records import TrainConfig
from autotune.records.trial import Target
from autotune.targets.script import read_script, script_label
from autotune.train.script.run import prepare_script_run
from autotune.train.script.recovery import train_script

words = [sys.executable, *sys.argv[1:]]
target = Target(spec=script_label(words), folder=".", script=read_script(words))
given = SimpleNamespace(
    config=TrainConfig(),
    baseline_config=TrainConfig(),
    origin="baseline",
    profile=None,
    promised_samples_per_second=None,
    training_loaders=(),
)
run = prepare_script_run(given, target)
assert "torch" not in sys.modules
sys.exit(train_script(run, say=print).status)
"""


@pytest.mark.slow
@pytest.mark.fault("20", injected="SIGKILL to the parent of a script's training", outcome="script and workers are gone")
def test_no_worker_and_no_script_survives_the_parent(bench: Bench) -> None:
    words = ["faulty_script.py", "--workers", "2", "--steps", "1000000"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *words], cwd=bench.folder, start_new_session=True)
    progress = bench.folder / "runs/faulty-script-001/progress-0.json"
    assert wait_until(progress.exists)
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) == 4  # the script, its two workers and the keeper
    parent.kill()
    parent.wait()
    assert wait_until(lambda: not any(is_alive(one) for one in family), seconds=60)


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_script_handles_its_own_signals(bench: Bench) -> None:
    script = bench.folder / "faulty_script.py"
    handler = (
        "import signal\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (_ for _ in ()).throw(SystemExit(33)))\n"
        "import os, threading; threading.Timer(1.0, os.kill, [os.getppid(), signal.SIGUSR1]).start()\n"
    )
    script.write_text(handler + script.read_text().replace("from __future__ import annotations\n", ""))
    assert bench.train("--steps", "1000000").status == 33


@pytest.mark.parametrize("option", ["--steps", "--max-time", "--resume", "--seed", "--keep-checkpoints", "--log"])
def test_what_only_its_own_flags_can_set_is_refused(bench: Bench, option: str) -> None:
    with pytest.raises(UsageError, match=f"{option} is for a workload") as refused:
        refuse_workload_options({"--steps": None, "--resume": False, option: 0}, bench.target())
    assert "faulty_script.py" in refused.value.hint
    refuse_workload_options({"--steps": None, "--resume": False, "--skip-verification": True}, bench.target())


@pytest.mark.slow
def test_its_own_error_shows_its_own_frames_only(bench: Bench, capfd: Any) -> None:
    end = bench.train("--fault", "own", "--at", "20")
    shown = capfd.readouterr().err
    assert end.status == 1
    assert shown.startswith("Traceback (most recent call last):\n")
    assert shown.endswith("ValueError: a bug of its own\n")
    assert "in forward" in shown
    assert "autotune/" not in shown
    assert "runpy" not in shown
    assert bench.said == ["20 steps, " + bench.said[-1].partition(", ")[2]]


@pytest.mark.slow
def test_an_early_death_is_told_with_its_step(bench: Bench) -> None:
    end = bench.train("--fault", "kill", "--at", "20")
    assert (end.status, end.summary.steps) == (137, 20)
    assert "after 20 steps" in bench.said[0]


def test_settings_that_the_command_cannot_take_are_refused(bench: Bench) -> None:
    with pytest.raises(ProfileError, match=r"the command has no \{micro_batch_size\}"):
        bench.train(micro_batch_size=16)
