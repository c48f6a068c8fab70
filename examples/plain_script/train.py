"""Learn handwritten digits: a training script like any other, which knows nothing of autotune."""

import argparse
import json

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split


def make_model(width: int = 48) -> nn.Module:
    """Return a small convolutional network: images `[batch, 1, 8, 8]` -> logits `[batch, 10]`."""
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


def main() -> None:
    """Train, validate and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--accum", type=int, default=1, help="batches of an optimizer step")
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    training, validation = random_split(data, [11 * 128, len(data) - 11 * 128])
    loader = DataLoader(training, batch_size=options.batch_size, shuffle=True)
    model = make_model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    for epoch in range(1, options.epochs + 1):
        model.train()
        for index, (images, labels) in enumerate(loader, start=1):
            loss = cross_entropy(model(images.to(device)), labels.to(device)) / options.accum
            loss.backward()
            if index % options.accum == 0 or index == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            images, labels = next(iter(DataLoader(validation, batch_size=len(validation))))
            accuracy = (model(images.to(device)).argmax(1).cpu() == labels).float().mean().item()
        print(json.dumps({"epoch": epoch, "accuracy": accuracy}), flush=True)
        torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
