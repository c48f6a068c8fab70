"""Trials of scripts in processes of their own: the losses are the script's, the folder stays as it was, failures are
results with a name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from record_factory import make_spec, make_target
from trial_world import World, open_world

from autotune.records import TrainConfig
from autotune.records.trial import TrialResult, TrialSpec, TrialStatus
from autotune.targets.script import read_script, script_label

SCRIPTS = Path(__file__).parents[1] / "scripts"
BASELINE = TrainConfig(num_threads=1, optimizer_implementation="for-loop")
EXACT_CHANGES: dict[str, Any] = {
    "num_workers": 2,
    "prefetch_factor": 4,
    "persistent_workers": True,
    "host_allocator": "glibc-tuned",
}
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
LONG_AGO_NS = 10**18


@dataclass
class Project:
    """A user's folder with scripts, and trials of them.

    Attributes:
        folder: the working folder; a folder of its own around it stands for the user's home.
        world: runs the trials.
    """

    folder: Path
    world: World

    def write(self, text: str, name: str = "train.py") -> None:
        """Make a script of the user's."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def make_trial(self, *words: str, **wanted: Any) -> TrialSpec:
        """Return the next trial of a command."""
        names = ("knobs", "metric_regexes", "metric_keys", "directions")
        options = {name: wanted.pop(name) for name in names if name in wanted}
        script = read_script((sys.executable, *(words or ("train.py",))), **options)
        number, self.world.trials = self.world.trials, self.world.trials + 1
        usual: dict[str, Any] = {"purpose": "quality", "config": BASELINE, "baseline": BASELINE, "quality_steps": 10}
        limits = {"warmup_cap_seconds": 0.5, "measure_seconds": 0.1, "ceilings_seconds": 0.3}
        return make_spec(
            number=number,
            target=make_target(script_label(script.command), self.folder, script=script),
            device="cpu",
            time_limit_seconds=wanted.pop("seconds", 120.0),
            **(usual | limits | wanted),
        )

    def run(self, *words: str, **wanted: Any) -> TrialResult:
        """Run a trial of a command and check that it left no process."""
        result = self.world.runner(self.make_trial(*words, **wanted))
        assert self.world.find_strays() == {}
        return result

    def log(self) -> str:
        """Return what the last trial printed."""
        return self.world.log(self.world.trials - 1)

    def snapshot(self) -> dict[str, Any]:
        """Return everything there is to know about the user's files."""
        home = self.folder.parent
        found: dict[str, Any] = {}
        for path in sorted([home, *home.rglob("*")]):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else None
            found[str(path)] = (status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, content)
        return found


@contextmanager
def open_project(parent: Path) -> Iterator[Project]:
    """Yield a folder with the scripts of this repository; its files are the same in the end."""
    folder = parent / "home" / "project"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with open_world(parent / "trials", warm=False) as world:
        yield Project(folder, world)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    with open_project(tmp_path) as project:
        yield project


def losses_of(result: TrialResult) -> tuple[float | None, ...]:
    """Return the losses of a trial that went well."""
    assert (result.status, result.cause, result.error) == (TrialStatus.COMPLETED, "", "")
    (curve,) = result.curves
    return curve.losses


SELF_MADE = """
import argparse
import json
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--batch-size", type=int, default=8)
args = parser.parse_args()
torch.manual_seed(args.seed)
x = torch.randn(60, 6)
y = x[:, :3].argmax(1)
loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
validation = DataLoader(TensorDataset(x, y), batch_size=30)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for epoch in range(args.epochs):
    model.train()
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        print("loss", repr(loss.item()))
    model.eval()
    with torch.no_grad():
        hits = sum((model(a).argmax(1) == b).sum().item() for a, b in validation)
    print(f"accuracy={hits / 60:.4f} after {epoch}")
    print(json.dumps({"epoch": epoch, "accuracy": hits / 60}))
"""
SELF_MADE_LOADERS = ("TensorDataset[60] by RandomSampler",)

LOOP = """
import os, sys, time
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def take_step(factor=1.0):
    optimizer.zero_grad()
    loss = factor * model(torch.ones(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
"""


