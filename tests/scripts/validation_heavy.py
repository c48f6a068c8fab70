import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score, f1_score
from sklearn.model_selection import train_test_split
from torch.utils.data import DataLoader, TensorDataset

seed = 2024
epochs = 30
batch_size = 32
lr = 1e-3

np.random.seed(seed)
torch.manual_seed(seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

X, y = load_digits(return_X_y=True)
X_train, X_valid, y_train, y_valid = train_test_split(X / 16, y, test_size=0.5, random_state=seed, stratify=y)
train_ds = TensorDataset(torch.tensor(X_train, dtype=torch.float32), torch.tensor(y_train))
valid_ds = TensorDataset(torch.tensor(X_valid, dtype=torch.float32), torch.tensor(y_valid))
train_dl = DataLoader(train_ds, batch_size=batch_size, shuffle=True)
valid_dl = DataLoader(valid_ds, batch_size=batch_size)


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Linear(64 * 16, 10)

    def forward(self, x):
        return self.classifier(self.features(x.view(-1, 1, 8, 8)).flatten(1))


model = CNN().to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=lr)

for epoch in range(epochs):
    model.train()
    train_loss, predictions, truth = [], [], []
    for data, target in train_dl:
        data, target = data.to(device), target.to(device)
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
        optimizer.step()
        train_loss.append(loss.item())
        predictions.append(output.detach().cpu().numpy().argmax(axis=1))
        truth.append(target.cpu().numpy())
    train_acc = accuracy_score(np.concatenate(truth), np.concatenate(predictions))

    # test-time augmentation: the mean over shifted copies of each image
    model.eval()
    probabilities, truth = [], []
    with torch.no_grad():
        for data, target in valid_dl:
            images = data.to(device).view(-1, 8, 8)
            views = [images, images.roll(1, dims=2), images.roll(-1, dims=2)]
            outputs = np.stack([model(view).softmax(dim=1).cpu().numpy() for view in views])
            probabilities.append(np.average(outputs, axis=0, weights=[2, 1, 1]))
            truth.append(target.numpy())
    probabilities, truth = np.concatenate(probabilities), np.concatenate(truth)
    val_f1 = f1_score(truth, probabilities.argmax(axis=1), average="macro")
    val_loss = -np.log(probabilities[np.arange(len(truth)), truth] + 1e-9).mean()
    print(f"Epoch {epoch + 1}/{epochs} train_loss={np.mean(train_loss):.4f} train_acc={train_acc:.4f}", end=" ")
    print(f"val_loss={val_loss:.4f} val_f1={val_f1:.4f}")
