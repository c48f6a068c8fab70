"""`autotune.hf` and `autotune.lightning`: a Trainer's parts as a workload, and training with the answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import require, run, run_lines, write_program
from record_factory import make_profile

from autotune.machine.hardware import read_hardware
from autotune.records import Evidence, Profile, TrainConfig

PROGRAMS = {"transformers": "hf_train.py", "lightning": "lightning_train.py"}
BUDGET = "4m"
"""Each launch imports a framework first; a busy machine needs twice what a quiet one does."""
BASELINE = TrainConfig(micro_batch_size=32)


def save_answer(folder: Path, config: TrainConfig, rate: float = 1.0) -> None:
    """Write an answer that was measured here at a rate."""
    evidence = Evidence(baseline_samples_per_second=rate, samples_per_second=rate)
    profile = make_profile(config=config, baseline_config=BASELINE, hardware=read_hardware(), evidence=evidence)
    profile.save(folder / "best.json")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "package"), [("autotune.hf", "transformers"), ("autotune.lightning", "lightning")])
def test_without_the_library_it_says_what_to_install(module: str, package: str, tmp_path: Path) -> None:
    source = f"import sys; sys.modules[{package!r}] = None\nimport {module}"
    done = run(tmp_path, "-c", source)
    assert f"{module} needs" in done.stderr
    source = f"import autotune, autotune.cli, sys; assert not {{'torch', {package!r}}} & sys.modules.keys()"
    assert run(tmp_path, "-c", source).returncode == 0


ASK_HF = """
import json, torch
import hf_train as own
import autotune.hf
from autotune.engine.loop import Training
from autotune.targets.workload import check_workload

loaded = check_workload(own.workload, label="x", fingerprint="y")
torch.manual_seed(0)
trainer = own.trainer
training = Training(loaded, loaded.baseline, device=torch.device("cpu"), seed=0)
rate = training.optimizer.param_groups[0]["lr"]
losses = [float(training.step().loss) for _ in range(60)]
trainer_optimizer, trainer_schedule = trainer.optimizer, trainer.lr_scheduler
after = training.optimizer.param_groups[0]["lr"]
with torch.no_grad():
    error = loaded.evaluate(training.model.eval(), torch.device("cpu"))
print(json.dumps([
    loaded.baseline.micro_batch_size, loaded.gradient_clip_norm, loaded.shuffle, type(training.optimizer).__name__,
    round(after / rate, 6), losses[-1] < losses[0], 0 < error["eval_loss"] < losses[0],
    trainer_optimizer is None and trainer_schedule is None,
]))
"""


@pytest.mark.slow
def test_a_trainers_parts_are_a_workload(tmp_path: Path) -> None:
    require("transformers")
    write_program("hf_train.py", tmp_path)
    # A linear schedule over 200 steps, of which 60 are taken.
    assert run_lines(tmp_path, ASK_HF) == [32, 1.0, True, "AdamW", 0.7, True, True, True]


ASK_TOKENS = """
import json, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
import autotune.hf
from autotune.engine.loop import Training
from autotune.targets.workload import check_workload

def build():
    return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=12, n_embd=8, n_layer=1, n_head=1, resid_pdrop=0.0,
                                      embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))

def make(index):
    tokens = torch.randint(16, (12,), generator=torch.Generator().manual_seed(index))
    return {"input_ids": tokens, "labels": torch.where(torch.arange(12) < 2 + index % 8, tokens, -100)}

data = [make(index) for index in range(64)]
gradients, losses = [], []
for micro, steps in ((16, 1), (4, 4)):
    arguments = TrainingArguments(per_device_train_batch_size=micro, gradient_accumulation_steps=steps, use_cpu=True,
                                  max_steps=3, max_grad_norm=0.0, optim="sgd", learning_rate=0.5, report_to=[])
    loaded = check_workload(autotune.hf.workload(Trainer(model_init=build, args=arguments, train_dataset=data)),
                            label="x", fingerprint="y")
    training = Training(loaded, loaded.baseline, device=torch.device("cpu"), seed=0)
    losses.append([float(training.step().loss) for _ in range(3)])
