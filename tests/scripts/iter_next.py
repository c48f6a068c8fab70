import argparse
import copy
import json

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1500)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--max-lr", type=float, default=5e-3)
parser.add_argument("--ema", type=float, default=0.98)
parser.add_argument("--eval-every", type=int, default=100)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"

x, y = load_digits(return_X_y=True)
x_train, x_val, y_train, y_val = train_test_split(x / 16, y, test_size=0.2, random_state=0, stratify=y)
x_val, y_val = torch.tensor(x_val, dtype=torch.float32, device=device), torch.tensor(y_val, device=device)
train_set = TensorDataset(torch.tensor(x_train, dtype=torch.float32), torch.tensor(y_train))
loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, drop_last=True)


class ResidualBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        return x + self.body(x)


model = nn.Sequential(nn.Linear(64, 256), *[ResidualBlock(256) for _ in range(3)], nn.Linear(256, 10)).to(device)
ema_model = copy.deepcopy(model).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.max_lr / 25)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.max_lr, total_steps=args.steps)
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)


@torch.no_grad()
def update_ema():
    for p_ema, p in zip(ema_model.parameters(), model.parameters(), strict=True):
        p_ema.lerp_(p, 1 - args.ema)


@torch.no_grad()
def evaluate():
    return (ema_model(x_val).argmax(1) == y_val).float().mean().item()


it = iter(loader)
for step in range(1, args.steps + 1):
    try:
        xb, yb = next(it)
    except StopIteration:
        it = iter(loader)
        xb, yb = next(it)

    loss = criterion(model(xb.to(device)), yb.to(device))
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    scheduler.step()
    update_ema()

    if step % args.eval_every == 0 or step == args.steps:
        print(json.dumps({"step": step, "loss": round(loss.item(), 5), "val_acc": round(evaluate(), 4)}))
