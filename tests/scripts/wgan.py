import argparse

import torch
from sklearn.datasets import load_digits
from torch import autograd, nn
from torch.utils.data import DataLoader, TensorDataset

N_CRITIC = 3
LAMBDA = 10.0
Z_DIM = 16


def mlp(n_in, n_out, width=256):
    return nn.Sequential(
        nn.Linear(n_in, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Linear(width, n_out)
    )


def infinite(loader):
    while True:
        for (x,) in loader:
            yield x


def gradient_penalty(critic, real, fake):
    alpha = torch.rand(real.size(0), 1, device=real.device)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    score = critic(mixed)
    (grad,) = autograd.grad(score, mixed, torch.ones_like(score), create_graph=True, retain_graph=True)
    return LAMBDA * ((grad.norm(2, dim=1) - 1) ** 2).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=800, help="generator steps")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = torch.tensor(load_digits().data, dtype=torch.float32) / 8 - 1
    batches = infinite(DataLoader(TensorDataset(data), batch_size=args.batch_size, shuffle=True, drop_last=True))
    generator = nn.Sequential(mlp(Z_DIM, 64), nn.Tanh()).to(device)
    critic = mlp(64, 1).to(device)
    opt_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.9))
    opt_c = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.9))

    for step in range(args.steps):
        for p in critic.parameters():
            p.requires_grad_(True)
        for _ in range(N_CRITIC):
            real = next(batches).to(device)
            with torch.no_grad():
                fake = generator(torch.randn(len(real), Z_DIM, device=device))
            loss_c = critic(fake).mean() - critic(real).mean() + gradient_penalty(critic, real, fake)
            opt_c.zero_grad()
            loss_c.backward()
            opt_c.step()

        for p in critic.parameters():
            p.requires_grad_(False)  # the critic needs no gradient while the generator learns
        loss_g = -critic(generator(torch.randn(args.batch_size, Z_DIM, device=device))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()

        if step % 50 == 0 or step == args.steps - 1:
            print(f"step {step} loss_critic {loss_c.item():.4f} loss_generator {loss_g.item():.4f}")


if __name__ == "__main__":
    main()
