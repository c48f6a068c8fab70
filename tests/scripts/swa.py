import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=50)
parser.add_argument("--swa-start", type=float, default=0.6, help="part of the epochs before the averaging starts")
parser.add_argument("--batch-size", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x, y = load_digits(return_X_y=True)
x, y = torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y)
loader = DataLoader(TensorDataset(x[:1437], y[:1437]), args.batch_size, shuffle=True, drop_last=False)
test_x, test_y = x[1437:].to(device), y[1437:].to(device)


def conv_bn(c_in, c_out):
    return nn.Sequential(nn.Conv2d(c_in, c_out, 3, padding=1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU())


model = nn.Sequential(
    conv_bn(1, 48), conv_bn(48, 48), nn.MaxPool2d(2), conv_bn(48, 64),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
).to(device)  # fmt: skip
swa_model = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
swa_start = int(args.epochs * args.swa_start)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(1, swa_start))
swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
loss_fn = nn.CrossEntropyLoss()


@torch.no_grad()
def test(net):
    net.eval()
    return (net(test_x).argmax(1) == test_y).float().mean().item()


for epoch in range(args.epochs):
    model.train()
    total = 0.0
    for inputs, targets in loader:
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        loss = loss_fn(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(targets)
    if epoch >= swa_start:
        swa_model.update_parameters(model)
        swa_scheduler.step()
    else:
        scheduler.step()
    print(f"epoch {epoch} loss {total / 1437:.5f} test_acc {test(model):.4f}")

update_bn(loader, swa_model, device=device)
print(f"swa test_acc {test(swa_model):.4f}")