print(json.dumps(losses))
"""


@pytest.mark.slow
def test_a_split_batch_weighs_by_tokens_as_the_trainer_does(tmp_path: Path) -> None:
    require("transformers")
    whole, split = run_lines(tmp_path, ASK_TOKENS)
    assert split == pytest.approx(whole, rel=1e-5)


ASK_STEPS = """
import json, torch
import lightning
from autotune.lightning import TunedCallback

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        self.planned = self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)

data, found = torch.utils.data.TensorDataset(torch.randn(256, 4)), []
for size in (32, 8):
    module = Module()
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False,
                                callbacks=[TunedCallback("best.json")])
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=size))
    found.append([trainer.global_step, module.planned])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_accumulation_keeps_the_effective_batch_and_is_there_when_a_schedule_is_made(tmp_path: Path) -> None:
    require("lightning")
    save_answer(tmp_path, BASELINE.replace(micro_batch_size=8, gradient_accumulation_steps=4))
    # The loader gives what it did before the search, and then what the answer has.
    assert run_lines(tmp_path, ASK_STEPS) == [[8, 8], [8, 8]]


ASK_LIGHTNING = """
import json, torch
import lightning_train as own
import autotune.lightning
from autotune.engine.loop import Training
from autotune.targets.workload import check_workload

class Scheduled(own.Module):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        warmup = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0, 1)
        decay = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return [optimizer], [torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], [0])]

work = autotune.lightning.from_lightning(Scheduled, own.Data(), metric=("error", "minimize"), precision="bf16")
loaded = check_workload(work, label="x", fingerprint="y")
training = Training(loaded, loaded.baseline, device=torch.device("cpu"), seed=0)
losses = [float(training.step().loss) for _ in range(130)]
with torch.no_grad():
    error = loaded.evaluate(training.model.eval(), torch.device("cpu"))
state = training.scheduler.state_dict()
training.scheduler.load_state_dict(state)
print(json.dumps([
    loaded.baseline.micro_batch_size, loaded.baseline.precision, loaded.shuffle,
    training.optimizer.param_groups[0]["lr"], losses[-1] < losses[0], 0 < error["error"] < 10, state["taken"],
]))
"""


@pytest.mark.slow
def test_a_module_and_its_data_are_a_workload(tmp_path: Path) -> None:
    require("lightning")
    write_program("lightning_train.py", tmp_path)
    # An epoch is 64 steps, and Lightning's schedules go on once an epoch.
    assert run_lines(tmp_path, ASK_LIGHTNING) == [32, "bf16", True, 0.00025, True, True, 130]


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_the_callback_applies_and_guards(package: str, tmp_path: Path) -> None:
    require(package)
    name = PROGRAMS[package]
    write_program(name, tmp_path)
    # A pace that no machine has, with a setting that only the place where the loader is built can take.
    save_answer(tmp_path, BASELINE.replace(num_threads=1, optimizer_implementation="fused", num_workers=1), rate=1e9)
    ending = """
group = trainer.optimizer.param_groups[0] if hasattr(trainer, "optimizer") else trainer.optimizers[0].param_groups[0]
print("FUSED", bool(group["fused"]))
"""
    source = (tmp_path / name).read_text()
    last = next(line for line in source.splitlines()[::-1] if line.strip())
    (tmp_path / name).write_text(source + "".join(f"    {line}\n" for line in ending.strip().splitlines()))
    assert last.startswith("    trainer.")
    done = run(tmp_path, name)
    assert done.returncode == 0, done.stderr
    assert "FUSED True" in done.stdout
    assert "that were measured: something else uses the machine" in done.stderr
    if package == "lightning":
        assert "to be set where Trainer and loader are built: num_workers" in done.stderr
    else:
        assert "was built without" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("package", PROGRAMS)
def test_it_is_searched_and_trains_with_the_answer(package: str, tmp_path: Path) -> None:
    require(package)
    name = PROGRAMS[package]
    write_program(name, tmp_path)
    searched = run(
        tmp_path, "-m", "autotune", "search", f"{name}:workload", "--budget", BUDGET, "--no-history", seconds=400
    )
    assert searched.returncode == 0, searched.stderr
    profile = Profile.load(tmp_path / "best.json")
    assert profile.verdict in ("improved", "keep", "inconclusive")
    assert profile.baseline_config.micro_batch_size == 32
    assert profile.evidence.trials["completed"] > 3
    trained = run(tmp_path, name)
    assert trained.returncode == 0, trained.stderr
