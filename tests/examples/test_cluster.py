"""The files for Slurm and Kubernetes: checked by their linters and models; the job run with a Slurm of two scripts."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import autotune

CLUSTER = Path(autotune.__file__).parents[1] / "examples" / "cluster"
SBATCH, MANIFEST = CLUSTER / "train.sbatch", CLUSTER / "pytorchjob.yaml"
WORKLOADS = Path(__file__).parents[1] / "distributed" / "shared_workloads.py"

SBATCH_OPTIONS = {
    "account", "acctg-freq", "array", "batch", "begin", "chdir", "clusters", "comment", "constraint", "container",
    "contiguous", "core-spec", "cores-per-socket", "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline",
    "delay-boot", "dependency", "distribution", "error", "exclude", "exclusive", "export", "export-file",
    "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket",
    "gpus-per-task", "gres", "gres-flags", "hint", "hold", "input", "job-name", "kill-on-invalid-dep", "licenses",
    "mail-type", "mail-user", "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice",
    "no-kill", "no-requeue", "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "open-mode", "output", "overcommit", "oversubscribe", "parsable",
    "partition", "power", "prefer", "priority", "profile", "propagate", "qos", "quiet", "reboot", "requeue",
    "reservation", "signal", "sockets-per-node", "spread-job", "switches", "thread-spec", "threads-per-core", "time",
    "time-min", "tmp", "uid", "use-min-nodes", "verbose", "wait", "wait-all-nodes", "wckey",
}  # fmt: skip
"""Of sbatch's manual page, Slurm 22.05."""


def run_linter(name: str, *words: str) -> str:
    linter = Path(sys.executable).with_name(name)
    done = subprocess.run([linter, *words], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_the_batch_script_is_clean_bash() -> None:
    assert run_linter("shellcheck", "--shell=bash", str(SBATCH)) == ""


def test_the_options_of_the_batch_script_exist() -> None:
    head = SBATCH.read_text().partition("\nset -euo")[0]
    options = re.findall(r"^#SBATCH --([a-z-]+)(?:=\S+)?$", head, re.MULTILINE)
    assert len(options) == head.count("\n#SBATCH")
    assert set(options) <= SBATCH_OPTIONS
    assert len(set(options)) == len(options)


def test_the_manifest_is_clean_yaml() -> None:
    rules = "{extends: default, rules: {line-length: {max: 120}}}"
    assert run_linter("yamllint", "--strict", "-d", rules, str(MANIFEST)) == ""


MODELS = ("kubeflow.training.models", "kubernetes.client.models")


def find_misfits(value: Any, kind: str, place: str) -> list[str]:
    """Return what does not fit a type of Kubernetes' own models: unknown fields, and values of another type."""
    if inner := re.fullmatch(r"list\[(.+)\]", kind):
        if not isinstance(value, list):
            return [f"{place}: no list"]
        return [one for index, part in enumerate(value) for one in find_misfits(part, inner[1], f"{place}[{index}]")]
    if inner := re.fullmatch(r"dict\(str, (.+)\)", kind):
        if not isinstance(value, dict):
            return [f"{place}: no mapping"]
        return [one for key, part in value.items() for one in find_misfits(part, inner[1], f"{place}.{key}")]
    plain = {"str": str, "int": int, "bool": bool, "float": (int, float), "object": object}
    if kind in plain:
        return [] if isinstance(value, plain[kind]) else [f"{place}: {value!r} is no {kind}"]
    found = [getattr(importlib.import_module(module), kind, None) for module in MODELS]
    model = next(one for one in found if one is not None)
    if not isinstance(value, dict):
        return [f"{place}: no {kind}"]
    fields = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    unknown = [f"{place}.{name}: not a field of {kind}" for name in value.keys() - fields.keys()]
    known = value.keys() & fields.keys()
    return unknown + [
        one for name in sorted(known) for one in find_misfits(value[name], fields[name], f"{place}.{name}")
    ]


@pytest.mark.slow
def test_the_manifest_fits_the_models_of_kubernetes() -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert find_misfits(manifest, "KubeflowOrgV1PyTorchJob", "job") == []
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    assert replicas.keys() == {"Master", "Worker"}
    assert {one["restartPolicy"] for one in replicas.values()} <= {"Always", "OnFailure", "Never", "ExitCode"}
    pods = sum(one["replicas"] for one in replicas.values())
    (container,) = replicas["Worker"]["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"  # the operator looks for it
    assert f"--nnodes {pods} " in container["args"][0]
    assert f"{manifest['metadata']['name']}-master-0:" in container["args"][0]
    broken = {**manifest, "spec": {**manifest["spec"], "replica": 1, "runPolicy": {"backoffLimit": "6"}}}
    assert sorted(find_misfits(broken, "KubeflowOrgV1PyTorchJob", "job")) == [
        "job.spec.replica: not a field of KubeflowOrgV1PyTorchJobSpec",
        "job.spec.runPolicy.backoffLimit: '6' is no int",
    ]


@pytest.mark.slow
def test_the_pods_command_is_clean_bash(tmp_path: Path) -> None:
    manifest = yaml.safe_load(MANIFEST.read_text())
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    assert container["command"] == ["/bin/bash", "-c"]
    (tmp_path / "command.sh").write_text(container["args"][0])
    assert run_linter("shellcheck", "--shell=bash", str(tmp_path / "command.sh")) == ""


SRUN = """#!/bin/bash
# Two nodes: both here.
[[ "$1" == --kill-on-bad-exit=0 ]] && shift
for node in 0 1; do SLURM_NODEID=$node "$@" & echo $! >> pids; done
worst=0
for job in $(jobs -p); do wait "$job" || worst=$?; done
exit "$worst"
"""
SCONTROL = """#!/bin/bash
if [[ "$1" == show ]]; then echo 127.0.0.1; echo other; else echo "$@" >> requeued; fi
"""


def start_job(folder: Path, job: int) -> subprocess.Popen[str]:
    path = f"{folder}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "n[0-1]"}
    environment = {**os.environ, **slurm, "SLURM_JOB_NUM_NODES": "2", "PATH": path}
    return subprocess.Popen(
        ["bash", folder / "train.sbatch"],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
def test_the_job_is_queued_again_after_its_signal_and_goes_on(tmp_path: Path) -> None:
    shutil.copy(WORKLOADS, tmp_path / "train.py")
    (tmp_path / "bin").mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL}
    programs["autotune"] = f'#!/bin/bash\nexec "{sys.executable}" -P -m autotune "$@"\n'
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    text = SBATCH.read_text()
    for ours, here in (("gpu ", "1 "), ("train.py:workload", "train.py:slow"), ("--epochs 90", "--epochs 12")):
        assert ours in text
        text = text.replace(ours, here)
    (tmp_path / "train.sbatch").write_text(text.replace("--profile best.json", "--seed 3"))
    run, job = tmp_path / "runs" / "job-4711", start_job(tmp_path, 4711)
    deadline = time.monotonic() + 120
    while job.poll() is None and not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.poll() is None, job.communicate()
    for pid in (tmp_path / "pids").read_text().split():
        os.kill(int(pid), signal.SIGUSR1)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 128 + signal.SIGUSR1, said
    assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
    job = start_job(tmp_path, 4711)
    said, _ = job.communicate(timeout=240)
    assert job.returncode == 0, said
    assert (run / "summary.json").exists()
