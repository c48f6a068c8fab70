"""python -m package_style.train --epochs 10"""

import argparse

import torch
from torch.nn.functional import cross_entropy

from . import __version__
from .data import get_loaders
from .model import Net


def parse_args():
    parser = argparse.ArgumentParser(prog="package_style.train")
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--version", action="version", version=__version__)
    return parser.parse_args()


def run_epoch(model, loader, device, optimizer=None):
    model.train(optimizer is not None)
    loss_sum, hits, seen = 0.0, 0, 0
    with torch.set_grad_enabled(optimizer is not None):
        for images, target in loader:
            images, target = images.to(device), target.to(device)
            logits = model(images)
            loss = cross_entropy(logits, target)
            if optimizer is not None:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            loss_sum += loss.item() * len(target)
            hits += (logits.argmax(1) == target).sum().item()
            seen += len(target)
    return loss_sum / seen, hits / seen


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = get_loaders(args.batch_size)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(1, args.epochs + 1):
        train_loss, train_acc = run_epoch(model, train_loader, device, optimizer)
        val_loss, val_acc = run_epoch(model, val_loader, device)
        print(f"{epoch:3d} | train {train_loss:.4f} {train_acc:.4f} | val {val_loss:.4f} {val_acc:.4f}")


if __name__ == "__main__":
    main()
