import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)


class MyAdam(torch.optim.Adam):
    """Adam with a warm-up, centred gradients and a decay towards zero of its own."""

    def __init__(self, params, lr=1e-3, warmup=50, decay=1e-5):
        super().__init__(params, lr=lr)
        self.warmup, self.decay, self.calls, self.peak = warmup, decay, 0, lr

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = self.peak * min(1.0, self.calls / self.warmup)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if p.dim() > 1:
                    p.grad -= p.grad.mean(dim=1, keepdim=True)
                p.mul_(1 - self.decay)
        return super().step(closure)


def pendulum(n, generator):
    """State of a pendulum, and its state a moment later."""
    state = torch.rand(n, 2, generator=generator) * torch.tensor([6.0, 4.0]) - torch.tensor([3.0, 2.0])
    angle, speed = state.unbind(1)
    for _ in range(20):
        speed = speed - 0.05 * (torch.sin(angle) + 0.1 * speed)
        angle = angle + 0.05 * speed
    return TensorDataset(state, torch.stack([angle, speed], dim=1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    generator = torch.Generator().manual_seed(args.seed)
    loader = DataLoader(pendulum(16_000, generator), batch_size=args.batch_size, shuffle=True, drop_last=True)
    val_x, val_y = (t.to(device) for t in pendulum(1000, generator).tensors)
    model = nn.Sequential(nn.Linear(2, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 2)).to(device)
    assert next(model.parameters()).dtype == torch.float64
    optimizer = MyAdam(model.parameters(), lr=2e-3)

    for epoch in range(1, args.epochs + 1):
        model.train()
        total = 0.0
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        model.eval()
        with torch.no_grad():
            val = nn.functional.mse_loss(model(val_x), val_y).item()
        print(f"epoch {epoch:2d} mse {total / len(loader):.8f} val {val:.8f}")


if __name__ == "__main__":
    main()
