import argparse

import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization: the gradient is taken at the worst point nearby (Foret et al. 2021)."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, dict(rho=rho, **kwargs))
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def _grad_norm(self):
        grads = [p.grad.norm(p=2) for group in self.param_groups for p in group["params"] if p.grad is not None]
        return torch.stack(grads).norm(p=2)

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is not None, "SAM needs a closure that does a full forward and backward pass"
        closure = torch.enable_grad()(closure)
        loss = closure()
        grad_norm = self._grad_norm()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                self.state[p]["old_p"] = p.clone()
                p.add_(p.grad * (group["rho"] / (grad_norm + 1e-12)))
        closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.copy_(self.state[p].pop("old_p"))
        self.base_optimizer.step()
        return loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rho", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    loader = DataLoader(TensorDataset(x[:1437], y[:1437]), batch_size=args.batch_size, shuffle=True)
    model = nn.Sequential(
        nn.Conv2d(1, 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 10),
    ).to(device)  # fmt: skip
    optimizer = SAM(model.parameters(), torch.optim.SGD, rho=args.rho, lr=0.05, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for inputs, targets in loader:
            inputs, targets = inputs.to(device), targets.to(device)

            def closure(inputs=inputs, targets=targets):
                optimizer.zero_grad()
                loss = criterion(model(inputs), targets)
                loss.backward()
                return loss

            total += optimizer.step(closure).item()
        model.eval()
        with torch.no_grad():
            acc = (model(x[1437:].to(device)).argmax(1).cpu() == y[1437:]).float().mean().item()
        print(f"epoch {epoch}: loss {total / len(loader):.5f} val_acc {acc:.4f}")


if __name__ == "__main__":
    main()
