import argparse

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

N_USERS, N_ITEMS, N_TAGS, N_DENSE = 1000, 400, 40, 6


class Clicks(Dataset):
    def __init__(self, n, seed):
        world, rng = np.random.default_rng(0), np.random.default_rng(seed)
        user_taste, item_taste = world.normal(size=(N_USERS, 4)), world.normal(size=(N_ITEMS, 4))
        tag_effect, item_tag = world.normal(size=N_TAGS), world.integers(0, N_TAGS, N_ITEMS)
        self.user, self.item = rng.integers(0, N_USERS, n), rng.integers(0, N_ITEMS, n)
        self.tag = item_tag[self.item]
        self.dense = rng.normal(size=(n, N_DENSE)).astype(np.float32)
        score = (user_taste[self.user] * item_taste[self.item]).sum(1) + tag_effect[self.tag] + self.dense[:, 0]
        self.click = (rng.random(n) < 1 / (1 + np.exp(-2 * score))).astype(np.float32)

    def __len__(self):
        return len(self.click)

    def __getitem__(self, i):
        return (self.user[i], self.item[i], self.tag[i]), self.dense[i], self.click[i]


def collate(samples):
    sparse, dense, click = zip(*samples, strict=True)
    return {
        "sparse": torch.tensor(np.array(sparse)),
        "dense": torch.from_numpy(np.stack(dense)),
        "click": torch.tensor(np.array(click)),
    }


class DLRM(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim, sparse=True) for n in (N_USERS, N_ITEMS, N_TAGS))
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.1)
        self.bottom = nn.Sequential(nn.Linear(N_DENSE, 128), nn.ReLU(), nn.Linear(128, dim))
        self.top = nn.Sequential(nn.Linear(dim + 6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("pairs", torch.triu_indices(4, 4, 1))

    def forward(self, batch):
        dense = self.bottom(batch["dense"])
        z = torch.stack([dense] + [table(batch["sparse"][:, k]) for k, table in enumerate(self.tables)], dim=1)
        interactions = (z @ z.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([dense, interactions], dim=1)).squeeze(1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    train_loader = DataLoader(Clicks(150_000, 1), args.batch_size, shuffle=True, collate_fn=collate)
    val_loader = DataLoader(Clicks(6_000, 2), args.batch_size, collate_fn=collate)
    model = DLRM().to(device)
    dense_params = [p for name, p in model.named_parameters() if not name.startswith("tables")]
    sparse_optimizer = torch.optim.SparseAdam(list(model.tables.parameters()), lr=1e-2)
    dense_optimizer = torch.optim.AdamW(dense_params, lr=2e-3)
    criterion = nn.BCEWithLogitsLoss()

    for epoch in range(args.epochs):
        means = {}
        for phase, loader in (("train", train_loader), ("val", val_loader)):
            model.train(phase == "train")
            total = 0.0
            for batch in loader:
                batch = {k: v.to(device) for k, v in batch.items()}
                with torch.set_grad_enabled(phase == "train"):
                    loss = criterion(model(batch), batch["click"])
                if phase == "train":
                    sparse_optimizer.zero_grad()
                    dense_optimizer.zero_grad()
                    loss.backward()
                    sparse_optimizer.step()
                    dense_optimizer.step()
                total += loss.item()
            means[phase] = total / len(loader)
        print(f"epoch {epoch}: train bce {means['train']:.4f}, val bce {means['val']:.4f}")


if __name__ == "__main__":
    main()
