from __future__ import annotations

from pathlib import Path

import pytest
from fake_machine import write

from autotune.machine.environment import read_surroundings

VARIABLES = (
    *("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "SLURM_CPUS_PER_TASK", "SLURM_JOB_CPUS_PER_NODE"),
    *("LSB_JOBID", "PBS_JOBID"),
)
X86 = "processor : 0\nmodel name : x\nflags : fpu {}avx2\n"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, ()),
        ({"proc/cpuinfo": X86.format(""), "proc/sys/kernel/osrelease": "6.18.0-generic\n"}, ()),
        ({".dockerenv": ""}, ("a Docker container",)),
        ({"run/.containerenv": 'name="private"\n'}, ("a Podman container",)),
        ({".singularity.d/runscript": ""}, ("an Apptainer container",)),
        ({"var/run/secrets/kubernetes.io/serviceaccount/token": "secret"}, ("a Kubernetes pod",)),
        ({"proc/cpuinfo": X86.format("hypervisor ")}, ("a virtual machine",)),
        ({"proc/cpuinfo": "model name : hypervisor\nflags : avx2\n"}, ()),
        (
            {
                "proc/cpuinfo": X86.format("hypervisor "),
                "proc/sys/kernel/osrelease": "5.15.1-microsoft-standard-WSL2\n",
            },
            ("the Windows Subsystem for Linux",),
        ),
        ({"proc/sys/kernel/osrelease": "4.4.0-19041-Microsoft\n"}, ("the Windows Subsystem for Linux",)),
        (
            {".dockerenv": "", "proc/cpuinfo": X86.format("hypervisor ")},
            ("a Docker container", "a virtual machine"),
        ),
    ],
    ids=[
        *("nothing", "plain", "docker", "podman", "apptainer", "kubernetes", "virtual", "name only"),
        *("wsl 2", "wsl 1", "docker in a virtual machine"),
    ],
)
def test_files_that_tell(tmp_path: Path, files: dict[str, str], words: tuple[str, ...]) -> None:
    write(tmp_path, files)
    assert read_surroundings(tmp_path) == words


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"SLURM_JOB_ID": ""}, ()),
        ({"SLURM_CPUS_PER_TASK": "8"}, ()),
        ({"SLURM_JOB_ID": "4711"}, ("a Slurm job",)),
        ({"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8"}, ("a Slurm job with 8 CPUs per task",)),
        ({"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "1"}, ("a Slurm job with 1 CPU per task",)),
        (
            {"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_CPUS_PER_NODE": "64"},
            ("a Slurm job with 8 CPUs per task",),
        ),
        ({"SLURM_JOB_ID": "4711", "SLURM_JOB_CPUS_PER_NODE": "16"}, ("a Slurm job with 16 CPUs per node",)),
        ({"SLURM_JOB_ID": "4711", "SLURM_JOB_CPUS_PER_NODE": "16(x2)"}, ("a Slurm job with 16 CPUs per node",)),
        ({"SLURM_JOB_ID": "4711", "SLURM_JOB_CPUS_PER_NODE": "16,8"}, ("a Slurm job",)),
        ({"SLURM_JOB_ID": "4711", "SLURM_CPUS_PER_TASK": "node7"}, ("a Slurm job",)),
        ({"LSB_JOBID": "4711"}, ("an LSF job",)),
        ({"PBS_JOBID": "4711.host"}, ("a PBS job",)),
        (
            {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "SLURM_JOB_ID": "4711"},
            ("a Kubernetes pod", "a Slurm job"),
        ),
    ],
)
def test_variables_that_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], words: tuple[str, ...]
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = read_surroundings(tmp_path)
    assert found == words
    assert not any(private in sentence for sentence in found for private in ("4711", "10.0.0.1", "host", "node7"))


def test_a_path_that_may_not_be_looked_at_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_path: Path) -> bool:
        raise PermissionError

    monkeypatch.setattr(Path, "exists", refuse)
    assert read_surroundings(tmp_path) == ()
