import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def make_graph(n_nodes=3000, n_edges=20_000, n_classes=6, n_features=64, seed=0):
    """Nodes are linked mostly within their class; the features alone say little."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(n_classes, (n_nodes,), generator=g)
    src = torch.randint(n_nodes, (n_edges,), generator=g)
    dst = torch.randint(n_nodes, (n_edges,), generator=g)
    keep = (y[src] == y[dst]) | (torch.rand(n_edges, generator=g) < 0.15)
    src, dst = src[keep], dst[keep]
    loops = torch.arange(n_nodes)
    edge_index = torch.stack([torch.cat([src, dst, loops]), torch.cat([dst, src, loops])])
    means = torch.randn(n_classes, n_features, generator=g)
    x = 0.3 * means[y] + torch.randn(n_nodes, n_features, generator=g)
    split = torch.rand(n_nodes, generator=g)
    return x, y, edge_index, split < 0.2, (split >= 0.2) & (split < 0.5), split >= 0.5


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index, norm):
        src, dst = edge_index
        x = self.lin(x)
        out = torch.zeros_like(x).index_add_(0, dst, x.index_select(0, src) * norm[:, None])
        return out + self.bias


class GCN(nn.Module):
    def __init__(self, in_channels, hidden, n_classes):
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden)
        self.conv2 = GCNConv(hidden, n_classes)

    def forward(self, x, edge_index, norm):
        x = F.dropout(x, p=0.5, training=self.training)
        x = F.relu(self.conv1(x, edge_index, norm))
        x = F.dropout(x, p=0.5, training=self.training)
        return self.conv2(x, edge_index, norm)


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=800)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--hidden", type=int, default=64)
parser.add_argument("--patience", type=int, default=50)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
x, y, edge_index, train_mask, val_mask, test_mask = (t.to(device) for t in make_graph())
degree = torch.bincount(edge_index[1], minlength=len(x)).float()
norm = degree[edge_index[0]].rsqrt() * degree[edge_index[1]].rsqrt()

model = GCN(x.size(1), args.hidden, 6).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
best_val, best_state, bad_epochs = float("inf"), None, 0
for epoch in range(1, args.epochs + 1):
    model.train()
    optimizer.zero_grad()
    out = model(x, edge_index, norm)
    loss = F.cross_entropy(out[train_mask], y[train_mask])
    loss.backward()
    optimizer.step()

    model.eval()
    with torch.no_grad():
        out = model(x, edge_index, norm)
        val_loss = F.cross_entropy(out[val_mask], y[val_mask]).item()
        val_acc = (out.argmax(1) == y)[val_mask].float().mean().item()
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss.item():.5f}, Val loss: {val_loss:.5f}, Val: {val_acc:.4f}")
    if val_loss < best_val:
        best_val, best_state, bad_epochs = val_loss, copy.deepcopy(model.state_dict()), 0
    else:
        bad_epochs += 1
        if bad_epochs >= args.patience:
            print(f"Early stopping at epoch {epoch}")
            break

model.load_state_dict(best_state)
model.eval()
with torch.no_grad():
    test_acc = (model(x, edge_index, norm).argmax(1) == y)[test_mask].float().mean().item()
print(f"Best val loss: {best_val:.5f}, Test: {test_acc:.4f}")
