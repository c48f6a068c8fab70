import argparse

import torch
from sklearn import datasets
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--bs", type=int, default=32)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = map(torch.tensor, datasets.load_digits(return_X_y=True))
x, y = (x.float() / 16).to(device), y.to(device)
x_train, y_train, x_valid, y_valid = x[:1437], y[:1437], x[1437:], y[1437:]


class DigitsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 64, 3, padding=1)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.lin = nn.Linear(1024, 10)

    def forward(self, xb):
        xb = xb.view(-1, 1, 8, 8)
        xb = torch.relu(self.conv1(xb))
        xb = nn.functional.max_pool2d(torch.relu(self.conv2(xb)), 2)
        return self.lin(xb.flatten(1))


model = DigitsNet().to(device)
loss_func = nn.functional.cross_entropy

for epoch in range(args.epochs):
    model.train()
    order = torch.randperm(len(x_train), device=device)
    for i in range((len(x_train) - 1) // args.bs + 1):
        idx = order[i * args.bs : (i + 1) * args.bs]
        loss = loss_func(model(x_train[idx]), y_train[idx])
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= args.lr * p.grad
                p.grad = None

    model.eval()
    with torch.no_grad():
        out = model(x_valid)
        acc = (out.argmax(dim=1) == y_valid).float().mean()
        print(epoch, f"train {loss.item():.5f} valid {loss_func(out, y_valid).item():.5f} accuracy {acc.item():.4f}")
