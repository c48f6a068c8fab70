"""Fits a sine; steps its scheduler once per micro batch, so with --accum 4 the rate falls four times as fast."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=16, help="micro batch size")
parser.add_argument("--accum", type=int, default=1, help="micro batches per optimizer step")
parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
x = torch.randn(1000, 8)
data = TensorDataset(x, torch.sin(x @ torch.randn(8, 1) / 2))
loader = DataLoader(data, batch_size=args.bs, shuffle=True)

model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: max(0.05, 1 - step / args.steps))

step, micro = 0, 0
while step < args.steps:
    for xb, yb in loader:
        loss = nn.functional.mse_loss(model(xb), yb) / args.accum
        loss.backward()
        micro += 1
        if micro % args.accum == 0:
            opt.step()
            opt.zero_grad()
            step += 1
            if step % 20 == 0:
                print(f"step {step} loss {loss.item() * args.accum:.5f} lr {sched.get_last_lr()[0]:.3e}")
        sched.step()
        if step == args.steps:
            break