# The losses


@pytest.mark.slow
def test_a_trial_learns_what_the_script_learns_alone_whatever_its_loader_does(project: Project) -> None:
    project.write(SELF_MADE)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-B", "train.py"]
    alone = subprocess.run(
        command, cwd=project.folder, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    printed = [float(line.split()[1]) for line in alone.stdout.splitlines() if line.startswith("loss")]
    assert len(printed) == 32
    before = project.snapshot()
    options: dict[str, Any] = {"quality_steps": 20, "training_loaders": SELF_MADE_LOADERS}
    plain = project.run(**options)
    assert list(losses_of(plain)) == printed[:20]
    assert plain.curves[0].samples == 20 * 8 - 2 * 4
    changed = project.run(**options, config=BASELINE.replace(**EXACT_CHANGES))
    assert losses_of(changed) == losses_of(plain)
    assert project.snapshot() == before
    assert (plain.written, changed.written) == ((), ())


@pytest.mark.slow
def test_equal_seeds_give_equal_losses_and_others_do_not(project: Project) -> None:
    project.write(SELF_MADE)
    found = [losses_of(project.run(seeds=(seed,), quality_steps=3)) for seed in (1, 2)]
    shifted = losses_of(project.run("train.py", "--seed", "4", quality_steps=3))
    assert found[0] != found[1]
    assert found[0] == shifted  # a trial's seed is added to the script's own


@pytest.mark.slow
def test_a_script_without_a_seed_is_given_the_trials(project: Project) -> None:
    project.write(
        "import random\nfirst = random.random() + random.Random().random()\n"
        "import numpy as np\nfirst += np.random.rand() + np.random.default_rng().random()\n"
        + LOOP.replace("torch.manual_seed(0)", "")
        + "for _ in range(3): take_step(1 + first)\n"
    )
    found = [losses_of(project.run(seeds=(seed,), quality_steps=3)) for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]


@pytest.mark.slow
def test_a_rounding_knob_reaches_the_script_and_stays_near(project: Project) -> None:
    project.write(SELF_MADE)
    plain = losses_of(project.run())
    cast = losses_of(project.run(config=BASELINE.replace(precision="bf16", optimizer_implementation="fused")))
    assert cast != plain
    assert cast == pytest.approx(plain, rel=0.05)


WRAPPED = ("whole_batches.py", "--wrapped")
SHAPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "plain_loop": (("plain_loop.py",), ("Digits[1440] by RandomSampler",)),
    "gan": (("gan.py",), ("TensorDataset[1797] by RandomSampler",)),
    "nano_gpt": (("nano_gpt.py",), ()),
    "by_hand": (("by_hand.py",), ()),
    "trainer_class": (("trainer_class.py",), ("Subset[1500] by RandomSampler",)),
    "whole_batches": (WRAPPED, ("MiniBatches[100] by RandomSampler",)),
    "two_backwards": (("two_backwards.py",), ("Snippets[5093] by RandomSampler",)),
    "package_style": (("-m", "package_style.train"), ("TensorDataset[1500] by RandomSampler",)),
    "ddp": ((*TORCHRUN, "ddp.py"), ("TensorDataset[1400] by DistributedSampler",)),
}


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_script_learns_the_same_again_and_with_every_exact_knob_changed(project: Project, shape: str) -> None:
    command, loaders = SHAPES[shape]
    before = project.snapshot()
    options: dict[str, Any] = {"training_loaders": loaders}
    expected = losses_of(project.run(*command, **options))
    assert len(expected) == 10
    assert len({*expected}) > 5
    assert losses_of(project.run(*command, **options)) == expected
    changed = project.run(*command, **options, config=BASELINE.replace(**EXACT_CHANGES))
    assert losses_of(changed) == expected
    assert project.snapshot() == before


# The folder


