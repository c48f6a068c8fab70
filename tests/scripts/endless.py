import torch
import torch.nn as nn

torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

# Copy task: which symbol stood at the marked position? The data never ends, nor does the training.
length, symbols, batch_size = 16, 8, 64


def next_batch():
    x = torch.randint(symbols, (batch_size, length), device=device)
    where = torch.randint(length, (batch_size,), device=device)
    marks = nn.functional.one_hot(where, length).unsqueeze(-1).float()
    return torch.cat([nn.functional.one_hot(x, symbols).float(), marks], dim=-1), x[torch.arange(batch_size), where]


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(symbols + 1, 96, batch_first=True)
        self.out = nn.Linear(96, symbols)

    def forward(self, x):
        return self.out(self.gru(x)[1][-1])


model = Reader().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
model.train()
step = 0
while True:
    x, y = next_batch()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} loss {loss.item():.4f}", flush=True)
