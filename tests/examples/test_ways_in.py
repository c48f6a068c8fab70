"""The smallest ways in: scripts that know nothing of autotune, and the commands that their READMEs tell to type."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

from autotune.cli import app
from autotune.records import Profile, TrainConfig

EXAMPLES = Path(__file__).parents[2] / "examples"
BUDGET = "5m"
"""Each launch imports a framework first; a busy machine needs twice what a quiet one does."""


@dataclass(frozen=True)
class Way:
    """What an example takes and gives.

    Attributes:
        packages: it imports.
        few_steps: flags that end it soon, the batch split in two.
        prints: its metric, as in its README.
        writes: what it leaves in its folder.
        search: words of the command to search with.
        exports: formats its README names.
    """

    packages: tuple[str, ...]
    few_steps: str
    prints: str
    writes: str
    search: str
    exports: tuple[str, ...] = ()


WAYS = {
    "plain_script": Way(
        packages=("sklearn",),
        few_steps="--epochs 2 --batch-size 64 --accum 2",
        prints=r'^\{"epoch": 2, "accuracy": 0\.[0-9]+\}$',
        writes="digits.pt",
        search="--epochs 1000 --batch-size {micro_batch_size} --accum {gradient_accumulation_steps}",
    ),
    "hf_trainer": Way(
        packages=("accelerate", "transformers"),
        few_steps="--max_steps 4 --eval_steps 2 --per_device_train_batch_size 16 --gradient_accumulation_steps 2",
        prints=r"'eval_loss': '[0-9.]+'",
        writes="trainer_output/model.safetensors",
        search="--max_steps 2000 --per_device_train_batch_size {micro_batch_size} "
        "--gradient_accumulation_steps {gradient_accumulation_steps}",
        exports=("hf",),
    ),
    "lightning": Way(
        packages=("lightning", "sklearn"),
        few_steps="--epochs 2 --batch_size 64 --accumulate_grad_batches 2",
        prints=r'^\{"accuracy": 0\.[0-9]+\}$',
        writes="lightning_logs/version_0/checkpoints/epoch=1-step=22.ckpt",
        search="--epochs 1000 --batch_size {micro_batch_size} --accumulate_grad_batches {gradient_accumulation_steps}",
        exports=("lightning",),
    ),
}


def read_commands(name: str) -> list[list[str]]:
    """Return the words after `autotune` of each command in an example's README."""
    text = (EXAMPLES / name / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    typed = [shlex.split(line, comments=True) for line in lines]
    return [words[1:] for words in typed if words[:1] == ["autotune"]]


def find_flags(name: str) -> set[str]:
    """Return the flags of a script: those it adds by itself, and the fields of the Trainer's arguments."""
    source = (EXAMPLES / name / "train.py").read_text(encoding="utf-8")
    flags = set(re.findall(r'add_argument\("(--[\w-]+)"', source))
    if "HfArgumentParser(TrainingArguments)" in source:
        spec = importlib.util.find_spec("transformers")
        assert spec is not None
        assert spec.origin is not None
        fields = Path(spec.origin).with_name("training_args.py").read_text(encoding="utf-8")
        flags |= {f"--{field}" for field in re.findall(r"^    (\w+): ", fields, flags=re.MULTILINE)}
    return flags


def open_example(name: str, folder: Path) -> Path:
    """Return a copy of an example, or skip without the packages it needs."""
    for package in WAYS[name].packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    work = folder / name
    work.mkdir()
    shutil.copy(EXAMPLES / name / "train.py", work)
    return work


def run(folder: Path, *words: str, seconds: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", *words],
        cwd=folder,
        # `python` is found on PATH, and has to be the one that runs the tests.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.parametrize("name", WAYS)
def test_the_script_knows_nothing_of_autotune(name: str) -> None:
    source = (EXAMPLES / name / "train.py").read_text(encoding="utf-8")
    nodes = list(ast.walk(compile(source, "train.py", "exec", flags=ast.PyCF_ONLY_AST)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert "torch" in imported
    assert not [module for module in imported if module.partition(".")[0] == "autotune"]


@pytest.mark.parametrize("name", WAYS)
def test_the_readme_names_commands_flags_and_placeholders_that_exist(name: str) -> None:
    if name == "hf_trainer" and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    commands, known = read_commands(name), typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert {words[0] for words in commands} >= {"search", "train"}
    assert {words[words.index("--to") + 1] for words in commands if words[0] == "export"} == {*WAYS[name].exports}
    for words in commands:
        known[words[0]].make_context(words[0], words[1:])  # refuses options that it does not have
        script = words[words.index("--") + 1 :] if "--" in words else []
        assert {word for word in script if word.startswith("--")} <= find_flags(name)
        assert {field for word in script for field in re.findall(r"\{(\w+)\}", word)} <= {*TrainConfig.model_fields}
    assert set(re.findall(r"--[\w-]+", WAYS[name].search)) <= {word for words in commands for word in words}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n != "plain_script")) for n in WAYS])
def test_the_script_trains_prints_its_metric_and_saves(name: str, tmp_path: Path) -> None:
    work, way = open_example(name, tmp_path), WAYS[name]
    done = run(work, "train.py", *way.few_steps.split())
    assert done.returncode == 0, done.stderr
    assert re.search(way.prints, done.stdout, flags=re.MULTILINE)
    assert (work / way.writes).stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_it_is_probed_and_searched_and_its_folder_stays_as_it_was(name: str, tmp_path: Path) -> None:
    work, way = open_example(name, tmp_path), WAYS[name]
    script = ("--", "python", "train.py", *way.search.split())
    probed = run(work, "-m", "autotune", "probe", *script)
    assert probed.returncode == 0, probed.stderr
    searched = run(work, "-m", "autotune", "search", "--budget", BUDGET, "--max-drift", "2%", *script, seconds=400)
    assert searched.returncode == 0, searched.stderr
    assert sorted(path.name for path in work.iterdir()) == [".autotune", "best.json", "report.html", "train.py"]
    profile = Profile.load(work / "best.json")
    assert profile.config.effective_batch_size == profile.baseline_config.effective_batch_size in (32, 128)
    assert profile.config.precision != "fp16"  # none of the scripts scales its loss
    for tool in way.exports:
        exported = run(work, "-m", "autotune", "export", "--profile", "best.json", "--to", tool)
        assert exported.returncode == 0, exported.stderr
        if tool == "hf":
            assert isinstance(json.loads(exported.stdout), dict)
        else:
            assert re.search(r"^trainer:", exported.stdout, flags=re.MULTILINE)
