import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(512, 32)
y = x @ torch.randn(32, 1)

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for step in range(6):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item())
