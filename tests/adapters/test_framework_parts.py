"""What a module, a loader or a Trainer may have that plain ones have not: taken as its own Trainer does, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from framework_runs import require, run_lines
from record_factory import make_profile

from autotune.records import TrainConfig

BASE = """
import json, torch
import lightning
import autotune.lightning
from autotune.engine.loop import Training
from autotune.errors import TargetError
from autotune.targets.workload import check_workload
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

CPU = torch.device("cpu")
samples = TensorDataset(torch.randn(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10.0))

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Data(lightning.LightningDataModule):
    def __init__(self, training=None, held_out=None):
        super().__init__()
        self.training, self.held_out = training or DataLoader(samples, 4), held_out

    def train_dataloader(self):
        return self.training

    def val_dataloader(self):
        return self.held_out

def begin(work):
    return Training(check_workload(work, label="x", fingerprint="y"), work.baseline, device=CPU, seed=0)
"""

ASK_LOADERS = """
def ask(**settings):
    try:
        autotune.lightning.from_lightning(Module, Data(DataLoader(samples, **settings)))
    except TargetError as error:
        return str(error)

print(json.dumps([
    ask(batch_sampler=BatchSampler(RandomSampler(samples), 4, False)) is None,
    ask(batch_size=4, shuffle=True, worker_init_fn=print) is None,
    ask(batch_sampler=[[0, 1], [2]]),
    ask(batch_size=None),
    ask(batch_size=4, sampler=RandomSampler(samples, replacement=True, num_samples=10)),
    ask(batch_size=4, sampler=RandomSampler(samples, num_samples=6)),
    ask(batch_size=4, num_workers=1, worker_init_fn=print),
]))
"""


@pytest.mark.slow
def test_loaders_whose_batches_a_workload_cannot_have_are_refused(tmp_path: Path) -> None:
    require("lightning")
    same, without_workers, *refused, with_workers = run_lines(tmp_path, BASE + ASK_LOADERS)
    assert (same, without_workers) == (False, True)
    assert all("no plain DataLoader" in told for told in refused)
    assert "worker_init_fn" in with_workers


ASK_MODULE = """
class Nested(Module):
    def training_step(self, batch, index, prefix="train"):
        assert (index, prefix) == (0, "train")
        assert torch.zeros(1, device=self.device).device == batch[0].device
        return super().training_step(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [{"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)}]

found = []
for drop_last in (False, True):
    work = autotune.lightning.from_lightning(Nested, Data(DataLoader(samples, 4, drop_last=drop_last)))
    training = begin(work)
    rates = []
    for _ in range(4):
        training.step()
        rates.append(training.optimizer.param_groups[0]["lr"])
    found.append(rates)
moved = work.build_model().to("meta")
plain = begin(autotune.lightning.from_lightning(Module, Data()))
print(json.dumps([*found, str(moved.module.device), float(plain.step().loss) > 0]))
"""


@pytest.mark.slow
def test_a_module_knows_its_device_and_its_steps_take_what_they_name(tmp_path: Path) -> None:
    require("lightning")
    # Ten samples in fours are three steps an epoch, and two where the last short batch is left out.
    every = [0.1, 0.1, 0.05, 0.05]
    full = [0.1, 0.05, 0.05, 0.025]
    assert run_lines(tmp_path, BASE + ASK_MODULE) == [every, full, "meta", True]


ASK_METRICS = """
class Mean(torch.nn.Module):  # as torchmetrics has them, with a list of all batches for a state
    def __init__(self):
        super().__init__()
        self.seen, self.computed = [], 0

    def forward(self, values):
        self.seen.append(values)
        return values.mean()

    def compute(self):
        self.computed += 1
        return torch.cat(self.seen).mean()

    def reset(self):
        self.seen = []

class Measured(Module):
    def __init__(self):
        super().__init__()
        self.means = torch.nn.ModuleDict({"trained": Mean(), "held_out": Mean()})

    def training_step(self, batch, index):
        self.means["trained"](batch[1])
        return super().training_step(batch)

    def validation_step(self, batch, index):
        self.means["held_out"](batch[1])
        self.log("mean", self.means["held_out"])

class Several(Module):
    def validation_step(self, batch, *, dataloader_idx, name="several"):
        self.log("mean", dataloader_idx)

class Graphs:
    def __init__(self, rows):
        self.rows = rows

class Graph(Module):
    def validation_step(self, batch):
        self.log("mean", float(len(batch.rows)))

def ask(module, *held_out):
    data = Data(held_out=list(held_out) if len(held_out) > 1 else held_out[0])
    work = autotune.lightning.from_lightning(module, data, metric=("mean", "maximize"))
    training = begin(work)
    training.step()
    return training.model.module, [work.evaluate(training.model, CPU) for _ in range(2)]

measured, means = ask(Measured, DataLoader(samples, 4))
_, several = ask(Several, DataLoader(samples, 4), DataLoader(samples, 5), DataLoader(samples, 10))
_, graphs = ask(Graph, DataLoader(samples, 5, collate_fn=Graphs))
print(json.dumps([
    means, several, graphs, measured.means["held_out"].computed,
    [len(one.seen) for one in measured.means.values()],
]))
"""


@pytest.mark.slow
def test_metrics_are_of_one_evaluation_and_all_of_its_loaders_and_keep_nothing(tmp_path: Path) -> None:
    require("lightning")
    means, several, graphs, computed, kept = run_lines(tmp_path, BASE + ASK_METRICS)
    assert means == pytest.approx([4.5, 4.5])
    assert several == pytest.approx([1.0, 1.0])
    assert graphs == [5.0, 5.0]
    assert (computed, kept) == (2, [0, 0])


ASK_CALLBACK = """
class Graphs:
    def __init__(self, rows):
        self.x = torch.stack([row[0] for row in rows])

class Graph(Module):
    def training_step(self, batch, index):
        return self.layer(batch.x).square().mean()

def ask(loader):
    callback = autotune.lightning.TunedCallback("best.json")
    counted = []
    callback.pace.count = counted.append
    trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, callbacks=[callback])
    trainer.fit(Graph(), loader)
    return counted

print(json.dumps([
    ask(DataLoader(samples, 5, collate_fn=Graphs)),
    ask(DataLoader(samples, batch_sampler=[[0, 1], [2]], collate_fn=Graphs)),
]))
"""


@pytest.mark.slow
def test_batches_that_hold_no_tensor_themselves_end_no_training(tmp_path: Path) -> None:
    require("lightning")
    config = TrainConfig(micro_batch_size=5)
    make_profile(config=config, baseline_config=config).save(tmp_path / "best.json")
    assert run_lines(tmp_path, BASE + ASK_CALLBACK) == [[5, 5], []]


ASK_TRAINER = """
import json, torch
from torch import nn
from transformers import Trainer, TrainingArguments
import autotune.hf
from autotune.errors import TargetError

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x, labels):
        return {"loss": (self.layer(x) - labels).square().mean()}

rows = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(10)]

def build(drop_last, held_out=None, size=4):
    arguments = TrainingArguments(per_device_train_batch_size=size, num_train_epochs=3, dataloader_drop_last=drop_last,
                                  use_cpu=True, report_to=[])
    return Trainer(model_init=Model, args=arguments, train_dataset=rows, eval_dataset=held_out)

def count_steps(*given, **named):
    work, steps = autotune.hf.workload(build(*given, **named)), 0
    optimizer = work.build_optimizer(work.build_model())
    schedule = work.build_scheduler(optimizer)
    while optimizer.param_groups[0]["lr"] > 0:
        optimizer.step()
        schedule.step()
        steps += 1
    return steps

try:
    autotune.hf.workload(build(False, {"near": rows, "far": rows}))
except TargetError as error:
    told = str(error)
print(json.dumps([count_steps(False), count_steps(True), count_steps(True, size=16), told]))
"""


@pytest.mark.slow
def test_a_trainers_schedule_is_as_long_as_its_loader_and_several_evaluation_sets_are_refused(tmp_path: Path) -> None:
    require("transformers")
    *steps, told = run_lines(tmp_path, ASK_TRAINER)
    assert steps == [9, 6, 3]
    assert "several evaluation sets (near, far)" in told
