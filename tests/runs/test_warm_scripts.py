"""Scripts whose torch was imported beforehand: they find it where they import it, and train the same."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_script_trials import BASELINE, SCRIPTS, Project, losses_of
from trial_world import open_world

from autotune.isolation.warm import servers as warm_servers
from autotune.isolation.warm.servers import ProcessKind, Servers, Starts
from autotune.records.trial import TrialResult

SCRIPT = """
{before}
import sys
IS_THERE = "torch" in sys.modules, "torch.nn" in sys.modules, "numpy" in sys.modules, "torch._dynamo" in sys.modules
{imports}
import random
import numpy as np
import torch
drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(30):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if _ == 0:
        is_main = sys.modules["__mp_main__"] is sys.modules["__main__"]  # classes come back from workers by that name
        print("SAW", IS_THERE, drawn, is_main, torch.__spec__.name, torch.__loader__ is torch.__spec__.loader)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.setattr(warm_servers, "_LEAST_FREE_BYTES", 0)
    folder = tmp_path / "home" / "project"
    shutil.copytree(SCRIPTS, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with open_world(tmp_path / "trials", warm=True) as world:
        yield Project(folder, world)


@pytest.fixture
def cold(project: Project, tmp_path: Path) -> Iterator[Project]:
    with open_world(tmp_path / "cold trials", warm=False) as world:
        yield Project(project.folder, world)


def run(project: Project, times: int) -> tuple[list[TrialResult], list[str]]:
    results, printed = [], []
    for _ in range(times):
        results.append(project.run("train.py", seeds=(1,)))
        printed += [line for line in project.log().splitlines() if line.startswith("SAW")]
    return results, printed


def servers(project: Project) -> int:
    return len(project.world.server_pids)


@pytest.mark.slow_cases("from torch.nn", "import numpy", "import torch.optim")
@pytest.mark.parametrize(
    "imports", ["import torch", "from torch.nn import Linear", "import numpy", "import torch.optim as optim"]
)
def test_a_script_finds_its_imports_where_it_makes_them(project: Project, cold: Project, imports: str) -> None:
    project.write(SCRIPT.format(before="", imports=imports))
    (anew,), found = run(cold, 1)
    results, printed = run(project, 2)
    assert servers(project) == 1
    assert printed == 2 * found
    assert "(False, False, False, False)" in found[0]
    assert losses_of(anew) == losses_of(results[0]) == losses_of(results[1])
    assert anew.startup_seconds is not None
    assert all(one.startup_seconds is not None and one.startup_seconds < anew.startup_seconds / 3 for one in results)


@pytest.mark.parametrize(
    "before",
    [
        "import os; os.environ['OMP_NUM_THREADS'] = '3'",
        pytest.param("import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])", marks=pytest.mark.slow),
    ],
)
def test_a_script_that_changes_its_process_first_is_started_cold(project: Project, cold: Project, before: str) -> None:
    if "affinity" in before and len(os.sched_getaffinity(0)) < 2:
        pytest.skip("this process has one CPU")
    project.write(SCRIPT.format(before=before, imports=""))
    found = run(cold, 1)[1]
    assert run(project, 2)[1] == 2 * found
    assert servers(project) == 0


def test_what_torch_does_not_read_may_be_set_before_it(project: Project) -> None:
    project.write(SCRIPT.format(before="import os; os.environ['LD_LIBRARY_PATH'] = '/nowhere'", imports=""))
    run(project, 2)
    assert servers(project) == 1


@pytest.mark.slow
def test_a_setting_that_torch_reads_later_is_not_missed(project: Project) -> None:
    later = "import torch, os; os.environ['TORCH_COMPILE_DISABLE'] = '1'; import torch._dynamo"
    disabled = "    print('SAW', torch._dynamo.config.disable)\n"
    project.write(SCRIPT.format(before="", imports=later) + disabled)
    printed = run(project, 2)[1]
    assert {line for line in printed if "(" not in line} == {"SAW True"}
    assert servers(project) == 0


def test_a_server_has_the_malloc_library_that_its_trials_ask_for(project: Project) -> None:
    project.write(SCRIPT.format(before="", imports="import os; print('MALLOC', os.environ['MALLOC_TRIM_THRESHOLD_'])"))
    tuned = BASELINE.replace(host_allocator="glibc-tuned")
    for _ in range(3):
        assert losses_of(project.run("train.py", config=tuned))
        assert "MALLOC 1073741824" in project.log()
    assert servers(project) == 1


def test_a_script_that_fails_before_its_import_fails_alike(project: Project) -> None:
    project.write("import sys\nassert 'torch' not in sys.modules\nraise ValueError('no such dataset')\n")
    first, *others = (project.run("train.py") for _ in range(3))
    assert "no such dataset" in first.error
    for one in others:
        assert (one.status, one.cause, one.error) == (first.status, first.cause, first.error)


def test_what_fails_only_when_it_is_forked_is_started_anew_from_then_on(project: Project) -> None:
    forked = "assert b'forkserver' not in open(f'/proc/{os.getppid()}/cmdline', 'rb').read()"
    project.write(SCRIPT.format(before="import os", imports=forked))
    results, _ = run(project, 3)
    assert losses_of(results[0]) == losses_of(results[1]) == losses_of(results[2])
    assert servers(project) == 0


@pytest.mark.slow
def test_both_of_a_pair_are_forked_or_neither(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    if not project.world.runner.takes_turns():
        pytest.skip("the file system of this folder has no named pipes")
    parent = "import os; print('SAW', 'forkserver' in open(f'/proc/{os.getppid()}/cmdline').read(), flush=True)"
    project.write(SCRIPT.format(before=parent, imports=""))
    forked = []
    for other in (BASELINE, BASELINE.replace(host_allocator="glibc-tuned")):
        pair = [project.make_trial("train.py", config=config, purpose="measure") for config in (BASELINE, other)]
        results = project.world.runner.run_in_turns(*pair)
        assert all(one.measurement is not None for one in results)
        forked.append(["SAW True" in project.world.log(spec.number) for spec in pair])
        monkeypatch.setattr(warm_servers, "_has_memory", lambda: False)
    assert forked == [[True, True], [False, False]]


KILLING = """
import os
import signal
from pathlib import Path

if os.path.exists("../kill") and b"forkserver" in Path(f"/proc/{os.getppid()}/cmdline").read_bytes():
    os.kill(os.getppid(), signal.SIGKILL)
"""


def test_a_trial_whose_server_dies_is_started_cold(project: Project) -> None:
    project.write(SCRIPT.format(before=KILLING, imports=""))
    results, _ = run(project, 2)
    assert servers(project) == 1
    (project.folder.parent / "kill").touch()
    assert losses_of(run(project, 1)[0][0]) == losses_of(results[0])
    assert servers(project) == 0
    (project.folder.parent / "kill").unlink()
    assert losses_of(run(project, 1)[0][0]) == losses_of(results[0])
    assert servers(project) == 1


def test_a_file_beside_the_script_is_not_taken_for_what_the_server_has_imported(tmp_path: Path) -> None:
    (tmp_path / "helper.py").touch()
    wanted = ProcessKind(python=(sys.executable,), cwd=str(tmp_path), beside=tmp_path)
    servers = Servers(lambda _pid: None, lambda: False, Starts())
    servers._servers[wanted] = SimpleNamespace(  # type: ignore[assignment]
        modules=frozenset({"helper"}), await_ready=lambda _should_stop: None, close=lambda: None, is_alive=lambda: True
    )
    assert servers.start(wanted, tmp_path, 1) is None
    assert not servers.prepare(wanted)
