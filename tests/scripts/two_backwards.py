import argparse
import os
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

FILES = ["argparse.py", "datetime.py", "decimal.py", "inspect.py", "socket.py", "tarfile.py", "turtle.py", "typing.py"]


class Snippets(Dataset):
    """Pieces of source files; the second task is to say which file a piece is from."""

    def __init__(self, split, length=49):
        library = Path(os.__file__).parent
        self.items = []
        for label, name in enumerate(f for f in FILES if (library / f).exists()):
            text = (library / name).read_bytes()[:40_000]
            pieces = [text[i : i + length] for i in range(0, len(text) - length, length)]
            self.items += [(p, label) for i, p in enumerate(pieces) if (i % 10 == 0) == (split == "val")]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        text, label = self.items[i]
        ids = torch.tensor(list(text))
        return ids[:-1], ids[1:], label


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.gru(self.embedding(x))[0]


class MultiTask(nn.Module):
    """Holds the parts; they are called one by one."""

    def __init__(self, width=96):
        super().__init__()
        self.encoder = Encoder(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.encoder.embedding.weight
        self.file_head = nn.Linear(width, len(FILES))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--aux-weight", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(Snippets("train"), batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(Snippets("val"), batch_size=args.batch_size)
    model = MultiTask().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(args.epochs):
        model.train()
        sums = torch.zeros(2)
        for x, y, label in train_loader:
            x, y, label = x.to(device), y.to(device), label.to(device)
            optimizer.zero_grad()
            h = model.encoder(x)
            loss_lm = F.cross_entropy(model.head(h).flatten(0, 1), y.flatten())
            loss_lm.backward(retain_graph=True)
            loss_file = args.aux_weight * F.cross_entropy(model.file_head(h.mean(dim=1)), label)
            loss_file.backward()
            optimizer.step()
            sums += torch.tensor([loss_lm.item(), loss_file.item()])
        model.eval()
        val_loss = correct = 0.0
        with torch.no_grad():
            for x, y, label in val_loader:
                h = model.encoder(x.to(device))
                val_loss += F.cross_entropy(model.head(h).flatten(0, 1), y.flatten().to(device)).item()
                correct += (model.file_head(h.mean(dim=1)).argmax(1).cpu() == label).sum().item()
        lm, file = (sums / len(train_loader)).tolist()
        print(f"epoch {epoch} lm {lm:.4f} file {file:.4f}", end=" ")
        print(f"val_lm {val_loss / len(val_loader):.4f} val_file_acc {correct / len(val_loader.dataset):.4f}")


if __name__ == "__main__":
    main()