def test_what_a_script_writes_is_told_and_gone(project: Project) -> None:
    project.write("weights", "model.pt")
    project.write("notes", "../elsewhere/notes.txt")
    project.write(
        LOOP
        + "open('log.txt', 'a').write('begun')\n"
        + "os.makedirs('out', exist_ok=True)\n"
        + "os.remove('short.py')\n"
        + "open('../elsewhere/notes.txt', 'a').write('more')\n"
        + "open('../elsewhere/new.txt', 'w').write('new')\n"
        + "for step in range(100):\n"
        + "    take_step()\n"
        + "    torch.save(model.state_dict(), 'model.pt')\n"
        + "    torch.save(optimizer.state_dict(), 'out/ckpt.pt')\n"
        + "    assert open('../elsewhere/notes.txt').read() == 'notesmore'\n"
    )
    for path in (project.folder.parent).rglob("*"):
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS))
    before = project.snapshot()
    result = project.run()
    assert len(losses_of(result)) == 10
    assert project.snapshot() == before
    assert {"log.txt", "model.pt", "out/ckpt.pt", "short.py"} <= {*result.written}
    assert {"../elsewhere/new.txt", "../elsewhere/notes.txt"} <= {*result.written}
    assert not any("__pycache__" in path for path in result.written)
    assert result.written_elsewhere == ()


@pytest.mark.slow
def test_one_trial_finds_nothing_of_the_one_before(project: Project) -> None:
    project.write(LOOP + "open('once.txt', 'x')\nfor _ in range(20): take_step()\n")
    assert [len(losses_of(project.run())) for _ in range(2)] == [10, 10]


# Ends


@pytest.mark.slow
def test_a_training_without_an_end_is_ended(project: Project) -> None:
    result = project.run("endless.py")
    assert len(losses_of(result)) == 10
    assert result.curves[0].samples == 640
    assert "step 9 loss" in project.log()
    assert "step 11 loss" not in project.log()


@pytest.mark.slow
def test_nothing_of_the_script_runs_after_the_last_step(project: Project) -> None:
    project.write(
        "import atexit\natexit.register(print, 'LATE exit handler')\n"
        + LOOP
        + "try:\n    for step in range(100):\n        print('STEP', step)\n        take_step()\n"
        + "finally:\n    print('LATE finally')\n    open('model.pt', 'w').close()\n"
    )
    result = project.run()
    assert len(losses_of(result)) == 10
    assert "STEP 9" in project.log()
    assert "STEP 10" not in project.log()
    assert "LATE" not in project.log()
    assert result.written == ()


@pytest.mark.slow
def test_a_script_that_ends_early_has_learned_so_much(project: Project) -> None:
    project.write(LOOP + "for _ in range(2): take_step()\nsys.exit(1)\n")
    result = project.run()
    assert len(losses_of(result)) == 2
    timed = project.run(purpose="measure")
    assert (timed.status, timed.cause) == (TrialStatus.CRASHED, "target")
    assert "took 2 optimizer steps" in timed.error


@pytest.mark.slow
def test_a_script_that_ends_with_status_1_although_all_went_well_is_timed(project: Project) -> None:
    project.write(LOOP + "for _ in range(8): take_step()\nsys.exit(1)\n")
    result = project.run(purpose="measure")
    assert len(losses_of(result)) == 8
    assert result.measurement is not None
    assert sum(block.optimizer_steps for block in result.measurement.blocks) == 8 - result.measurement.warmup_steps
    assert result.measurement.samples_per_second > 0.0
    assert result.startup_seconds > 0.0


