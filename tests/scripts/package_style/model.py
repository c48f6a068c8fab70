import torch
from torch import nn


class Net(nn.Module):
    """Each row of the image is a token."""

    def __init__(self, rows=8, columns=8, width=64, heads=4, layers=2, classes=10):
        super().__init__()
        self.embed = nn.Linear(columns, width)
        self.position = nn.Parameter(torch.randn(1, rows, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images):
        return self.head(self.encoder(self.embed(images) + self.position).mean(dim=1))
