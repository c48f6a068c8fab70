"""`accelerate launch` and `deepspeed` as ways to start a script: what they come to, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UsageError
from autotune.targets.launch.accelerate import split_accelerate
from autotune.targets.launch.command import Launch, find_launch
from autotune.targets.launch.deepspeed import split_deepspeed
from autotune.targets.launch.machine import count_gpus, count_physical_cores

ASK_ACCELERATE = """
import json, os, sys
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
found = []
for words in json.loads(sys.argv[1]):
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    is_spread = (args.multi_gpu or args.use_fsdp) and not args.cpu
    env = prepare_multi_gpu_env(args) if is_spread else prepare_simple_launcher_cmd_env(args)[1]
    changed = {name: value for name, value in env.items() if os.environ.get(name) != value}
    found.append([changed, args.num_processes if is_spread else 1, args.training_script, args.training_script_args])
print(json.dumps(found))
"""
LINES = (
    "--cpu train.py --lr 1",
    "--cpu --mixed_precision bf16 --num_cpu_threads_per_process 3 train.py",
    "--num-processes=1 --mixed-precision bf16 --debug -q -m pkg.train --x",
    "--num_processes 1 --dynamo_backend inductor --dynamo_mode reduce-overhead --dynamo_use_dynamic train.py",
    "--multi_gpu --num_processes 2 --gpu_ids 1,3 --enable_cpu_affinity --main_process_port 0 train.py",
    "--multi_gpu --num_processes 4 --num_machines 1 --max_restarts 2 train.py --multi_gpu",
    "--config_file cpu.yaml train.py",
    "--config_file spread.yaml --mixed_precision no train.py",
    "--config_file spread.json train.py",
    "--use_fsdp --fsdp_version 2 --num_processes 2 --fsdp_offload_params true --main_process_port 0 train.py",
    "--config_file fsdp.yaml train.py",
    "--config_file fsdp.yaml --fsdp_state_dict_type FULL_STATE_DICT train.py",
    "--config_file dynamo.yaml --num_processes 1 train.py",
)
CONFIGS = {
    "cpu.yaml": "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\nmixed_precision: bf16\n",
    "spread.yaml": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nnum_machines: 1\n"
        "gpu_ids: all\nmixed_precision: fp16\nmachine_rank: 0\nmain_process_port: 0\nuse_cpu: false\ndebug: false\n"
    ),
    "spread.json": '{"distributed_type": "MULTI_GPU", "num_processes": 3, "main_process_port": 0, "debug": true}',
    "fsdp.yaml": (
        "distributed_type: FSDP\nnum_processes: 2\nmain_process_port: 0\nmixed_precision: bf16\nfsdp_config:\n"
        "  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_reshard_after_forward: false\n"
        "  fsdp_transformer_layer_cls_to_wrap: Block\n  fsdp_state_dict_type: SHARDED_STATE_DICT\n"
    ),
    "dynamo.yaml": "distributed_type: 'NO'\ndynamo_config:\n  dynamo_backend: INDUCTOR\n  dynamo_use_fullgraph: true\n",
}
needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in CONFIGS.items():
        (tmp_path / name).write_text(content)
    return tmp_path


@pytest.mark.slow
@needs_accelerate
def test_the_variables_are_those_of_the_installed_accelerate(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "OMP_"))}
    environment["HF_HOME"] = str(folder / "home")
    asked = [sys.executable, "-c", ASK_ACCELERATE, json.dumps([shlex.split(line) for line in LINES])]
    told = subprocess.run(asked, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    for line, (variables, processes, name, arguments) in zip(LINES, json.loads(told.stdout), strict=True):
        start = split_accelerate(shlex.split(line), folder=folder, environment=environment)
        assert start.environment == variables, line
        assert start.processes == processes, line
        assert (start.script.name, list(start.script.arguments)) == (name, arguments), line


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("--multi_gpu --num_processes 2 train.py", ("--standalone", "--nproc-per-node=2")),
        (
            "--multi_gpu --num_processes=4 --max_restarts 2 --tee=3 train.py",
            ("--standalone", "--nproc-per-node=4", "--max-restarts=2", "--tee=3"),
        ),
        ("--config_file spread.yaml train.py", ("--standalone", "--nproc-per-node=2")),
        ("--config_file spread.yaml --num_processes 3 train.py", ("--standalone", "--nproc-per-node=3")),
        ("--cpu train.py", ()),
    ],
)
def test_accelerate_launch_is_torchrun_or_python(folder: Path, line: str, options: tuple[str, ...]) -> None:
    start = split_accelerate(shlex.split(line), folder=folder, environment={"HF_HOME": str(folder)})
    assert start.script.options == options
    assert (start.script.kind, start.script.name) == ("file", "train.py")


def test_its_own_configuration_file_counts_unless_cpu_is_asked_for(folder: Path) -> None:
    environment = {"HF_HOME": str(folder / "home")}
    (folder / "home" / "accelerate").mkdir(parents=True)
    (folder / "home" / "accelerate" / "default_config.yaml").write_text(CONFIGS["spread.yaml"])
    start = split_accelerate(["train.py"], folder=folder, environment=environment)
    assert (start.processes, start.environment["ACCELERATE_MIXED_PRECISION"]) == (2, "fp16")
    start = split_accelerate(["--cpu", "train.py"], folder=folder, environment=environment)
    assert (start.processes, start.environment["ACCELERATE_MIXED_PRECISION"]) == (1, "no")


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--tpu train.py", "'--tpu' is not supported: a TPU", "torchrun"),
        ("--use_deepspeed train.py", "its DeepSpeed plugin", "torchrun"),
        ("--zero_stage 2 train.py", "of such a plugin", "torchrun"),
        ("--use_fsdp train.py", "is told to start 0 processes", "--num_processes 2"),
        ("--num_machines 2 --num_processes 4 --multi_gpu train.py", "on 2 machines is more than", "one machine"),
        ("--mixed_precision fp8 --num_processes 1 train.py", "fp8 is not supported", "fp16 or bf16"),
        ("--num_processes 2 train.py", "starts one process here, and not the 2", "--multi_gpu --num_processes 2"),
        ("--num_processes two train.py", "'two' is no whole number", "--num_processes 2"),
        ("--multi_gpu train.py", "is told to start 0 processes", "--num_processes 2"),
        ("--cpu --multi_gpu --num_processes 2 train.py", "--cpu or several", "Accelerator(cpu=True)"),
        ("--no_python train", "autotune runs the script with python", "torchrun"),
        ("--mpirun_hostfile f train.py", "MPI", "torchrun"),
        ("--nproc 2 train.py", "'--nproc' is not one that autotune knows", "torchrun"),
        ("--mixed_precisio fp16 train.py", "is not one that autotune knows", "--mixed_precision"),
        ("--cpu=yes train.py", "takes no value", "--cpu"),
        ("--mixed_precision", "needs a value", "VALUE"),
        ("--cpu", "no script", "train.py"),
        ("--config_file none.yaml train.py", "none.yaml: No such file", "accelerate config"),
        ("--config_file broken.yaml train.py", "is no configuration file", "accelerate config"),
        ("--config_file deepspeed.yaml train.py", "DeepSpeed plugin is not supported", "torchrun"),
        ("--config_file sage.yaml train.py", "it trains elsewhere", "torchrun"),
        ("--config_file slurm.yaml train.py", "does not say how many processes", "--num_processes"),
    ],
)  # fmt: skip
def test_what_accelerate_starts_otherwise_is_refused(folder: Path, line: str, message: str, hint: str) -> None:
    (folder / "broken.yaml").write_text("a: [1\n")
    (folder / "deepspeed.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 2\n")
    (folder / "sage.yaml").write_text("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'\n")
    (folder / "slurm.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: -1\n")
    with pytest.raises(UsageError) as caught:
        split_accelerate(
            shlex.split(line), folder=folder, environment={"HF_HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
        )
    assert message in caught.value.message
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("line", "size", "devices", "passes"),
    [
        ("--num_gpus 2 train.py --x", 2, "0,1", True),
        ("--num_gpus=1 --no_local_rank train.py --x", 1, "0", False),
        ("--include localhost:1,3 --master_port 1234 train.py --x", 2, "1,3", True),
        ("-i localhost:2 train.py --x", 1, "2", True),
    ],
)
def test_deepspeed_is_torchrun(line: str, size: int, devices: str, passes: bool) -> None:
    found = split_deepspeed(shlex.split(line), environment={}, hostfile=Path("/no/hostfile"))
    assert found.script.options == ("--standalone", f"--nproc-per-node={size}")
    assert (found.script.name, found.script.arguments) == ("train.py", ("--x",))
    assert (found.environment, found.passes_local_rank) == ({"CUDA_VISIBLE_DEVICES": devices}, passes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--hostfile hosts train.py", "other machines"),
        ("-H hosts train.py", "other machines"),
        ("--num_nodes 2 --num_gpus 1 train.py", "--num_nodes 2 is more than this machine"),
        ("--include worker-0:1 train.py", "'worker-0:1' is not supported"),
        ("--include localhost:0 --num_gpus 1 train.py", "is not supported"),
        ("--autotuning run train.py", "trials of its own"),
        ("--bind_cores_to_rank train.py", "numactl"),
        ("train.py", "finds no GPU here"),
    ],
)
def test_what_deepspeed_starts_otherwise_is_refused(line: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_deepspeed(shlex.split(line), environment={"CUDA_VISIBLE_DEVICES": ""}, hostfile=Path("/no/hostfile"))


def test_a_hostfile_of_deepspeed_is_other_machines(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-0 slots=8\n")
    with pytest.raises(UsageError, match="on the machines of"):
        split_deepspeed(["--num_gpus", "2", "train.py"], environment={}, hostfile=tmp_path / "hostfile")


def find(folder: Path, line: str) -> Launch:
    for name in ("accelerate", "accelerate-launch", "deepspeed", "python3"):
        program = folder / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(f"#!{folder}/bin/python3\n")
        program.chmod(0o755)
    (folder / "train.py").touch()
    return find_launch(shlex.split(line), folder=folder, path=str(folder / "bin"))


@pytest.mark.parametrize(
    "launcher",
    [
        "accelerate launch",
        "accelerate-launch",
        "python3 -m accelerate.commands.launch",
        "python3 -m accelerate.commands.accelerate_cli launch",
        "bin/accelerate launch",
    ],
)
def test_a_script_is_found_behind_accelerate(folder: Path, launcher: str) -> None:
    found = find(folder, f"{launcher} --multi_gpu --num_processes 2 --mixed_precision bf16 train.py --lr 1")
    assert (found.interpreter, found.kind, found.name) == (f"{folder}/bin/python3", "file", "train.py")
    assert (found.arguments, found.launcher_options) == (("--lr", "1"), ("--standalone", "--nproc-per-node=2"))
    assert dict(found.environment)["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert find(folder, f"{launcher} --cpu train.py").launcher_options is None


@pytest.mark.parametrize("launcher", ["deepspeed", "python3 -m deepspeed.launcher.runner"])
def test_a_script_is_found_behind_deepspeed(folder: Path, launcher: str) -> None:
    found = find(folder, f"{launcher} --num_gpus 2 train.py --lr 1")
    assert (found.name, found.launcher_options) == ("train.py", ("--standalone", "--nproc-per-node=2"))
    assert (found.passes_local_rank, found.interpreter_options) == (True, ("-u",))


def test_another_command_of_accelerate_trains_nothing(folder: Path) -> None:
    with pytest.raises(UsageError, match="accelerate config trains nothing"):
        find(folder, "accelerate config")


def test_what_launchers_look_up_is_read_from_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()
    assert count_gpus({}, root=tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "1"}, root=tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, root=tmp_path) == 0
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        file = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list"
        file.parent.mkdir(parents=True)
        file.write_text(siblings)
    assert count_physical_cores(root=tmp_path) == 2
    assert count_physical_cores(root=tmp_path / "empty") == 1