CRASHED, TIMED_OUT, DIVERGED = TrialStatus.CRASHED, TrialStatus.TIMED_OUT, TrialStatus.DIVERGED
FAILURES: dict[str, tuple[str, dict[str, Any], TrialStatus, str, str]] = {
    "raises before it trains": (
        "import torch\nraise LookupError('no data in ./data')\n",
        {},
        CRASHED,
        "user-error",
        "LookupError: no data in ./data",
    ),
    "raises without torch": ("raise LookupError('no data')\n", {}, CRASHED, "user-error", "LookupError: no data"),
    "refuses its arguments": (
        "import argparse, torch\nargparse.ArgumentParser(prog='train').parse_args(['--typo'])\n",
        {},
        CRASHED,
        "target",
        "exit status 2 before its first step; it printed: train: error: unrecognized arguments: --typo",
    ),
    "refuses its arguments ahead of torch": (
        "import argparse\nargparse.ArgumentParser(prog='train').parse_args(['--typo'])\nimport torch\n",
        {},
        CRASHED,
        "target",
        "exit status 2 before its first step; it printed: train: error: unrecognized arguments: --typo",
    ),
    "says why it ends": (
        "import sys, torch\nsys.exit('no data in ./data')\n",
        {},
        CRASHED,
        "target",
        "exit status 1 before its first step; it printed: no data in ./data",
    ),
    "never trains": (
        "import torch\nprint(torch.nn.Linear(2, 2)(torch.ones(2)))\n",
        {},
        CRASHED,
        "target",
        "without an optimizer step or a backward pass",
    ),
    "asks for something": (LOOP + "input('go on? ')\n", {}, CRASHED, "user-error", "EOFError"),
    "hangs before its first step": (LOOP + "time.sleep(600)\n", {"seconds": 5.0}, TIMED_OUT, "timeout", "after 5 s"),
    "ends its process in mid training": (
        LOOP + "for _ in range(5): take_step()\nos._exit(0)\n",
        {},
        CRASHED,
        "no-result",
        "without a result",
    ),
    "has a loss that is not finite": (
        LOOP + "for step in range(1000): take_step(float('nan') if step == 5 else 1.0)\n",
        {"purpose": "measure"},
        DIVERGED,
        "non-finite",
        "not finite at optimizer step 5",
    ),
    "ends with a loss that is not finite": (
        LOOP + "for step in range(7): take_step(float('nan') if step == 5 else 1.0)\n",
        {"purpose": "measure"},
        DIVERGED,
        "non-finite",
        "not finite at optimizer step 5",
    ),
    "breaks in the middle": (
        LOOP + "for step in range(5): take_step()\nraise ZeroDivisionError('oh')\n",
        {},
        CRASHED,
        "user-error",
        "ZeroDivisionError: oh",
    ),
}


@pytest.mark.slow_cases(
    "refuses its arguments",
    "raises before it trains",
    "hangs before its first step",
    "ends with a loss that is not finite",
    "asks for something",
    "raises without torch",
    "says why it ends",
    "breaks in the middle",
)
@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.fault(
    "17", injected="scripts that raise, refuse their flags or never train", outcome="their own words, before any step"
)
@pytest.mark.fault("15", injected="a script whose loss becomes nan", outcome="non-finite, with the step")
def test_a_failure_is_a_result_with_a_cause(project: Project, name: str) -> None:
    text, wanted, status, cause, error = FAILURES[name]
    project.write(text)
    result = project.run(**wanted)
    assert (result.status, result.cause) == (status, cause), result.error
    assert error in result.error
    assert result.curves == ()


@pytest.mark.slow
def test_a_quality_run_says_where_a_loss_was_not_finite(project: Project) -> None:
    project.write(LOOP + "for step in range(50): take_step(float('inf') if step == 2 else 1.0)\n")
    losses = losses_of(project.run(quality_steps=3))
    assert losses[:2] != (None, None)
    assert losses[2] is None


