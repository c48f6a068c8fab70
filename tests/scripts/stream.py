import argparse
import itertools
import os
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset

CONTEXT = 32


class SourceStream(IterableDataset):
    """Windows of the standard library's source, file after file, for ever; only the order of files is random."""

    def __init__(self, seed):
        self.files = sorted(Path(os.__file__).parent.glob("*.py"))
        self.seed = seed

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            for i in torch.randperm(len(self.files), generator=generator).tolist():
                raw = self.files[i].read_bytes()[:4000]
                ids = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long() if raw else torch.empty(0)
                for start in range(0, len(ids) - CONTEXT, CONTEXT):
                    yield ids[start : start + CONTEXT], ids[start + CONTEXT]


class NextByte(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.conv = nn.Conv1d(width, 128, 5)
        self.out = nn.Sequential(nn.GELU(), nn.Flatten(), nn.Linear(128 * (CONTEXT - 4), 256))

    def forward(self, x):
        return self.out(self.conv(self.embed(x).transpose(1, 2)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(SourceStream(args.seed), batch_size=args.batch_size, num_workers=args.num_workers)
    model = NextByte().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    average = None
    model.train()
    for step, (context, target) in enumerate(itertools.islice(loader, args.steps), start=1):
        loss = nn.functional.cross_entropy(model(context.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        average = loss.item() if average is None else 0.98 * average + 0.02 * loss.item()
        if step % 50 == 0 or step == args.steps:
            print(f"step {step} loss {average:.4f}")


if __name__ == "__main__":
    main()
