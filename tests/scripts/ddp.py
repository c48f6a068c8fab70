"""torchrun --nproc-per-node 2 ddp.py, or just python ddp.py"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

distributed = "RANK" in os.environ
rank = int(os.environ.get("RANK", "0"))
local_rank = int(os.environ.get("LOCAL_RANK", "0"))


def log(*args):
    if rank == 0:
        print(*args, flush=True)


def build(device):
    model = nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 10),
    ).to(device)  # fmt: skip
    if distributed:
        model = DistributedDataParallel(model, device_ids=[local_rank] if device.type == "cuda" else None)
    return model


def train(args, device):
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train_set = TensorDataset(x[:1400], y[:1400])
    sampler = DistributedSampler(train_set, seed=args.seed) if distributed else None
    loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=sampler is None, sampler=sampler)

    model = build(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device=device)
        for inputs, target in loader:
            inputs, target = inputs.to(device), target.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), target)
            loss.backward()
            optimizer.step()
            total += torch.tensor([loss.item() * len(target), len(target)], device=device)
        if distributed:
            dist.all_reduce(total)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                net = model.module if distributed else model
                acc = (net(x[1400:].to(device)).argmax(1).cpu() == y[1400:]).float().mean().item()
            log(f"epoch {epoch} loss {(total[0] / total[1]).item():.5f} val_acc {acc:.4f}")
    if rank == 0:
        torch.save(model.state_dict(), "ddp.pt")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if distributed:
        dist.init_process_group("gloo")
    train(args, device)
    if distributed:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
