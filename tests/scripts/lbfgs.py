import argparse

import torch
import torch.nn as nn
import torch.optim as optim
from sklearn.datasets import load_digits

# Same as the time sequence example: LBFGS over all of the data at once.

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=60, help="epochs to run")
    parser.add_argument("--seed", type=int, default=0)
    opt = parser.parse_args()
    torch.manual_seed(opt.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    data, target = load_digits(return_X_y=True)
    data = torch.from_numpy(data).float().to(device) / 16
    target = torch.from_numpy(target).to(device)
    train_x, train_y, test_x, test_y = data[:1400], target[:1400], data[1400:], target[1400:]

    model = nn.Sequential(nn.Linear(64, 448), nn.Tanh(), nn.Linear(448, 448), nn.Tanh(), nn.Linear(448, 10)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = optim.LBFGS(model.parameters(), lr=0.2, max_iter=8, history_size=20)

    for epoch in range(opt.epochs):

        def closure():
            optimizer.zero_grad()
            loss = criterion(model(train_x), train_y)
            loss = loss + 1e-3 * sum(p.pow(2).sum() for p in model.parameters())
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        with torch.no_grad():
            pred = model(test_x)
            test_loss = criterion(pred, test_y)
        print(f"epoch {epoch} loss: {loss.item():.6f} test loss: {test_loss.item():.6f}")
