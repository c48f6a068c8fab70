import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info


class NoisySines(Dataset):
    """Which of eight frequencies is in the signal? Each item is drawn anew from the dataset's own generator."""

    def __init__(self, length, points=128):
        self.length = length
        self.t = np.linspace(0, 1, points, dtype=np.float32)
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        label = index % 8
        phase = self.rng.uniform(0, 2 * np.pi)
        signal = np.sin(2 * np.pi * (label + 2) * self.t + phase)
        signal += self.rng.normal(0, 0.8, size=self.t.shape)
        return torch.from_numpy(signal.astype(np.float32)), label


def reseed(worker):
    get_worker_info().dataset.rng = np.random.default_rng(get_worker_info().seed)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--num-workers", type=int, default=0)
parser.add_argument("--reseed", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
seeding = {"worker_init_fn": reseed} if args.reseed else {}
train_loader = DataLoader(NoisySines(6000), args.batch_size, shuffle=True, num_workers=args.num_workers, **seeding)
val_loader = DataLoader(NoisySines(800), args.batch_size, num_workers=args.num_workers)

net = nn.Sequential(
    nn.Unflatten(1, (1, 128)),
    nn.Conv1d(1, 32, 9, padding=4),
    nn.ReLU(),
    nn.MaxPool1d(2),
    nn.Conv1d(32, 32, 9, padding=4),
    nn.ReLU(),
    nn.MaxPool1d(2),
    nn.Flatten(),
    nn.Linear(32 * 32, 8),
).to(device)
optimizer = torch.optim.RMSprop(net.parameters(), lr=5e-4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

for epoch in range(args.epochs):
    net.train()
    train_loss = 0.0
    for signal, label in train_loader:
        loss = nn.functional.cross_entropy(net(signal.to(device)), label.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        train_loss += loss.item() / len(train_loader)
    net.eval()
    val_loss = val_acc = 0.0
    with torch.no_grad():
        for signal, label in val_loader:
            out, label = net(signal.to(device)), label.to(device)
            val_loss += nn.functional.cross_entropy(out, label).item() / len(val_loader)
            val_acc += (out.argmax(1) == label).sum().item() / 800
    scheduler.step(val_loss)
    print(f"{epoch:2d} train loss {train_loss:.5f} val loss {val_loss:.5f} val acc {val_acc:.4f}")