PICKY = """
class Picky(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("full precision only")
        return self.linear(x)
model = Picky()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
SWALLOWED = {
    "and ends": "for _ in range(20):\n    try:\n        take_step()\n    except Exception as e:\n        print(e)\n",
    "and has no end": "while True:\n    try:\n        take_step()\n    except Exception:\n        time.sleep(0.001)\n",
    "and steps all the same": (
        "for _ in range(20):\n    try:\n        take_step()\n    except Exception:\n        optimizer.step()\n"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SWALLOWED)
def test_a_setting_that_breaks_each_step_is_found_even_if_the_script_swallows_it(project: Project, how: str) -> None:
    project.write(LOOP + PICKY + SWALLOWED[how])
    result = project.run(config=BASELINE.replace(precision="bf16"), seconds=30.0)
    assert (result.status, result.cause) == (CRASHED, "user-error"), result.error
    assert "full precision only" in result.error


@pytest.mark.slow
@pytest.mark.parametrize("caught", ["KeyboardInterrupt", "BaseException"])
def test_a_stop_ends_a_script_that_catches_interrupts(project: Project, caught: str) -> None:
    project.write(
        LOOP
        + "print('begun', flush=True)\nwhile True:\n    try:\n        time.sleep(0.01)\n"
        + f"    except {caught}:\n        continue\n"
    )
    project.world.should_stop = lambda: "begun" in project.log()
    result = project.run()
    assert (result.status, result.cause) == (TrialStatus.INTERRUPTED, "interrupted")


@pytest.mark.slow
def test_a_script_that_catches_everything_is_ended_by_its_last_step(project: Project) -> None:
    project.write(
        LOOP + "while True:\n    try:\n        take_step()\n    except BaseException:\n        print('CAUGHT')\n"
    )
    assert len(losses_of(project.run())) == 10
    assert "CAUGHT" not in project.log()
    assert len(losses_of(project.run(purpose="measure"))) > 4
    assert "CAUGHT" not in project.log()


@pytest.mark.slow
def test_a_flag_that_the_script_ignores_is_found(project: Project) -> None:
    project.write(SELF_MADE)
    command = ("train.py", "--batch-size", "{micro_batch_size:8}")
    baseline = BASELINE.replace(micro_batch_size=8)
    wanted: dict[str, Any] = {"baseline": baseline, "training_loaders": SELF_MADE_LOADERS}
    result = project.run(*command, **wanted, config=baseline.replace(micro_batch_size=4))
    assert (result.status, result.cause) == (TrialStatus.UNSUPPORTED, "flag-ignored")
    assert result.error == "the command asks for micro batches of 4, and they are 8"
    # The script as it is does what its own value says, so that the same flag is no failure there.
    assert len(losses_of(project.run(*command, **wanted, config=baseline))) == 10


ACCUMULATED = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset

accumulate = int(sys.argv[1])
torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(56, 6)), batch_size=8, shuffle=True)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(20):
    for number, (x,) in enumerate(loader, 1):
        (model(x).square().mean() / accumulate).backward()
        if number % accumulate == 0 or number == len(loader):
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.slow
def test_a_flag_is_heeded_although_the_last_step_of_an_epoch_accumulates_less(project: Project) -> None:
    project.write(ACCUMULATED)
    baseline = BASELINE.replace(micro_batch_size=8, gradient_accumulation_steps=2)
    wanted: dict[str, Any] = {"baseline": baseline, "training_loaders": ("TensorDataset[56] by RandomSampler",)}
    command = ("train.py", "{gradient_accumulation_steps:2}")
    assert len(losses_of(project.run(*command, **wanted, config=baseline.replace(num_threads=2)))) == 10
    more = baseline.replace(gradient_accumulation_steps=4)
    assert len(losses_of(project.run(*command, **wanted, config=more))) == 10
    project.write(ACCUMULATED.replace("int(sys.argv[1])", "2"))
    result = project.run(*command, **wanted, config=more)
    assert (result.status, result.cause) == (TrialStatus.UNSUPPORTED, "flag-ignored")


@pytest.mark.slow
def test_a_flag_that_is_heeded_is_not_applied_twice(project: Project) -> None:
    project.write(SELF_MADE.replace("batch_size=8, shuffle", "batch_size=args.batch_size, shuffle"))
    command = ("train.py", "--batch-size", "{micro_batch_size:8}")
    baseline = BASELINE.replace(micro_batch_size=8)
    result = project.run(
        *command, baseline=baseline, config=baseline.replace(micro_batch_size=4), training_loaders=SELF_MADE_LOADERS
    )
    assert len(losses_of(result)) == 10
    assert result.curves[0].samples == 40


@pytest.mark.slow
def test_a_knob_of_the_scripts_own_reaches_it(project: Project) -> None:
    project.write(SELF_MADE)
    command, knobs = ("train.py", "--seed", "{own:3}"), ["own=3,5"]
    plain = losses_of(project.run(*command, knobs=knobs, config=None, baseline=None, quality_steps=3))
    baseline = BASELINE.replace(user_knobs={"own": 3})
    wanted: dict[str, Any] = {"knobs": knobs, "baseline": baseline, "quality_steps": 3}
    assert losses_of(project.run(*command, **wanted, config=baseline)) == plain
    assert losses_of(project.run(*command, **wanted, config=baseline.replace(user_knobs={"own": 5}))) != plain


# The script's own figure


@pytest.mark.slow
@pytest.mark.parametrize(
    "metric", [{"metric_regexes": [r"accuracy=([0-9.]+)"]}, {"metric_keys": ["accuracy"]}], ids=["regex", "key"]
)
def test_the_figure_printed_after_the_last_step_is_read(project: Project, metric: dict[str, list[str]]) -> None:
    project.write(SELF_MADE)
    result = project.run(**metric, directions=["maximize"], evaluate=True)
    assert len(losses_of(result)) == 10
    log = project.log()
    figures = [float(line.split("=")[1].split()[0]) for line in log.splitlines() if line.startswith("accuracy=")]
    assert len(figures) == 2  # an epoch has eight steps, so the tenth is in the second
    assert result.curves[0].metrics == pytest.approx({"accuracy": figures[-1]}, abs=1e-4)


@pytest.mark.slow
def test_every_figure_is_waited_for(project: Project) -> None:
    project.write(SELF_MADE + '    if epoch in (0, 2):\n        print("kappa: 0.%d" % epoch)\n')
    result = project.run(
        metric_regexes=["kappa: ([0-9.]+)"], metric_keys=["accuracy"], directions=["maximize"], evaluate=True
    )
    assert len(losses_of(result)) == 10
    figures = [float(line.split("=")[1].split()[0]) for line in project.log().splitlines() if "accuracy=" in line]
    assert len(figures) == 3  # the tenth step is in the second epoch, and the other figure comes after the third
    assert result.curves[0].metrics == pytest.approx({"kappa": 0.2, "accuracy": figures[-1]}, abs=1e-4)


@pytest.mark.slow
def test_a_figure_that_is_not_waited_for_is_not_read(project: Project) -> None:
    project.write(SELF_MADE)
    result = project.run(metric_keys=["accuracy"], directions=["maximize"], evaluate=False)
    assert len(losses_of(result)) == 10
    assert result.curves[0].metrics == {}


@pytest.mark.slow
def test_a_figure_that_never_comes_is_none(project: Project) -> None:
    project.write(SELF_MADE)
    result = project.run("train.py", "--epochs", "2", metric_keys=["f1"], directions=["maximize"], evaluate=True)
    assert len(losses_of(result)) == 10
    assert result.curves[0].metrics == {"f1": None}


@pytest.mark.slow
def test_the_operations_of_a_step_are_the_models_own(project: Project) -> None:
    project.write(
        """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 32, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 32))
