"""Small trainings that several processes share; without dropout their steps are those of one process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from autotune.records.config import TrainConfig

SAMPLES = 37
"""With effective batches of 12 an epoch's last step has one sample, and with two processes the first has none of it."""


class Words(Dataset[tuple[Tensor, Tensor]]):
    """Samples of 1 to 5 words."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(5, 4, generator=generator), torch.arange(5) < 1 + index % 5


class Counted:
    """A mean over words, with how many they are."""

    baseline = TrainConfig(micro_batch_size=6, gradient_accumulation_steps=2, num_threads=1)
    gradient_clip_norm = 0.5
    metric = ("error", "minimize")
    pause_seconds = 0.0

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_dataset(self) -> Dataset[Any]:
        return Words()

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        time.sleep(self.pause_seconds)
        words, is_word = batch
        losses = (model(words)[..., 0] - words.sum(-1)) ** 2
        return (losses * is_word).sum() / is_word.sum(), is_word.sum()

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        words = torch.linspace(-1.0, 1.0, 20, device=device).reshape(5, 4)
        return float(((model(words)[:, 0] - words.sum(-1)) ** 2).mean())


class Plain(Counted):
    """A mean over samples."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        words, _ = batch
        return ((model(words)[..., 0] - words.sum(-1)) ** 2).mean()


class Uneven(Counted):
    """An effective batch of one micro batch, so that two processes split it; the last step of an epoch is short."""

    baseline = TrainConfig(micro_batch_size=10, num_threads=1)


class Partial(Plain):
    """A parameter without a part in the loss."""

    find_unused_parameters = True

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_parameter("spare", nn.Parameter(torch.zeros(2)))
        return model


class Unsaid(Partial):
    """The same, without a word about it."""

    find_unused_parameters = False


class Noisy(Counted):
    """Dropout: each process draws masks of its own."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


class Slow(Noisy):
    """Long enough to be killed in the middle."""

    pause_seconds = 0.05


def _stop_at(place: str, call: int) -> None:
    """Stop this process where STOPS says so, `1:loss:5`, or kill it where KILLS does; all hang where HANGS says so."""
    if os.environ.get("HANGS") == f"{place}:{call}":
        time.sleep(3600.0)
    here = f"{os.environ.get('RANK')}:{place}:{call}"
    if os.environ.get("STOPS") == here:
        os.kill(os.getpid(), signal.SIGSTOP)
    if os.environ.get("KILLS") == here:
        os.kill(os.getpid(), signal.SIGKILL)


class _StoppingSGD(torch.optim.SGD):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.calls += 1
        _stop_at("optimizer", self.calls)
        return found


class Stopping(Noisy):
    """A process that hangs, in a step or after one."""

    def __init__(self) -> None:
        self.calls = 0

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return _StoppingSGD(model.parameters(), lr=0.1)

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        _stop_at("loss", self.calls)
        return super().compute_loss(model, batch)


class StoppingSharded(Stopping):
    """The same, with a shard of the model in each."""

    baseline = Stopping.baseline.replace(distributed_strategy="fsdp")


class Normed(Plain):
    """Statistics over the samples of a process, of which there is more than one in each batch."""

    drop_last = True

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Flatten(1), nn.Linear(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.Unflatten(1, (5, 1))
        )

    def evaluate(self, model: nn.Module, device: torch.device) -> float:
        words = torch.linspace(-1.0, 1.0, 20, device=device).reshape(1, 5, 4)
        return float(((model(words)[..., 0] - words.sum(-1)) ** 2).mean())


class Pairs(Plain):
    """A loss over the pairs in a batch."""

    baseline = TrainConfig(micro_batch_size=12, num_threads=1)

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        found = model(batch[0])[:, :, 0]
        return (found @ found.T).tanh().mean()


class Large(Counted):
    """Out of memory on the second process alone."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        if os.environ.get("RANK") == "1" and len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().compute_loss(model, batch)


class Mistaken(Counted):
    """A mistake that the second process alone makes, after a few steps."""

    def __init__(self) -> None:
        self.calls = 0

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        if os.environ.get("RANK") == "1" and self.calls > 5:
            raise ValueError("no such word")
        return super().compute_loss(model, batch)


class Lagging(Plain):
    """The second process takes three times as long as the first for its forward passes."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Tensor:
        for _ in range(300 if os.environ.get("RANK") == "1" else 100):
            loss = super().compute_loss(model, batch)
        return loss


class Stacked(Counted):
    """Repeated blocks, a tied pair of weights, a frozen parameter and a buffer."""

    baseline = TrainConfig(micro_batch_size=3, gradient_accumulation_steps=4, num_threads=1)
    is_gathered: bool | None = None

    def build_model(self) -> nn.Module:
        return Stack()

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().compute_loss(model, batch)
        self.is_gathered = not hasattr(model.blocks[0][0].weight, "full_tensor")  # type: ignore[index, union-attr]
        return found

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)


class Stack(nn.Module):
    """Blocks between two uses of one weight."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 4)) for _ in range(3))
        self.leave = nn.Linear(4, 4)
        self.leave.weight = self.enter.weight
        self.scale = nn.Parameter(torch.full((4,), 0.5), requires_grad=False)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, words: Tensor) -> Tensor:
        hidden = self.enter(words)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        if self.training:
            self.count += 1
        return (self.leave(hidden) * self.scale).sum(-1, keepdim=True)


class Sharded(Stacked):
    """The same, a shard of it in each process."""

    baseline = Stacked.baseline.replace(distributed_strategy="fsdp")


class SlowlySharded(Sharded):
    """Long enough to be killed in the middle."""

    pause_seconds = 0.05


class Averaged(Sharded):
    """An average of its weights."""

    def build_averaged_model(self, model: nn.Module) -> torch.optim.swa_utils.AveragedModel:
        return torch.optim.swa_utils.AveragedModel(model)


class Reaching(Sharded):
    """A block's weight used outside of the block."""

    def compute_loss(self, model: nn.Module, batch: Any) -> Any:
        loss, words = super().compute_loss(model, batch)
        return loss + 0.01 * model.blocks[0][0].weight.square().sum(), words


class _Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Any:
        return (Words()[index] for index in range(SAMPLES))


class Streamed(Counted):
    """Samples without numbers."""

    def train_dataset(self) -> Dataset[Any]:
        return _Stream()


counted, plain, uneven, partial, unsaid = Counted(), Plain(), Uneven(), Partial(), Unsaid()
noisy, slow, stopping, lagging = Noisy(), Slow(), Stopping(), Lagging()
stopping_sharded = StoppingSharded()
stacked, sharded, slowly_sharded, averaged, reaching = Stacked(), Sharded(), SlowlySharded(), Averaged(), Reaching()
normed, pairs, large, mistaken, streamed = Normed(), Pairs(), Large(), Mistaken(), Streamed()
