"""Trains a small transformer on ragged sequences, as scripts do; --fault makes one mistake."""

import argparse
from itertools import islice

import torch
import torch.nn.functional as F
from models import CausalTransformer
from synthetic import IGNORED, ragged_sequences
from torch.utils.data import DataLoader, Subset

FAULTS = (
    "none",
    "nothing",
    "loss-scale",
    "doubled-rate",
    "dropped-batch",
    "skipped-batch",
    "forgotten-masks",
    "unequal-means",
)

parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=16, help="micro batch size")
parser.add_argument("--accum", type=int, default=1, help="micro batches per optimizer step")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--samples", type=int, default=250, help="few, so that the end of an epoch comes early")
parser.add_argument("--epochs", type=int, default=1000)
parser.add_argument("--dropout", type=float, default=0.3)
parser.add_argument("--optimizer", choices=["adamw", "sgd"], default="adamw")
parser.add_argument("--fault", choices=FAULTS, default="none")
args = parser.parse_args()

torch.manual_seed(0)
data = Subset(ragged_sequences(), range(args.samples))
loader = DataLoader(
    data, batch_size=args.bs, shuffle=True, num_workers=args.workers, drop_last=args.fault == "dropped-batch"
)
model = CausalTransformer(dropout=args.dropout, forgets_masks=args.fault == "forgotten-masks")
rate = 2.0 if args.fault == "doubled-rate" else 1.0
if args.optimizer == "adamw":
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * rate)
else:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * rate, momentum=0.9)

for epoch in range(args.epochs):
    batches, total = iter(loader), 0.0
    while window := list(islice(batches, args.accum)):
        if args.fault == "skipped-batch" and len(window[-1][0]) < args.bs:
            continue
        tokens = sum(int((targets != IGNORED).sum()) for _, targets in window)
        for inputs, targets in window:
            logits = model(inputs).flatten(0, 1)
            if args.fault == "unequal-means":
                loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED) / len(window)
            else:
                loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum") / tokens
            if args.fault == "loss-scale":
                loss = 1.05 * loss
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    print(f"epoch {epoch} loss {total / (len(loader) / args.accum):.4f}")
