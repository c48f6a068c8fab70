import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset


class MiniBatches(Dataset):
    """Item i is mini-batch i, already put together: a tensor [B, 8, 16] and its targets [B]."""

    def __init__(self, n_batches, batch_size, seed):
        rng = np.random.default_rng(seed)
        filters = np.random.default_rng(99).normal(size=(4, 8))  # shared by the two splits
        self.x = rng.normal(size=(n_batches, batch_size, 8, 16)).astype(np.float32)
        self.y = np.einsum("fc,nbct->nbft", filters, self.x).max(-1).argmax(-1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), torch.from_numpy(self.y[i])


def get_loader(dataset, shuffle, wrapped):
    if wrapped:
        return DataLoader(dataset, batch_size=1, shuffle=shuffle)
    return DataLoader(dataset, batch_size=None, shuffle=shuffle)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=15)
    p.add_argument("--batch-size", type=int, default=128)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--wrapped", action="store_true", help="batch_size=1 in the loader, squeezed away in the loop")
    args = p.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader = get_loader(MiniBatches(100, args.batch_size, args.seed), True, args.wrapped)
    val_loader = get_loader(MiniBatches(10, args.batch_size, args.seed + 1), False, args.wrapped)

    model = nn.Sequential(
        nn.Conv1d(8, 192, 1), nn.ReLU(), nn.Conv1d(192, 192, 1), nn.ReLU(), nn.AdaptiveMaxPool1d(1), nn.Flatten(),
        nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, 4),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loss_fn = nn.CrossEntropyLoss()

    def unpack(batch):
        x, y = batch
        if args.wrapped:
            x, y = x.squeeze(0), y.squeeze(0)
        return x.to(device), y.to(device)

    for epoch in range(args.epochs):
        model.train()
        losses = []
        for batch in train_loader:
            x, y = unpack(batch)
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        hits = total = 0
        with torch.no_grad():
            for batch in val_loader:
                x, y = unpack(batch)
                hits += (model(x).argmax(1) == y).sum().item()
                total += len(y)
        print(f"epoch {epoch} train_loss {np.mean(losses):.4f} val_acc {hits / total:.4f}", flush=True)


if __name__ == "__main__":
    main()
