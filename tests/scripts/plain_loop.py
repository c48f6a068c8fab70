import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from sklearn.datasets import load_digits
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, train=True):
        images, labels = load_digits(return_X_y=True)
        keep = slice(0, 1440) if train else slice(1440, None)
        self.images = torch.tensor(images[keep], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[keep])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(1024, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def train(args, model, device, train_loader, optimizer, epoch):
    model.train()
    optimizer.zero_grad()
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(device), target.to(device)
        output = model(data)
        loss = F.nll_loss(output, target) / args.accum
        loss.backward()
        if (batch_idx + 1) % args.accum == 0 or batch_idx + 1 == len(train_loader):
            optimizer.step()
            optimizer.zero_grad()
        if batch_idx % 10 == 0:
            print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item() * args.accum:.6f}")


def test(model, device, test_loader):
    model.eval()
    correct = 0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data.to(device))
            correct += (output.argmax(dim=1) == target.to(device)).sum().item()
    return correct / len(test_loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="PyTorch digits example")
    parser.add_argument("--batch-size", type=int, default=64, help="input batch size for training (default: 64)")
    parser.add_argument("--epochs", type=int, default=40, help="number of epochs to train (default: 40)")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: 0.001)")
    parser.add_argument("--seed", type=int, default=1, help="random seed (default: 1)")
    parser.add_argument("--accum", type=int, default=1, help="batches per optimizer step (default: 1)")
    parser.add_argument("--num-workers", type=int, default=0, help="loader processes (default: 0)")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(Digits(), batch_size=args.batch_size, shuffle=True, num_workers=args.num_workers)
    test_loader = DataLoader(Digits(train=False), batch_size=256)
    model = Net().to(device)
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    scheduler = StepLR(optimizer, step_size=10, gamma=0.7)
    for epoch in range(1, args.epochs + 1):
        train(args, model, device, train_loader, optimizer, epoch)
        val_acc = test(model, device, test_loader)
        print(f"val_acc={val_acc:.4f}")
        with open("log.txt", "a") as log:
            log.write(f"{epoch} {val_acc:.4f}\n")
        scheduler.step()
    torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
