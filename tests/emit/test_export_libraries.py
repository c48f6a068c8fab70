"""Exported settings in the hands of the real libraries: parsed, constructed, and a tiny training run with them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from exported_source import ask, read_call

from autotune.emit.export import EXPORTERS, Export
from autotune.records import TrainConfig

BASELINE = TrainConfig(micro_batch_size=8)
TUNED = BASELINE.replace(
    micro_batch_size=4,
    gradient_accumulation_steps=2,
    precision="bf16",
    optimizer_implementation="fused",
    num_workers=1,
    prefetch_factor=3,
    persistent_workers=True,
    num_threads=1,
    cudnn_benchmark=True,
)
"""What a CPU can do, and each tool expresses in a way of its own."""


def export(to: str, config: TrainConfig = TUNED, **changes: Any) -> Export:
    return EXPORTERS[to](ask(config, BASELINE, **changes))


def require(package: str) -> None:
    """Skip without a package; it is imported in no process but the program's."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def run_python(source: str, folder: Path, *words: str, start: tuple[str, ...] = (), seconds: int = 240) -> Any:
    """Run a program in a process of its own and return the JSON of its last line."""
    (folder / "program.py").write_text(source)
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "TRANSFORMERS_VERBOSITY": "error", "TMPDIR": str(folder)}
    done = subprocess.run(
        [*(start or (sys.executable,)), "program.py", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


# ---- transformers

HF_PROGRAM = """
import json, sys
import torch
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainerCallback, TrainingArguments

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)
    def forward(self, x, labels):
        seen.append([len(x), torch.is_autocast_enabled("cpu")])
        return {"loss": (self.linear(x) - labels).square().mean()}

seen = []
parser = HfArgumentParser(TrainingArguments)
if sys.argv[1].endswith(".json"):
    (arguments,) = parser.parse_json_file(sys.argv[1])
else:
    (arguments,) = parser.parse_args_into_dataclasses()
arguments.max_steps, arguments.report_to = 3, []
arguments.save_strategy = "no"
data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(64)]
trainer = Trainer(model=Model(), args=arguments, train_dataset=data)
trainer.train()
loader, group = trainer.get_train_dataloader(), trainer.optimizer.param_groups[0]
print(json.dumps({
    "steps": trainer.state.global_step, "seen": seen, "workers": loader.num_workers, "fused": group.get("fused"),
    "prefetch": loader.prefetch_factor, "persistent": loader.persistent_workers,
}))
"""
HF_RAN = {
    "steps": 3,
    "seen": [[4, True]] * 6,
    "workers": 1,
    "fused": True,
    "prefetch": 3,
    "persistent": True,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["hf", "hf-flags"])
def test_a_trainer_runs_from_the_file_and_from_the_flags(form: str, tmp_path: Path) -> None:
    require("transformers")
    made = export(form)
    (tmp_path / made.filename).write_text(made.text)
    words = [made.filename] if form == "hf" else made.text.split()
    assert run_python(HF_PROGRAM, tmp_path, *words) == HF_RAN


def test_training_arguments_have_every_field_that_is_written() -> None:
    """By the source that is installed, which takes no seconds to import."""
    require("transformers")
    from autotune.emit.export.hf import _read_field_names

    known = _read_field_names()
    assert known
    every = TUNED.replace(
        activation_checkpointing="full", compile_mode="default", matmul_precision="high", pin_memory=True
    )
    written = json.loads(export("hf", every.replace(non_blocking=True)).text)
    assert written.keys() <= known
    assert written.keys() >= {"use_cpu", "optim", "tf32", "activation_checkpointing", "accelerator_config"}


def test_products_of_a_cpu_are_no_argument_of_a_trainer() -> None:
    made = export("hf", BASELINE.replace(matmul_precision="medium"))
    assert "tf32" not in made.text
    assert made.unmapped["matmul_precision"].startswith('torch.set_float32_matmul_precision("medium")')


# ---- Lightning

LIGHTNING_PROGRAM = """
import json, sys
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.seen = []
    def training_step(self, batch, index):
        self.seen.append([len(batch[0]), torch.is_autocast_enabled("cpu")])
        return self.linear(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), **json.loads(sys.argv[2]))

class Data(lightning.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(64, 4)), **json.loads(sys.argv[3]))

own = {"max_steps": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
       "enable_progress_bar": False, "enable_model_summary": False}
if sys.argv[1] == "cli":
    from lightning.pytorch.cli import LightningCLI
    arguments = ["fit", "--config", "tuned.yaml", *(f"--trainer.{name}={value}" for name, value in own.items())]
    trainer = LightningCLI(Module, Data, args=arguments, save_config_callback=None).trainer
else:
    import yaml
    trainer = lightning.Trainer(**own, **yaml.safe_load(open("tuned.yaml"))["trainer"])
    trainer.fit(Module(), Data())
loader, group = trainer.train_dataloader, trainer.optimizers[0].param_groups[0]
print(json.dumps({
    "steps": trainer.global_step, "seen": trainer.lightning_module.seen, "fused": group["fused"],
    "benchmark": torch.backends.cudnn.benchmark, "workers": loader.num_workers, "prefetch": loader.prefetch_factor,
}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["cli", "trainer"])
def test_lightning_runs_from_the_file(way: str, tmp_path: Path) -> None:
    require("lightning")
    if way == "cli":
        require("jsonargparse")
    made = export("lightning")
    (tmp_path / made.filename).write_text(made.text)
    optimizer, loader = (read_call(made.unmapped[name])[1] for name in ("optimizer_implementation", "num_workers"))
    assert run_python(LIGHTNING_PROGRAM, tmp_path, way, json.dumps(optimizer), json.dumps(loader)) == {
        "steps": 3,
        "seen": [[4, True]] * 6,
        "fused": True,
        "benchmark": True,
        "workers": 1,
        "prefetch": 3,
    }


# ---- Accelerate

ACCELERATE_PROGRAM = """
import json, sys
import accelerate, torch
from torch.utils.data import DataLoader, TensorDataset

accelerator = {accelerator}
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), **json.loads(sys.argv[1]))
loader = DataLoader(TensorDataset(torch.randn(24, 4)), **json.loads(sys.argv[2]))
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
seen, steps = [], 0
for (x,) in loader:
    with accelerator.accumulate(model):
        with accelerator.autocast():
            seen.append([len(x), torch.is_autocast_enabled("cpu")])
            loss = model(x).float().square().mean()
        accelerator.backward(loss)
        optimizer.step()
        steps += accelerator.sync_gradients
        optimizer.zero_grad()
