import argparse
import tempfile

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class RecordFile(Dataset):
    """Fixed-size records (64 pixels, 1 label) behind one open file handle."""

    RECORD = 65

    def __init__(self, file, indices, transform=None):
        self.file, self.indices, self.transform = file, indices, transform

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, i):
        self.file.seek(int(self.indices[i]) * self.RECORD)
        record = np.frombuffer(self.file.read(self.RECORD), dtype=np.uint8)
        pixels, label = torch.from_numpy(record[:-1].copy()), int(record[-1])
        return (self.transform(pixels) if self.transform else pixels), label


def write_records(file):
    x, y = load_digits(return_X_y=True)
    file.write(np.concatenate([x, y[:, None]], axis=1).astype(np.uint8).tobytes())
    file.flush()
    return np.random.RandomState(0).permutation(len(y))


def train_epoch(model, loader, optimizer, criterion, device):
    model.train()
    losses = []
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model, loader, device):
    model.eval()
    return sum((model(x.to(device)).argmax(1).cpu() == y).sum().item() for x, y in loader) / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    with tempfile.TemporaryFile() as file:
        order = write_records(file)
        scale = 1 / 16
        train_set = RecordFile(file, order[:1400], transform=lambda pixels: pixels.float() * scale - 0.5)
        test_set = RecordFile(file, order[1400:], transform=lambda pixels: pixels.float() * scale - 0.5)
        train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
        test_loader = DataLoader(test_set, batch_size=args.batch_size)

        model = nn.Sequential(
            nn.Linear(64, 1024), nn.ReLU(), nn.Dropout(0.2), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
        ).to(device)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
        criterion = nn.CrossEntropyLoss()
        for epoch in range(args.epochs):
            loss = train_epoch(model, train_loader, optimizer, criterion, device)
            print(f"epoch {epoch}: loss={loss:.5f} test_acc={accuracy(model, test_loader, device):.4f}")


if __name__ == "__main__":
    main()
