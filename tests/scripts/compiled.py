import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Mixer(nn.Module):
    def __init__(self, n_in=32, width=512, depth=3, n_out=8):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.head = nn.Linear(width, n_out)

    def forward(self, x):
        x = self.stem(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + nn.functional.silu(layer(norm(x)))
        return self.head(x)


def make_data(n, generator):
    x = torch.randn(n, 32, generator=generator)
    teacher = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (torch.tanh(x) @ teacher + 0.5 * x[:, :8] * x[:, 8:16]).argmax(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(args.seed)
    train_loader = DataLoader(make_data(20_000, generator), args.batch_size, shuffle=True, drop_last=True)
    val_x, val_y = make_data(2_000, generator).tensors

    model = Mixer().to(device)
    if args.compile:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        running = 0.0
        for x, y in train_loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            running += loss.item()
        model.eval()
        with torch.no_grad():
            accuracy = (model(val_x.to(device)).argmax(1) == val_y.to(device)).float().mean().item()
        print(f"epoch {epoch}: train loss {running / len(train_loader):.4f}, val accuracy {accuracy:.4f}")


if __name__ == "__main__":
    main()
