import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split

# How fast does a network fit noise? (Zhang et al., Understanding deep learning requires rethinking generalization)

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=30)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--lr", type=float, default=0.05)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dataset = TensorDataset(torch.randn(3000, 3, 16, 16), torch.randint(10, (3000,)))
train_set, val_set = random_split(dataset, [2500, 500])
train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
val_loader = DataLoader(val_set, batch_size=250)

model = nn.Sequential(
    nn.Flatten(), nn.Linear(768, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
criterion = nn.CrossEntropyLoss()

for epoch in range(args.epochs):
    model.train()
    train_loss = correct = 0
    for x, y in train_loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out, y)
        loss.backward()
        optimizer.step()
        train_loss += loss.item() * len(y)
        correct += (out.argmax(1) == y).sum().item()
    model.eval()
    val_correct = 0
    with torch.no_grad():
        for x, y in val_loader:
            val_correct += (model(x.to(device)).argmax(1) == y.to(device)).sum().item()
    print(
        f"epoch={epoch} train_loss={train_loss / len(train_set):.4f} "
        f"train_acc={correct / len(train_set):.4f} val_acc={val_correct / len(val_set):.4f}"
    )
