import torch
from torch import nn


class Gated(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.value = nn.Linear(width, width)
        self.gate = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        h = self.norm(x)
        return x + self.dropout(self.value(h) * torch.sigmoid(self.gate(h)))


def build_model(hidden, dropout, n_in=64, n_out=10):
    return nn.Sequential(
        nn.Linear(n_in, hidden), Gated(hidden, dropout), Gated(hidden, dropout), nn.Linear(hidden, n_out)
    )