for _ in range(1000):
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
"""
    )
    result = project.run(purpose="probe", config=None, seconds=40.0)
    assert result.facts is not None, result.error
    # A product of [16, 64] and [64, 32], forward and twice that backward: 2 operations for each multiply and add.
    assert result.facts.model.flops_per_sample == pytest.approx(3 * 2 * 64 * 32)


@pytest.mark.slow
def test_a_step_that_evaluates_its_loss_again_and_again_makes_all_these_operations(project: Project) -> None:
    project.write(
        """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(64, 32, bias=False)
optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-6, max_iter=5, tolerance_grad=0.0, tolerance_change=0.0)
inputs, targets = torch.randn(16, 64), torch.randn(16, 32)
while True:
    def evaluate():
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        return loss
    optimizer.step(evaluate)
"""
    )
    result = project.run(purpose="probe", config=None, seconds=40.0)
    assert result.facts is not None, result.error
    assert result.facts.model.flops_per_sample == pytest.approx(5 * 3 * 2 * 64 * 32)
    assert result.facts.model.calls_per_step in range(1, 10)  # of one evaluation: all the others compile nothing anew


@pytest.mark.slow
def test_the_workers_of_a_dataset_that_keeps_what_it_has_read_stay(project: Project) -> None:
    project.write(
        """