print(json.dumps({{
    "steps": steps, "seen": seen, "precision": accelerator.mixed_precision, "workers": loader.num_workers,
    "compiles": accelerator.state.dynamo_plugin.backend.value, "threads": torch.get_num_threads(),
}}))
"""


@pytest.mark.slow
def test_accelerate_launches_with_the_file(tmp_path: Path) -> None:
    require("accelerate")
    made = export("accelerate")
    (tmp_path / made.filename).write_text(made.text)
    line = made.unmapped["gradient_accumulation_steps"].replace("..., ", "")
    optimizer, loader = (read_call(made.unmapped[name])[1] for name in ("optimizer_implementation", "num_workers"))
    source = ACCELERATE_PROGRAM.format(accelerator=line)
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--config_file", made.filename)
    assert run_python(source, tmp_path, json.dumps(optimizer), json.dumps(loader), start=launch) == {
        "steps": 3,
        "seen": [[4, True]] * 6,
        "precision": "bf16",
        "workers": 1,
        "compiles": "NO",
        "threads": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
def test_accelerate_reads_every_key(mode: Any, tmp_path: Path) -> None:
    require("accelerate")
    made = export("accelerate", TUNED.replace(compile_mode=mode))
    (tmp_path / made.filename).write_text(made.text)
    source = """
import json
from accelerate.commands.config.config_args import load_config_from_file
read = load_config_from_file("accelerate.yaml")
print(json.dumps({"precision": read.mixed_precision, "dynamo": read.dynamo_config}))
"""
    read = run_python(source, tmp_path)
    assert read["precision"] == "bf16"
    assert read["dynamo"]["dynamo_mode"] == mode


# ---- DeepSpeed

DEEPSPEED_KEYS = {
    "train_micro_batch_size_per_gpu": int,
    "gradient_accumulation_steps": int,
    "torch_autocast": {"enabled": bool, "dtype": str, "lower_precision_safe_modules": list},
}
"""Those of deepspeed.ai/docs/config-json that a setting of ours could be, with their types."""


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_keys_are_those_of_its_documentation(precision: Any) -> None:
    made = json.loads(EXPORTERS["deepspeed"](ask(TUNED.replace(precision=precision), TUNED)).text)
    del made["_comment"]
    for name, value in made.items():
        known = DEEPSPEED_KEYS[name]
        if isinstance(known, dict):
            assert all(isinstance(inner, known[key]) for key, inner in value.items())
        else:
            assert isinstance(value, known)


@pytest.mark.slow
def test_deepspeed_reads_the_file(tmp_path: Path) -> None:
    require("deepspeed")
    made = export("deepspeed")
    (tmp_path / made.filename).write_text(made.text)
    source = """
import json
from deepspeed.runtime.config import DeepSpeedConfig
read = DeepSpeedConfig("deepspeed.json")
print()
print(json.dumps([read.train_batch_size, read.torch_autocast_enabled, str(read.torch_autocast_dtype)]))
"""
    assert run_python(source, tmp_path) == [8, True, "torch.bfloat16"]


# ---- the environment

ENVIRONMENT_PROGRAM = """
import json, os, torch
print(json.dumps([torch.get_num_threads(), os.environ["MALLOC_TRIM_THRESHOLD_"]]))
"""


def test_a_process_has_what_the_sourced_file_sets(tmp_path: Path) -> None:
    made = export("env", TUNED.replace(host_allocator="glibc-tuned"))
    (tmp_path / made.filename).write_text(made.text)
    start = ("sh", "-ec", f'. ./tuned.env; exec "{sys.executable}" "$@"', "sh")
    assert run_python(ENVIRONMENT_PROGRAM, tmp_path, start=start) == [1, "1073741824"]
