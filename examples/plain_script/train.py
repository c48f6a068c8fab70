"""Learn handwritten digits: a training script like any other, which knows nothing of autotune."""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batches = DataLoader[tuple[Tensor, ...]]


def make_model(width: int) -> nn.Module:
    """Return a small convolutional network for images of `[batch, 1, 8, 8]`."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(2 * width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * width * 16, 10),
    )


def train_epoch(model: nn.Module, loader: Batches, optimizer: torch.optim.Optimizer, accum: int, device: str) -> None:
    """Train one epoch; `accum` micro batches make one optimizer step."""
    model.train()
    for index, (images, labels) in enumerate(loader):
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        (loss / accum).backward()  # type: ignore[no-untyped-call]
        if (index + 1) % accum == 0:
            optimizer.step()
            optimizer.zero_grad()


def validate(model: nn.Module, loader: Batches, device: str) -> float:
    """Return the accuracy."""
    model.eval()
    hits = []
    with torch.no_grad():
        for images, labels in loader:
            hits.append(model(images.to(device)).argmax(1).cpu() == labels)
    return float(torch.cat(hits).float().mean())


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--accum", type=int, default=1)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=48)
    options = parser.parse_args()

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, validation = torch.utils.data.random_split(data, [0.8, 0.2])
    model = make_model(options.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True, drop_last=True)
    for epoch in range(options.epochs):
        train_epoch(model, loader, optimizer, options.accum, device)
        accuracy = validate(model, DataLoader(validation, batch_size=256), device)
        print(json.dumps({"epoch": epoch + 1, "accuracy": accuracy}), flush=True)
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