import torch

class Keeping(torch.utils.data.Dataset):
    def __init__(self):
        self.made = {}
    def __len__(self):
        return 3_000_000  # more than a fast machine reads while it is probed
    def __getitem__(self, index):
        return self.made.setdefault(index, torch.randn(4))

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs in torch.utils.data.DataLoader(Keeping(), batch_size=16, shuffle=True):
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
"""
    )
    result = project.run(purpose="probe", config=None, seconds=40.0)
    assert result.facts is not None, result.error
    assert "keeps what it has read" in result.facts.fixed["num_workers"]


def test_a_probe_takes_a_scripts_step_apart(project: Project) -> None:
    project.write(
        """
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 32))
for _ in range(1000):
    for inputs, targets in torch.utils.data.DataLoader(data, batch_size=16):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        print(loss.item())
"""
    )
    result = project.run(purpose="probe", config=None, seconds=120.0)
    assert result.facts is not None, result.error
    facts = result.facts
    assert facts.work is not None
    assert facts.work.host_syncs_per_step == 1
    assert facts.work.operations_per_step > 10
    assert facts.data.batch_bytes == 16 * 4 * (64 + 32)
    assert (facts.data.loader_seconds_per_step or 0) > 0
    assert facts.memory is not None
    parameters = 64 * 64 + 64 + 64 * 32 + 32
    assert facts.memory.weights_bytes == facts.memory.gradient_bytes == 4 * parameters
    assert facts.memory.optimizer_bytes >= 2 * 4 * parameters
    assert facts.memory.modes[0].precision == "fp32"


PAUSES = """
import time

import torch

def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

torch.manual_seed(0)
model = torch.nn.Linear(64, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn({steps} * 16, 64), torch.randn({steps} * 16, 32))
loader = torch.utils.data.DataLoader(data, batch_size=16)
for _ in range(1000):
    began = time.monotonic()
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        spin(0.01)  # most of a step, so that an epoch takes as long beside a busy neighbour
    model.eval()
    with torch.no_grad():
        spin({epochs} * (time.monotonic() - began))
    model.train()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epochs", "told"),
    [(1.0, "of the time goes to"), (500.0, "between two epochs")],
)
def test_a_probe_sees_what_a_script_does_between_two_epochs(project: Project, epochs: float, told: str) -> None:
    project.write(PAUSES.format(steps=250, epochs=epochs))
    result = project.run(purpose="probe", config=None, seconds=40.0)
    assert result.facts is not None, result.error
    assert [one for one in result.facts.warnings if told in one] != []
    assert 0.3 < result.facts.aside_fraction < 0.8
    assert result.facts.supports_bf16
    assert result.facts.memory is not None
    assert result.facts.memory.missing == ""


EVALUATES_ON_TRAINING_DATA = """
import time

import torch

def spin(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 160

    def __getitem__(self, index):
        if not model.training:
            spin(0.001)
        return torch.full((8,), float(index % 7)), torch.ones(1)

torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
loader = torch.utils.data.DataLoader(Samples(), batch_size=16, shuffle=True)
for _ in range(1000):
    model.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        spin(0.01)
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        for inputs, targets in loader:
            model(inputs)
"""


def test_what_a_script_waits_for_to_evaluate_is_no_wait_of_its_steps(project: Project) -> None:
    project.write(EVALUATES_ON_TRAINING_DATA)
    result = project.run(purpose="measure")
    assert result.measurement is not None, result.error
    assert result.measurement.data_wait_fraction < 0.5  # 160 ms of it for each 100 ms of training


LOSS_INSIDE = """
import torch

class Judge(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return (self.layer(x).squeeze(1) - y).square().mean()

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096))
model = torch.compile(Judge())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in torch.utils.data.DataLoader(data, batch_size=16):
    optimizer.zero_grad()
    model(x, y).backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_compiled_model_that_computes_its_loss_is_compiled_anew(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # nothing is compiled yet
    project.write(LOSS_INSIDE)
    assert len(losses_of(project.run("train.py"))) == 10
