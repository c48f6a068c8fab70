"""What this process runs in: a container, a batch job, a virtual machine. Files and environment in, words out.

The words are for a reader and for the records others will see: no name of a host, a user, a job or a folder is in
them.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from autotune.machine.cpus import read_cpu_fields, read_cpu_flags
from autotune.machine.procfs import read_text

_CONTAINER_FILES = {
    "a Docker container": ".dockerenv",
    "a Podman container": "run/.containerenv",
    "an Apptainer container": ".singularity.d",
}
_KUBERNETES_FOLDER = "var/run/secrets/kubernetes.io/serviceaccount"


def read_surroundings(root: Path) -> tuple[str, ...]:
    """Return what this process runs in, outermost last; empty on a plain machine.

    Source: podman-run(1) (`/run/.containerenv`), Kubernetes "Accessing the API from a Pod", the output variables of
    sbatch(1), bsub(1) and qsub(1B). The `hypervisor` flag is CPUID leaf 1, ECX bit 31.

    Args:
        root: where the file system starts.
    """
    found = [name for name, path in _CONTAINER_FILES.items() if _exists(root / path)]
    if os.environ.get("KUBERNETES_SERVICE_HOST") or _exists(root / _KUBERNETES_FOLDER):
        found.append("a Kubernetes pod")
    if os.environ.get("SLURM_JOB_ID"):
        found.append(_describe_slurm())
    found += [
        f"{name} job"
        for name, variable in (("an LSF", "LSB_JOBID"), ("a PBS", "PBS_JOBID"))
        if os.environ.get(variable)
    ]
    if "microsoft" in (read_text(root / "proc/sys/kernel/osrelease") or "").lower():
        found.append("the Windows Subsystem for Linux")
    elif "hypervisor" in (read_cpu_flags(read_cpu_fields(root)) or ()):
        found.append("a virtual machine")
    return tuple(found)


def _describe_slurm() -> str:
    """Return the job and the CPUs it was granted, where Slurm says so."""
    per_task = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if re.fullmatch("[0-9]+", per_task):
        return f"a Slurm job with {_count_cpus(per_task)} per task"
    # `16` or `16(x2)`; nodes that differ are `16,8`, which does not tell which of them this one is.
    per_node = re.fullmatch(r"([0-9]+)(\(x[0-9]+\))?", os.environ.get("SLURM_JOB_CPUS_PER_NODE", ""))
    return f"a Slurm job with {_count_cpus(per_node[1])} per node" if per_node else "a Slurm job"


def _count_cpus(count: str) -> str:
    return f"{int(count)} CPU{'s' * (int(count) != 1)}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False
