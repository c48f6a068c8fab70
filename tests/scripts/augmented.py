import argparse
import random

import numpy as np
import torch
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class AugmentedDigits(Dataset):
    def __init__(self, images, labels, augment):
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index].astype(np.float32) / 16
        if self.augment:
            if random.random() < 0.5:
                image = np.roll(image, random.choice([-1, 1]), axis=random.randint(0, 1))
            image = image * np.random.uniform(0.8, 1.2) + np.random.normal(0, 0.05, image.shape)
        image = torch.as_tensor(image, dtype=torch.float32).unsqueeze(0)
        if self.augment:
            image = image * (torch.rand_like(image) > 0.05)  # dead pixels
        return image, int(self.labels[index])


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    if args.seed is not None:
        set_seed(args.seed)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    digits = load_digits()
    train_set = AugmentedDigits(digits.images[:1440], digits.target[:1440], augment=True)
    test_set = AugmentedDigits(digits.images[1440:], digits.target[1440:], augment=False)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    test_loader = DataLoader(test_set, batch_size=128, num_workers=args.workers)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 10),
    ).to(device)  # fmt: skip
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4)

    for epoch in range(args.epochs):
        model.train()
        running_loss = 0.0
        for inputs, labels in train_loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = criterion(model(inputs), labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item() * len(labels)
        model.eval()
        correct = 0
        with torch.no_grad():
            for inputs, labels in test_loader:
                correct += (model(inputs.to(device)).argmax(1).cpu() == labels).sum().item()
        print(f"[{epoch + 1}] loss: {running_loss / len(train_set):.4f} test accuracy: {correct / len(test_set):.4f}")


if __name__ == "__main__":
    main()
